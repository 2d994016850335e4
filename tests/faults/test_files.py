"""The kubelet's files and log directories: gone, damaged, closed, endless, or full of lies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.faults import files
from tests.faults.matrix import ACCUSES_AGAIN, Fault, counts, fault_of, is_down, is_up, suffer
from tests.faults.site import Inject, Site, Sites, injects

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHECKPOINT, LOGS, DRA, BOTH = "Device checkpoint", "Log directories", "DRA files", "All identity files"
UP = is_up("pod_identity")
checkpoint_fault = partial(fault_of, CHECKPOINT, UP)
logs_fault = partial(fault_of, LOGS, UP)
AS_BEFORE = (
    "gpumap_allocation_info unchanged",
    "gpumap_container_gpu_memory_used_bytes unchanged",
    "gpumap_device_memory_used_by_owner_bytes unchanged",
    "gpumap_container_unassigned_use unchanged",
)
NO_GONE = 'gpumap_device_memory_used_by_owner_bytes{owner="gone"} 0'


def checkpoint(site: Site) -> Path:
    return site.node.checkpoint


def pods(site: Site) -> Path:
    return site.node.directory / "log" / "pods"


def links(site: Site) -> Path:
    return site.node.directory / "log" / "containers"


def tree(site: Site, name: str) -> Path:
    pod = site.pods[name]
    return pods(site) / f"{pod.namespace}_{pod.name}_{pod.uid}"


# --- the device checkpoint --------------------------------------------------------------------------------------------


def damaged(fault: str, inject: Inject, reason: str, detail: str = "") -> Fault:
    """The log directories still name every pod: no number changes."""
    log = f"source complains source=pod_identity reason=checkpoint_{reason} detail=…{detail}"
    capability = 'gpumap_capability{capability="device_checkpoint"} 0'
    metrics = (UP, counts("pod_identity", f"checkpoint_{reason}"), capability)
    return Fault(CHECKPOINT, fault, inject, AS_BEFORE, metrics, (log, "capabilities device_checkpoint=0 …"))


def rows_of(text: bytes, change: Callable[[list[dict[str, object]]], object]) -> bytes:
    document = json.loads(text)
    change(document["Data"]["PodDeviceEntries"])
    return json.dumps(document).encode()


def swap_uids(text: bytes) -> bytes:
    """Each row has the pod UID of another."""

    def change(rows: list[dict[str, object]]) -> None:
        uids = [row["PodUID"] for row in rows]
        for row, uid in zip(rows, [*uids[1:], uids[0]], strict=True):
            row["PodUID"] = uid

    return rows_of(text, change)


def other_uids(text: bytes) -> bytes:
    """Pods of yesterday with the same devices: the kubelet does not rewrite the file when a pod ends."""

    def change(rows: list[dict[str, object]]) -> None:
        rows += [row | {"PodUID": f"{str(row['PodUID'])[:-4]}0000"} for row in rows]

    return rows_of(text, change)


def break_rows(text: bytes) -> bytes:
    def change(rows: list[dict[str, object]]) -> None:
        rows += [{"PodUID": 7}, {}]

    return rows_of(text, change)


@contextlib.asynccontextmanager
async def rewritten_in_place(site: Site) -> AsyncIterator[None]:
    """A writer truncates the file and writes it again, byte by byte, over and over."""
    path = checkpoint(site)
    content = path.read_bytes()
    ended = threading.Event()

    def write() -> None:
        while not ended.wait(0.01):
            path.write_bytes(content[: len(content) // 2])
            ended.wait(0.01)
            path.write_bytes(content)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()
        path.write_bytes(content)


def at_checkpoint(make: files.Make) -> Inject:
    return files.in_place_of(checkpoint, make)


def in_checkpoint(change: Callable[[bytes], bytes]) -> Inject:
    return files.changed(checkpoint, change)


CHECKPOINTS = (
    checkpoint_fault(
        "it is missing",
        at_checkpoint(files.nothing),
        *AS_BEFORE,
        metrics=('gpumap_capability{capability="device_checkpoint"} 0',),
        log=("capabilities device_checkpoint=0 …",),
    ),
    damaged("it is empty", in_checkpoint(lambda text: b""), "corrupt"),
    damaged("it is cut off", in_checkpoint(lambda text: text[:-9]), "corrupt"),
    damaged("it is binary", in_checkpoint(lambda text: bytes(range(256))), "corrupt"),
    damaged("it is a JSON list", in_checkpoint(lambda text: b"[]"), "corrupt"),
    damaged("it is nested 100,000 deep", in_checkpoint(lambda text: b'{"Data":' + b"[" * 100_000), "corrupt"),
    damaged("it has 25 MiB", at_checkpoint(files.sparse(25 << 20)), "unreadable", "larger than 24 MiB"),
    damaged("it is a directory", at_checkpoint(files.directory), "unreadable", "not a regular file"),
    damaged("it is a pipe without a writer", at_checkpoint(files.pipe), "unreadable", "not a regular file"),
    damaged("it is a link to /dev/zero", at_checkpoint(files.zeros), "unreadable", "not a regular file"),
    damaged("it is a link to itself", at_checkpoint(files.loop), "unreadable", "Too many levels"),
    damaged("gpumap may not read it", files.closed(checkpoint), "unreadable", "Permission denied"),
    checkpoint_fault(
        "its checksum is wrong",
        in_checkpoint(lambda text: text.replace(b'"Checksum":', b'"Checksum":1')),
        *AS_BEFORE,
        metrics=('gpumap_capability{capability="device_checkpoint"} 1',),
    ),
    checkpoint_fault(
        "two of its rows are incomplete",
        in_checkpoint(break_rows),
        *AS_BEFORE,
        metrics=(counts("pod_identity", "checkpoint_row"),),
        log=("source complains source=pod_identity reason=checkpoint_row detail=…",),
    ),
    checkpoint_fault(
        "it has rows of pods that ended, with devices of pods that run",
        in_checkpoint(other_uids),
        "gpumap_allocation_info unchanged",
        NO_GONE,
        "gpumap_container_unassigned_use unchanged",
    ),
    checkpoint_fault(
        "its rows have each other's pod UIDs",
        in_checkpoint(swap_uids),
        "gpumap_allocation_info unchanged",
        'gpumap_container_gpu_memory_used_bytes{pod="left"} absent',
        'gpumap_container_gpu_memory_used_bytes{pod="right"} absent',
        'gpumap_container_gpu_memory_used_bytes{pod="whole"} absent',
        'gpumap_container_gpu_memory_used_bytes{pod="idle"} 0',
        "gpumap_container_unassigned_use unchanged",
        NO_GONE,
    ),
    checkpoint_fault(
        "a writer rewrites it in place all the time",
        rewritten_in_place,
        "gpumap_allocation_info unchanged",
        NO_GONE,
        "gpumap_container_unassigned_use unchanged",
        log=None,
        looks=4,
    ),
)

# --- log directories --------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def with_more(site: Site, make: Callable[[Path], object]) -> AsyncIterator[None]:
    """More entries in both directories."""
    known = {*pods(site).iterdir(), *links(site).iterdir()}
    await asyncio.to_thread(make, site.node.directory / "log")  # the kubelet answers in this loop
    yield
    added = {*pods(site).iterdir(), *links(site).iterdir()} - known
    for path in added:
        files.remove(path)
        await asyncio.sleep(0)


def more(make: Callable[[Path], object]) -> Inject:
    return lambda site: with_more(site, make)


def odd_entries(logs: Path) -> None:
    (logs / "pods" / "ml_a_b_c").mkdir()
    (logs / "pods" / "no-underscores").mkdir()
    (logs / "pods" / "ml_file_0000").touch()
    (logs / "pods" / "ml_line\nend_0000").mkdir()
    os.mkdir(os.fsencode(logs / "pods") + b"/ml_not-utf8\xff_0000")
    os.mkfifo(logs / "containers" / "a_ml_main-0123456789abcdef.log")
    (logs / "containers" / "loop.log").symlink_to("loop.log")
    (logs / "containers" / "up.log").symlink_to("../../../../../../etc/shadow")
    (logs / "containers" / ("x" * 251 + ".log")).symlink_to("x")


def many_entries(logs: Path) -> None:
    for number in range(10_000):
        (logs / "pods" / f"old_pod-{number}_{number:08}-0000").mkdir()


def too_many_entries(logs: Path) -> None:
    for number in range(17_000):
        (logs / "pods" / f"old_pod-{number}_{number:08}-0000").mkdir()


@contextlib.asynccontextmanager
async def looping_containers(site: Site) -> AsyncIterator[None]:
    """The directory of a pod has links to itself and to its parent beside its container."""
    folder = tree(site, "whole")
    (folder / "loop").symlink_to("loop")
    (folder / "parent").symlink_to("..")
    yield
    (folder / "loop").unlink()
    (folder / "parent").unlink()


@contextlib.asynccontextmanager
async def lying_links(site: Site) -> AsyncIterator[None]:
    """The squatter's container id is linked to the pod that holds GPU 1, and a second tree has the squatter's UID."""
    squatter, whole = site.pods["squatter"], site.pods["whole"]
    target = f"/var/log/pods/ml_whole_{whole.uid}/main/0.log"
    lie = links(site) / f"whole_ml_main-{squatter.containers['main']}.log"
    lie.symlink_to(target)
    second = pods(site) / f"ml_whole_{squatter.uid}" / "main"
    second.mkdir(parents=True)
    yield
    lie.unlink()
    files.remove(second.parent)


@contextlib.asynccontextmanager
async def churning(site: Site) -> AsyncIterator[None]:
    """Other pods' directories come and go all the time, also while gpumap reads them."""
    ended = threading.Event()

    def churn() -> None:
        number = 0
        while not ended.is_set():
            folder = pods(site) / f"ml_short-{number % 7}_{number:08}-0000"
            (folder / "main").mkdir(parents=True)
            files.remove(folder)
            number += 1

    writer = threading.Thread(target=churn)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()


def without(fault: str, inject: Inject, *log: str, reason: str = "") -> Fault:
    """Without log directories nothing can be accused."""
    page = ("gpumap_allocation_info unchanged", "gpumap_container_unassigned_use absent", NO_GONE)
    metrics = (UP, 'gpumap_capability{capability="pod_logs"} 0')
    counted = (counts("pod_identity", reason),) if reason else ()
    lines = (*log, "capabilities … pod_logs=0 …")
    return Fault(LOGS, fault, inject, page, (*metrics, *counted), lines, ACCUSES_AGAIN)


UNREADABLE = "source complains source=pod_identity reason=pod_logs_unreadable detail=…"
TREES = (
    without("pods/ is missing", files.in_place_of(pods, files.nothing)),
    without("pods/ is a plain file", files.in_place_of(pods, files.text("")), UNREADABLE, reason="pod_logs_unreadable"),
    without("pods/ is a link to itself", files.in_place_of(pods, files.loop), UNREADABLE, reason="pod_logs_unreadable"),
    without("gpumap may not read pods/", files.closed(pods), UNREADABLE, reason="pod_logs_unreadable"),
    without("pods/ has 17,000 entries", more(too_many_entries), UNREADABLE, reason="pod_logs_unreadable"),
    logs_fault("containers/ is missing", files.in_place_of(links, files.nothing), *AS_BEFORE),
    logs_fault("pods/ has 10,000 entries of ended pods", more(many_entries), *AS_BEFORE),
    logs_fault(
        "names of other forms, a line end, bytes that are not UTF-8, a pipe, links to themselves and out of the tree",
        more(odd_entries),
        *AS_BEFORE,
    ),
    logs_fault(
        "gpumap may not read the directory of one pod",
        files.closed(lambda site: tree(site, "whole")),
        *AS_BEFORE,
        metrics=(counts("pod_identity", "pod_logs_unreadable"),),
        log=(UNREADABLE,),
    ),
    logs_fault("a pod's directory has links to itself and its parent", looping_containers, *AS_BEFORE),
    logs_fault(
        "a link gives a squatter's container to another pod, and a second directory its UID", lying_links, *AS_BEFORE
    ),
    logs_fault("directories of other pods come and go within a read", churning, *AS_BEFORE, looks=4),
)

# --- all of them ------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def all_gone(site: Site) -> AsyncIterator[None]:
    moved = [(path, path.with_name(f"{path.name}-kept")) for path in (checkpoint(site), pods(site), links(site))]
    for path, kept in moved:
        path.rename(kept)
    yield
    for path, kept in moved:
        kept.rename(path)


ALL = (
    Fault(
        BOTH,
        "checkpoint and log directories are missing",
        all_gone,
        (
            "gpumap_allocation_info unchanged",
            "gpumap_container_unassigned_use absent",
            'gpumap_device_memory_used_by_owner_bytes{owner="gone"} absent',
            "/readyz 200",
        ),
        is_down("pod_identity", "checkpoint_missing"),
        ("source down source=pod_identity reason=…",),
        ACCUSES_AGAIN,
    ),
)

# --- DRA --------------------------------------------------------------------------------------------------------------


def state(site: Site) -> Path:
    return site.node.kubelet_root / "dra_manager_state"


def driver_checkpoint(site: Site) -> Path:
    return site.node.kubelet_root / "plugins" / "gpu.nvidia.com" / "checkpoint.json"


@injects
async def new(site: Site, path_of: Callable[[Site], Path], make: files.Make) -> AsyncIterator[None]:
    path = path_of(site)
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)
    yield
    files.remove(path)


def dra_rows() -> Iterator[Fault]:
    kinds: tuple[tuple[str, files.Make, str], ...] = (
        ("is cut off", files.text('{"Data":"{'), "corrupt"),
        ("is a JSON list", files.text("[]"), "corrupt"),
        ("has 25 MiB", files.sparse(25 << 20), "unreadable"),
        ("is a pipe without a writer", files.pipe, "unreadable"),
    )
    for name, path_of, word in (
        ("the kubelet's state", state, "dra_state"),
        ("the DRA driver's checkpoint", driver_checkpoint, "dra_checkpoint"),
    ):
        for fault, make, reason in kinds:
            log = f"source complains source=pod_identity reason={word}_{reason} detail=…"
            metrics = (UP, counts("pod_identity", f"{word}_{reason}"))
            yield Fault(DRA, f"{name} {fault}", new(path_of, make), AS_BEFORE, metrics, (log,))


FAULTS = (*CHECKPOINTS, *TREES, *ALL, *dra_rows())


@pytest.mark.parametrize("fault", FAULTS, ids=str)
async def test_the_files(fault: Fault, sites: Sites) -> None:
    """The page, the self-metrics and the log are as the row says, and the next collection is as before."""
    async with sites.borrow(fault.start) as site:
        await suffer(fault, site)
