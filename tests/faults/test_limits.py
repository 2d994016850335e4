"""Limits of the kernel: open files, processes and threads, inotify,"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.ending import exits_with, refuse_start
from tests.faults.matrix import ACCUSES_AGAIN, Fault, is_down, is_up, suffer
from tests.faults.site import Inject, Site, Sites, Start, injects
from tests.faults.test_agent import nothing
from tests.faults.test_driver import ALL_AS_BEFORE, DOWN, UP, down, errors
from tests.faults.test_kubelet import LAST_LIST
from tests.faults.test_worker import signalled

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = "Limits"
OTHER_UID = (
    *("setpriv", "--reuid=61234", "--clear-groups", "--inh-caps=+dac_override", "--ambient-caps=+dac_override"),
    *("prlimit", "--nproc=10:10"),
)
"""RLIMIT_NPROC does not hold for root. Another user can read this clone only with a capability."""


@injects
async def limited(site: Site, which: int, value: Callable[[int], int]) -> AsyncIterator[None]:
    """A soft limit of the running gpumap is lower for a while."""
    before = resource.prlimit(site.agent.pid, which)
    resource.prlimit(site.agent.pid, which, (value(site.agent.pid), before[1]))
    yield
    resource.prlimit(site.agent.pid, which, before)


@contextlib.asynccontextmanager
async def no_file(site: Site) -> AsyncIterator[None]:
    """The soft limit of open files is 0, and a new client connects."""
    address = site.agent.url.removeprefix("http://").split(":")
    async with limited(resource.RLIMIT_NOFILE, lambda _: 0)(site):
        with socket.create_connection((address[0], int(address[1]))):
            yield


@contextlib.contextmanager
def in_cgroup(controller: str, limit: str, value: str, pid: int) -> Iterator[None]:
    """A process is in a cgroup with a limit, by cgroup v1 or v2; if it lives on, it returns to its own."""
    root = Path("/sys/fs/cgroup")
    parent = root / controller if (root / controller).exists() else root
    group = parent / f"gpumap-test-{os.getpid()}"
    try:
        group.mkdir()
        if not (group / limit).exists():
            group.rmdir()
            pytest.skip(f"cgroups have no {limit}")
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    found = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    before = parent / found[controller if controller in found else ""].lstrip("/")
    (group / limit).write_text(value)
    (group / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            (before / "cgroup.procs").write_text(str(pid))
        group.rmdir()


@contextlib.asynccontextmanager
async def no_thread(site: Site) -> AsyncIterator[None]:
    """gpumap is in a cgroup that starts no process and no thread. Its worker stays outside."""
    with in_cgroup("pids", "pids.max", "0", site.agent.pid):
        yield


@contextlib.asynccontextmanager
async def no_memory(site: Site) -> AsyncIterator[None]:
    """The worker gets no more memory. The worker after it is in gpumap's own cgroup."""
    (worker,) = site.agent.children()
    v1 = Path("/sys/fs/cgroup/memory").exists()  # noqa: ASYNC240 -- sysfs never waits
    with in_cgroup("memory", "memory.limit_in_bytes" if v1 else "memory.max", "0", worker):
        await site.agent.until(lambda _: worker not in site.agent.children(), "the worker is not killed")
        yield


@contextlib.asynccontextmanager
async def kubelet_restarted(site: Site) -> AsyncIterator[None]:
    await site.node.kubelet.stop()
    await site.node.kubelet.start()
    yield


@injects
async def both(site: Site, first: Inject, second: Inject) -> AsyncIterator[None]:
    async with first(site), second(site):
        yield


NO_TREE = (
    "gpumap_allocation_info unchanged",
    "gpumap_device_memory_used_bytes unchanged",
    "gpumap_container_unassigned_use absent",
    'gpumap_device_memory_used_by_owner_bytes{owner="gone"} absent',
    "/readyz 200",
)
NO_TREE_METRICS = is_down("procfs", "unreadable")
NO_TREE_LOG = "source down source=procfs reason=unreadable detail=…Too many open files"
NO_WORKER_LOG = "source down source=nvml reason=worker_start detail=…only 0 more"
WORKER_ENDS = signalled(signal.SIGKILL)

AT_START = (
    Fault(
        LIMITS,
        "12 open files are allowed at the start",
        nothing,
        exits_with(1),
        (),
        ("gpumap: the limit of open files is 12 (ulimit -n): gpumap needs at least 64",),
        start=Start(parent=("prlimit", "--nofile=12:12")),
    ),
)

RUNNING = (
    Fault(
        LIMITS,
        "no more files can be opened (RLIMIT_NOFILE), and a client connects",
        no_file,
        page=NO_TREE,
        self_metrics=(*NO_TREE_METRICS, UP, is_up("kubelet")),
        log=(NO_TREE_LOG, "cannot accept connections reason='Too many open files'"),
        recovers=ACCUSES_AGAIN,
    ),
    Fault(
        LIMITS,
        "no more files can be opened, and the NVML worker ends",
        both(no_file, WORKER_ENDS),
        page=DOWN,
        self_metrics=(*down("worker_start"), *NO_TREE_METRICS, is_up("kubelet")),
        log=(NO_WORKER_LOG, NO_TREE_LOG),
        recovers=ACCUSES_AGAIN,
    ),
    Fault(
        LIMITS,
        "no more files can be opened, and the kubelet restarts",
        both(no_file, kubelet_restarted),
        page=NO_TREE,
        self_metrics=(*is_down("kubelet", "no_descriptors"), *NO_TREE_METRICS, UP),
        log=("source down source=kubelet reason=no_descriptors", NO_TREE_LOG),
        recovers=ACCUSES_AGAIN,
    ),
)

CGROUPS = (
    Fault(
        LIMITS,
        "the NVML worker reaches the memory limit of its cgroup: the kernel kills it",
        no_memory,
        page=ALL_AS_BEFORE,
        self_metrics=(UP, errors("worker_crashed")),
        log=("source complains source=nvml reason=worker_crashed detail='the worker was killed by SIGKILL'",),
    ),
    Fault(
        LIMITS,
        "no process and no thread can be started (pids.max)",
        no_thread,
        page=ALL_AS_BEFORE,
        self_metrics=(UP, is_up("kubelet")),
        log=(),
    ),
    Fault(
        LIMITS,
        "no process and no thread can be started, and the NVML worker ends",
        both(no_thread, WORKER_ENDS),
        page=DOWN,
        self_metrics=(*down("worker_start"), is_up("kubelet")),
        log=(NO_WORKER_LOG,),
        recovers=ACCUSES_AGAIN,
    ),
    Fault(
        LIMITS,
        "no process and no thread can be started, and the kubelet restarts",
        both(no_thread, kubelet_restarted),
        page=LAST_LIST,
        self_metrics=(*is_down("kubelet", "no_threads"), UP),
        log=("source down source=kubelet reason=no_threads detail=…pids.max",),
        recovers=ACCUSES_AGAIN,
    ),
)

USERS = (
    Fault(
        LIMITS,
        "10 processes and threads are allowed at the start (RLIMIT_NPROC)",
        nothing,
        exits_with(1),
        (),
        ("gpumap: only … more threads can be started (ulimit -u, or the cgroup's pids.max): gpumap needs at least 40",),
        start=Start(parent=OTHER_UID),
    ),
)


@pytest.mark.parametrize("fault", RUNNING, ids=str)
async def test_the_limits(fault: Fault, sites: Sites) -> None:
    async with sites.borrow(fault.start) as site:
        await suffer(fault, site)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a cgroup")
@pytest.mark.parametrize("fault", CGROUPS, ids=str)
async def test_the_limits_of_a_cgroup(fault: Fault, sites: Sites) -> None:
    async with sites.borrow(fault.start) as site:
        await suffer(fault, site)


@pytest.mark.parametrize("fault", AT_START, ids=str)
async def test_the_limits_at_the_start(fault: Fault, library: Path) -> None:
    await refuse_start(fault, library)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start gpumap as another user")
@pytest.mark.parametrize("fault", USERS, ids=str)
async def test_the_limits_of_another_user(fault: Fault, library: Path) -> None:
    await refuse_start(fault, library)
