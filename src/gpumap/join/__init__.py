"""The reducer: `step(memory, observations) -> (memory, snapshot)`. Pure: no clock, no files, no log."""

from gpumap.join.memory import Memory
from gpumap.join.scene import Rules
from gpumap.join.step import step

__all__ = ["Memory", "Rules", "step"]
