"""`gpumap waste --would-fit` asks a real Prometheus for a week of known samples."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from tests.command import one_line, run_command
from tests.prometheus import prometheus
from tests.scraped import Samples, labels, store

GIB, HOUR = 1 << 30, 3600
EVERY = 240
TOTAL = 85_520_809_984
TARGET = {"job": "gpumap", "instance": "n1:9401", "node": "n1"}
PODS: dict[str, tuple[int, str, int, int]] = {
    "small": (5, "0.1", 8 * 24, 1),
    "medium": (28, "0.2", 8 * 24, 1),
    "large": (70, "0.1", 8 * 24, 1),
    "new": (5, "0.1", 12, 1),
    "two": (5, "0.1", 8 * 24, 2),
    "unmeasured": (5, "", 8 * 24, 1),
    "burst": (5, "0.1", 8 * 24, 1),
}
"""Peak in GiB, share of SM time, hours of samples, number of GPUs."""


def week() -> Samples:
    """What was scraped until shortly after now: pods on whole GPUs; each has a sidecar that uses a GiB."""
    samples, now = Samples(), int(time.time()) // EVERY * EVERY
    end = now + 4 * EVERY

    def scrape(name: str, value: str, hours: int = 1, /, **of: str) -> None:
        times = range(now - hours * HOUR, end, EVERY)
        samples.scrape(
            name,
            labels(**TARGET | of),
            times,
            lambda at: Decimal(value) * (at - times[0] if name.endswith("_total") else 1),
        )

    times = range(now - HOUR, end, EVERY)
    samples.scrape("gpumap_snapshot_timestamp_seconds", labels(**TARGET), times, Decimal)
    scrape("gpumap_node_info", "1", internal_ip="10.0.0.1")
    scrape("gpumap_driver_info", "1", driver_version="580", cuda_version="13.0", nvml_version="13")
    scrape("gpumap_capability", "1", capability="pid_visibility")
    for source in ("kubelet", "nvml", "procfs", "pod_identity"):
        scrape("gpumap_source_up", "1", source=source)
    index = 0
    for pod, (gib, share, hours, gpus) in PODS.items():
        for _ in range(gpus):
            uuid = f"GPU-{index:08}"
            info = {"gpu_uuid": uuid, "index": str(index), "minor": str(index), "pci_bus_id": f"0:{index}"}
            info |= {"model": "NVIDIA H100 80GB HBM3", "mig_profile": "", "gpu_instance_id": ""}
            scrape("gpumap_device_info", "1", uuid=uuid, compute_instance_id="", **info)
            scrape("gpumap_gpu_up", "1", gpu_uuid=uuid)
            scrape("gpumap_device_holders", "1", uuid=uuid)
            scrape("gpumap_device_memory_total_bytes", str(TOTAL), uuid=uuid)
            scrape("gpumap_device_memory_used_bytes", str(GIB), uuid=uuid)
            name = {"namespace": "ml", "pod": pod, "container": "main", "uuid": uuid}
            scrape("gpumap_allocation_slots", "1", resource="nvidia.com/gpu", **name)
            scrape("gpumap_container_allocated_gpus", "1", **name)
            scrape("gpumap_container_gpu_memory_peak_bytes", str(gib * GIB), hours, **name)
            scrape("gpumap_container_sm_seconds_total", share or "0", hours, **name)
            if share:
                scrape("gpumap_container_sm_utilization_ratio", share, hours, **name)
            scrape("gpumap_container_gpu_memory_peak_bytes", str(GIB), hours, **name | {"container": "side"})
            if pod == "burst":  # half an hour, and not at the full hour
                begin = now // HOUR * HOUR - 9 * HOUR + 600
                burst = labels(**TARGET | name | {"container": "batch"})
                times = range(begin, begin + 1800, EVERY)
                samples.scrape("gpumap_container_gpu_memory_peak_bytes", burst, times, lambda _: Decimal(70 * GIB))
            index += 1
    return samples


@pytest.fixture(name="server", scope="module")
def run_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("week")
    with prometheus(folder, data=store(week(), folder)) as found:
        yield found.url


@pytest.mark.parametrize("where", [("-n", "ml"), ("--node", "n1"), ()])
def test_a_hint_for_each_holder_of_a_whole_gpu(server: str, where: tuple[str, ...]) -> None:
    """A pod counts with its sidecar, and with what ran for half an hour. Without a day of known samples, or with two
    GPUs, there is no hint."""
    words = ("waste", "--would-fit", "--prometheus", server, *where)
    found = json.loads(run_command(*words, "-o", "json").stdout)["would_fit"]
    hints = {row["pod"]: row["would_fit"] for row in found}
    assert hints == {
        **{"small": "1g.10gb", "medium": "3g.40gb"},
        **dict.fromkeys(("large", "new", "two", "unmeasured", "burst")),
    }
    small = next(row for row in found if row["pod"] == "small")
    assert small["memory_peak_bytes"] == 6 * GIB
    assert small["sm_peak_ratio"] == pytest.approx(0.1, abs=1e-3)
    assert small["days_seen"] == pytest.approx(7, abs=0.1)
    assert small["saved_gpus"] == pytest.approx(6 / 7, abs=1e-3)
    new, unmeasured = (next(row for row in found if row["pod"] == pod) for pod in ("new", "unmeasured"))
    assert new["days_seen"] == pytest.approx(0.5, abs=0.1)
    assert unmeasured["memory_peak_bytes"] is None


def test_the_table(server: str) -> None:
    """The largest saving first, and what the hint is based on."""
    lines = run_command("waste", "--would-fit", "--prometheus", server, "-n", "ml").stdout.splitlines()
    assert "WOULD FIT" in lines[0]
    assert "small" in lines[1]
    assert "medium" in lines[2]
    assert any(line.startswith("A hint for the owner, not a finding") for line in lines)
    assert lines[-1].startswith("Sum: 1.36 of 8 GPUs")
    names = run_command("waste", "--would-fit", "--prometheus", server, "-n", "ml", "-o", "name").stdout.split()
    assert names == ["pod/small", "pod/medium"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), "--would-fit requires --prometheus"),
        (("--prometheus", "http://127.0.0.1:9", "--sort-by", "waste"), "--would-fit cannot be combined with"),
    ],
)
def test_flags_that_do_not_fit(flags: tuple[str, ...], expected: str) -> None:
    assert one_line(run_command("waste", "--would-fit", *flags), 2).startswith(expected)
