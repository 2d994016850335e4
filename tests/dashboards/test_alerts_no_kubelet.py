"""The alerts over machines without a kubelet, and over GPUs that share the machine's memory: healthy ones fire none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import golden
from tests.promtool import accepted, promtool

ALERTS = Path(__file__).resolve().parents[2] / "charts" / "gpumap" / "rules" / "alerts.yaml"
TARGET = {"job": "gpumap", "node": "gpu-1", "instance": "gpu-1"}
HOURS, MINUTES = 3, 2
"""Longer than any of these alerts waits, and the time between two scrapes."""
SCRAPES = 60 // MINUTES * HOURS
GROWS = ("gpumap_container_sm_seconds_total",)
GIB = 1 << 30
USED = "gpumap_device_memory_used_bytes"
TOTAL = "gpumap_device_memory_total_bytes"


def series_of(page: str, **changed: float) -> list[dict[str, str]]:
    """The page as Prometheus keeps it, and never changing, but for `GROWS`; some families have another value."""
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    rows = [({**TARGET, **one.labels}, one.name, changed.get(one.name, one.value)) for one in samples]
    rows.append((TARGET, "up", 1.0))
    return [
        {
            "series": f"{name}{{{','.join(f'{key}={json.dumps(value)}' for key, value in sorted(labels.items()))}}}",
            "values": f"{value}+{60 * MINUTES * (name in GROWS)}x{SCRAPES}",
        }
        for labels, name, value in rows
    ]


def write(folder: Path, series: list[dict[str, str]], expected: list[str]) -> Path:
    """A unit test of promtool: at the end exactly these alerts are pending or fire."""
    asked: dict[str, Any] = {
        "expr": "group by (alertname) (ALERTS)",
        "eval_time": f"{HOURS}h",
        "exp_samples": [{"labels": f'{{alertname="{one}"}}', "value": 1} for one in expected],
    }
    test = {"interval": f"{MINUTES}m", "input_series": series, "promql_expr_test": [asked]}
    file = folder / "test.json"
    file.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "5m", "tests": [test]}))
    return file


def page_of(capture: str) -> str:
    return golden.page(golden.CAPTURES / capture).decode()


@pytest.mark.parametrize("capture", ["workstation", "gb10", "jetson-thor", "jetson-orin", "grace-numa"])
def test_a_healthy_machine_fires_nothing(tmp_path: Path, capture: str) -> None:
    """Whatever of the kubelet is not there: no source that is down, no capability lost, no holder that is idle."""
    accepted("test", "rules", write(tmp_path, series_of(page_of(capture)), []))


def test_the_page_cache_of_grace_is_no_full_memory(tmp_path: Path) -> None:
    """Nearly all memory is used, and no process is there: the operating system can free it."""
    full = series_of(page_of("grace-numa"), **{USED: 95 * GIB, TOTAL: 96 * GIB})
    accepted("test", "rules", write(tmp_path, full, []))


def test_full_memory_of_processes_is_one(tmp_path: Path) -> None:
    """The same with processes, of whomever: the next allocation fails."""
    full = series_of(page_of("workstation"), **{USED: 23.5 * GIB, TOTAL: 24 * GIB})
    accepted("test", "rules", write(tmp_path, full, ["GpumapGpuMemoryNearlyFull"]))


def test_a_kubelet_that_is_down_is_still_told(tmp_path: Path) -> None:
    """The alert is not blind: with the source, and down, it fires."""
    down = [*series_of(page_of("workstation"))]
    labels = ",".join(f'{key}="{value}"' for key, value in {**TARGET, "source": "kubelet"}.items())
    down.append({"series": f"gpumap_source_up{{{labels}}}", "values": f"0x{SCRAPES}"})
    assert promtool("test", "rules", write(tmp_path, down, [])).returncode != 0
    accepted("test", "rules", write(tmp_path, down, ["GpumapSourceDown"]))
