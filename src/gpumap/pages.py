"""The newest snapshot in every form that is asked for, each made once a snapshot and only on request.

A reader never waits for a source: what there is, is there. A snapshot that is too old is not served; then the pages
tell of gpumap itself alone.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

import prometheus_client
from prometheus_client.openmetrics import exposition as openmetrics

from gpumap.document import document
from gpumap.exposition import Exposition
from gpumap.families import Family
from gpumap.lanes import Lane
from gpumap.model import Source
from gpumap.snapshot import Snapshot

Form = Literal["text", "openmetrics", "nodes", "map"]
_GZIP_LEVEL = 1


class Pages:
    """Keeps the newest snapshot and its pages. `families` are the main page's, `node_families` /metrics/nodes'."""

    def __init__(
        self,
        families: Iterable[Family],
        self_families: Iterable[Family],
        node_families: Iterable[Family],
        stale_after_seconds: float,
        monotonic: Callable[[], float],
    ) -> None:
        everything = (*families, *self_families)
        self._pages = {
            "text": Exposition(everything),
            "openmetrics": Exposition(everything, openmetrics=True),
            "nodes": Exposition(node_families),
        }
        self._stale_after_seconds = stale_after_seconds
        self._monotonic = monotonic
        self._process = prometheus_client.CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self._process)
        self._lane = Lane("gpumap-pages")
        self._snapshot: Snapshot | None = None
        self._stale = False
        self._made: dict[tuple[Form, bool], bytes] = {}

    def publish(self, snapshot: Snapshot) -> None:
        """Take the newest snapshot. Pages of the one before are dropped."""
        self._snapshot, self._stale, self._made = snapshot, False, {}

    def current(self) -> Snapshot | None:
        """Give the newest snapshot; too old a one without its data; `None` before the first."""
        snapshot = self._snapshot
        too_old = snapshot is not None and self._monotonic() - snapshot.at.monotonic > self._stale_after_seconds
        if snapshot is not None and too_old and not self._stale:
            self._snapshot, self._stale, self._made = _without_data(snapshot), True, {}
        return self._snapshot

    async def page(self, form: Form, *, gzipped: bool) -> bytes | None:
        """Give a page's bytes, `None` before the first snapshot."""
        snapshot = self.current()
        if snapshot is None:
            return None
        made, key = self._made, (form, gzipped)
        if key not in made:
            made[key] = await self._lane.run(lambda: made.get(key) or self._make(form, gzipped, snapshot, made))
        return made[key]

    def not_ready(self) -> str | None:
        """Say why gpumap is not ready: neither kubelet nor NVML has answered lately. `None`: it is."""
        snapshot = self._snapshot
        if snapshot is None:
            return "the first collection is not finished"
        now = self._monotonic()
        asked = [health for health in snapshot.sources if health.source in (Source.KUBELET, Source.NVML)]
        for health in asked:
            if health.last_success and now - health.last_success.monotonic <= self._stale_after_seconds:
                return None
        said = (f"{health.source.value}: {health.reason or 'no answer'} {health.detail}".strip() for health in asked)
        return "; ".join(said)

    def close(self) -> None:
        """Let the rendering thread end."""
        self._lane.close()

    def _make(self, form: Form, gzipped: bool, snapshot: Snapshot, made: dict[tuple[Form, bool], bytes]) -> bytes:
        if gzipped:
            plain = made.get((form, False)) or self._make(form, False, snapshot, made)
            made[form, False] = plain
            return gzip.compress(plain, _GZIP_LEVEL, mtime=0)
        if form == "map":
            return json.dumps(document(snapshot), ensure_ascii=False).encode("utf-8", "backslashreplace")
        page = self._pages[form].render(snapshot)
        if form == "text":
            return page + prometheus_client.generate_latest(self._process)
        if form == "openmetrics":
            own: bytes = openmetrics.generate_latest(self._process)  # type: ignore[no-untyped-call]
            return page.removesuffix(b"# EOF\n") + own
        return page


def _without_data(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, driver=None, gpus=(), leaves=(), containers=(), processes=(), unmatched=(), pods=())
