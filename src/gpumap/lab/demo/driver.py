"""A fake of the NVML worker: `python -m gpumap.lab.demo.driver`, with the same lines on stdin and stdout.

It plays a scenario by the wall clock, and agrees with the node that another process plays. A GPU that is hung
answers when its fault is over. The driver ends when stdin does.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gpumap.agent.nvml_worker import wire
from gpumap.lab.demo.fake_worker import LISTENING_GROUP, reading_for, serve
from gpumap.lab.demo.readings import CUDA_VERSION, DRIVER_VERSION, NVML_VERSION, gpu_readings
from gpumap.lab.demo.scenario import ScenarioError, default_scenario, load_scenario
from gpumap.lab.demo.scenario_model import Scenario
from gpumap.lab.demo.schedule import cues, next_cue, process_lives
from gpumap.model.readings import GpuReading

POLL_SECONDS = 0.1
"""How soon after the end of its fault a hung GPU answers."""


class Driver:
    """Answers requests. `now` gives the seconds since the play began; a hung GPU's read stays pending until it ends.

    From the first request on that wants them, the driver sends XID events as they come.
    """

    def __init__(
        self, scenario: Scenario, now: Callable[[], float], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._scenario = scenario
        self._now = now
        self._monotonic = monotonic
        self._pending: dict[int, int] = {}
        self._groups: tuple[str, ...] = ()
        self._listening_since: float | None = None
        self._listened_until = 0.0  # of the play

    @property
    def patience_seconds(self) -> float | None:
        """In how long there may be lines that no request asked for; `None`: never."""
        cue = None if self._listening_since is None else next_cue(self._scenario, self._listened_until)
        event = None if cue is None else max(cue - self._now(), 0.0)
        hung = POLL_SECONDS if self._pending else None
        return min((wait for wait in (event, hung) if wait is not None), default=None)

    def read(self, request: wire.Request) -> Iterator[bytes]:
        """What was listened to, the driver's line, then a line for each GPU that answers now."""
        self._groups, self._release = request.groups, request.release
        yield from self._listening(release=request.release)
        busy = tuple(sorted(self._pending))
        gpus = len(self._scenario.gpus)
        message = wire.DriverMessage(request.read, DRIVER_VERSION, CUDA_VERSION, NVML_VERSION, gpus, busy)
        yield wire.encode(message)
        for gpu in sorted(self._readings(), key=lambda gpu: gpu.index in request.last):
            if gpu.index in busy or gpu.index in request.skip:
                continue
            if gpu.fault == "hung":
                self._pending[gpu.index] = request.read
            else:
                yield wire.encode(wire.GpuMessage(request.read, gpu))

    def unasked(self) -> Iterator[bytes]:
        """XID events that have come, and lines of GPUs that hung and no longer do."""
        yield from self._xids()
        for gpu in self._readings() if self._pending else ():
            if gpu.index in self._pending and gpu.fault != "hung":
                yield wire.encode(wire.GpuMessage(self._pending.pop(gpu.index), gpu))

    def _listening(self, *, release: bool) -> Iterator[bytes]:
        """Every event until now, then for how long there was a listener: no time if the driver is released."""
        if LISTENING_GROUP not in self._groups:
            self._listening_since = None
            return
        if release or self._listening_since is None:
            self._listening_since, self._listened_until = self._monotonic(), self._now()
        until = self._listening_since if release else self._monotonic()
        yield from self._xids()
        periods = (wire.ListeningPeriod(gpu.uuid, self._listening_since, until) for gpu in self._scenario.gpus)
        yield wire.encode(wire.ListeningMessage(tuple(periods)))
        if release:
            self._listening_since = None

    def _xids(self) -> Iterator[bytes]:
        if self._listening_since is None:
            return
        now, at = self._now(), self._monotonic()
        for cue in cues(self._scenario, self._listened_until, now):
            when = at - (now - cue.seconds)
            yield wire.encode(wire.XidMessage(cue.gpu.uuid, cue.xid.code, *cue.instance_ids, when))
        self._listened_until = max(self._listened_until, now)  # a clock that is set back repeats no event

    def _readings(self) -> tuple[GpuReading, ...]:
        seconds = self._now()
        readings = gpu_readings(self._scenario, process_lives(self._scenario, seconds), seconds)
        return tuple(reading_for(gpu, self._groups, release=self._release) for gpu in readings)


def main() -> int:
    """Exit 0 when stdin ended, 2 for a scenario with a mistake."""
    parser = argparse.ArgumentParser(prog="gpumap.lab.demo.driver", description="The NVML worker of a simulated node.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--scenario", type=Path, help="a scenario (docs/dev/scenario.md)")
    which.add_argument("--default", action="store_true", help="the embedded scenario")
    parser.add_argument("--epoch", type=float, required=True, help="when the play began, in Unix seconds")
    arguments = parser.parse_args()
    # Ctrl-C goes to the whole terminal; the service decides, and closes our stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        scenario = default_scenario() if arguments.default else load_scenario(arguments.scenario)
        serve(Driver(scenario, lambda: time.time() - arguments.epoch))
    except (ScenarioError, ValueError) as error:
        print(f"gpumap.lab.demo.driver: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
