"""How long it takes: from a pod's manifest and from the kubelet's answer to the page, and from memory to its bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from tests.cluster.cases import MEMORY, ONE_GPU, pod, process_of
from tests.cluster.gpu_node import PATIENCE_SECONDS, GpuNode, values
from tests.cluster.recorder import POLL_SECONDS, Recorder
from tests.cluster.workloads import Work, Workload, use
from tests.machine import MIB

PODS = 6
OFTEN_SECONDS = 0.01
AGENT = "gpumap"
"""The one with the chart's defaults."""
LISTED, SHOWN, ALLOCATED, CREATED = (
    "manifest written → kubelet's List has the device",
    "kubelet's List has the device → it is on the page",
    "driver lists the process → its bytes are on the page",
    "manifest written → device is on the page",
)


def measure(live: GpuNode) -> Mapping[str, list[float]]:
    """Start pods one after another, and follow each until its memory is on the page."""
    found: dict[str, list[float]] = {CREATED: [], LISTED: [], SHOWN: [], ALLOCATED: []}
    recorder = live.recorders[AGENT]
    recorder.pause_seconds = OFTEN_SECONDS
    try:
        for number in range(PODS):
            for what, seconds in _follow(live, recorder, pod(f"timed-{number}", main=Work(use(220, after=1), ONE_GPU))):
                found[what].append(max(seconds, 0.0))
    finally:
        recorder.pause_seconds = POLL_SECONDS
    return found


def _follow(live: GpuNode, recorder: Recorder, workload: Workload) -> Iterator[tuple[str, float]]:
    """The delays of one pod."""
    written = time.time()
    with live.running(workload):
        listed = _listed(live, workload.full_name)
        live.until(AGENT, lambda text: values(text, MEMORY, pod=workload.full_name) == [220 * MIB], "memory")
        pid = process_of(live, workload)
        (began,) = [one.began.end for one in live.watch.truth.processes if one.pid == pid and one.uses]
    shown = _first(recorder, written, f'gpumap_allocation_info{{namespace="ml",pod="{workload.full_name}"')
    bytes_shown = _first(recorder, began, f'{MEMORY}{{namespace="ml",pod="{workload.full_name}"', f" {220 * MIB}")
    yield CREATED, shown - written
    yield LISTED, listed - written
    yield SHOWN, shown - listed
    yield ALLOCATED, bytes_shown - began


def _listed(live: GpuNode, name: str) -> float:
    """When the kubelet's List first has a device of the pod."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not live.list_devices().get(("ml", name, "main")):
        assert time.monotonic() < deadline, f"{name} gets no device"
        time.sleep(OFTEN_SECONDS)
    return time.time()


def _first(recorder: Recorder, after: float, start: str, end: str = "") -> float:
    """When a page first had a line like this."""
    for answer in list(recorder.answers):
        if answer.path != "/metrics" or answer.last_at < after:
            continue
        if any(line.startswith(start) and line.endswith(end) for line in answer.text.splitlines()):
            return answer.first_at
    raise AssertionError(f"no page has {start}…{end}")
