"""GPUs that share the machine's memory (DGX Spark, Jetson), and Grace in NUMA mode: decided by the driver's answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumap.agent.metrics import GROUPS
from gpumap.agent.published import published
from gpumap.cli.commands.doctor import doctor_checks
from gpumap.cli.commands.map import map_table
from gpumap.cli.commands.top import top_table
from gpumap.cli.commands.waste import waste_table
from gpumap.cli.rows import NodeMaps, gpu_rows
from gpumap.cli.table import Shape
from gpumap.model.node import Node
from gpumap.model.readings import GpuProcess
from gpumap.model.terms import Owner
from tests import golden
from tests.nodes import Gpu as NodeGpu
from tests.nodes import Pod, TestNode, gpu_uuid
from tests.nodes import Process as NodeProcess
from tests.standin import Driver, Gpu, Process
from tests.worker import Start

A = "GPU-00000000-0000-0000-0000-00000000000a"
GIB, MIB = 1 << 30, 1 << 20
ALERTS = Path(__file__).parents[1] / "rules" / "alerts.yaml"


def unified(*processes: Process, total: int | None = None) -> Driver:
    """One GPU that does not report its memory: the call is refused, or answers 0."""
    return Driver(gpus=[Gpu(A, memory_total_bytes=total, memory_reserved_bytes=0, processes=list(processes))])


# --- the worker -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [None, 0], ids=["refused", "zero"])
def test_a_gpu_without_memory_of_its_own(start: Start, total: int | None) -> None:
    """No memory of the device, whether the driver refuses or answers 0; that of its processes stays."""
    reading = start().read_one(unified(Process(10, 64 * MIB), Process(11, None), total=total))
    assert (reading.memory, reading.fault) == (None, None)
    assert reading.processes == (GpuProcess(10, 64 * MIB, "C"), GpuProcess(11, None, "C"))


@pytest.mark.parametrize("pid", [0, (1 << 22) + 1, 0xFFFF_FFFF])
def test_impossible_pids_make_the_list_unknown(start: Start, pid: int) -> None:
    """The list is no evidence: neither its other rows, nor that no other process is there."""
    worker = start()
    assert worker.read_one(unified(Process(10, MIB), Process(pid, 0))).processes is None
    assert worker.read_one(unified(Process(10, MIB), Process(1 << 22, MIB))).processes == (
        GpuProcess(10, MIB, "C"),
        GpuProcess(1 << 22, MIB, "C"),
    )


def test_more_than_the_machine_has_is_unknown(start: Start) -> None:
    """A process cannot use more memory than the machine has."""
    reading = start().read_one(unified(Process(10, 1 << 60), Process(11, MIB)))
    assert reading.processes == (GpuProcess(10, None, "C"), GpuProcess(11, MIB, "C"))


# --- what is shown ----------------------------------------------------------------------------------------------------


def mapped(capture: str) -> Node:
    return published(golden.snapshots(golden.CAPTURES / capture)[-1], collect=tuple(GROUPS))


def families(capture: str) -> set[str]:
    text = golden.page(golden.CAPTURES / capture).decode()
    return {line.partition("{")[0] for line in text.splitlines() if not line.startswith("#")}


@pytest.mark.parametrize("capture", ["gb10", "jetson-thor", "jetson-orin"])
def test_memory_of_the_device_is_absent(capture: str) -> None:
    assert not [
        one for one in families(capture) if one.startswith(("gpumap_device_memory_t", "gpumap_device_memory_f"))
    ]
    assert "gpumap_device_memory_used_bytes" not in families(capture)
    (device,) = mapped(capture).devices
    assert device.memory is None
    assert "unaccounted" not in [one.owner for one in device.owners]


@pytest.mark.parametrize(("capture", "listed"), [("gb10", "39.7GiB"), ("jetson-thor", "8.2GiB")])
def test_the_sum_of_the_processes_is_shown(capture: str, listed: str) -> None:
    """In the place of `used of total`; nothing is said to have no reading."""
    maps = NodeMaps((mapped(capture),))
    head, device, *_ = map_table(maps, Shape()).splitlines()
    assert device[head.index("USED") :].split()[0] == listed
    assert "unaccounted" not in top_table(maps, Shape())
    nvml = next(check for check in doctor_checks(maps.maps[0]) if check.check == "nvml")
    assert (nvml.state, nvml.seen.rpartition(", ")[2]) == ("ok", "1 device readable")


@pytest.mark.parametrize("memory", [None, "no process"])
def test_memory_that_neither_device_nor_process_reports_is_unknown(memory: str | None) -> None:
    """A device that does not report its memory, with a process without memory, or without a process: not 0."""
    pod = Pod("ml", "train", {"main": {"nvidia.com/gpu": [str(gpu_uuid(0))]}})
    node = TestNode([NodeGpu(0, values={"memory": None})], [pod])
    node.processes = [] if memory else [NodeProcess(10, gpu_uuid(0), pod, memory=None)]
    maps = NodeMaps((published(node.collect()),))
    head, device, *_ = map_table(maps, Shape()).splitlines()
    assert device[head.index("USED") :].split() == ["-", "-"]
    (row,) = gpu_rows(maps.maps[0])
    assert row.used_bytes is None


def test_waste_is_looked_for_without_the_devices_memory() -> None:
    """The holder of the GB10 computes: there is no waste, and that is known."""
    maps = NodeMaps((mapped("gb10"),))
    assert waste_table(maps, Shape()).startswith("No waste found")
    assert maps.maps[0].finding_sums["squatter_bytes"] == 0


def test_processes_that_are_not_known_leave_nothing_idle() -> None:
    """Of the Orin's use nothing is known, and no owner has a zero."""
    assert not [one for one in families("jetson-orin") if "owner" in one or "processes" in one]
    assert "the use of the only device is not known" in map_table(NodeMaps((mapped("jetson-orin"),)), Shape())


def test_memory_without_a_process_is_no_leak() -> None:
    """Grace in NUMA mode counts the page cache as used: no finding, no remedy, and no alert reads the remainder."""
    grace = mapped("grace-numa")
    assert grace.findings == ()
    (device,) = grace.devices
    assert {one.owner: one.memory_bytes for one in device.owners}[Owner.UNACCOUNTED] == 85 * GIB
    assert "unaccounted" not in ALERTS.read_text(encoding="utf-8")
