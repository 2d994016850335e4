"""A node that is played: its kubelet on a real socket, its files in real folders, and a driver in the place of the NVML
worker.

`show` sets it to one frame of a capture. `playing` shows frames at their times: those of a capture, repeatedly, or
those that the demo makes of a scenario. Everything is below one directory. `files_of` lists the files of a frame.
`serve_demo` and `serve_node` run the service over it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import logging
import math
import os
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gpumap.agent import service
from gpumap.agent.nvml_worker import wire
from gpumap.agent.own_process import stop_by_signal
from gpumap.agent.settings import Settings
from gpumap.lab.capture import answers, contents
from gpumap.lab.capture.checkpoints import SHARING_FOLDER, container_id
from gpumap.lab.capture.format import About, Capture, Frame
from gpumap.lab.demo import kubelet as fake
from gpumap.lab.demo.scenario_model import Scenario
from gpumap.lab.demo.world import play as play_scenario
from gpumap.lab.driver import HANGS, XIDS
from gpumap.lab.node_files import Content, NodeFiles, parents, temporary_folder
from gpumap.model.errors import FatalError
from gpumap.model.observations import NvmlReading

STILL_SECONDS = 5.0
"""How long a capture of one frame lasts until it begins again, without changes."""

_log = logging.getLogger(__name__)

CHECKPOINT = "kubelet/device-plugins/kubelet_internal_checkpoint"
DRA_STATE = "kubelet/dra_manager_state"
DRA_CHECKPOINT = "kubelet/plugins/gpu.nvidia.com/checkpoint.json"
LOGS = "var/log"
PROC = "proc"
SYS = "sys"
OWN = "own"

Play = Iterator[tuple[float, Frame]]
"""Frames with their times on the monotonic clock. A late frame is shown at once."""


class PlayedNode:
    """Plays `capture` below `directory`. With `hangs` a hung GPU does not answer; else it answers that it hangs."""

    def __init__(self, capture: Capture, directory: Path, *, hangs: bool = False) -> None:
        self._capture = capture
        self._directory = directory
        self._files = NodeFiles(directory)
        socket = directory / "kubelet" / "kubelet.sock"
        self._kubelet = fake.PlayedKubelet(socket, {"v1alpha1", capture.about.podresources})
        self._pods_api: fake.PlayedPodsApi | None = None
        if contents.PODS in capture.frames[0].files:
            pods = answers.pods(capture.frames[0].files[contents.PODS])
            self._pods_api = fake.PlayedPodsApi(directory / "kubelet" / "pods.sock", pods)
        self._starts = 0
        self._hangs = hangs
        self._nvml = b""
        self._events = itertools.count()

    @property
    def driver_command(self) -> list[str]:
        """Return the command to start in the place of the NVML worker."""
        command = [sys.executable, "-P", "-m", "gpumap.lab.driver", str(self._directory)]
        return [*command, HANGS] if self._hangs else command

    def settings(self, settings: Settings) -> Settings:
        """Point every source at this node."""
        # A frame has a scheduler's files, or the reason why they could not be read.
        has_sharing_files = any(
            "gpu_fractioning" in contents.down(frame.files) or any(map(container_id, frame.files))
            for frame in self._capture.frames
        )
        return replace(
            settings,
            node_name=self._capture.about.node,
            has_kubelet=self._capture.about.kubelet,
            kubelet_socket=self._kubelet.socket_path,
            checkpoint_candidates=(self._directory / CHECKPOINT,),
            dra_state=self._directory / DRA_STATE,
            dra_driver_checkpoint=self._directory / DRA_CHECKPOINT,
            pods_api_socket=None if self._pods_api is None else self._pods_api.socket_path,
            gpu_fractioning_map=self._directory / SHARING_FOLDER if has_sharing_files else None,
            pod_log_root=self._directory / LOGS,
            proc=self._directory / PROC,
            sys=self._directory / SYS,
            visible_devices="all",
            own_entry=self._directory / OWN,
            resource=re.compile(self._capture.about.resource),
        )

    async def show(self, frame: Frame) -> None:
        """Set the node to this frame: the kubelet first, the processes last."""
        await self._show_kubelet(frame)
        if self._pods_api is not None and not self._pods_api.running:
            await self._pods_api.start()
        await asyncio.to_thread(self._files.show, files_of(frame.files))
        self._show_xids(frame)

    @contextlib.asynccontextmanager
    async def playing(self, play: Play | None = None) -> AsyncIterator[None]:
        """Play frames until the block ends: those of the capture, or others after its first one."""
        over = asyncio.Event()
        task: asyncio.Task[None] | None = None
        try:
            try:
                await self.show(self._capture.frames[0])
            except OSError as error:  # for example a full disk
                raise FatalError(f"cannot play the node: {error.filename}: {error.strerror}") from error
            play = repeated(self._capture.frames) if play is None else play
            task = asyncio.create_task(self._play(play, over), name="gpumap-played-node")
            yield
        finally:
            over.set()
            if task is not None:
                await task  # not cancelled: its own thread may be writing files
            await self.stop()

    async def stop(self) -> None:
        await self._kubelet.stop()
        if self._pods_api is not None:
            await self._pods_api.stop()

    async def _play(self, play: Play, over: asyncio.Event) -> None:
        trouble = ""
        for due, frame in play:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), max(due - time.monotonic(), 0.0))
            if over.is_set():
                return
            try:
                await self.show(frame)
                trouble = ""
            except OSError as error:  # for example a full disk; the next frame writes what is missing
                if str(error) != trouble:
                    _log.warning("played node is not up to date error=%s", error)
                trouble = str(error)

    def _show_xids(self, frame: Frame) -> None:
        """Leave the events of a frame that is new for the driver."""
        text = frame.files[contents.NVML]
        reading = contents.reading(frame.files) if text != self._nvml else None
        self._nvml = text
        if isinstance(reading, NvmlReading) and reading.xids:
            now_seconds = time.monotonic()
            messages = (wire.XidMessage(*xid[:4], now_seconds - xid.age_seconds, xid.times) for xid in reading.xids)
            self._files.add(f"{XIDS}/{next(self._events):06}", b"".join(map(wire.encode, messages)))

    async def _show_kubelet(self, frame: Frame) -> None:
        if not self._capture.about.kubelet:
            return
        allocatable = answers.answer(frame.files, contents.ALLOCATABLE)
        self._kubelet.show(fake.ALLOCATABLE, fake.NO_ALLOCATABLE if allocatable is None else allocatable)
        starts = contents.starts(frame.files)
        if self._starts not in (0, starts):
            await self._kubelet.stop(leave_socket=True)
        self._starts = starts
        down = contents.down(frame.files).get("kubelet")
        if down and down.reason in ("socket_missing", "connection_refused"):
            # A kubelet that ends does not remove its socket; the next one does.
            await self._kubelet.stop(leave_socket=down.reason == "connection_refused")
            if down.reason == "socket_missing":
                self._kubelet.socket_path.unlink(missing_ok=True)
            return
        answer: bytes | fake.Refuse
        if down:
            answer = b"\xff" if down.reason == "decode" else fake.refusal(down.reason)
        else:
            answer = answers.answer(frame.files, contents.LIST) or b""
        for method in self._kubelet.lists:
            self._kubelet.show(method, answer)
        if not self._kubelet.running:
            await self._kubelet.start()


def repeated(frames: Sequence[Frame]) -> Play:
    """The frames at their times, again and again."""
    last_offset = frames[-1].offset_seconds
    play_seconds = last_offset + (last_offset / (len(frames) - 1) if last_offset else STILL_SECONDS)
    began = time.monotonic()
    return (
        (began + number * play_seconds + frame.offset_seconds, frame)
        for number in itertools.count()
        for frame in frames
    )


def files_of(frame: Mapping[str, bytes]) -> dict[str, Content]:
    """Return the content of the node, a folder before its content, in the order of appearance."""
    down = contents.down(frame)
    files: dict[str, Content] = {}
    if "checkpoint" in down:
        files |= _DOWN_CHECKPOINTS.get(down["checkpoint"].reason, {})
    elif contents.CHECKPOINT in frame:
        files[CHECKPOINT] = frame[contents.CHECKPOINT]
    for place, name in ((DRA_STATE, contents.DRA_STATE), (DRA_CHECKPOINT, contents.DRA_CHECKPOINT)):
        if name in frame:
            files[place] = frame[name]
    if "pod_logs" not in down:
        for entry in contents.log_entries(frame) or ():
            for parent in parents(entry.path):
                files.setdefault(parent, None)
            files[entry.path] = entry.target if entry.kind == "l" else None if entry.kind == "d" else b""
    elif down["pod_logs"].reason != "pod_logs_missing":
        files |= {**dict.fromkeys(parents(LOGS)), LOGS: None, f"{LOGS}/pods": b""}  # no directory, and so unreadable
    files |= _sharing_files(frame, down)
    files |= _pci_files(frame)
    files[PROC] = None
    if "procfs" not in down:  # without its own entry gpumap cannot judge any other
        files |= {OWN: None, f"{OWN}/cgroup": frame[contents.OWN_CGROUP]}
        if contents.OWN_PID_IN_TREE in frame:
            files[f"{PROC}/{os.getpid()}"] = None
        for path in sorted(frame):
            if path.startswith("proc/"):
                files.setdefault(path.rpartition("/")[0], None)
                files[path] = frame[path]
    return files | {contents.NVML: frame[contents.NVML]}


def _sharing_files(frame: Mapping[str, bytes], down: Mapping[str, contents.Down]) -> dict[str, Content]:
    """Return the mapping files. One that was damaged or no file has a name of its own."""
    why = down["gpu_fractioning"].reason if "gpu_fractioning" in down else ""
    if why == "gpu_fractioning_missing":
        return {}
    files: dict[str, Content] = {path: frame[path] for path in sorted(frame) if container_id(path)}
    if why:
        files[f"{SHARING_FOLDER}/{'0' * 64}.json"] = b"" if why == "gpu_fractioning_corrupt" else None
    return {SHARING_FOLDER: None, **files}


def _pci_files(frame: Mapping[str, bytes]) -> dict[str, Content]:
    """Return the GPUs on PCI as the kernel shows them, if they are known."""
    functions = contents.pci_functions(frame)
    folder = f"{SYS}/bus/pci/devices"
    files: dict[str, Content] = {} if functions is None else {**dict.fromkeys(parents(folder)), folder: None}
    for function in functions or ():
        path = f"{folder}/{function.address}"
        files |= {
            path: None,
            f"{path}/vendor": b"0x10de\n",
            f"{path}/device": f"{function.device_id}\n".encode(),
            f"{path}/class": f"{function.class_code}00\n".encode(),
            f"{path}/driver_override": f"{function.driver_override or '(null)'}\n".encode(),
        }
        if function.driver:
            files[f"{path}/driver"] = f"../../../../bus/pci/drivers/{function.driver}"
    return files


_DOWN_CHECKPOINTS: Mapping[str, dict[str, Content]] = {
    "checkpoint_unreadable": {CHECKPOINT: None},
    "checkpoint_corrupt": {CHECKPOINT: b"{"},
    "deadline_exceeded": {CHECKPOINT: None},
}


# --- serving ----------------------------------------------------------------------------------------------------------


async def serve_demo(settings: Settings, scenario: Scenario) -> None:
    """Serve a scenario until a signal comes."""
    about = About(settings.node_name, resource=settings.resource.pattern)
    play = play_scenario(scenario)
    _, first = next(play)
    await serve_node(settings, Capture(about, (first,)), play, hangs=True)


async def serve_node(settings: Settings, capture: Capture, play: Play | None = None, *, hangs: bool = False) -> None:
    """Serve a node that is played until a signal comes. Its sources replace those of `settings`."""
    stop = stop_by_signal()  # before anything exists that would remain
    with service.bind(settings.listen) as listener, temporary_folder() as folder:
        node = PlayedNode(capture, Path(folder), hangs=hangs)
        async with node.playing(play):
            _announce(listener)
            # Ids without a device, and what was hidden from a recorded gpumap, stay so: a restart would bring nothing.
            await service.serve(node.settings(settings), node.driver_command, listener, stop, math.inf)


def _announce(listener: socket.socket) -> None:
    """Print the page's address, on a terminal: a log is for programs."""
    if sys.stdout is not None and sys.stdout.isatty():
        host, port = listener.getsockname()[:2]
        shown_host = "127.0.0.1" if ipaddress.ip_address(host).is_unspecified else host
        shown_host = f"[{shown_host}]" if ":" in shown_host else shown_host
        print(f"Open http://{shown_host}:{port}/ in a browser. Ctrl-C ends it.", flush=True)
