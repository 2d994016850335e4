"""A simulated node: its kubelet, its files and its GPUs' driver, where the real sources find them, while time goes by.

`DemoNode` plays a scenario below a directory and removes all of it at the end. Another process plays the GPUs
(`driver_command`), in the place of the NVML worker. `files_of` says which files a `World` has: the
checkpoints, /var/log and /proc.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from gpumap.lab.demo.kubelet import FakeKubelet
from gpumap.lab.demo.scenario_model import Scenario
from gpumap.lab.demo.texts import link_name, link_target, tree_name
from gpumap.lab.demo.world import World, world
from gpumap.lab.node_files import Content, NodeFiles

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
        await asyncio.to_thread(self._files.show, files_of(now))

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


def files_of(now: World) -> dict[str, Content]:
    """The node's files, from the kubelet's to the processes: in this order they appear."""
    files: dict[str, Content] = {"kubelet/device-plugins/kubelet_internal_checkpoint": now.checkpoint.encode()}
    if now.notes:
        files["kubelet/plugins/gpu.nvidia.com/checkpoint.json"] = now.notes.encode()
    files |= {"log/pods": None, "log/containers": None, "proc": None}
    for tree in now.logs.trees:
        folder = f"log/pods/{tree_name(tree)}"
        files[folder] = None
        for container in tree.containers:
            files |= {f"{folder}/{container}": None, f"{folder}/{container}/0.log": b""}
    files |= {f"log/containers/{link_name(link)}": link_target(link) for link in now.logs.links}
    for proc in now.procs:
        folder = f"proc/{proc.pid}"
        files |= {folder: None, f"{folder}/comm": f"{proc.comm}\n".encode()}
        files |= {f"{folder}/stat": proc.stat.encode(), f"{folder}/cgroup": proc.cgroup.encode()}
    return files
