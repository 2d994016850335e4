"""The frames of a scenario: its world at a moment, in the form of a capture.

An XID event is in the first frame after its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from gpumap.lab.capture import contents
from gpumap.lab.capture.format import Frame
from gpumap.lab.demo.kubelet import allocatable_answer, list_answer
from gpumap.lab.demo.readings import CUDA_VERSION, DRIVER_VERSION, NVML_VERSION
from gpumap.lab.demo.scenario_model import Scenario, nth_bus_id
from gpumap.lab.demo.schedule import cues
from gpumap.lab.demo.texts import cgroup_text
from gpumap.lab.demo.world import World, world
from gpumap.model.device_ids import pci_address
from gpumap.model.observations import NvmlReading, PciFunction
from gpumap.model.readings import Listening, XidError

TICK_SECONDS = 0.25
OWN_CGROUP = "/system.slice/gpumap.service"


def play(
    scenario: Scenario, clock: Callable[[], float] = time.time, epoch: float | None = None
) -> Iterator[tuple[float, Frame]]:
    """A frame for each tick, with its time on the monotonic clock. A tick that is late is left out.

    `clock` gives Unix seconds. `epoch` is when the play began, by default now.
    """
    epoch = clock() if epoch is None else epoch
    due, before = time.monotonic(), clock() - epoch
    while True:
        seconds = clock() - epoch + max(due - time.monotonic(), 0.0)
        yield due, frame(scenario, before, seconds)
        before = seconds
        due = max(due + TICK_SECONDS, time.monotonic())


def frame(scenario: Scenario, before: float, seconds: float) -> Frame:
    """The node `seconds` after the epoch, with the XID events since the frame `before`."""
    node = world(scenario, seconds)
    xids = (
        XidError(cue.gpu.uuid, cue.xid.code, *cue.instance_ids, seconds - cue.seconds)
        for cue in cues(scenario, before, seconds)
    )
    listening = (Listening(gpu.uuid, max(seconds, 0.0), 0.0) for gpu in scenario.gpus)
    versions = DRIVER_VERSION, CUDA_VERSION, NVML_VERSION
    reading = NvmlReading(*versions, node.gpus, tuple(xids), tuple(listening))
    files = {
        contents.CHECKPOINT: node.checkpoint.encode(),
        contents.LOG_TREE: contents.log_text(node.logs),
        contents.OWN_CGROUP: cgroup_text(scenario.cgroups, OWN_CGROUP).encode(),
        contents.NVML: contents.reading_text(reading),
        contents.PCI: contents.pci_text(_pci_functions(scenario)),
    }
    if node.notes:
        files[contents.DRA_CHECKPOINT] = node.notes.encode()
    for proc in node.procs:
        files |= {f"proc/{proc.pid}/stat": proc.stat.encode(), f"proc/{proc.pid}/cgroup": proc.cgroup.encode()}
    return Frame(seconds, files | _kubelet(node))


def _pci_functions(scenario: Scenario) -> Iterator[PciFunction]:
    """Return the GPUs of NVML, and those that NVML does not list."""
    for index in range(len(scenario.gpus) + scenario.missing_gpus):
        yield PciFunction(pci_address(nth_bus_id(index)), "0x2330", "0x0302", "nvidia")


def _kubelet(node: World) -> dict[str, bytes]:
    if not node.kubelet_up:
        return {contents.DOWN: contents.down_text({"kubelet": contents.Down("connection_refused")})}
    return {
        f"{contents.LIST}.pb": list_answer(node.pods, node.numa),
        f"{contents.ALLOCATABLE}.pb": allocatable_answer(node.allocatable, node.numa),
    }
