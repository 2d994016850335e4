"""The NVML worker process: killed, stopped, or with another library under it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from tests import standin
from tests.faults.matrix import Fault, fault_of, suffer
from tests.faults.site import Site, Sites, Start, injects
from tests.faults.test_driver import ALL_AS_BEFORE, CARD, DOWN, NOT_MEASURED, OTHERS, UP, answers, down, errors, hangs
from tests.machine import gpu_uuid

pytestmark = pytest.mark.asyncio(loop_scope="module")
PART = "NVML worker"
up_fault = partial(fault_of, PART, UP)
IMPATIENT = Start(deadline_seconds=1.0)
LIBRARY = Path(tempfile.gettempdir()) / f"gpumap-faults-{os.getpid()}" / "libnvidia-ml.so.1"
OWN_LIBRARY = Start(flags=("--nvml-library", str(LIBRARY)))


@pytest.fixture(scope="module", autouse=True)
def _own_library(library: Path) -> object:
    """A copy that tests may damage."""
    LIBRARY.parent.mkdir()
    shutil.copy(library, LIBRARY)
    yield
    shutil.rmtree(LIBRARY.parent)


@injects
async def signalled(site: Site, number: signal.Signals) -> AsyncIterator[None]:
    """The worker gets a signal; SIGCONT afterwards, for one that was only stopped."""
    workers = site.agent.children()
    for pid in workers:
        os.kill(pid, number)
    yield
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def stopped_for_two_minutes(site: Site) -> AsyncIterator[None]:
    """gpumap replaces it after half a minute."""
    (worker,) = site.agent.children()
    os.kill(worker, signal.SIGSTOP)
    try:
        await site.agent.until(lambda page: not page.up("nvml"), "the worker answers")
        await asyncio.sleep(120)
        assert worker not in site.agent.children()
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGCONT)


@contextlib.asynccontextmanager
async def crashes_at_start(site: Site) -> AsyncIterator[None]:
    """The worker is killed, and NVML crashes each new one."""
    crashing = answers(lambda driver: driver.crash.add(("nvmlInitWithFlags", "*")))
    async with crashing(site), signalled(signal.SIGKILL)(site):
        yield


@contextlib.asynccontextmanager
async def hangs_in_another_call(site: Site) -> AsyncIterator[None]:
    """The worker is killed while a call of it hangs."""
    async with hangs("nvmlDeviceGetPowerUsage", 1)(site):
        await site.agent.until(
            lambda page: page.value("gpumap_gpu_up", gpu_uuid=gpu_uuid(1)) == 0, "the call does not hang"
        )
    async with signalled(signal.SIGKILL)(site):
        yield


def replace_library() -> None:
    temporary = LIBRARY.with_suffix(".new")
    shutil.copy(standin.build(standin.LIBRARIES), temporary)
    temporary.rename(LIBRARY)


@injects
async def library(site: Site, damage: Callable[[], object], *, ends_worker: bool = False) -> AsyncIterator[None]:
    """The file of the library is damaged under a running worker, and replaced afterwards."""
    damage()
    if ends_worker:
        for pid in site.agent.children():
            os.kill(pid, signal.SIGKILL)
    yield
    replace_library()


FAULTS = (
    up_fault(
        "the worker is killed",
        signalled(signal.SIGKILL),
        *ALL_AS_BEFORE,
        metrics=(errors("worker_crashed"),),
        log=("source complains source=nvml reason=worker_crashed detail='the worker was killed by SIGKILL'",),
    ),
    up_fault(
        "the worker has a segmentation fault between two readings",
        signalled(signal.SIGSEGV),
        *ALL_AS_BEFORE,
        metrics=(errors("worker_crashed"),),
        log=("source complains source=nvml reason=worker_crashed detail='the worker was killed by SIGSEGV'",),
    ),
    up_fault(
        "the library crashes the worker whenever one GPU is read",
        answers(lambda driver: driver.crash.add(("nvmlDeviceGetPowerUsage", 1))),
        f'gpumap_gpu_fault_info{{gpu_{CARD},reason="worker_crashed"}} 1',
        *NOT_MEASURED,
        *OTHERS,
        metrics=(errors("worker_crashed"),),
        log=(f"gpu down uuid={gpu_uuid(1)} index=1 reason=worker_crashed",),
        recovers=70,
    ),
    Fault(
        PART,
        "the library crashes the worker in its first call",
        crashes_at_start,
        page=DOWN,
        self_metrics=down("worker_crashed"),
        log=("source down source=nvml reason=worker_crashed",),
        recovers=2,
    ),
    Fault(
        PART,
        "the worker is stopped (SIGSTOP)",
        signalled(signal.SIGSTOP),
        page=DOWN,
        self_metrics=down("deadline_exceeded"),
        log=("source down source=nvml reason=deadline_exceeded",),
        recovers=2,
        start=IMPATIENT,
    ),
    up_fault(
        "the worker is killed while a call on one GPU hangs",
        hangs_in_another_call,
        *ALL_AS_BEFORE,
        metrics=(errors("hung"),),
        log=(f"gpu down uuid={gpu_uuid(1)} index=1 reason=hung", f"gpu up uuid={gpu_uuid(1)} index=1"),
        recovers=2,
        start=IMPATIENT,
    ),
    up_fault(
        "another file is renamed over the loaded library", library(replace_library), *ALL_AS_BEFORE, start=OWN_LIBRARY
    ),
    up_fault("the loaded library is deleted", library(LIBRARY.unlink), *ALL_AS_BEFORE, start=OWN_LIBRARY),
    Fault(
        PART,
        "the library is deleted, and the worker ends",
        library(LIBRARY.unlink, ends_worker=True),
        page=DOWN,
        self_metrics=down("library_not_found"),
        log=("source down source=nvml reason=library_not_found detail=…No such file or directory",),
        start=OWN_LIBRARY,
    ),
    Fault(
        PART,
        "the loaded library is cut off to 4 KiB",
        library(lambda: os.truncate(LIBRARY, 4096)),
        page=DOWN,
        self_metrics=down("worker_crashed"),
        log=("source down source=nvml reason=worker_crashed detail='the worker was killed by SIGBUS'",),
        recovers=2,
        start=OWN_LIBRARY,
    ),
    Fault(
        PART,
        "zeros are written over the loaded library",
        library(lambda: LIBRARY.write_bytes(bytes(20_000))),
        page=DOWN,
        self_metrics=down("library_not_found"),
        log=("source=nvml reason=library_not_found detail=…invalid ELF header",),
        recovers=2,
        start=OWN_LIBRARY,
    ),
)

LONG = (
    up_fault(
        "the worker is stopped (SIGSTOP) for two minutes",
        stopped_for_two_minutes,
        *ALL_AS_BEFORE,
        metrics=(errors("deadline_exceeded"),),
        log=("source down source=nvml reason=deadline_exceeded", "source up source=nvml"),
        start=IMPATIENT,
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
async def test_the_worker(fault: Fault, sites: Sites) -> None:
    async with sites.borrow(fault.start) as site:
        await suffer(fault, site)


@pytest.mark.e2e
@pytest.mark.parametrize("fault", LONG, ids=str)
async def test_the_worker_for_minutes(fault: Fault, sites: Sites) -> None:
    async with sites.borrow(fault.start) as site:
        await suffer(fault, site)
