"""Which pods and processes of a scenario exist at a time, over repeated plays.

Pure, and the only module that knows `repeat`. Times here are seconds since the epoch of the demo, over all plays.
Times of a scenario are seconds since the beginning of a play.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gpumap.lab.demo.scenario_model import Container, Gpu, Pod, Process, Scenario, Xid
from gpumap.lab.demo.texts import derived_uuid, digest, number, pid_of
from gpumap.model.readings import XidError
from gpumap.model.terms import PodUid

BOOT_TICKS = 3 * 8_640_000
"""The node was up for three days when the demo began."""
TICKS_PER_SECOND = 100
PROC_LEAD = 0.5
"""A process is in /proc before it opens the GPU, and leaves it after."""


@dataclass(frozen=True, slots=True)
class Window:
    """From `start` until before `end`."""

    start: float = -math.inf
    end: float = math.inf

    def __contains__(self, seconds: float) -> bool:
        return self.start <= seconds < self.end

    def shifted(self, start: float, end: float) -> Window:
        return Window(self.start + start, self.end + end)


@dataclass(frozen=True, slots=True)
class PodLife:
    """A pod in one play, or over all of them where it is always there (`play` 0)."""

    spec: Pod
    play: int
    uid: PodUid
    window: Window

    def container_id(self, container: Container) -> str:
        return digest(self.uid, self.play, container.name)


@dataclass(frozen=True, slots=True)
class ProcessLife:
    """A process: of a container (`spec` is `None`: its main process, which uses no GPU), or of the host."""

    spec: Process | None
    comm: str
    pid: int
    window: Window
    start_ticks: int
    pod: PodLife | None
    container: Container | None


def play_of(scenario: Scenario, seconds: float) -> tuple[int, float]:
    """The number of the play at a time, and the time within it."""
    play = max(0, math.floor(seconds / scenario.repeat_seconds))
    return play, max(0.0, seconds - play * scenario.repeat_seconds)


def pod_lives(scenario: Scenario, seconds: float) -> tuple[PodLife, ...]:
    """Every pod of this play and the one before: what has ended leaves traces."""
    play, _ = play_of(scenario, seconds)
    plays = (play - 1, play) if play else (play,)
    return tuple(
        _pod_life(scenario, pod, number)
        for pod in range(len(scenario.pods))
        for number in (plays if scenario.pods[pod].start is not None else (0,))
    )


def process_lives(scenario: Scenario, seconds: float) -> Iterator[ProcessLife]:
    """Every process of this play and the one before."""
    play, _ = play_of(scenario, seconds)
    plays = (play - 1, play) if play else (play,)
    actors = list(_actors(scenario))
    for actor_number, (spec, pod, container) in enumerate(actors):
        of_pod = None if pod is None else scenario.pods[pod].start
        for number_of_play in (0,) if (spec.start if spec else of_pod) is None else plays:
            life = None if pod is None else _pod_life(scenario, pod, 0 if of_pod is None else number_of_play)
            pid = pid_of(scenario.node, actor_number, len(actors), number_of_play)
            yield _process_life(scenario, spec, life, container, number_of_play, pid)


def _pod_life(scenario: Scenario, number: int, play: int) -> PodLife:
    pod = scenario.pods[number]
    names = (scenario.node, pod.namespace, pod.name, f"pods[{number}]")
    # The UID of a static pod is the hash of a manifest.
    derived = digest(*names)[:32] if pod.static else derived_uuid(*names, play)
    begin = play * scenario.repeat_seconds
    always = pod.start is None or pod.end is None
    window = Window() if always else Window(begin + (pod.start or 0.0), begin + (pod.end or 0.0))
    return PodLife(pod, play, PodUid(pod.uid or derived), window)


def _actors(scenario: Scenario) -> Iterator[tuple[Process | None, int | None, Container | None]]:
    """Every process of the scenario, with the number of its pod and its container. Its place gives it its PIDs."""
    for number_of_pod, pod in enumerate(scenario.pods):
        for container in pod.containers:
            yield from ((process, number_of_pod, container) for process in container.processes)
            if not container.init:
                yield None, number_of_pod, container
    yield from ((host, None, None) for host in scenario.host_processes)


def _process_life(
    scenario: Scenario, spec: Process | None, pod: PodLife | None, container: Container | None, play: int, pid: int
) -> ProcessLife:
    begin = play * scenario.repeat_seconds
    window = Window()
    if spec is None and pod is not None:
        window = pod.window.shifted(1.0, -0.5)
    elif spec is not None and spec.start is not None and spec.end is not None:
        window = Window(begin + spec.start, begin + spec.end)
    since = -float(600 + number(3000, scenario.node, pid)) if window.start == -math.inf else window.start - PROC_LEAD
    return ProcessLife(
        spec=spec,
        comm=spec.comm if spec else (container.name if container else "init")[:15],
        pid=pid,
        window=window,
        start_ticks=BOOT_TICKS + int(since * TICKS_PER_SECOND),
        pod=pod,
        container=container,
    )


# --- XID events -------------------------------------------------------------------------------------------------------


def xid_errors(scenario: Scenario, after: float, until: float) -> list[XidError]:
    """Return the events after one time until another, in their order."""
    play, _ = play_of(scenario, until)
    errors = [
        XidError(gpu.uuid, xid.code, *_instance_ids(gpu, xid), until - (begin + xid.moment))
        # Of the play before, too: it may have been going on at `after`.
        for begin in (number * scenario.repeat_seconds for number in (play - 1, play) if number >= 0)
        for gpu in scenario.gpus
        for xid in gpu.xids
        if after < begin + xid.moment <= until
    ]
    return sorted(errors, key=lambda error: -error.age_seconds)


def _instance_ids(gpu: Gpu, xid: Xid) -> tuple[int | None, int | None]:
    """Of the GPU instance and of the compute instance, where it is a MIG device's."""
    device = None if xid.instance is None else gpu.devices[xid.instance]
    return (device.gpu_instance_id, device.compute_instance_id) if device else (None, None)
