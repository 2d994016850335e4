"""The reducer: `step(memory, observations) -> (memory, snapshot)`. Pure: no clock, no files, no log."""

from gpumap.agent.join.joined import Rules
from gpumap.agent.join.memory import Memory
from gpumap.agent.join.step import step

__all__ = ["Memory", "Rules", "step"]
