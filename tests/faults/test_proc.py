"""/proc: processes that end, hide or lie."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from gpumap.lab.demo import texts
from tests.faults import files
from tests.faults.matrix import ACCUSES_AGAIN, Fault, counts, fault_of, is_down, is_up, suffer
from tests.faults.site import Inject, Site, Sites
from tests.machine import gpu_uuid

pytestmark = pytest.mark.asyncio(loop_scope="module")
PART = "/proc"
UP = is_up("procfs")
up_fault = partial(fault_of, PART, UP)
USED = "gpumap_container_gpu_memory_used_bytes"
OWNED = "gpumap_device_memory_used_by_owner_bytes"
AS_BEFORE = (
    "gpumap_allocation_info unchanged",
    f"{USED} unchanged",
    f"{OWNED} unchanged",
    "gpumap_container_unassigned_use unchanged",
)
BLIND = (
    "gpumap_allocation_info unchanged",
    f"{USED} absent",
    "gpumap_container_unassigned_use absent",
    f'{OWNED}{{owner="assigned"}} absent',
    f'{OWNED}{{owner="gone"}} absent',
    f'{OWNED}{{uuid="{gpu_uuid(1)}",owner="unknown"}} 11818500096',
)
"""Nothing is known of any process: its memory is of an unknown owner."""
WITHOUT_ONE = (
    "gpumap_allocation_info unchanged",
    f'{USED}{{pod="whole"}} absent',
    f'{USED}{{pod="left"}} unchanged',
    f'{OWNED}{{uuid="{gpu_uuid(1)}",owner="unknown"}} 11811160064',
    "gpumap_container_unassigned_use unchanged",
)
"""Only the process on GPU 1 is unknown."""


def root(site: Site) -> Path:
    return site.processes.root


def entry(site: Site) -> Path:
    """The process on GPU 1."""
    return root(site) / str(site.pids["whole"])


def file(name: str) -> Callable[[Site], Path]:
    return lambda site: entry(site) / name


@contextlib.asynccontextmanager
async def hidden(site: Site) -> AsyncIterator[None]:
    """hidepid=2: gpumap sees no process of another user."""
    kept = site.node.directory / "kept-proc"
    kept.mkdir()
    folders = list(root(site).iterdir())
    for folder in folders:
        folder.rename(kept / folder.name)
    yield
    for folder in folders:
        (kept / folder.name).rename(folder)
    kept.rmdir()


@contextlib.asynccontextmanager
async def coming_and_going(site: Site) -> AsyncIterator[None]:
    """Other processes start and end all the time; their directories are half there within a read."""
    ended = threading.Event()

    def churn() -> None:
        while not ended.is_set():
            for pid in range(5_000_000, 5_000_010):
                folder = root(site) / str(pid)
                folder.mkdir()
                (folder / "cgroup").write_text("")
                (folder / "cgroup").unlink()
                folder.rmdir()

    writer = threading.Thread(target=churn)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()


@contextlib.asynccontextmanager
async def many(site: Site) -> AsyncIterator[None]:
    """20,000 processes beside those on the GPUs, the first ones in the order of PIDs."""
    pids = range(10_000, 30_000)

    def start() -> None:
        for pid in pids:
            (root(site) / str(pid)).mkdir()
            (root(site) / str(pid) / "cgroup").write_text("0::/system.slice/web.service\n")

    def end() -> None:
        for pid in pids:
            (root(site) / str(pid) / "cgroup").unlink()
            (root(site) / str(pid)).rmdir()

    await asyncio.to_thread(start)
    yield
    await asyncio.to_thread(end)


@contextlib.asynccontextmanager
async def odd_names(site: Site) -> AsyncIterator[None]:
    names = (b"12\n13", b'"quoted"', "٣".encode(), b"\xff\xfe", b"-1", b"99999999999999999999999")
    for name in names:
        os.mkdir(os.fsencode(root(site)) + b"/" + name)
    (root(site) / "4242").touch()
    yield
    for name in names:
        os.rmdir(os.fsencode(root(site)) + b"/" + name)
    (root(site) / "4242").unlink()


def stat_of(comm: str) -> Callable[[bytes], bytes]:
    return lambda text: texts.stat_text(4711, comm, 4711).encode()


def zombie(text: bytes) -> bytes:
    return text.replace(b") S ", b") Z ")


def unreadable(fault: str, inject: Inject, detail: str) -> Fault:
    """One complaint, about one process."""
    log = f"source complains source=procfs reason=unreadable detail=…{detail}"
    return up_fault(fault, inject, *WITHOUT_ONE, metrics=(counts("procfs", "unreadable"),), log=(log,))


VISIBLE = "processes of other containers are not visible pid_visibility=0 reason=…"
FAULTS = (
    Fault(
        PART,
        "it is missing",
        files.in_place_of(root, files.nothing),
        BLIND,
        is_down("procfs", "unreadable"),
        ("source down source=procfs reason=unreadable detail=…",),
        ACCUSES_AGAIN,
    ),
    Fault(
        PART,
        "gpumap may not read it",
        files.closed(root),
        BLIND,
        is_down("procfs", "unreadable"),
        ("source down source=procfs reason=unreadable detail=…Permission denied",),
        ACCUSES_AGAIN,
    ),
    up_fault(
        "it shows no process of others (hidepid)",
        hidden,
        *BLIND,
        metrics=('gpumap_capability{capability="pid_visibility"} 0',),
        log=(VISIBLE,),
        recovers=ACCUSES_AGAIN,
    ),
    up_fault("a process has ended, and NVML still lists it", files.in_place_of(entry, files.nothing), *WITHOUT_ONE),
    up_fault("a plain file has the name of a process", files.in_place_of(entry, files.text("")), *WITHOUT_ONE),
    unreadable("gpumap may not read the entry of a process", files.closed(entry), "Permission denied"),
    unreadable(
        "a process's cgroup is a directory", files.in_place_of(file("cgroup"), files.directory), "Is a directory"
    ),
    unreadable(
        "a process's cgroup is a link to itself", files.in_place_of(file("cgroup"), files.loop), "Too many levels"
    ),
    unreadable(
        "a process's cgroup is a link to /dev/zero",
        files.in_place_of(file("cgroup"), files.zeros),
        "larger than 64 KiB",
    ),
    unreadable("a process's stat is cut off", files.changed(file("stat"), lambda text: text[:20]), "too few fields"),
    up_fault(
        "a process's cgroup is 4 KiB of noise",
        files.changed(file("cgroup"), lambda text: bytes(range(256)) * 16),
        *WITHOUT_ONE,
    ),
    up_fault("a process's cgroup is empty", files.changed(file("cgroup"), lambda text: b""), *WITHOUT_ONE),
    up_fault(
        "a process's cgroup is a pipe without a writer", files.in_place_of(file("cgroup"), files.pipe), *WITHOUT_ONE
    ),
    up_fault(
        "a process's cgroups name two pods",
        files.changed(
            file("cgroup"),
            lambda text: text.replace(
                b"pids:/kubepods",
                b"pids:/kubepods/besteffort/pod00000000-0000-0000-0000-000000000000/x\n77:a:/kubepods",
            ),
        ),
        *WITHOUT_ONE,
    ),
    up_fault(
        "a process's name has a line end, quotes and brackets",
        files.changed(file("stat"), stat_of('a) R 1 (\n"b')),
        *AS_BEFORE,
    ),
    up_fault("a process on a GPU is a zombie", files.changed(file("stat"), zombie), *AS_BEFORE),
    up_fault("entries with names that are no PIDs", odd_names, *AS_BEFORE),
    up_fault("processes start and end within a read", coming_and_going, *AS_BEFORE, looks=4),
    up_fault("there are 20,000 processes", many, *AS_BEFORE),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
async def test_proc(fault: Fault, sites: Sites) -> None:
    """The page, the self-metrics and the log are as the row says, and the next collection is as before."""
    async with sites.borrow(fault.start) as site:
        await suffer(fault, site)
