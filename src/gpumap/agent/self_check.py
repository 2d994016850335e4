"""What `doctor` learns on this node beyond the map: counts from each source, and what this process may do.

Reads only, each question with a deadline of its own. A failure is an answer, never raised.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from gpumap.agent.executors import SerialExecutor
from gpumap.agent.service import watched
from gpumap.agent.settings import Settings
from gpumap.agent.sources.checkpoint import CheckpointSource
from gpumap.agent.sources.fractioning import FractioningSource
from gpumap.agent.sources.identity import PodLogsSource
from gpumap.agent.sources.inotify import Watcher
from gpumap.agent.sources.kubelet import KubeletSource
from gpumap.agent.sources.pods_api import PodsApiSource
from gpumap.agent.sources.second_list import PREFIX
from gpumap.model import cgroups
from gpumap.model.formatting import counted
from gpumap.model.node_facts import Answer, Facts, Privileges
from gpumap.model.observations import KubeletAnswer, SourceError

DEADLINE_SECONDS = 2.0
PROC_SELF = Path("/proc/self")
API_TOKEN = Path("var/run/secrets/kubernetes.io/serviceaccount/token")
RUNTIME_SOCKETS = (
    Path("run/containerd/containerd.sock"),
    Path("run/k3s/containerd/containerd.sock"),
    Path("run/crio/crio.sock"),
    Path("run/docker.sock"),
    Path("var/run/docker.sock"),
)
_CAPABILITIES = """
CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE
NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN
SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE
MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE
"""
CAPABILITIES = tuple(_CAPABILITIES.split())
"""By bit of a capability set (linux/capability.h)."""
WORST_FIRST = (
    "SYS_ADMIN",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_PTRACE",
    "BPF",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "NET_ADMIN",
)


async def look(settings: Settings) -> Facts:
    """Ask everything at once. On a machine without a kubelet, there is nothing to ask of it."""
    if not settings.has_kubelet:
        return Facts(Answer(), Answer(), Answer(), Answer(), privileges())
    required, requested = await asyncio.gather(
        asyncio.gather(
            _kubelet(settings),
            _in_time(partial(_checkpoint, settings)),
            _in_time(partial(_pod_logs, settings)),
            _push(settings),
        ),
        asyncio.gather(
            _second_list(settings.pod_resources_socket),
            _gpu_fractioning(settings.gpu_fractioning_map),
            _pods_api(settings.pods_api_socket),
        ),
    )
    return Facts(*required, privileges(), *requested)


def privileges(proc_self: Path = PROC_SELF, root: Path = Path("/")) -> Privileges:
    """Read what this process may do. What cannot be read is not claimed."""
    held = _capabilities(_read(proc_self / "status"))
    own = cgroups.own(_read(proc_self / "cgroup"))
    token = root / API_TOKEN
    sockets = {os.path.realpath(root / path): path for path in reversed(RUNTIME_SOCKETS) if (root / path).exists()}
    return Privileges(
        uid=os.getuid(),
        capabilities=tuple(sorted(held, key=lambda one: (one not in WORST_FIRST, _place(one)))),
        api_token=f"/{API_TOKEN}" if token.exists() else None,
        runtime_sockets=tuple(sorted(f"/{path}" for path in sockets.values())),
        bare_host=cgroups.is_bare_host(own),
    )


def _place(name: str) -> int:
    return WORST_FIRST.index(name) if name in WORST_FIRST else CAPABILITIES.index(name)


def _capabilities(status: str) -> list[str]:
    match = re.search(r"^CapEff:\s*([0-9a-f]{1,32})$", status, re.MULTILINE)
    bits = int(match[1], 16) if match else 0
    return [name for bit, name in enumerate(CAPABILITIES) if bits >> bit & 1]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


async def _kubelet(settings: Settings) -> Answer:
    return await _ask(KubeletSource(settings.kubelet_socket), lambda answer: _listed(answer, settings))


async def _second_list(socket: Path | None) -> Answer | None:
    if socket is None:
        return None
    source = KubeletSource(socket, list_only=True)
    return await _ask(source, lambda answer: f"{counted(len(answer.pods), 'pod')} listed", PREFIX)


async def _ask(source: KubeletSource, words: Callable[[KubeletAnswer], str], prefix: str = "") -> Answer:
    try:
        answer = await source.read(DEADLINE_SECONDS)
    except SourceError as error:
        last = error.complaints[-1]
        return Answer(reason=f"{prefix}{last.reason}", detail=last.detail)
    finally:
        await source.close()
    return Answer(words(answer.value))


async def _pods_api(socket: Path | None) -> Answer | None:
    if socket is None:
        return None
    source = PodsApiSource(socket, DEADLINE_SECONDS)
    try:
        await source.start(DEADLINE_SECONDS)
        pods, complaints = source.read()
    finally:
        await source.close()
    if pods is not None:
        return Answer(f"{counted(len(pods), 'pod')} reported")
    if complaints:
        return Answer(reason=complaints[-1].reason, detail=complaints[-1].detail)
    return Answer(reason="pods_api_deadline_exceeded", detail=f"no answer within {DEADLINE_SECONDS:g} s")


async def _gpu_fractioning(directory: Path | None) -> Answer | None:
    if directory is None:
        return None

    def read() -> str:
        found, complaints = FractioningSource(directory).read()
        if complaints:
            raise SourceError(*complaints[-1])
        return f"files of {counted(len(found.links), 'container')}"

    return await _in_time(read)


def _listed(answer: KubeletAnswer, settings: Settings) -> str:
    pods = f"{counted(len(answer.pods), 'pod')} listed"
    if answer.allocatable is None:
        return f"{pods}, offered slots unknown"
    counts = {row.resource: len(row.ids) for row in answer.allocatable if settings.resource.fullmatch(row.resource)}
    offered = ", ".join(f"{count} {resource}" for resource, count in sorted(counts.items()))
    return f"{pods}, offered: {offered or 'no GPU'}"


def _checkpoint(settings: Settings) -> str:
    found = CheckpointSource(settings.checkpoint_candidates).read().value
    pods = len({entry.pod_uid for entry in found.entries})
    entries = counted(len(found.entries), "entry", "entries")
    return f"{entries} of {counted(pods, 'pod')}, {counted(len(found.registered), 'resource')} registered"


def _pod_logs(settings: Settings) -> str:
    found = PodLogsSource(settings.pod_log_root).read(time.time()).value
    return f"directories of {counted(len(found.trees), 'pod')}, links of {counted(len(found.links), 'container')}"


async def _push(settings: Settings) -> Answer:
    watcher = Watcher(watched(settings))

    def watch() -> str:
        watcher.watch()
        if not watcher.is_on and watcher.trouble is not None:
            raise SourceError(*watcher.trouble)
        return f"{counted(len(watcher.directories), 'directory', 'directories')} watched"

    try:
        return await _in_time(watch)
    finally:
        watcher.close()


async def _in_time(read: Callable[[], str]) -> Answer:
    lane = SerialExecutor("gpumap-facts")
    asked: Awaitable[str] = lane.run(read, DEADLINE_SECONDS)
    try:
        return Answer(await asked)
    except SourceError as error:
        last = error.complaints[-1]
        return Answer(reason=last.reason, detail=last.detail)
    except TimeoutError:
        return Answer(reason="deadline_exceeded", detail=f"no answer within {DEADLINE_SECONDS:g} s")
    finally:
        lane.close()
