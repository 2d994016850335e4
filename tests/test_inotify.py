"""What inotify reports of real directories: what is news, what is none, and where it is refused."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpumap.agent.sources.inotify import CREATE, MOVED_TO, Place, Watcher, places
from gpumap.model.terms import PodName

PATIENCE_SECONDS = 60.0


def every(_: str) -> bool:
    return True


def none(_: str) -> bool:
    return False


@contextlib.contextmanager
def watching(*watched: Place) -> Iterator[Watcher]:
    watcher = Watcher(watched)
    try:
        watcher.watch()
        yield watcher
    finally:
        watcher.close()


async def event_of(watcher: Watcher) -> None:
    """Return when there is news, and take it."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        await watcher.news.wait()
    watcher.news.clear()


async def is_silent(watcher: Watcher, directory: Path) -> bool:
    """Whether what has happened so far in `directory` was no news: another watcher has seen all of it."""
    with watching(Place(directory, CREATE, every)) as other:
        (directory / f"mark-{time.monotonic_ns()}").touch()
        await event_of(other)
    try:
        async with asyncio.timeout(0.05):
            await watcher.news.wait()
    except TimeoutError:
        return True
    return False


def put(path: Path) -> None:
    """Write a file as the kubelet does: under another name, then renamed."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.touch()
    temporary.rename(path)


async def test_a_file_that_is_renamed_into_place_is_news(tmp_path: Path) -> None:
    """The name that matters is reported each time that it is replaced; temporary names, reads and removals are not."""
    with watching(Place(tmp_path, MOVED_TO, lambda name: name == "checkpoint", allocations=True)) as watcher:
        assert (watcher.is_on, watcher.trouble) == (True, None)
        for _ in range(2):
            put(tmp_path / "checkpoint")
            await event_of(watcher)
            put(tmp_path / "other")
            (tmp_path / "checkpoint").read_text()
            os.listdir(tmp_path)
            (tmp_path / "other").unlink()
            assert await is_silent(watcher, tmp_path)


async def test_a_directory_that_comes_later_is_watched_from_the_next_look_on(tmp_path: Path) -> None:
    """Until then the reason is reported; there is nothing to wait for, and nothing to hear."""
    folder = tmp_path / "later"
    with watching(Place(folder, CREATE, every, allocations=True)) as watcher:
        assert not watcher.is_on
        assert watcher.trouble is not None
        assert watcher.trouble.reason == "directory_missing"
        assert str(folder) in watcher.trouble.detail
        folder.mkdir()
        watcher.watch()
        assert watcher.is_on
        assert not watcher.trouble
        (folder / "file").touch()
        await event_of(watcher)


async def test_a_directory_that_goes_is_news_once(tmp_path: Path) -> None:
    """Its end is reported, the next look finds it missing, and a new one in its place is watched."""
    folder = tmp_path / "folder"
    folder.mkdir()
    with watching(Place(folder, CREATE, every, allocations=True)) as watcher:
        for _ in range(2):
            folder.rmdir()
            await event_of(watcher)
            watcher.watch()
            assert not watcher.is_on
            assert await is_silent(watcher, tmp_path)
            folder.mkdir()
            watcher.watch()
            assert watcher.is_on
            (folder / "file").touch()
            await event_of(watcher)
            (folder / "file").unlink()


async def test_a_replaced_directory_is_watched(tmp_path: Path) -> None:
    """Moved away, with another in its place: the new one is watched, the old one is not; also if its parent is."""
    parent = tmp_path / "parent"
    folder = parent / "folder"
    folder.mkdir(parents=True)
    with watching(Place(folder, CREATE, every)) as watcher:
        folder.rename(tmp_path / "old")
        await event_of(watcher)
        folder.mkdir()
        watcher.watch()
        (tmp_path / "old" / "file").touch()
        assert await is_silent(watcher, tmp_path / "old")
        (folder / "file").touch()
        await event_of(watcher)

        parent.rename(tmp_path / "old-parent")  # of which nothing is reported
        folder.mkdir(parents=True)
        watcher.watch()
        (folder / "file").touch()
        await event_of(watcher)


def queue_length() -> int:
    return int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())


async def test_a_queue_that_overflows_is_news(tmp_path: Path) -> None:
    """If the kernel drops events, any file may have changed: it is time to look, whatever the names were."""
    most = queue_length()
    if most > 1 << 17:
        pytest.skip("the queue is too long here")
    (tmp_path / "a").touch()
    with watching(Place(tmp_path, MOVED_TO, none)) as watcher:
        await asyncio.sleep(0)
        for _ in range(most // 2 + 1):  # the event loop, which would read them, waits meanwhile
            os.rename(tmp_path / "a", tmp_path / "b")
            os.rename(tmp_path / "b", tmp_path / "a")
        await event_of(watcher)
        assert await is_silent(watcher, tmp_path)


async def test_a_container_of_a_pod_with_a_gpu_is_news(tmp_path: Path) -> None:
    """Its link is made when it starts and removed with it. Most containers of a node have no GPU."""
    (tmp_path / "pods").mkdir()
    folder = tmp_path / "containers"
    folder.mkdir()
    watched = places(tmp_path / "none" / "kubelet.sock", (), (), tmp_path)
    mine, other = (folder / f"{pod}_ml_main-{'0' * 64}.log" for pod in ("mine", "other"))
    with watching(*watched) as watcher:
        mine.symlink_to("nowhere")
        assert await is_silent(watcher, folder), "no pod is followed yet"
        mine.unlink()
        assert await is_silent(watcher, folder)
        watcher.pods_with_gpu = frozenset({PodName("ml", "mine")})
        other.symlink_to("nowhere")
        assert await is_silent(watcher, folder)
        assert watcher.started_at == -math.inf
        mine.symlink_to("nowhere")
        await event_of(watcher)
        assert watcher.started_at > -math.inf
        mine.unlink()
        await event_of(watcher)


async def test_the_places_of_a_node(tmp_path: Path) -> None:
    """Allocations, plugins, claims, the kubelet's socket, pods that come and go; nothing else that happens there."""
    root, logs = tmp_path / "kubelet", tmp_path / "log"
    plugins, driver, sockets = root / "device-plugins", root / "plugins/gpu.nvidia.com", root / "pod-resources"
    for folder in (plugins, driver, sockets, logs / "pods"):
        folder.mkdir(parents=True)
    checkpoints = plugins / "checkpoint", tmp_path / "none" / "checkpoint"
    claims = root / "dra_manager_state", driver / "checkpoint.json"
    watched = places(sockets / "kubelet.sock", checkpoints, claims, logs)
    for state in claims:
        state.touch()
    pod = logs / "pods" / "ml_pod_1234"
    matter: list[Callable[[], object]] = [
        lambda: put(plugins / "checkpoint"),
        lambda: (plugins / "nvidia-gpu.sock").touch(),
        lambda: put(plugins / "kubelet.sock"),
        lambda: put(root / "dra_manager_state"),
        lambda: (root / "dra_manager_state").write_text("in place"),
        lambda: put(driver / "checkpoint.json"),
        lambda: put(sockets / "kubelet.sock"),
        pod.mkdir,
        pod.rmdir,
    ]
    with watching(*watched) as watcher:
        assert (watcher.is_on, watcher.trouble) == (True, None)
        for happen in matter:
            happen()
            await event_of(watcher)
        put(plugins / "else")
        put(sockets / "else.sock")
        put(root / "cpu_manager_state")
        (root / "pods").mkdir()
        (driver / "else").touch()
        (logs / "pods" / "lost+found").mkdir()
        for folder in (plugins, sockets, root, driver, logs / "pods"):
            assert await is_silent(watcher, folder)
