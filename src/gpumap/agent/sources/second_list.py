"""The kubelet, with a second List: that of a scheduler's agent which adds the devices that it shares among pods.

The agent answers as a kubelet does. Koordinator's koordlet forwards the kubelet's List and appends ids
(koordinator-sh/koordinator, pkg/koordlet/statesinformer/impl/states_pod_resources.go). Its failure is a complaint: the
kubelet's answer remains.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from gpumap.agent.sources.kubelet import KubeletSource
from gpumap.model.observations import Complaint, KubeletAnswer, SecondList, SourceAnswer, SourceError

PREFIX = "pod_resources_"
"""Of the reasons of the second List's complaints."""
PATIENCE_SECONDS = 1.0
"""For the agent, in addition to twice the time of the kubelet: it forwards the kubelet's List. An agent that hangs must
not delay each collection by the whole deadline."""


class CorrectedKubelet:
    """Reads the kubelet first. A pod that the kubelet lists, but not the agent, then has no answer of the agent."""

    def __init__(self, kubelet: KubeletSource, agent: KubeletSource) -> None:
        self._kubelet = kubelet
        self._agent = agent

    async def read(self, timeout_seconds: float) -> SourceAnswer[KubeletAnswer]:
        """Ask both within the time. Raises SourceError if the kubelet fails, for the same reasons as `KubeletSource`.

        A failure of the agent is a complaint `pod_resources_<reason>`.
        """
        started = time.monotonic()
        answer, complaints = await self._kubelet.read(timeout_seconds)
        passed = time.monotonic() - started
        patience = min(PATIENCE_SECONDS + 2 * passed, timeout_seconds - passed)
        second, complaints_of_second = await self._second(max(patience, 0.001))
        marked = (Complaint(f"{PREFIX}{one.reason}", one.detail) for one in complaints_of_second)
        return SourceAnswer(replace(answer, second=second), (*complaints, *marked))

    async def wait_until_back(self) -> None:
        await self._kubelet.wait_until_back()

    async def close(self) -> None:
        await asyncio.gather(self._kubelet.close(), self._agent.close())

    async def _second(self, timeout_seconds: float) -> tuple[SecondList, tuple[Complaint, ...]]:
        try:
            answer, complaints = await self._agent.read(timeout_seconds)
        except SourceError as error:
            return SecondList(None), error.complaints
        return SecondList(answer.pods), complaints
