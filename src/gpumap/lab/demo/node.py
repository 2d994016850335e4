"""A simulated node: its kubelet, its files and its GPUs' driver, where the real sources find them, while time goes by.

`DemoNode` plays a scenario below a directory and removes all of it at the end. Another process plays the GPUs
(`driver_command`), in the place of the NVML worker. `NodeFiles` keeps the node's files as a `World` says: its
checkpoints, /var/log and /proc.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from gpumap.lab.demo.kubelet import FakeKubelet
from gpumap.lab.demo.scenario_model import Scenario
from gpumap.lab.demo.texts import link_name, link_target, tree_name
from gpumap.lab.demo.world import World, world

TICK_SECONDS = 0.25

_log = logging.getLogger(__name__)


class DemoNode:
    """Plays `scenario` below `directory` while it is entered. `epoch` is when the play began, by default now.

    `clock` gives Unix seconds; the driver, another process, goes by the machine's.
    """

    def __init__(
        self,
        scenario: Scenario,
        directory: Path,
        epoch: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._scenario = scenario
        self._directory = directory
        self._epoch = epoch
        self._clock = clock
        self._made_directory = False
        self._files = NodeFiles(directory)
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.kubelet = FakeKubelet(self.kubelet_root / "pod-resources" / "kubelet.sock")

    @property
    def node_name(self) -> str:
        return self._scenario.node

    @property
    def kubelet_root(self) -> Path:
        return self._directory / "kubelet"

    @property
    def log_root(self) -> Path:
        return self._directory / "log"

    @property
    def proc_root(self) -> Path:
        return self._directory / "proc"

    @property
    def driver_command(self) -> list[str]:
        """What to start in the NVML worker's place. It plays the same text, even if the scenario's file has changed."""
        if self._epoch is None:
            raise RuntimeError("the node must be entered first")
        scenario = str(self._directory / "scenario.yaml")
        command = [sys.executable, "-P", "-m", "gpumap.lab.demo.driver"]
        return [*command, "--scenario", scenario, "--epoch", repr(self._epoch)]

    async def __aenter__(self) -> DemoNode:
        self._made_directory = not self._directory.exists()
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / "scenario.yaml").write_text(self._scenario.text, encoding="utf-8")
        if self._epoch is None:
            self._epoch = self._clock()
        try:
            await self._show(self._now())
        except BaseException:
            await self._remove()
            raise
        self._task = asyncio.create_task(self._play(), name="gpumap-demo-node")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._task is not None:
                self._over.set()
                await self._task  # not cancelled: a thread of its own may be writing files
        finally:
            await self._remove()

    def _now(self) -> World:
        return world(self._scenario, self._clock() - (self._epoch or 0.0))

    async def _play(self) -> None:
        trouble = ""
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), TICK_SECONDS)
            try:
                await self._show(self._now())
                trouble = ""
            except OSError as error:  # a full disk, say; the next time writes what is missing
                if str(error) != trouble:
                    _log.warning("simulated node is not up to date error=%s", error)
                trouble = str(error)

    async def _show(self, now: World) -> None:
        """In a node's order: the kubelet knows of a pod first, then its files do, and its processes come last."""
        await self._show_kubelet(now)
        await asyncio.to_thread(self._files.show, now)

    async def _show_kubelet(self, now: World) -> None:
        self.kubelet.set_numa(now.numa)
        self.kubelet.set_pods(now.pods)
        self.kubelet.set_allocatable(now.allocatable)
        if now.kubelet_up and not self.kubelet.running:
            await self.kubelet.start()
        elif not now.kubelet_up and self.kubelet.running:
            # A kubelet that ends does not remove its socket; the next one does.
            await self.kubelet.stop(leave_socket=True)

    async def _remove(self) -> None:
        await self.kubelet.stop()
        made = (self.kubelet_root, self.log_root, self.proc_root, self._files.staging)
        for folder in made:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        (self._directory / "scenario.yaml").unlink(missing_ok=True)
        if self._made_directory:
            with contextlib.suppress(OSError):
                self._directory.rmdir()


Folder = tuple[tuple[str, str], ...]
"""Files of a folder: relative path and content."""


class NodeFiles:
    """The files below `directory`, as they were shown last. It writes only what changed.

    What others read while it changes appears and disappears whole, by renaming, as it does on a real node.
    """

    def __init__(self, directory: Path) -> None:
        self.staging = directory / "staging"
        self._checkpoint = directory / "kubelet" / "device-plugins" / "kubelet_internal_checkpoint"
        self._notes = directory / "kubelet" / "plugins" / "gpu.nvidia.com" / "checkpoint.json"
        self._pods = directory / "log" / "pods"
        self._containers = directory / "log" / "containers"
        self._proc = directory / "proc"
        self._written: dict[Path, str] = {}
        self._trees: dict[str, Folder] = {}
        self._processes: dict[str, Folder] = {}
        self._links: dict[str, str] = {}

    def show(self, now: World) -> None:
        """What appears does so from the kubelet's files to the processes; what disappears, the other way round."""
        for folder in (self.staging, self._pods, self._containers, self._proc):
            folder.mkdir(parents=True, exist_ok=True)
        trees = {
            tree_name(tree): tuple((f"{container}/0.log", "") for container in tree.containers)
            for tree in now.logs.trees
        }
        links = {link_name(link): link_target(link) for link in now.logs.links}
        processes = {
            str(proc.pid): (("comm", f"{proc.comm}\n"), ("stat", proc.stat), ("cgroup", proc.cgroup))
            for proc in now.procs
        }
        self._write(self._checkpoint, now.checkpoint)
        if now.notes:
            self._write(self._notes, now.notes)
        self._add(self._pods, self._trees, trees)
        self._link(links)
        self._add(self._proc, self._processes, processes)
        self._remove(self._proc, self._processes, processes)
        self._unlink(links)
        self._remove(self._pods, self._trees, trees)

    def _write(self, path: Path, text: str) -> None:
        """As the kubelet's file store: a temporary file in the same directory, then a rename."""
        if text == self._written.get(path):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o600)
        temporary.rename(path)
        self._written[path] = text

    def _add(self, root: Path, shown: dict[str, Folder], wanted: Mapping[str, Folder]) -> None:
        for name, files in wanted.items():
            if shown.get(name) == files:
                continue
            new = name not in shown
            folder = self.staging / name if new else root / name
            folder.mkdir(exist_ok=True)
            for relative, content in files:
                (folder / relative).parent.mkdir(exist_ok=True)
                (folder / relative).write_text(content, encoding="utf-8")
            if new:
                folder.rename(root / name)
            shown[name] = files

    def _remove(self, root: Path, shown: dict[str, Folder], wanted: Mapping[str, Folder]) -> None:
        for name in shown.keys() - wanted.keys():
            gone = self.staging / "gone"  # a longer name than its own might be too long
            (root / name).rename(gone)
            shutil.rmtree(gone)
            del shown[name]

    def _link(self, wanted: Mapping[str, str]) -> None:
        for name in wanted.keys() - self._links.keys():
            (self._containers / name).symlink_to(wanted[name])
            self._links[name] = wanted[name]

    def _unlink(self, wanted: Mapping[str, str]) -> None:
        for name in self._links.keys() - wanted.keys():
            (self._containers / name).unlink(missing_ok=True)
            del self._links[name]
