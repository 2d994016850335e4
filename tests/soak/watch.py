"""An agent of the soak: started, restarted and asked, each of its pages judged, and what it costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import ssl
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics

from tests import laws, standin
from tests.demo_process import environment
from tests.exposed import Page
from tests.laws import Span, Window
from tests.promtool import promtool
from tests.soak import clock
from tests.soak.agent import LEAK
from tests.soak.door import Door
from tests.soak.node import AGENTS, SoakNode, Truth
from tests.soak.window import make_window

POLL_SECONDS = 0.1
INTERVAL_SECONDS = 0.25
STALE_AFTER_SECONDS = 300.0
"""Of the fast clock: three times as long as the longest collection, as it is by default."""
GRACE_SECONDS = 60.0
"""After a kubelet restart, gpumap keeps a pod that the List omits for so long, while a trace of it exists."""
COUNTERS_EXPIRE_SECONDS = 280.0
"""gpumap forgets after 300 s between two readings of the driver, and a reading may be a second (20 s of the fast clock)
before its page."""
PROMTOOL_PAGES = 100
OPENMETRICS_PAGES = 20
PATIENCE_SECONDS = 120.0
SOURCES = (os.getcwd(), os.path.join(os.getcwd(), "src"))
MOST_SAID = 12
TIMESTAMP = "gpumap_snapshot_timestamp_seconds"


class BrokenLawError(Exception):
    """The first law that a page broke. `page` and `document` are what was served."""

    def __init__(self, what: Sequence[str], page: str, document: str) -> None:
        super().__init__(
            "\n".join([*what[:MOST_SAID], *([f"and {len(what) - MOST_SAID} more"] if len(what) > MOST_SAID else [])])
        )
        self.page = page
        self.document = document


@dataclass
class Usage:
    """What the processes of an agent cost after so many collections, at that time of the fast clock."""

    at: float
    collections: float
    memory_kib: dict[str, int]
    """Anonymous memory: shares of libraries depend on how many processes run."""
    descriptors: dict[str, int]
    threads: dict[str, int]
    children: int
    files: int
    pids: dict[str, int]


@dataclass
class Watched:
    """One agent. `collections` counts those of all its lives that were seen on pages, `excused` the pages on which
    something may have been missing because the machine paused."""

    name: str
    node: SoakNode
    flags: Sequence[str]
    door: Door | None = None
    leak_bytes: int = 0
    pages: int = 0
    excused: int = 0
    maps: int = 0
    collections: float = 0
    lives: int = 0
    usage: list[Usage] = field(default_factory=list)
    why_not_settled: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    port: int = 0

    def __post_init__(self) -> None:
        self.counters = laws.Counters(COUNTERS_EXPIRE_SECONDS)
        self.process: asyncio.subprocess.Process | None = None
        self._ends: list[float] = []  # of the last windows
        self._last_page: Page | None = None
        self._last_collections = 0.0
        self._new_page = asyncio.Event()
        self._settled_truth: Truth | None = None
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_SECONDS))
        self._tls: ssl.SSLContext | bool = True if self.door is None else self.door.tls
        self.temporary = self.node.directory / f"tmp-{self.name}"
        self.temporary.mkdir()

    @property
    def log(self) -> Path:
        return self.node.directory / f"{self.name}.log"

    @property
    def url(self) -> str:
        return f"{'http' if self.door is None else 'https'}://127.0.0.1:{self.port}"

    @property
    def authorization(self) -> dict[str, str]:
        """The header that this agent asks for."""
        return {} if self.door is None else {"Authorization": self.door.authorization()}

    # --- its life ---

    async def start(self) -> None:
        """Start it on the port that it had before."""
        node = self.node
        variables = standin.environment(node.library, node.state(self.name)) | clock.environment()
        variables |= {"TMPDIR": str(self.temporary), LEAK: str(self.leak_bytes), "PYTHONPATH": os.pathsep.join(SOURCES)}
        options = [
            *("--listen", f"127.0.0.1:{self.port}", "--interval", f"{INTERVAL_SECONDS * 1000:g}ms"),
            *("--stale-after", f"{STALE_AFTER_SECONDS:g}s", "--node-name", "soak"),
            *node.flags_for(node.proc),
            *self.flags,
            *(self.door.flags if self.door is not None else ()),
        ]
        begins = self.log.stat().st_size if self.log.exists() else 0
        self._ends = [clock.now().wall]
        self._last_collections = 0.0
        self.counters.restarted()
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.soak.agent", "serve", *options),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=log,
                env=environment(**variables),
            )
        self.lives += 1
        give_up = time.monotonic() + PATIENCE_SECONDS
        while "serving address=" not in (text := self.log.read_bytes()[begins:].decode()):
            if self.process.returncode is not None or time.monotonic() > give_up:
                raise BrokenLawError([f"{self.name} does not start: {text[-2000:]}"], "", "")
            await asyncio.sleep(0.05)
        self.port = int(text.partition("serving address=")[2].split()[0].rpartition(":")[2])

    async def end(self, number: signal.Signals) -> None:
        """End it by a signal; its exit code must fit."""
        assert self.process is not None
        self.process.send_signal(number)
        async with asyncio.timeout(PATIENCE_SECONDS):
            code = await self.process.wait()
        if code != (0 if number is signal.SIGTERM else -number):
            raise BrokenLawError([f"{self.name} ended with {code}"], "", "")

    async def close(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        await self._session.close()

    @property
    def worker(self) -> int | None:
        """The PID of its NVML worker, if it has one."""
        assert self.process is not None
        found = _children(self.process.pid)
        return found[-1] if found else None

    # --- its pages ---

    async def watch(self) -> None:
        """Judge every new page, for ever. Raises BrokenLawError."""
        while True:
            since = clock.now().wall
            try:
                text = await self._get("/metrics")
            except (aiohttp.ClientError, ConnectionError):
                await asyncio.sleep(POLL_SECONDS)
                continue
            if text and self._is_new(text):
                await self._judge(text, since)
            await asyncio.sleep(POLL_SECONDS)

    async def replace_password(self) -> None:
        """Ask for another password and certificate. The password before the last one must be refused."""
        assert self.door is not None
        old = {"Authorization": self.door.authorization(before=True)}
        async with self._session.get(f"{self.url}/metrics", headers=old, ssl=self._tls) as answer:
            if answer.status != 401:
                raise BrokenLawError([f"{self.name}: an old password gives {answer.status}"], "", "")
        self.door.replace()

    async def _get(self, path: str, **headers: str) -> str:
        async with self._session.get(self.url + path, headers=headers | self.authorization, ssl=self._tls) as answer:
            if answer.status == 503:
                return ""  # before the first collection
            if answer.status == 401 and "page" in self.node.truth.broken(self.name, or_recovering=True):
                return ""  # it does not know the new password yet
            if answer.status != 200:
                raise BrokenLawError([f"{path} answers {answer.status}"], await answer.text(), "")
            return await answer.text()

    def _is_new(self, text: str) -> bool:
        at = text.find(f"\n{TIMESTAMP} ")
        line = text[at + 1 : text.find("\n", at + 1)]
        new, self._line = line != getattr(self, "_line", ""), line
        return new

    async def _judge(self, text: str, asked: float) -> None:
        page = Page(text)
        (at,) = page.samples[TIMESTAMP].values()
        document: dict[str, Any] = {}
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            document = json.loads(await self._get("/api/v1/map") or "{}")
        begins, oldest = self._ends[-1], self._ends[max(-3, -len(self._ends))]
        if asked - at > STALE_AFTER_SECONDS:
            rows = [name for name in page.samples if name.startswith(("gpumap_container_", "gpumap_device_"))]
            self._raise([f"L6: the page is {asked - at} s old, and has {rows}"] if rows else [], page, document)
            return
        found = [*laws.wrong(page, self._window(begins, at)), *self.counters.check(page, at)]
        answered = clock.now().wall
        paused = self.node.paused(oldest, answered) or answered - at > STALE_AFTER_SECONDS
        self.excused += paused
        if not paused:
            found += laws.missing(page, self._steady(oldest, at))
        if document and document["timestamp"] >= at:
            later = document["timestamp"]
            found += laws.wrong_map(document, self._window(begins, later))
            if not paused:
                found += laws.missing_in_map(document, self._steady(oldest, later))
            found += laws.disagreement(page, document) if later == at and not document["stale"] else []
            self.maps += 1
            for device in document["devices"]:
                self.seen.update(row["owner"] for row in device["processes"])
        self._raise(found, page, document)
        await self._now_and_then(text)
        self.pages += 1
        collections = page.collections
        self.collections += collections - self._last_collections
        self._last_collections = collections
        truth = self.node.truth
        if begins >= truth.ended:
            settled = make_window(self.name, Span(begins, at), [truth], [truth], recovering_counts=False)
            self.why_not_settled = [*laws.missing(page, settled)]
            self._settled_truth = None if self.why_not_settled else truth
        self._ends = [*self._ends[-3:], at]
        if self.pages % 10 == 0:
            self.usage.append(self._usage())
        self._new_page.set()

    def _window(self, begins: float, ends: float) -> Window:
        """The window of a page. The List that it shows may be older."""
        truths = self.node.during(begins, ends)
        oldest = self._last_list(begins)
        listed = truths if oldest is None else self.node.during(oldest, ends)
        fresh = self.node.during(begins - STALE_AFTER_SECONDS, ends)
        has_list = any("no kubelet" not in at.broken(self.name, or_recovering=False) for at in fresh)
        span, earlier = Span(begins, ends), self.node.earlier
        return make_window(self.name, span, truths, listed, has_list=has_list, earlier=earlier)

    def _steady(self, oldest: float, ends: float) -> Window:
        """The window of the last pages: an accusation needs two collections."""
        truths = self.node.during(oldest, ends)
        return make_window(self.name, Span(oldest, ends), truths, truths)

    def _last_list(self, begins: float) -> float | None:
        """Return when the kubelet last answered before a fault that the page may still show. None: there is none.

        A pause of the machine is such a fault: the kubelet of this process did not answer either.
        """
        oldest, found, over = begins - GRACE_SECONDS, None, math.inf  # `over`: when the truth had changed
        for truth in reversed(self.node.history):
            if over < oldest:
                break
            broken = "kubelet" in truth.broken(self.name, or_recovering=True)
            if broken or self.node.paused(max(truth.began, oldest), min(over, begins)):
                found = oldest = min(oldest, truth.began - GRACE_SECONDS)
            over = truth.ended
        return found

    def _raise(self, found: Sequence[str], page: Page, document: object) -> None:
        if found:
            what = [f"{self.name}: {one}" for one in found]
            raise BrokenLawError(what, page.text, json.dumps(document, indent=1))

    async def _now_and_then(self, text: str) -> None:
        """Other readers of some pages: promtool, and prometheus_client's parser of OpenMetrics."""
        if self.pages % PROMTOOL_PAGES == 0 and "native" in self.flags:
            done = await asyncio.to_thread(promtool, "check", "metrics", page=text)
            if done.returncode or done.stdout or done.stderr:
                raise BrokenLawError([f"L8: promtool says {done.stdout}{done.stderr}"], text, "")
        if self.pages % OPENMETRICS_PAGES == 0:
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                other = await self._get("/metrics", Accept="application/openmetrics-text;version=1.0.0")
                list(read_openmetrics(other))  # type: ignore[no-untyped-call]

    # --- what the plan waits for ---

    async def settled(self, most_collections: float) -> float:
        """Wait until a page shows all of the truth. Return how many collections it took."""
        begun, give_up = self.collections, time.monotonic() + PATIENCE_SECONDS
        while self._settled_truth is not self.node.truth:
            self._new_page.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5.0):
                    await self._new_page.wait()
            slow = self.collections - begun > most_collections
            if slow or (time.monotonic() > give_up and self.collections == begun):
                text = self._last_page.text if self._last_page else ""
                what = f"{self.name}: {self.collections - begun:g} collections later it has not recovered"
                raise BrokenLawError([what, *self.why_not_settled], text, "")
        return self.collections - begun

    async def passes(self, seconds: float) -> None:
        """Wait until its pages are so much newer, by the fast clock."""
        goal = self._ends[-1] + seconds
        while self._ends[-1] < goal:
            self._new_page.clear()
            await self._new_page.wait()

    # --- what it costs ---

    def _usage(self) -> Usage:
        assert self.process is not None
        children = _children(self.process.pid)
        pids = {"service": self.process.pid} | ({"worker": children[-1]} if children else {})
        usage = Usage(clock.now().wall, self.collections, {}, {}, {}, len(children), _count_files(self.temporary), pids)
        for part, pid in pids.items():
            with contextlib.suppress(OSError, StopIteration):
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                usage.memory_kib[part] = next(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:"))
                usage.descriptors[part] = len(os.listdir(f"/proc/{pid}/fd"))
                usage.threads[part] = len(os.listdir(f"/proc/{pid}/task"))
        return usage


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return sorted(found)


def _count_files(directory: Path) -> int:
    return sum(1 for _ in directory.rglob("*"))


def agents(node: SoakNode, leak_bytes: int) -> list[Watched]:
    """The two agents: all that gpumap can show, with and without other exporters' names."""
    steady, restarted = AGENTS
    everything = ("--collect", "all", "--process-metrics")
    return [
        Watched(steady, node, (*everything, "--dialect", "native"), leak_bytes=leak_bytes),
        Watched(restarted, node, ("--dialect", "all"), Door(node.directory / "door")),
    ]
