"""A node as `tests.nodes` has it, but for its NVML reading: that is a real worker's, over the stand-in driver."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gpumap.agent.sources.nvml import NvmlSource, worker_command
from gpumap.model.observations import NvmlReading
from tests import standin
from tests.nodes import TestNode

PATIENCE_SECONDS = 60.0


@dataclass
class MeasuredNode(TestNode):
    """Its `gpus` say nothing; its `processes` are what /proc has."""

    __test__ = False

    reading: NvmlReading = field(default_factory=lambda: NvmlReading("", "", "", ()))

    def _nvml(self) -> NvmlReading:
        return self.reading


async def measure(driver: standin.Driver, folder: Path) -> NvmlReading:
    """What a worker says of a driver."""
    driver.write(folder / "state")
    library = standin.build(standin.LIBRARIES)
    source = NvmlSource(["env", f"STANDIN_STATE={folder / 'state'}", *worker_command(str(library))])
    try:
        return (await source.read(1.0, PATIENCE_SECONDS)).value
    finally:
        await source.close()
