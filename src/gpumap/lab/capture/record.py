"""Records a node: the service's own loop over recorded sources, each collection a frame. It writes nothing to disk."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from gpumap import __version__
from gpumap.agent.collect import Collector, Sources
from gpumap.agent.service import asked_groups, join_settings_of
from gpumap.agent.settings import Settings, collect_everything
from gpumap.agent.sources.pci import PciSource
from gpumap.lab.capture import contents
from gpumap.lab.capture.contents import Down
from gpumap.lab.capture.format import About, Capture, Frame
from gpumap.lab.capture.limits import LIMITS
from gpumap.lab.capture.recorders import (
    Files,
    Recorded,
    RecordingIdentity,
    RecordingKubelet,
    RecordingNvml,
    RecordingProcfs,
)
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import Source

SHORT_SECONDS = 1.0
"""Between the two collections without a duration: SM time and accusations need two."""
SM_SECONDS = 5.0
"""SM time covers at least this time, also if the interval is shorter."""
_GIVEN_UP = "deadline_exceeded"
_NO_ANSWER = Down(_GIVEN_UP, "no answer in time")


class Recorder:
    """Reads a node's sources as the service does. Call `close` at the end."""

    def __init__(self, settings: Settings, driver_command: Sequence[str]) -> None:
        self._settings = settings
        everything = collect_everything(settings)
        self._nvml = RecordingNvml(driver_command, asked_groups(everything.groups, everything.dialects))
        self._procfs = RecordingProcfs(settings.proc, settings.own_entry, has_kubelet=settings.has_kubelet)
        self._kubelet = RecordingKubelet(settings.kubelet_socket)
        rules = join_settings_of(settings)
        self._pci = None if rules.why_not_on_pci else PciSource(settings.sys)
        kubelet = self._kubelet if settings.has_kubelet else None
        self._identity = RecordingIdentity(
            settings.checkpoint_candidates,
            settings.pod_log_root,
            (settings.dra_state, settings.dra_driver_checkpoint),
            rules.is_gpu_resource,
            settings.gpu_fractioning_map,
        )
        self._loop = Collector(
            Sources(self._nvml, self._procfs, self._identity.read if kubelet else None, kubelet, pci=self._pci),
            rules,
            interval_seconds=max(settings.interval_seconds, SM_SECONDS),
            publish=lambda snapshot: None,
        )

    async def frame(self) -> tuple[Files, Snapshot]:
        """Collect once: the files of the answers, and the snapshot that the service makes of them."""
        self._nvml.recorded, self._procfs.recorded, self._kubelet.recorded, self._identity.recorded = {}, {}, {}, {}
        snapshot = await self._loop.collect()
        sources = ("procfs", *(("kubelet", "checkpoint", "pod_logs") if self._settings.has_kubelet else ()))
        recorded: Recorded = {**dict.fromkeys(sources, _NO_ANSWER), **self._kubelet.recorded}
        # A read of files that missed its deadline ends in a thread of its own, now or in a later collection. Its result
        # then belongs to no collection.
        late = {source.source for source in snapshot.node.sources if not source.up and source.reason == _GIVEN_UP}
        recorded |= {} if Source.PROCFS in late else self._procfs.recorded
        recorded |= {} if Source.POD_IDENTITY in late else self._identity.recorded
        files: Files = {contents.NVML: contents.reading_text(_NO_ANSWER), **self._nvml.recorded}
        if self._pci is not None and self._pci.answer is not None:
            files[contents.PCI] = contents.pci_text(self._pci.answer)
        down: dict[str, Down] = {}
        for source, answer in recorded.items():
            if isinstance(answer, Down):
                down[source] = answer
            else:
                files |= answer
        return files | ({contents.DOWN: contents.down_text(down)} if down else {}), snapshot

    def about(self) -> About:
        """The known facts of the node after its sources were read."""
        settings = self._settings
        return About(
            settings.node_name,
            settings.has_kubelet,
            self._kubelet.version,
            f"recorded by gpumap {__version__}",
            resource=settings.resource.pattern,
        )

    async def close(self) -> None:
        self._loop.close()
        self._procfs.close()
        if self._pci is not None:
            self._pci.close()
        await asyncio.gather(self._nvml.close(), self._kubelet.close())


async def record(
    settings: Settings, driver_command: Sequence[str], seconds: float | None, stop: asyncio.Event
) -> tuple[Capture, Snapshot] | None:
    """Record for this time at the settings' interval, or two collections. At `stop`, return what exists.

    Returns the capture and the last snapshot; `None` if it was stopped before the end of the first collection.
    """
    interval = SHORT_SECONDS if seconds is None else min(settings.interval_seconds, seconds)
    recorder = Recorder(settings, driver_command)
    frames: list[Frame] = []
    last_snapshot: Snapshot | None = None
    size, files_held, began = 0, 0, time.monotonic()
    try:
        while len(frames) < LIMITS.frames and size < LIMITS.total_bytes // 2 and files_held < LIMITS.files // 2:
            began_seconds = round(time.monotonic() - began, 3)  # as it will be written: accounting depends on it
            collected = await _unless(stop, recorder)
            if collected is None:
                break
            frames.append(Frame(began_seconds if frames else 0.0, collected[0]))
            last_files = frames[-2].files if len(frames) > 1 else {}
            size += sum(
                len(content) for name, content in frames[-1].files.items() if last_files.get(name) is not content
            )
            last_snapshot, files_held = collected[1], files_held + len(collected[0])
            due = began_seconds + interval
            if due > (seconds or interval) * 1.001 and len(frames) > 1:
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), max(began + due - time.monotonic(), 0.0))
            if stop.is_set():
                break
        return (Capture(recorder.about(), tuple(frames)), last_snapshot) if last_snapshot is not None else None
    finally:
        await recorder.close()


async def _unless(stop: asyncio.Event, recorder: Recorder) -> tuple[Files, Snapshot] | None:
    """One collection, unless `stop` comes first."""
    collecting = asyncio.create_task(recorder.frame())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((collecting, stopping), return_when=asyncio.FIRST_COMPLETED)
        return collecting.result() if collecting.done() else None
    finally:
        for task in (collecting, stopping):
            task.cancel()
        await asyncio.gather(collecting, stopping, return_exceptions=True)
