"""The alerts over machines without a kubelet, and over GPUs that share the machine's memory: healthy ones fire none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import golden
from tests.promtool import assert_answers

ALERTS = Path(__file__).resolve().parents[2] / "charts" / "gpumap" / "rules" / "alerts.yaml"
TARGET = {"job": "gpumap", "node": "gpu-1", "instance": "gpu-1"}
HOURS, MINUTES = 3, 2
"""Longer than any of these alerts waits, and the time between two scrapes."""
SCRAPES = 60 // MINUTES * HOURS
GROWS = ("gpumap_container_sm_seconds_total",)
GIB = 1 << 30
USED = "gpumap_device_memory_used_bytes"
TOTAL = "gpumap_device_memory_total_bytes"


def series_of(page: str, **changed: float) -> dict[str, str]:
    """The page as Prometheus keeps it, and never changing, but for `GROWS`; some families have another value."""
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    rows = [({**TARGET, **one.labels}, one.name, changed.get(one.name, one.value)) for one in samples]
    rows.append((TARGET, "up", 1.0))
    return {named(name, labels): f"{value}+{60 * MINUTES * (name in GROWS)}x{SCRAPES}" for labels, name, value in rows}


def named(name: str, labels: Mapping[str, str]) -> str:
    return f"{name}{{{','.join(f'{key}={json.dumps(value)}' for key, value in sorted(labels.items()))}}}"


def assert_alerts(folder: Path, series: Mapping[str, str], *expected: str) -> None:
    """At the end exactly these alerts are pending or fire."""
    alerts = {f'{{alertname="{one}"}}': 1 for one in expected}
    asked = "group by (alertname) (ALERTS)", f"{HOURS}h", alerts
    assert_answers(folder, series, asked, rules=[ALERTS], interval=f"{MINUTES}m")


def page_of(capture: str) -> str:
    return golden.page(golden.CAPTURES / capture).decode()


@pytest.mark.parametrize("capture", ["workstation", "gb10", "jetson-thor", "jetson-orin", "grace-numa"])
def test_a_healthy_machine_fires_nothing(tmp_path: Path, capture: str) -> None:
    """Whatever of the kubelet is not there: no source that is down, no capability lost, no holder that is idle."""
    assert_alerts(tmp_path, series_of(page_of(capture)))


def test_the_page_cache_of_grace_is_no_full_memory(tmp_path: Path) -> None:
    """Nearly all memory is used, and no process is there: the operating system can free it."""
    full = series_of(page_of("grace-numa"), **{USED: 95 * GIB, TOTAL: 96 * GIB})
    assert_alerts(tmp_path, full)


def test_full_memory_of_processes_is_one(tmp_path: Path) -> None:
    """The same with processes: the next allocation fails."""
    full = series_of(page_of("workstation"), **{USED: 23.5 * GIB, TOTAL: 24 * GIB})
    assert_alerts(tmp_path, full, "GpumapGpuMemoryNearlyFull")


def test_a_kubelet_that_is_down_is_reported(tmp_path: Path) -> None:
    """The alert is not blind: with the source, and down, it fires."""
    source = named("gpumap_source_up", {**TARGET, "source": "kubelet"})
    down = {**series_of(page_of("workstation")), source: f"0x{SCRAPES}"}
    assert_alerts(tmp_path, down, "GpumapSourceDown")
