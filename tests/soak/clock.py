"""The clock of the soak: SPEED times as fast as the machine's, and the same in all processes of a run."""

from __future__ import annotations

import os
import time

from gpumap.agent.collect import now as machine_now
from gpumap.model.observations import Moment

SPEED = 20.0
_EPOCH = "SOAK_EPOCH"


def environment() -> dict[str, str]:
    """The variable by which a child process has the clock of this one. The first call starts it."""
    os.environ.setdefault(_EPOCH, f"{time.monotonic()!r} {time.time()!r}")
    return {_EPOCH: os.environ[_EPOCH]}


def now() -> Moment:
    """The moment of the fast clock."""
    monotonic, wall = map(float, environment()[_EPOCH].split())
    real = machine_now()
    passed = (real.monotonic - monotonic) * SPEED
    return Moment(monotonic + passed, wall + passed, real.asleep)
