"""Which pods and processes of a scenario exist at a time, over repeated plays.

Pure, and the only module that knows `repeat`. Times here are seconds since the epoch of the demo, over all plays.
Times of a scenario are seconds since the beginning of a play.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from gpumap.lab.demo.names import Pids, derived_uuid, digest, number, static_uid
from gpumap.lab.demo.scenario_model import Container, Gpu, HostProcess, Pod, Process, Scenario, Xid
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
    host: HostProcess | None


@dataclass(frozen=True, slots=True)
class ScheduledProcess:
    """A process of the scenario; its number gives it its PIDs. `pod` is the number of its pod."""

    number: int
    spec: Process | None
    pod: int | None = None
    container: Container | None = None
    host: HostProcess | None = None


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
    actors = _actors(scenario)
    pids = Pids(scenario.node, len(actors))
    for actor in actors:
        for number_of_play in plays if _comes_and_goes(scenario, actor) else (0,):
            yield _process_life(scenario, actor, number_of_play, pids)


def _pod_life(scenario: Scenario, number: int, play: int) -> PodLife:
    pod = scenario.pods[number]
    names = (scenario.node, pod.namespace, pod.name, f"pods[{number}]")
    derived = static_uid(*names) if pod.static else derived_uuid(*names, play)
    begin = play * scenario.repeat_seconds
    always = pod.start is None or pod.end is None
    window = Window() if always else Window(begin + (pod.start or 0.0), begin + (pod.end or 0.0))
    return PodLife(pod, play, PodUid(pod.uid or derived), window)


@lru_cache(maxsize=4)
def _actors(scenario: Scenario) -> tuple[ScheduledProcess, ...]:
    cast: list[tuple[Process | None, int | None, Container | None, HostProcess | None]] = []
    for pod, spec in enumerate(scenario.pods):
        for container in spec.containers:
            cast += [(process, pod, container, None) for process in container.processes]
            if not container.init:
                cast.append((None, pod, container, None))
    cast += [(host, None, None, host) for host in scenario.host_processes]
    return tuple(ScheduledProcess(number, *roles) for number, roles in enumerate(cast))


def _comes_and_goes(scenario: Scenario, actor: ScheduledProcess) -> bool:
    if actor.spec is not None:
        return actor.spec.start is not None
    return actor.pod is not None and scenario.pods[actor.pod].start is not None


def _process_life(scenario: Scenario, actor: ScheduledProcess, play: int, pids: Pids) -> ProcessLife:
    pod = None
    if actor.pod is not None:
        pod = _pod_life(scenario, actor.pod, 0 if scenario.pods[actor.pod].start is None else play)
    begin = play * scenario.repeat_seconds
    if actor.spec is None:
        window = Window() if pod is None else pod.window.shifted(1.0, -0.5)
    elif actor.spec.start is None or actor.spec.end is None:
        window = Window()
    else:
        window = Window(begin + actor.spec.start, begin + actor.spec.end)
    pid = pids.of(actor.number, play)
    since = -float(600 + number(3000, scenario.node, pid)) if window.start == -math.inf else window.start - PROC_LEAD
    return ProcessLife(
        spec=actor.spec,
        comm=actor.spec.comm if actor.spec else (actor.container.name if actor.container else "init")[:15],
        pid=pid,
        window=window,
        start_ticks=BOOT_TICKS + int(since * TICKS_PER_SECOND),
        pod=pod,
        container=actor.container,
        host=actor.host,
    )


# --- XID events -------------------------------------------------------------------------------------------------------


class XidCue(NamedTuple):
    seconds: float
    gpu: Gpu
    xid: Xid

    @property
    def instance_ids(self) -> tuple[int | None, int | None]:
        """Of the GPU instance and of the compute instance, where it is a MIG device's."""
        if self.xid.instance is None:
            return None, None
        device = self.gpu.devices[self.xid.instance]
        return device.gpu_instance_id, device.compute_instance_id


def cues(scenario: Scenario, after: float, until: float) -> list[XidCue]:
    """Those after one time until another, in their order; of the play then and the one before, if it was longer."""
    play, _ = play_of(scenario, until)
    return sorted(
        (cue for number in (play - 1, play) for cue in _cues_of_play(scenario, number) if after < cue.seconds <= until),
        key=lambda cue: (cue.seconds, cue.gpu.index),
    )


def _cues_of_play(scenario: Scenario, play: int) -> Iterator[XidCue]:
    begin = play * scenario.repeat_seconds
    return (XidCue(begin + xid.at, gpu, xid) for gpu in scenario.gpus for xid in gpu.xids if play >= 0)
