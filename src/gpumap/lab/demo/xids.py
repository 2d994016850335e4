"""When the XID events of a scenario come, over repeated plays. Pure: times are seconds since the epoch of the demo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gpumap.lab.demo.scenario_file import Xid
from gpumap.lab.demo.scenario_model import GpuSpec, Scenario
from gpumap.lab.demo.schedule import play_of


class XidCue(NamedTuple):
    seconds: float
    gpu: GpuSpec
    xid: Xid

    @property
    def instance_ids(self) -> tuple[int | None, int | None]:
        """Of the GPU instance and of the compute instance, where it is a MIG device's."""
        if self.xid.instance is None:
            return None, None
        device = self.gpu.mig[self.xid.instance]
        return device.gpu_instance_id, device.compute_instance_id


def cues(scenario: Scenario, after: float, until: float) -> list[XidCue]:
    """Those after one time until another, in their order; of the play then and the one before, if it was longer."""
    play, _ = play_of(scenario, until)
    return sorted(
        (cue for number in (play - 1, play) for cue in _of_play(scenario, number) if after < cue.seconds <= until),
        key=lambda cue: (cue.seconds, cue.gpu.index),
    )


def next_cue(scenario: Scenario, after: float) -> float | None:
    """When the next one comes, if ever."""
    play, _ = play_of(scenario, after)
    coming = (cue.seconds for number in (play, play + 1) for cue in _of_play(scenario, number) if cue.seconds > after)
    return min(coming, default=None)


def _of_play(scenario: Scenario, play: int) -> Iterator[XidCue]:
    begin = play * scenario.repeat_seconds
    return (XidCue(begin + xid.at, gpu, xid) for gpu in scenario.gpus for xid in gpu.xids if play >= 0)
