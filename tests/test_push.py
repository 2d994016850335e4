"""Push: when the loop collects for what inotify reports, and the service as it runs with it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpumap.agent import collect
from gpumap.agent.collect import PUSH_PAUSE_SECONDS, Collector
from gpumap.agent.sources.inotify import CREATE, Place, Watcher
from gpumap.lab.demo import texts
from gpumap.model.observations import (
    ContainerLink,
    KubeletAnswer,
    NvmlReading,
    PodIdentity,
    ProcTable,
    SourceAnswer,
    SourceError,
)
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import ContainerName, PodUid
from tests import standin
from tests.agent import serve, until
from tests.exposed import Page
from tests.machine import Node, gpu_uuid
from tests.nodes import RULES

LONG = ("--interval", "1h", "--stale-after", "1h")
"""Whatever is seen within a test's patience was pushed."""

NEARLY = 0.8
"""A collection is seen to begin a little after it has."""


# --- the loop ---------------------------------------------------------------------------------------------------------


class Sources:
    """Sources that fail at once, but for the kubelet's, which waits for `gate` and takes `seconds`. `started` and
    `ended`: when collections began and were over."""

    is_real = True

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self.started: list[float] = []
        self.ended: list[float] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.snapshots: list[Snapshot] = []

    @contextlib.asynccontextmanager
    async def running(self, watcher: Watcher | None, interval_seconds: float = 3600.0) -> AsyncIterator[None]:
        """The loop over them, its first collection done, and long enough ago that news is taken at once."""
        rules = replace(RULES, stale_after_seconds=3600.0)
        loop = Collector(
            collect.Sources(_Nvml(self.started), NoProcfs(), self.identity, self, watcher or Watcher(())),
            rules,
            interval_seconds=interval_seconds,
            publish=self._publish,
        )
        task = asyncio.create_task(loop.run())
        try:
            await self.collected(1)
            await asyncio.sleep(PUSH_PAUSE_SECONDS)
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            loop.close()
            if isinstance(watcher, Watcher):
                watcher.close()

    def _publish(self, snapshot: Snapshot) -> None:
        self.ended.append(time.monotonic())
        self.snapshots.append(snapshot)

    async def collected(self, number: int) -> None:
        await self.until(lambda: len(self.snapshots) >= number, "it does not collect")

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        async def ask() -> bool:
            return holds()

        await until(ask, bool, what)

    @property
    def triggers(self) -> dict[str, int]:
        return dict(self.snapshots[-1].collections)

    @property
    def is_on(self) -> bool:
        return self.snapshots[-1].node.capabilities["push"]

    async def read(self, timeout_seconds: float) -> SourceAnswer[KubeletAnswer]:
        await self.gate.wait()
        await asyncio.sleep(self._seconds)
        raise SourceError("unavailable", "this is a test")

    async def wait_until_back(self) -> None:
        await asyncio.Event().wait()

    def identity(self) -> SourceAnswer[PodIdentity]:
        raise SourceError("pod_logs_missing", "this is a test")


class _Nvml:
    def __init__(self, started: list[float]) -> None:
        self._started = started

    async def read(self, interval_seconds: float, timeout_seconds: float) -> SourceAnswer[NvmlReading]:
        self._started.append(time.monotonic())
        raise SourceError("driver_not_loaded", "this is a test")

    async def close(self) -> bool:
        return True


class NoProcfs:
    is_real = True

    def clock_ticks(self) -> int | None:
        return None

    def read(self, pids: list[int], not_after: int | None, pod_uids: frozenset[PodUid]) -> SourceAnswer[ProcTable]:
        raise SourceError("unreadable", "this is a test")


def watcher_of(folder: Path) -> Watcher:
    return Watcher((Place(folder, CREATE, lambda _: True, allocations=True),))


async def test_a_burst_is_two_collections(tmp_path: Path) -> None:
    """The first event starts one at once, however long the interval; all others of the burst together one more."""
    sources = Sources()
    async with sources.running(watcher_of(tmp_path)):
        assert sources.triggers == {"interval": 1, "push": 0}
        (tmp_path / "0").touch()
        await sources.collected(2)
        for number in range(1, 20):
            (tmp_path / str(number)).touch()
        await sources.collected(3)
        assert sources.started[2] - sources.started[1] >= NEARLY * PUSH_PAUSE_SECONDS
        await asyncio.sleep(3 * PUSH_PAUSE_SECONDS)
        assert sources.triggers == {"interval": 1, "push": 2}


async def test_what_happens_during_a_collection_leads_to_another(tmp_path: Path) -> None:
    """The List may have been read before: there is one more collection after it, and no third."""
    sources = Sources()
    async with sources.running(watcher_of(tmp_path)):
        sources.gate.clear()
        (tmp_path / "first").touch()
        await sources.until(lambda: len(sources.started) == 2, "no collection has begun")
        await asyncio.sleep(2 * PUSH_PAUSE_SECONDS)  # a slow collection, not a second one beside it
        (tmp_path / "second").touch()
        assert len(sources.started) == 2
        sources.gate.set()
        await sources.collected(3)
        await asyncio.sleep(2 * PUSH_PAUSE_SECONDS)
        assert sources.triggers == {"interval": 1, "push": 2}


async def test_a_slow_collection_is_followed_by_a_pause_as_long(tmp_path: Path) -> None:
    """However much news there is, collecting for it takes no more than half of the time."""
    sources = Sources(seconds=2 * PUSH_PAUSE_SECONDS)
    async with sources.running(watcher_of(tmp_path)):

        async def touch() -> int:
            (tmp_path / str(time.monotonic_ns())).touch()
            return len(sources.ended)

        await until(touch, lambda ended: ended >= 4, "it does not collect")
        for started, ended, following in zip(sources.started[1:], sources.ended[1:], sources.started[2:], strict=False):
            assert following - ended >= NEARLY * (ended - started)


async def test_the_interval_goes_on_beside_news(tmp_path: Path) -> None:
    """With events all the time collections keep their distance; without any more the interval counts from the last."""
    sources = Sources()
    async with sources.running(watcher_of(tmp_path), interval_seconds=1.0):
        for number in range(20):
            (tmp_path / str(number)).touch()
            await asyncio.sleep(PUSH_PAUSE_SECONDS / 5)
        pushed = len(sources.started)
        pauses = [later - earlier for earlier, later in zip(sources.started[1:], sources.started[2:], strict=False)]
        assert min(pauses) >= NEARLY * PUSH_PAUSE_SECONDS
        await sources.collected(pushed + 2)
        assert sources.triggers["interval"] >= 2


async def test_a_lost_directory_is_looked_for_at_the_interval(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its end starts one collection, not one after the other; each change of push is one line of log."""
    folder = tmp_path / "folder"
    folder.mkdir()
    sources = Sources()
    caplog.set_level("INFO", logger="gpumap")
    async with sources.running(watcher_of(folder), interval_seconds=1.0):
        folder.rmdir()
        await sources.collected(2)
        await sources.collected(4)
        assert not sources.is_on
        assert sources.triggers["push"] == 1
        folder.mkdir()
        await sources.until(lambda: sources.is_on, "the new directory is not watched")
        (folder / "file").touch()
        triggered = sources.triggers["push"]
        await sources.until(lambda: sources.triggers["push"] > triggered, "it is not heard")
    lines = [record.message for record in caplog.records if "push=" in record.message]
    assert [line.split(" push=")[1][0] for line in lines] == ["1", "0", "1"]
    assert f"reason=directory_missing detail='{folder}: No such file or directory'" in lines[1]


class Started(Watcher):
    """A trigger by which a container has just started."""

    def __init__(self) -> None:
        super().__init__(())
        self.is_on = True
        self.started_at = time.monotonic()

    def watch(self) -> None:
        """Stay as it is."""


@pytest.mark.parametrize("seconds", [0.0, 2 * collect.BURST_INTERVAL_SECONDS])
async def test_after_a_start_collections_follow_for_a_while(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """They keep their distance, a slow one is followed by a pause as long, and then only the interval counts."""
    monkeypatch.setattr(collect, "BURST_SECONDS", 2.0)
    sources = Sources(seconds)
    async with sources.running(Started()):
        await sources.collected(2)
        for started, ended, following in zip(sources.started, sources.ended, sources.started[1:], strict=False):
            assert following - started >= NEARLY * max(collect.BURST_INTERVAL_SECONDS, 2 * (ended - started))
        await asyncio.sleep(2.0 + 2 * collect.BURST_INTERVAL_SECONDS + 2 * seconds)
        collections = len(sources.started)
        await asyncio.sleep(2 * collect.BURST_INTERVAL_SECONDS + 2 * seconds)
        assert len(sources.started) == collections
        assert sources.triggers["interval"] == 1


@pytest.mark.parametrize(
    ("interval", "deadline"), [(0.1, 1.0), (0.5, 1.0), (1.0, 1.0), (2.5, 2.5), (5.0, 5.0), (60.0, 5.0)]
)
def test_the_deadline_of_a_source_is_the_interval_within_limits(interval: float, deadline: float) -> None:
    assert collect.deadline_seconds(interval) == deadline


async def test_without_news_the_interval_alone_decides() -> None:
    """Commands that look have no watcher: push is 0, and no count of it is served."""
    sources = Sources()
    async with sources.running(None, interval_seconds=0.1):
        await sources.collected(4)
        assert set(sources.triggers) == {"interval"}
        assert not sources.is_on


# --- the service ------------------------------------------------------------------------------------------------------


def pushed(page: Page) -> float:
    return page.value("gpumap_collections_total", trigger="push") or 0


async def test_an_assigned_pod_is_on_the_page_at_once(node: Node) -> None:
    """With an interval of an hour: what the kubelet allocates is served, and counted as pushed; so is a pod's end."""
    async with serve(node, *LONG) as agent, serve(node, *LONG, "--no-push") as polling:
        page = await agent.until(lambda page: page.collections == 1, "it does not collect")
        assert page.capable("push")
        assert pushed(page) == 0
        pod = node.admit("fresh", main=[gpu_uuid(1)])
        page = await agent.until(lambda page: page.value("gpumap_allocation_info", pod="fresh") == 1, "it is not seen")
        assert pushed(page) >= 1
        assert page.value("gpumap_collections_total", trigger="interval") == 1
        node.delete(pod)
        await agent.until(lambda page: "gpumap_allocation_info" not in page.samples, "its end is not seen")
        assert agent.log.count("push=1") == 1

        page = await polling.until(lambda page: page.collections == 1, "it does not collect")
        assert not page.capable("push")
        assert (page.collections, pushed(page)) == (1, 0)
        assert "push=" not in polling.log


async def test_the_memory_of_a_new_pod_is_seen_without_the_interval(node: Node) -> None:
    """It allocates some time after its container started, and no file shows that."""
    node.processes.start(node.admit("neighbour", main=[gpu_uuid(2)]).cgroup("main"))  # PIDs of pods are visible
    async with serve(node, *LONG) as agent:
        await agent.until(lambda page: page.collections == 1, "it does not collect")
        pod = node.admit("fresh", main=[gpu_uuid(1)])
        await agent.until(lambda page: used(page, "fresh") == 0, "the idle holder is not seen")
        await agent.later(2)
        pid = node.run(pod.cgroup("main"), 1, 3 << 30)
        await agent.until(lambda page: used(page, "fresh") == 3 << 30, "its memory is not seen")
        node.release(pid)
        page = await agent.until(lambda page: used(page, "fresh") == 0, "the end of its process is not seen")
        assert page.value("gpumap_collections_total", trigger="interval") == 1


async def test_a_container_that_starts_again_is_seen_without_the_interval(node: Node) -> None:
    """Its new link starts a collection: gpumap did not see the pod come."""
    pod = node.admit("known", main=[gpu_uuid(1)])
    node.processes.start(node.admit("neighbour", main=[gpu_uuid(2)]).cgroup("main"))
    async with serve(node, *LONG) as agent:
        page = await agent.until(lambda page: used(page, "known") == 0, "it does not collect")
        assert page.collections == 1
        node.run(pod.cgroup("main"), 1, 3 << 30)
        link = ContainerLink("f" * 64, pod.uid, ContainerName(pod.namespace, pod.name, "main"))
        (node.directory / "log" / "containers" / texts.link_name(link)).symlink_to(texts.link_target(link))
        page = await agent.until(lambda page: used(page, "known") == 3 << 30, "its memory is not seen")
        assert page.value("gpumap_collections_total", trigger="interval") == 1


def used(page: Page, pod: str) -> float | None:
    return page.value("gpumap_container_gpu_memory_used_bytes", pod=pod)


async def test_the_time_of_a_process_that_no_list_had_starts_collections(node: Node) -> None:
    """It began and ended between two collections: gpumap looks more often, to see the next one with its owner."""
    node.admit("short", main=[gpu_uuid(1)])
    samples = node.driver.gpus[1].samples
    assert samples is not None
    samples.append(standin.Sample(4_000_000, sm=40))
    node.update_driver()
    async with serve(node, *LONG) as agent:
        page = await agent.until(lambda page: pushed(page) >= 3, "the interval alone counts")
        assert page.value("gpumap_collections_total", trigger="interval") == 1
        assert page.value("gpumap_container_sm_utilization_ratio", pod="short") is None, "it may be the container's"


async def test_an_idle_node_is_never_pushed(node: Node) -> None:
    """What gpumap itself reads, and processes that come and go, are no news."""
    node.admit("pod", main=[gpu_uuid(1)])
    async with serve(node) as agent:
        await agent.later(5)
        pid = node.run("/system.slice/sshd.service", 1, 1 << 20)
        await agent.later(5)
        node.release(pid)
        page = await agent.later(5)
        assert page.capable("push")
        assert pushed(page) == 0


async def test_a_restarted_kubelet_is_queried_at_once(node: Node) -> None:
    """Its new socket starts a collection, whether or not its absence was noticed."""
    node.admit("pod", main=[gpu_uuid(1)])
    async with serve(node, *LONG) as agent:
        await agent.until(lambda page: page.collections == 1, "it does not collect")
        await node.kubelet.stop(leave_socket=True)
        await node.kubelet.start()
        page = await agent.until(lambda page: pushed(page) >= 1, "the restart is not seen")
        assert page.up("kubelet")
        assert page.value("gpumap_allocation_info", pod="pod") == 1


async def test_a_checkpoint_that_comes_later_makes_push(node: Node) -> None:
    """Without the kubelet's directory push is 0 and polling goes on; with it push is 1. Each is one line of log."""
    folder = node.kubelet_root / "device-plugins"
    folder.rename(node.directory / "aside")
    async with serve(node) as agent:
        page = await agent.later()
        assert not page.capable("push")
        assert page.up("kubelet")
        (node.directory / "aside").rename(folder)
        await agent.until(lambda page: page.capable("push"), "the directory is not watched")
        await agent.later(3)
        assert (agent.log.count(" push=0 "), agent.log.count(" push=1")) == (1, 1)
        assert "push=0 reason=directory_missing" in agent.log
