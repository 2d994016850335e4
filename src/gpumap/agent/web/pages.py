"""The newest snapshot in every form that is asked for, each made once a snapshot and only on request.

A reader never waits for a source: what there is, is there. A snapshot that is too old is not served; then the pages
tell of gpumap itself alone.
"""

from __future__ import annotations

import gzip
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import prometheus_client
from prometheus_client.openmetrics import exposition as openmetrics

from gpumap.agent.executors import SerialExecutor
from gpumap.agent.exposition import Exposition
from gpumap.agent.node_map import node_map
from gpumap.agent.web.history import Curves, History, history_document
from gpumap.model.families import Family, Numbered
from gpumap.model.map import encode
from gpumap.model.observations import Source
from gpumap.model.snapshot import Snapshot

Form = Literal["text", "openmetrics", "map", "history"]
Wanted = Form | tuple[Literal["path"], str]
"""A form of the snapshot, or a dialect's own page by its path."""
_GZIP_LEVEL = 1
_UTF8 = ("utf-8", "backslashreplace")


LATE = "collections are late, fail or do not end: see gpumap's log"
"""Where nothing else is known."""


class _What(NamedTuple):
    """What a page is made of. `curves` are the history's. `stale`: why there is no data, a sentence."""

    snapshot: Snapshot
    curves: Curves | None
    stale: str


class Pages:
    """Keeps the newest snapshot and its pages. `families` are the main page's; `by_path` has those of other pages.

    `interval_seconds`, the time between snapshots, and `collect`, the groups that are asked for, are told to readers of
    the map. `why_late` tells why no newer snapshot comes; an empty text where nothing is known of it.
    """

    def __init__(
        self,
        families: Iterable[Family | Numbered],
        self_families: Iterable[Family],
        by_path: Mapping[str, Iterable[Family]],
        stale_after_seconds: float,
        monotonic: Callable[[], float],
        interval_seconds: float | None = None,
        collect: Sequence[str] | None = None,
    ) -> None:
        everything = (*families, *self_families)
        self._pages: dict[Wanted, Exposition] = {
            "text": Exposition(everything),
            "openmetrics": Exposition(everything, openmetrics=True),
            **{("path", path): Exposition(families) for path, families in by_path.items()},
        }
        self.paths = tuple(by_path)
        self._stale_after_seconds = stale_after_seconds
        self._monotonic = monotonic
        self._interval_seconds = interval_seconds
        self._collect = collect
        self.why_late: Callable[[], str] = str
        self._process = prometheus_client.CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self._process)
        self._lane = SerialExecutor("gpumap-pages")
        self._snapshot: Snapshot | None = None
        self._stale = ""
        self._made: dict[tuple[Wanted, bool], bytes] = {}
        self._history = History()
        self._process_name = secrets.token_hex(4)
        self._versions = 0

    def publish(self, snapshot: Snapshot) -> None:
        """Take the newest snapshot. Pages of the one before are dropped."""
        self._snapshot, self._stale, self._made = snapshot, "", {}
        self._versions += 1
        self._history.add(snapshot)

    def current(self) -> Snapshot | None:
        """Give the newest snapshot; too old a one without its data; `None` before the first."""
        snapshot = self._snapshot
        if snapshot is not None and self._is_too_old(snapshot) and not self._stale:
            stale = f"no collection for more than {self._stale_after_seconds:g} s: {self.why_late() or LATE}"
            self._snapshot, self._stale, self._made = _without_data(snapshot), stale, {}
            self._versions += 1
        return self._snapshot

    def version(self) -> str | None:
        """Name what `page` gives now, unlike any other of this process or another; `None` before the first."""
        return f"{self._process_name}-{self._versions}" if self.current() else None

    async def page(self, form: Wanted, *, gzipped: bool) -> bytes | None:
        """Give a page's bytes, `None` before the first snapshot."""
        snapshot = self.current()
        if snapshot is None:
            return None
        made, key = self._made, (form, gzipped)
        if key not in made:
            curves = self._history.curves() if form == "history" else None  # here, where nothing adds to it meanwhile
            what = _What(snapshot, curves, self._stale)
            made[key] = await self._lane.run(lambda: made.get(key) or self._make(form, gzipped, what, made))
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
        said = [f"{one.source.value}: {one.reason or 'no answer'} {one.detail}".strip() for one in asked if not one.up]
        if not said or self._is_too_old(snapshot):  # what they said then may be a reason, too
            said.insert(0, f"no collection for {now - snapshot.at.monotonic:.0f} s: {self.why_late() or LATE}")
        return "; ".join(said)

    def close(self) -> None:
        """Let the rendering thread end."""
        self._lane.close()

    def _is_too_old(self, snapshot: Snapshot) -> bool:
        return self._monotonic() - snapshot.at.monotonic > self._stale_after_seconds

    def _make(self, form: Wanted, gzipped: bool, what: _What, made: dict[tuple[Wanted, bool], bytes]) -> bytes:
        if gzipped:
            plain = made.get((form, False)) or self._make(form, False, what, made)
            made[form, False] = plain
            return gzip.compress(plain, _GZIP_LEVEL, mtime=0)
        if what.curves is not None:
            return json.dumps(history_document(what.curves), ensure_ascii=False, separators=(",", ":")).encode(*_UTF8)
        if form == "map":
            return encode(node_map(what.snapshot, self._interval_seconds, self._collect, what.stale))
        page = self._pages[form].render(what.snapshot)
        if form == "text":
            return page + prometheus_client.generate_latest(self._process)
        if form == "openmetrics":
            own: bytes = openmetrics.generate_latest(self._process)  # type: ignore[no-untyped-call]
            return page.removesuffix(b"# EOF\n") + own
        return page


def _without_data(snapshot: Snapshot) -> Snapshot:
    return replace(
        snapshot,
        driver=None,
        gpus=(),
        nameless_gpus=(),
        leaves=(),
        containers=(),
        processes=(),
        unmatched=(),
        pods=(),
        device_health=None,
        accounts=(),
        gpu_accounts=(),
        xids=(),
        container_xids=(),
        hidden=(),
    )
