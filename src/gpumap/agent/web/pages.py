"""The newest snapshot in every format that clients request. Each is rendered once per snapshot, and only on request.

A client never waits for a source. A snapshot that is too old is not served: the pages then contain only the metrics of
gpumap itself.
"""

from __future__ import annotations

import functools
import gzip
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import prometheus_client
from prometheus_client.openmetrics import exposition as openmetrics

from gpumap.agent.executors import SerialExecutor
from gpumap.agent.exposition import Exposition
from gpumap.agent.published import published
from gpumap.agent.web.history import History
from gpumap.model import remedies
from gpumap.model.check import Verdict, check, short_line
from gpumap.model.families import Family, NumberedFamilies
from gpumap.model.node import Node, encode, json_bytes
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import Source

Format = Literal["text", "openmetrics", "map", "history"] | tuple[Literal["path"], str]
"""A format of the snapshot, or a dialect's own page by its path."""
_Rendered = dict[tuple[Format, bool], bytes]
"""Pages by format, and whether they are compressed."""
_GZIP_LEVEL = 1
_GZIP_LEVEL_OF_MAP = 4
"""A map repeats itself: at level 4 it is 13 % smaller, and takes no longer."""

LATE = "collections are late, fail or hang: see gpumap's log"
"""The reason if no other is known."""


class Pages:
    """Keeps the newest snapshot and its pages. `families` are the main page's; `by_path` has those of other pages.

    The map shows `interval_seconds`, the time between snapshots, and `collect`, the groups that NVML reads. `why_late`
    returns why no newer snapshot comes; an empty text if the reason is unknown.
    """

    def __init__(
        self,
        families: Iterable[Family | NumberedFamilies],
        self_families: Iterable[Family],
        by_path: Mapping[str, Iterable[Family]],
        stale_after_seconds: float,
        monotonic: Callable[[], float],
        interval_seconds: float | None = None,
        collect: Sequence[str] | None = None,
    ) -> None:
        everything = (*families, *self_families)
        self._pages: dict[Format, Exposition] = {
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
        self._thread = SerialExecutor("gpumap-pages")
        self._snapshot: Snapshot | None = None
        self._stale = ""
        self._rendered: _Rendered = {}
        self._make_map: Callable[[], Node]
        self._history = History()
        self._process_name = secrets.token_hex(4)
        self._versions = 0

    def publish(self, snapshot: Snapshot) -> None:
        """Set the newest snapshot. Pages of the one before are dropped."""
        self._show(snapshot, "")
        self._history.add(snapshot)

    def _show(self, snapshot: Snapshot, stale: str) -> None:
        self._snapshot, self._stale, self._rendered = snapshot, stale, {}
        self._make_map = functools.cache(lambda: published(snapshot, self._interval_seconds, self._collect, stale))
        self._versions += 1

    def current(self) -> Snapshot | None:
        """Return the newest snapshot, without its data if it is too old; `None` before the first."""
        snapshot = self._snapshot
        if snapshot is not None and self._is_too_old(snapshot) and not self._stale:
            stale = f"no collection for more than {self._stale_after_seconds:g} s: {self.why_late() or LATE}"
            self._show(_strip_data(snapshot), stale)
        return self._snapshot

    def version(self) -> str | None:
        """Return a name for the content of `page`, which no other time or process has; `None` without a snapshot."""
        return f"{self._process_name}-{self._versions}" if self.current() else None

    async def page(self, form: Format, *, gzipped: bool) -> bytes | None:
        """Return a page's bytes; `None` before the first snapshot."""
        snapshot = self.current()
        if snapshot is None:
            return None
        rendered, key, make_map = self._rendered, (form, gzipped), self._make_map
        # Here, because no other thread adds to it meanwhile.
        history = self._history.copy() if form == "history" and key not in rendered else None

        def render() -> None:
            if key in rendered:
                return  # for an earlier request
            plain = rendered.get((form, False)) or self._render(form, snapshot, make_map, history)
            rendered[form, False] = plain
            if gzipped:
                rendered[key] = gzip.compress(plain, _GZIP_LEVEL_OF_MAP if form == "map" else _GZIP_LEVEL, mtime=0)

        if key not in rendered:
            await self._thread.run(render)  # it is kept also if the client is gone meanwhile
        return rendered[key]

    async def check(self, only: Collection[str], node: str) -> Verdict | None:
        """Judge the GPUs by these conditions; `None` before the first snapshot. A `node` must be this node's name."""
        snapshot = self.current()
        if snapshot is None:
            return None
        if node not in ("", snapshot.node.name):
            return Verdict(2, short_line(f"the gpumap of node {snapshot.node.name} answers, not of {node}"))
        return check(await self._thread.run(self._make_map), only)

    def not_ready(self) -> str | None:
        """Return why gpumap is not ready: neither kubelet nor NVML has answered lately. `None` if it is ready."""
        snapshot = self._snapshot
        if snapshot is None:
            return "the first collection is not finished"
        current_seconds = self._monotonic()
        sources = [source for source in snapshot.node.sources if source.source in (Source.KUBELET, Source.NVML)]
        answered = [snapshot.answered[source.source] for source in sources if source.source in snapshot.answered]
        if any(current_seconds - seconds <= self._stale_after_seconds for seconds in answered):
            return None
        reasons = [
            f"{source.source}: {source.reason or 'no answer'} {source.detail}".strip()
            for source in sources
            if not source.up
        ]
        if not reasons or self._is_too_old(snapshot):  # old reasons may still apply
            age_seconds = current_seconds - snapshot.at.monotonic
            reasons.insert(0, f"no collection for {age_seconds:.0f} s: {self.why_late() or LATE}")
        return "; ".join(reasons)

    def close(self) -> None:
        """End the rendering thread."""
        self._thread.close()

    def _is_too_old(self, snapshot: Snapshot) -> bool:
        return self._monotonic() - snapshot.at.monotonic > self._stale_after_seconds

    def _render(self, form: Format, snapshot: Snapshot, make_map: Callable[[], Node], history: History | None) -> bytes:
        if history is not None:
            return json_bytes(history.document())
        if form == "map":
            return encode(make_map())
        page = self._pages[form].render(snapshot)
        if form == "text":
            return page + prometheus_client.generate_latest(self._process)
        if form == "openmetrics":
            process: bytes = openmetrics.generate_latest(self._process)  # type: ignore[no-untyped-call]
            return page.removesuffix(b"# EOF\n") + process
        return page


def _strip_data(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot with only what gpumap knows of itself."""
    node = snapshot.node
    bare = Node(
        timestamp=node.timestamp,
        name=node.name,
        internal_ip=node.internal_ip,
        sources=node.sources,
        capabilities=node.capabilities,
        pid_visibility_reason=node.pid_visibility_reason,
        remedies=remedies.capability_remedies(node.capabilities, gpu_answers=False),
    )
    return replace(snapshot, node=bare, containers=(), processes=(), hidden=())
