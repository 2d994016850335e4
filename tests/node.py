"""A GPU node for tests of the service as it runs: fake kubelet, stand-in driver, identity files, real or plain processes.

`Node` is the machine, `serve` starts the installed `gpumap` over it, and `Agent` asks that over HTTP. Everything is
waited for with a deadline; an agent that logged a traceback, or did not end well, fails its test.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, Self, TypeVar

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from gpumap.demo import texts
from gpumap.demo.kubelet import FakeKubelet
from gpumap.model import (
    CheckpointEntry,
    ContainerLink,
    ContainerName,
    DeviceId,
    ListedContainer,
    ListedPod,
    LogTree,
    PodUid,
    ResourceDevices,
)
from tests import standin

T = TypeVar("T")
GPUMAP = Path(sys.executable).with_name("gpumap")
"""The installed command."""
PATIENCE_SECONDS = 20.0
POLL_SECONDS = 0.03
MIB = 1 << 20
GIB = 1 << 30
WHOLE, SHARED = "nvidia.com/gpu", "nvidia.com/gpu.shared"


def gpu_uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without what would steer gpumap, and with `variables`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GPUMAP_", "NODE_"))}
    return inherited | variables


async def until(ask: Callable[[], Awaitable[T]], holds: Callable[[T], bool], what: str) -> T:
    """Ask again and again until the answer holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds(answer := await ask()):
        assert time.monotonic() < deadline, f"{what}; the last answer was\n{answer}"
        await asyncio.sleep(POLL_SECONDS)
    return answer


# --- processes --------------------------------------------------------------------------------------------------------


class Processes(Protocol):
    """Where the GPU processes of a node are: `root` is what `--proc` names."""

    root: Path

    def start(self, cgroup: str) -> int: ...
    def end(self, pid: int) -> None: ...
    def close(self) -> None: ...


class PlainProcesses:
    """Processes that are only files: PID/cgroup, PID/stat and PID/comm below `root`, and no `self`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._pid = 4_000_000
        root.mkdir(parents=True, exist_ok=True)

    def start(self, cgroup: str) -> int:
        self._pid += 1
        self.write(self._pid, texts.cgroup_text("v1-cgroupfs", cgroup))
        return self._pid

    def write(self, pid: int, cgroup_text: str) -> None:
        folder = self.root / f"new-{pid}"
        folder.mkdir()
        (folder / "cgroup").write_text(cgroup_text)
        (folder / "stat").write_text(texts.stat_text(pid, "python3", 4711))
        (folder / "comm").write_text("python3\n")
        folder.rename(self.root / str(pid))

    def end(self, pid: int) -> None:
        shutil.rmtree(self.root / str(pid))

    def close(self) -> None:
        shutil.rmtree(self.root)


class NoCgroupsError(Exception):
    """This machine does not let us make cgroups; the message says why."""


class RealProcesses:
    """Real processes (`sleep`) in cgroups of their own, made in every hierarchy that lets us. All of it is undone."""

    def __init__(self) -> None:
        self.root = Path("/proc")
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._made: list[Path] = []
        mounts = Path("/sys/fs/cgroup")
        found = [mounts] if (mounts / "cgroup.procs").exists() else [mounts / "pids", mounts / "unified"]
        self._hierarchies = [hierarchy for hierarchy in found if _lets_us_make_cgroups(hierarchy)]
        if not self._hierarchies:
            raise NoCgroupsError("cgroups cannot be made here: it takes root, and a writable /sys/fs/cgroup")

    def start(self, cgroup: str) -> int:
        process = subprocess.Popen(["sleep", "300"])
        self._running[process.pid] = process
        self.move(process.pid, cgroup)
        return process.pid

    def move(self, pid: int, cgroup: str) -> None:
        for hierarchy in self._hierarchies:
            folder = hierarchy
            for step in cgroup.strip("/").split("/"):
                folder = folder / step
                with contextlib.suppress(FileExistsError):
                    folder.mkdir()
                    self._made.append(folder)
            (folder / "cgroup.procs").write_text(str(pid))

    def entering(self, cgroup: str) -> list[str]:
        """What to write before a command to run it in a cgroup."""
        self.end(self.start(cgroup))
        files = " ".join(f"{hierarchy}{cgroup}/cgroup.procs" for hierarchy in self._hierarchies)
        return ["sh", "-c", f'for file in {files}; do echo $$ > "$file"; done; exec "$@"', "sh"]

    def end(self, pid: int) -> None:
        process = self._running.pop(pid)
        process.kill()
        process.wait()

    def close(self) -> None:
        for pid in list(self._running):
            self.end(pid)
        deadline = time.monotonic() + PATIENCE_SECONDS
        for folder in reversed(self._made):
            while folder.exists() and time.monotonic() < deadline:
                with contextlib.suppress(OSError):  # busy until its last process is quite gone
                    folder.rmdir()
                if folder.name in ("kubepods", "besteffort"):
                    break  # another test run may have pods in it


class HostProcesses:
    """The processes that this machine has. None is started."""

    root = Path("/proc")

    def start(self, cgroup: str) -> int:
        raise NotImplementedError

    def end(self, pid: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def _lets_us_make_cgroups(hierarchy: Path) -> bool:
    probe = hierarchy / f"gpumap-test-{secrets.token_hex(4)}"
    try:
        probe.mkdir()
        with subprocess.Popen(["sleep", "10"]) as process:
            try:
                (probe / "cgroup.procs").write_text(str(process.pid))
            finally:
                process.kill()
        probe.rmdir()
    except OSError:
        with contextlib.suppress(OSError):
            probe.rmdir()
        return False
    return True


# --- the node ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pod:
    """A pod of a node. `containers` has the container ids by name, `devices` the kubelet's device ids."""

    namespace: str
    name: str
    uid: PodUid
    containers: Mapping[str, str]
    devices: Mapping[str, tuple[DeviceId, ...]]

    def cgroup(self, container: str) -> str:
        return texts.pod_cgroup("v1-cgroupfs", "besteffort", self.uid, self.containers[container])

    def listed(self) -> ListedPod:
        containers = (
            ListedContainer(name, tuple(_by_resource(self.devices.get(name, ())))) for name in self.containers
        )
        return ListedPod(self.namespace, self.name, tuple(containers))


def _by_resource(ids: Sequence[DeviceId]) -> Iterator[ResourceDevices]:
    shared = tuple(sorted(id_ for id_ in ids if "::" in id_))
    whole = tuple(sorted(set(ids) - set(shared)))
    return (ResourceDevices(name, found) for name, found in ((WHOLE, whole), (SHARED, shared)) if found)


@dataclass
class Node:
    """A machine below `directory`. Each change is there for the next collection; the driver's state is `driver`.

    GPU 0 is offered as four time-slicing replicas, the others are given whole.
    """

    directory: Path
    library: Path
    processes: Processes
    gpus: int = 3
    pods: list[Pod] = field(default_factory=list)
    driver: standin.Driver = field(init=False)
    kubelet: FakeKubelet = field(init=False)

    def __post_init__(self) -> None:
        self.driver = standin.Driver(
            gpus=[standin.Gpu(gpu_uuid(index), memory_used_bytes=64 * MIB) for index in range(self.gpus)]
        )
        self.kubelet = FakeKubelet(self.kubelet_root / "pod-resources" / "kubelet.sock")
        for folder in ("kubelet/device-plugins", "log/pods", "log/containers"):
            (self.directory / folder).mkdir(parents=True)
        self.tell_driver()
        self.tell_kubelet()

    @property
    def kubelet_root(self) -> Path:
        return self.directory / "kubelet"

    @property
    def state(self) -> Path:
        return self.directory / "driver-state"

    @property
    def flags(self) -> list[str]:
        """What points gpumap at this node, but for the driver."""
        return [
            *("--kubelet-root", str(self.kubelet_root)),
            *("--pod-log-root", str(self.directory / "log")),
            *("--proc", str(self.processes.root)),
        ]

    @property
    def offered(self) -> tuple[ResourceDevices, ...]:
        replicas = tuple(DeviceId(f"{gpu_uuid(0)}::{number}") for number in range(4))
        whole = tuple(DeviceId(gpu_uuid(index)) for index in range(1, self.gpus))
        return ResourceDevices(WHOLE, whole), ResourceDevices(SHARED, replicas)

    # --- pods ---

    def admit(self, name: str, namespace: str = "ml", **containers: Sequence[str]) -> Pod:
        """A new pod, with the device ids of each of its containers; no process of it runs yet."""
        pod = Pod(
            namespace,
            name,
            PodUid(str(uuid.uuid4())),
            {container: secrets.token_hex(32) for container in containers},
            {container: tuple(map(DeviceId, ids)) for container, ids in containers.items()},
        )
        self.pods.append(pod)
        self.tell_kubelet()
        for container, container_id in pod.containers.items():
            tree = texts.tree_name(LogTree(pod.uid, namespace, name, ()))
            (self.directory / "log" / "pods" / tree / container).mkdir(parents=True)
            link = ContainerLink(container_id, pod.uid, ContainerName(namespace, name, container))
            (self.directory / "log" / "containers" / texts.link_name(link)).symlink_to(texts.link_target(link))
        return pod

    def delete(self, pod: Pod) -> None:
        """The kubelet forgets a pod and removes its logs. Processes of it that still run are left over."""
        self.pods.remove(pod)
        self.tell_kubelet()
        shutil.rmtree(self.directory / "log" / "pods" / f"{pod.namespace}_{pod.name}_{pod.uid}")
        for container_id in pod.containers.values():
            for link in (self.directory / "log" / "containers").glob(f"*-{container_id}.log"):
                link.unlink()

    def tell_kubelet(self, *, listed: Sequence[Pod] | None = None, registered: bool = True) -> None:
        """What it answers from now on: all pods, or only those `listed`; its plugins' offer, once they `registered`."""
        self.kubelet.set_pods([pod.listed() for pod in (self.pods if listed is None else listed)])
        self.kubelet.set_allocatable(self.offered if registered else ())
        rows = [
            texts.AllocatedEntry(CheckpointEntry(pod.uid, name, devices.resource, frozenset(devices.ids)), ())
            for pod in self.pods
            for name, ids in pod.devices.items()
            for devices in _by_resource(ids)
        ]
        checkpoint = self.kubelet_root / "device-plugins" / "kubelet_internal_checkpoint"
        temporary = checkpoint.with_suffix(".tmp")
        temporary.write_text(texts.checkpoint_text(rows, self.offered, {}))
        temporary.rename(checkpoint)

    # --- processes ---

    def run(self, cgroup: str, gpu: int, memory_bytes: int, sm_percent: int = 0) -> int:
        """Start a process that uses a GPU. `cgroup` is a pod's (`Pod.cgroup`) or of the host."""
        pid = self.processes.start(cgroup)
        self.use(pid, gpu, memory_bytes, sm_percent)
        return pid

    def use(self, pid: int, gpu: int, memory_bytes: int, sm_percent: int = 0) -> None:
        device = self.driver.gpus[gpu]
        assert device.processes is not None
        assert device.samples is not None
        assert device.memory_used_bytes is not None
        device.processes.append(standin.Process(pid, memory_bytes))
        device.samples.append(standin.Sample(pid, sm=sm_percent))
        device.memory_used_bytes += memory_bytes
        self.tell_driver()

    def release(self, pid: int) -> None:
        """A process ends, and what it used is free."""
        for device in self.driver.gpus:
            for process in list(device.processes or ()):
                if process.pid == pid:
                    device.processes = [other for other in device.processes or () if other.pid != pid]
                    device.samples = [other for other in device.samples or () if other.pid != pid]
                    device.memory_used_bytes = (device.memory_used_bytes or 0) - (process.memory_bytes or 0)
        self.tell_driver()
        self.processes.end(pid)

    def tell_driver(self) -> None:
        """Write what the stand-in answers from now on."""
        self.driver.write(self.state)


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A temporary folder whose name leaves room for a Unix socket's path."""
    with tempfile.TemporaryDirectory(prefix="gpumap-") as folder:
        yield Path(folder)


# --- the agent --------------------------------------------------------------------------------------------------------


class Page:
    """A metrics page, read by prometheus_client's parser."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                rows = self.samples.setdefault(sample.name, {})
                labels = frozenset(sample.labels.items())
                assert labels not in rows, f"{sample.name} {sample.labels} stands twice"
                rows[labels] = sample.value

    def __str__(self) -> str:
        return self.text

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The samples of a family that have `labels`, by another label."""
        wanted = labels.items()
        rows = self.samples.get(name, {})
        return {dict(row)[label]: value for row, value in rows.items() if row >= wanted}

    def value(self, name: str, **labels: str) -> float | None:
        """The one sample with these labels among its own; None where there is none."""
        wanted = labels.items()
        found = [value for row, value in self.samples.get(name, {}).items() if row >= wanted]
        assert len(found) < 2, f"{name} {labels} stands {len(found)} times"
        return found[0] if found else None

    def up(self, source: str) -> bool:
        return self.value("gpumap_source_up", source=source) == 1

    def capable(self, capability: str) -> bool:
        return self.value("gpumap_capability", capability=capability) == 1

    @property
    def collections(self) -> float:
        return sum(self.samples.get("gpumap_collections_total", {}).values())

    def container_series(self) -> set[tuple[str, frozenset[tuple[str, str]]]]:
        """Every series on containers: its name and labels."""
        prefixes = ("gpumap_container_", "gpumap_allocation_", "pod_and_gpu_map_info")
        return {(name, row) for name, rows in self.samples.items() if name.startswith(prefixes) for row in rows}


class Answer(NamedTuple):
    status: int
    text: str
    headers: Mapping[str, str]


class Agent:
    """A running `gpumap`, and what it logged so far."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, wrapped: bool) -> None:
        self.process = process
        self.url = ""
        self._log = log
        self._wrapped = wrapped
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_SECONDS))

    async def __aenter__(self) -> Self:
        async def log() -> str:
            return self.log

        try:
            found = await until(log, lambda text: "serving address=" in text or self.ended, "it does not serve")
            match = re.search(r"serving address=(\S+)", found)
            assert match is not None, f"it ended with {self.process.returncode}\n{found}"
        except BaseException:
            await self._kill()
            raise
        self.url = f"http://{match[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            code = await self.stop()
        finally:
            await self._kill()
        assert code == 0, f"it ended with {code}\n{self.log}"
        assert "Traceback" not in self.log, self.log

    @property
    def pid(self) -> int:
        """gpumap's own, not that of the command it was started by."""
        return next(iter(_children(self.process.pid))) if self._wrapped else self.process.pid

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it by a signal, if it has not ended, and give its exit code."""
        if not self.ended:
            os.kill(self.pid, number)
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.process.wait()

    async def _kill(self) -> None:
        await self._session.close()
        if not self.ended:
            self.process.kill()
            await self.process.wait()

    async def get(self, path: str) -> Answer:
        async with self._session.get(self.url + path) as response:
            return Answer(response.status, await response.text(), response.headers)

    async def page(self) -> Page:
        """/metrics now; an empty page before the first collection."""
        answer = await self.get("/metrics")
        return Page(answer.text if answer.status == 200 else "")

    async def until(self, holds: Callable[[Page], bool], what: str) -> Page:
        """The first page that holds."""
        return await until(self.page, holds, what)

    async def later(self, collections: int = 2) -> Page:
        """The page after so many more collections; by default of one that began after this call."""
        goal = (await self.page()).collections + collections
        return await self.until(lambda page: page.collections >= goal, "it does not collect")

    async def pages(self) -> AsyncIterator[Page]:
        """Each collection's page from now on, as far as polling sees them all."""
        seen = 0.0
        while True:
            page = await self.until(lambda page: page.collections > seen, "it does not collect")
            seen = page.collections
            yield page

    def children(self) -> dict[int, str]:
        """The processes that it started: their command lines by PID."""
        return {pid: Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in _children(self.pid)}


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.asynccontextmanager
async def serve(
    node: Node, *flags: str, library: Path | None = None, parent: Sequence[str] = (), **variables: str
) -> AsyncIterator[Agent]:
    """Run `gpumap serve` over a node until the block ends; `parent` is a command that has it as its only child."""
    with tempfile.TemporaryDirectory(prefix="gpumap-log-") as folder:
        log = Path(folder) / "log"
        found = () if library is None else ("--nvml-library", str(library))
        options = [*node.flags, *found, "--interval", "300ms", *flags]
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *(*parent, str(GPUMAP), "serve", "--listen", "127.0.0.1:0", *options),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=errors,
                env=environment(**standin.environment(node.library, node.state) | variables),
            )
        async with Agent(process, log, wrapped=bool(parent)) as agent:
            yield agent
