"""`gpumap serve` on the clock of the soak: `python -m tests.soak.agent serve …`.

The collector and the pages have the fast clock: what gpumap remembers, it forgets SPEED times as soon. Deadlines,
pauses and the worker process keep the machine's time, because the machine does not get faster. Seconds that the worker
reports are converted. SOAK_LEAK_BYTES makes it leak so much in each collection.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import replace

from msgspec import structs

from gpumap.__main__ import main
from gpumap.agent import collect, service
from gpumap.agent.sources.nvml import NvmlSource
from gpumap.model.observations import Moment, NvmlReading, SourceAnswer
from gpumap.model.readings import GpuReading
from tests.soak.clock import SPEED, now

LEAK = "SOAK_LEAK_BYTES"
_leaked: list[bytes] = []


class FastNvml(NvmlSource):
    """The source as it is, with the worker's seconds in those of the fast clock."""

    async def read(self, interval_seconds: float, timeout_seconds: float) -> SourceAnswer[NvmlReading]:
        answer = await super().read(interval_seconds, timeout_seconds)
        reading = answer.value
        fast = replace(
            reading,
            gpus=tuple(map(_fast_gpu, reading.gpus)),
            xids=tuple(one._replace(age_seconds=one.age_seconds * SPEED) for one in reading.xids),
            listening=tuple(
                one._replace(since_seconds=one.since_seconds * SPEED, until_seconds=one.until_seconds * SPEED)
                for one in reading.listening
            ),
        )
        return SourceAnswer(fast, answer.complaints)


def _fast_gpu(gpu: GpuReading) -> GpuReading:
    seconds = gpu.sampled_seconds
    return gpu if seconds is None else structs.replace(gpu, sampled_seconds=seconds * SPEED)


def leaking(size_bytes: int) -> Moment:
    """The clock, which is asked in each collection."""
    _leaked.append(os.urandom(size_bytes))
    return now()


if __name__ == "__main__":
    leak_bytes = int(os.environ.get(LEAK, "0"))
    clock = functools.partial(leaking, leak_bytes) if leak_bytes else now
    vars(collect)["DEADLINE_SECONDS_MIN"] = collect.DEADLINE_SECONDS_MAX
    vars(service)["NvmlSource"] = FastNvml
    vars(service)["serve"] = functools.partial(service.serve, clock=clock)
    sys.exit(main())
