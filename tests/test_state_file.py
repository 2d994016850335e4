"""--state-file: what outlives a restart, and what comes of a file that cannot be used, or a disk that does not work."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from gpumap.agent.collect import Collector, Sources, now
from gpumap.agent.exposition import Exposition
from gpumap.agent.join import Memory
from gpumap.agent.join.accounting import GpuCounters
from gpumap.agent.join.xids import ContainerXidMemory, GpuXidMemory, XidMemory
from gpumap.agent.metrics import native
from gpumap.agent.state import USABLE_SECONDS, OutdatedError, decode, encode
from gpumap.agent.state_file import BYTES_MAX, FileLock, StateFile, lock_path, read_boot_id, replace_file
from gpumap.model.errors import UsageError
from gpumap.model.observations import ContainerName, Failed, Moment, Observed, ProcTable, SourceAnswer, SourceError
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot
from tests.agent import PATIENCE_SECONDS, serve
from tests.demo_process import GPUMAP, environment, fetch, listening, wait_for
from tests.examples import examples
from tests.node import GIB, Node
from tests.node import gpu_uuid as card
from tests.nodes import RULES, Gpu, Pod, Process, TestNode, gpu_uuid
from tests.processes import PlainProcesses
from tests.test_settings import settle

GPU = gpu_uuid(0)
POD = Pod("ml", "a", {"main": {"nvidia.com/gpu": [GPU]}})
HELD, ENERGY = "gpumap_container_allocated_gpu_seconds_total", "gpumap_container_energy_joules_total"
UNATTRIBUTED, GAP = "gpumap_gpu_energy_unattributed_joules_total", "gpumap_accounting_gap_seconds_total"
DEVICE_ENERGY = "gpumap_gpu_energy_joules_total"
COUNTERS = re.compile(
    r"gpumap_(container_(allocated_gpu|sm|gpu_memory_byte)_seconds|container_energy_joules"
    r"|gpu_energy_unattributed_joules|accounting_gap_seconds|gpu_xid_errors|xid_blind_seconds)_total"
)


def lived(at: float = 1000.0) -> TestNode:
    """A node with a container that was charged for a while."""
    node = TestNode([Gpu(0, millijoules=1000)], [POD], [Process(100, GPU, POD, sm=0.1)], clock=at)
    node.collect()
    node.gpus[0].millijoules = 4333
    node.collect()
    return node


BOOT = read_boot_id()


def written() -> dict[str, Any]:
    document = json.loads(encode(lived().memory, BOOT))
    assert isinstance(document, dict)
    return document


# --- the text ---------------------------------------------------------------------------------------------------------


def test_counters_go_on_where_they_stood() -> None:
    """What is read back is what was written, to the last digit; what is charged begins with the second collection."""
    node = lived()
    before = node.memory.ledger
    node.memory = Memory(ledger=decode(encode(node.memory, BOOT), node.now, BOOT).ledger)
    node.gpus[0].millijoules = 5333
    snapshot = node.collect(3.0)
    assert snapshot.accounts[0].allocated_gpu_seconds == before.charges[POD.full(), GPU].allocated_gpu_seconds == 5.0
    assert snapshot.accounts[0].energy_joules == 3.333
    assert snapshot.gpu_accounts[0].gap_seconds == 3.0
    assert snapshot.gpu_accounts[0].energy_unattributed_joules == 1.0
    assert node.collect(2.0).accounts[0].allocated_gpu_seconds == 7.0


def test_downtime_is_a_gap() -> None:
    """From the last saving to the first reading no container is charged."""
    node = lived()
    node.memory = Memory(ledger=decode(encode(node.memory, BOOT), node.later(100.0), BOOT).ledger)
    node.clock += 100.0
    node.gpus[0].millijoules = 50
    snapshot = node.collect(1.0)
    assert snapshot.gpu_accounts[0].gap_seconds == 101.0
    assert snapshot.gpu_accounts[0].energy_unattributed_joules == 0.05, "the driver's counter restarted"


def test_within_one_boot_the_time_away_is_exact() -> None:
    """A change of the wall clock does not matter. The time in which the machine sleeps counts."""
    node = lived()
    text, at = encode(node.memory, "boot-1"), node.now
    for wall in (at.wall - 3600.0, at.wall + 1e9, 0.0):
        assert decode(text, Moment(at.monotonic + 100.0, wall, at.asleep + 400.0), "boot-1").away_seconds == 500.0


@pytest.mark.parametrize(
    ("saved_in", "boot_id", "later"),
    [
        ("boot-1", "boot-2", 5.0),
        ("boot-1", None, 5.0),
        (None, "boot-1", 5.0),
        (None, None, 5.0),
        ("boot-1", "boot-1", USABLE_SECONDS + 1.0),
        ("boot-1", "boot-1", -1.0),
    ],
)
def test_an_outdated_state_is_not_taken_up(saved_in: str | None, boot_id: str | None, later: float) -> None:
    """After a reboot the file may be older than the last scrape. So may a file that was saved long ago."""
    node = lived()
    with pytest.raises(OutdatedError):
        decode(encode(node.memory, saved_in), node.later(later), boot_id)


def test_who_is_not_seen_expires_over_restarts() -> None:
    """How long nobody has seen a container is kept; the time while gpumap was away does not count."""
    node = lived()
    node.down = {"kubelet"}
    node.pods, node.processes = [], []
    for _ in range(12):
        node.collect(55.0)
        state = decode(encode(node.memory, BOOT), node.later(500.0), BOOT)
        node.clock += 500.0
        node.memory = Memory(ledger=state.ledger, gpus=node.memory.gpus)
    assert node.collect(10.0).accounts, "List and all are missing"
    node.down = set()
    assert not node.collect(10.0).accounts


def test_xid_errors_outlive_a_restart() -> None:
    """Errors are kept, what was not settled when it was saved is still open, and so is the time since."""
    node = lived()
    at = node.now.monotonic
    name = ContainerName("ml", "a", "main")
    known = XidMemory(
        gpus={
            GPU: GpuXidMemory({79: 1, 43: 2}, 1.5, at - 4.0, True, heard_at={79: 1.7e9, 43: 1.8e9}),
            gpu_uuid(1): GpuXidMemory({}, 0.0, None, False),
        },
        containers={(name, GPU): ContainerXidMemory({79: 1}, 12.0, at - 3.0)},
    )
    memory = Memory(ledger=node.memory.ledger, xids=known)
    state = decode(encode(memory, BOOT), node.later(20.0), BOOT)
    remembered = GpuXidMemory({79: 1, 43: 2}, 1.5, at - 4.0, True, heard_at={79: 1.7e9, 43: 1.8e9})
    assert state.xids.gpus[GPU] == remembered
    assert state.xids.gpus[gpu_uuid(1)].settled_until is None
    assert state.xids.containers[name, GPU] == ContainerXidMemory({79: 1}, at + 320.0, at + 20.0 - 3.0)


def test_peaks_and_last_activity_outlive_a_restart() -> None:
    """A roll-out does not make a busy container idle since the roll-out, nor its peak lower."""
    node = lived()
    (process,) = node.processes
    process.memory = 7 * GIB
    active = node.collect()
    process.memory, process.sm = GIB, 0.0
    before = node.collect()
    text = encode(node.memory, BOOT)
    state = decode(text, node.later(60.0), BOOT)
    node.memory = Memory(ledger=state.ledger, xids=state.xids, uses=state.uses)
    ((row,), (old,)) = node.collect(60.0).containers, before.containers
    assert (old.use and old.use.seen_seconds) is None, "it was there before gpumap"
    assert row.use
    assert old.use
    assert row.use.memory_peak_bytes == old.use.memory_peak_bytes == 7 * GIB
    assert row.use.last_active == old.use.last_active == active.at.wall
    older = json.loads(text)
    del older["uses"]
    assert decode(json.dumps(older).encode(), node.now, BOOT).uses == {}, "a file of an older version"
    node.memory = Memory(uses=state.uses)
    node.pods[0].generation += 1
    (row,) = node.collect().containers
    assert row.use
    assert row.use.memory_peak_bytes == GIB, "another pod of the same name"


def test_the_age_of_a_container_outlives_a_restart() -> None:
    """A new pod is not as new as gpumap after a roll-out."""
    node = lived()
    node.pods[0].generation += 1
    node.collect()
    state = decode(encode(node.memory, BOOT), node.later(60.0), BOOT)
    node.memory = Memory(ledger=state.ledger, xids=state.xids, uses=state.uses)
    (row,) = node.collect(60.0).containers
    assert row.use
    assert row.use.seen_seconds == pytest.approx(60.0)


def test_gpus_that_are_away_are_kept_apart() -> None:
    """A GPU that was taken from the node is not shown after a restart either."""
    node = lived()
    node.gpus.clear()
    node.collect()
    state = decode(encode(node.memory, BOOT), node.now, BOOT)
    assert state.ledger.gpus == {}
    assert state.ledger.away[GPU] == GpuCounters(0.0, 0, 4333)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe\x00", "decode"),
        (b"[]", "laid out"),
        (b"[" * 100_000, "nested"),
        (b'{"version":2}', "version 2"),
        (b'{"version":"1"}', "version is not"),
        (b'{"version":1}', "saved_at"),
        (b'{"version":1,"saved_at":' + b"9" * 5000 + b"}", "limit"),
        (b'{"version":1,"saved_at":-1.0,"boot_seconds":1.0}', "saved_at is not"),
        (b'{"version":1,"saved_at":1.0,"boot_seconds":"x"}', "boot_seconds is not"),
        (b'{"version":1,"saved_at":1.0,"boot_seconds":1.0,"boot_id":null,"gpus":{}}', "gpus is not a list"),
        (b'{"version":1,"saved_at":1.0,"boot_seconds":1.0,"boot_id":null,"gpus":[null]}', "laid out"),
    ],
)
def test_a_text_that_is_none_of_ours(text: bytes, why: str) -> None:
    """Whatever else stands in the file is told in a few words."""
    with pytest.raises(ValueError, match=why):
        decode(text, now(), BOOT)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("gpus", 0, "uuid"), 7),
        (("gpus", 0, "gap_seconds"), None),
        (("gpus", 0, "counter_millijoules"), 0.5),
        (("gpus", 0, "unattributed_millijoules"), 2**70),
        (("containers", 0, "allocated_gpu_seconds"), -0.1),
        (("containers", 0, "sm_seconds"), "1"),
        (("containers", 0, "memory_byte_seconds"), 1e30),
        (("containers", 0, "energy_millijoules"), True),
        (("containers", 0, "pod"), None),
        (("containers", 0, "gpu"), []),
        (("gpu_xids", 0, "errors"), [[79]]),
        (("gpu_xids", 0, "heard_at"), [[79]]),
        (("gpu_xids", 0, "heard_at"), [[79, -1.0]]),
        (("gpu_xids", 0, "errors"), {"79": 1}),
        (("containers", 0, "unseen_seconds"), -1.0),
        (("gpu_xids", 0, "listened"), 1),
        (("gpu_xids", 0, "errors"), [[2**64, 1]]),
    ],
)
def test_a_value_that_cannot_be(path: tuple[str, int, str], value: object) -> None:
    """An absurd value costs its row, and no other."""
    document: Any = written()
    document["gpu_xids"] = [{"uuid": GPU, "errors": [], "blind_seconds": 0.0, "open_seconds": None, "listened": True}]
    well = decode(json.dumps(document).encode(), lived().now, BOOT)
    assert well.left_out == 0
    section, number, name = path
    document[section][number][name] = value
    ill = decode(json.dumps(document).encode(), lived().now, BOOT)
    assert ill.left_out == 1
    rows = {"gpus": ill.ledger.gpus, "containers": ill.ledger.charges, "gpu_xids": ill.xids.gpus}
    assert {one for one, found in rows.items() if not found} == {section}


def test_numbers_that_json_has_not_are_refused() -> None:
    """Who wrote NaN was not gpumap."""
    document = written()
    document["gpus"][0]["gap_seconds"] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        decode(json.dumps(document).encode(), lived().now, BOOT)


_ODD = st.sampled_from([0, 1, 2**63, 2**64 - 1, 2**64, 2**90, -1])
_ODD_NUMBERS = st.sampled_from([0.0, 1.5, 1e24, 1e25, -1.0, math.inf, math.nan])


@given(_ODD, _ODD, _ODD_NUMBERS, _ODD, _ODD)
def test_what_is_written_can_be_read_back(counter: int, energy: int, seconds: float, code: int, errors: int) -> None:
    """Whatever a driver told, each row is read back as it was, or was not written; the others are."""
    node = lived()
    ledger = node.memory.ledger
    key = POD.full(), GPU
    odd = structs.replace(ledger.charges[key], energy_millijoules=energy, sm_seconds=seconds)
    other = Uuid("GPU-odd")
    ledger = replace(
        ledger,
        gpus={**ledger.gpus, other: GpuCounters(seconds, energy, counter)},
        charges={**ledger.charges, (POD.full(), other): odd},
    )
    xids = XidMemory({GPU: GpuXidMemory({code: errors}, seconds, None, True), other: GpuXidMemory({}, 0.0, None, True)})
    state = decode(encode(Memory(ledger=ledger, xids=xids), BOOT), node.now, BOOT)
    assert state.left_out == 0
    assert state.ledger.charges[key] == structs.replace(
        ledger.charges[key], present=False, allocated_gpus=None, memory_bytes=None
    )
    assert state.ledger.gpus.get(other) in (None, ledger.gpus[other])
    assert state.xids.gpus.keys() >= {other}
    if min(counter, energy) >= 0 and max(counter, energy) < 2**64 and 0 <= seconds <= 1e24:
        assert state.ledger.gpus[other] == ledger.gpus[other]
        assert state.ledger.charges[POD.full(), other].energy_millijoules == energy


@given(st.data())
def test_no_text_raises_anything_else(data: st.DataObject) -> None:
    """A text that was cut off, or in which a byte is another, is read or refused, and nothing else."""
    text = bytearray(encode(lived().memory, BOOT))
    del text[data.draw(st.integers(0, len(text))) :]
    for _ in range(data.draw(st.integers(0, 3)) if text else 0):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        decode(bytes(text), now(), BOOT)


# --- the file ---------------------------------------------------------------------------------------------------------


async def test_a_file_of_its_owner_alone_replaced_at_once(tmp_path: Path) -> None:
    """The file has mode 0600; a name that a killed gpumap left behind is in nobody's way; nothing else is left."""
    path = tmp_path / "state.json"
    (tmp_path / ".state.json.new").write_text("half of")
    state, node = StateFile(path), lived()
    await state.save(node.memory)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (await StateFile(path).load(node.now)).ledger.charges.keys() == node.memory.ledger.charges.keys()
    with path.open("rb") as first:
        node.collect()
        await state.save(node.memory)
        await state.close()
        assert first.read() != path.read_bytes(), "replaced, not written into"
    assert sorted(os.listdir(tmp_path)) == ["state.json", "state.json.lock"]


async def test_nothing_to_lose_is_not_written(tmp_path: Path) -> None:
    """A node on which no GPU found has no file."""
    state, node = StateFile(tmp_path / "state.json"), TestNode()
    node.collect()
    await state.save(node.memory)
    await state.close()
    assert os.listdir(tmp_path) == []


async def test_a_missing_file_is_no_trouble(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first start says so, as information."""
    caplog.set_level(logging.INFO)
    assert await StateFile(tmp_path / "state.json").load(now()) == Memory()
    assert [record.levelname for record in caplog.records] == ["INFO"]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("kind", ["refused", "slow"])
async def test_a_file_that_is_not_read_is_set_aside(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that fails, or is slow, costs no counters for ever: the file is kept under another name, and told."""
    path, node, goes_on = tmp_path / "state.json", lived(), threading.Event()
    good = encode(node.memory, BOOT)
    path.write_bytes(good)
    (tmp_path / "state.json.unread").write_text("an earlier one")

    def read(path: Path) -> bytes:
        if kind == "refused":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        goes_on.wait()
        return b""

    state = StateFile(path, read_file=read, load_seconds=1.0)
    assert await state.load(node.now) == Memory()
    goes_on.set()
    assert str(tmp_path / "state.json.unread") in caplog.records[-1].getMessage()
    node.collect()
    async with asyncio.timeout(20):
        while not path.exists():
            await state.save(node.memory)
            await asyncio.sleep(0.01)
    await state.close()
    assert files(tmp_path)["state.json.unread"] == good
    assert decode(files(tmp_path)["state.json"], node.now, BOOT).ledger.charges


async def test_a_file_that_cannot_be_set_aside_is_not_written_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Then nothing is written as long as this gpumap lives; one line says so."""
    path, node = tmp_path / "state.json", lived()
    path.write_bytes(b"whatever it is")
    (tmp_path / "state.json.damaged" / "full").mkdir(parents=True)
    state = StateFile(path)
    assert await state.load(node.now) == Memory()
    await state.save(node.memory)
    await state.close()
    assert path.read_bytes() == b"whatever it is"
    (record,) = caplog.records
    assert "gpumap writes nothing" in record.getMessage()


async def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A text beyond the bound costs one line. The older file is removed: newer counters are served."""
    path, node = tmp_path / "state.json", lived()
    state = StateFile(path, deadline_seconds=PATIENCE_SECONDS)
    await state.save(node.memory)
    (key, charge), *_ = node.memory.ledger.charges.items()
    many = {(key[0]._replace(pod="x" * 1_000_000 + str(n)), key[1]): charge for n in range(17)}
    for _ in range(2):
        assert await state.save(Memory(ledger=replace(node.memory.ledger, charges=many)))
    await state.close()
    assert not path.exists()
    (record,) = caplog.records
    assert "larger than 16 MiB" in record.getMessage()


async def test_rows_that_are_left_out_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line says that counters go on, and how many do not."""
    path, document = tmp_path / "state.json", written()
    document["containers"][0]["sm_seconds"] = -1
    path.write_text(json.dumps(document))
    memory = await StateFile(path).load(lived().now)
    assert memory.ledger.gpus
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "rows_left_out=1" in record.getMessage()


@pytest.mark.parametrize("kind", ["corrupt", "truncated", "huge", "pipe", "folder"])
async def test_a_file_that_cannot_be_used_is_one_line(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Counters start at 0, one warning names the file, why, and what became of it; nothing is raised."""
    path = tmp_path / "state.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        text = encode(lived().memory, BOOT)
        path.write_bytes({"corrupt": b"\0" * 99, "truncated": text[:-9], "huge": b" " * (BYTES_MAX + 1)}[kind])
    assert await StateFile(path).load(now()) == Memory()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(path) in record.getMessage()
    assert "\n" not in record.getMessage()
    aside = "state.json.unread" if kind == "folder" else "state.json.damaged"
    assert {*os.listdir(tmp_path)} == {aside, "state.json.lock"}


async def test_a_disk_that_fails_is_told_when_it_begins_and_when_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that is gone, and then full, costs one line; another comes when the file is written again."""
    caplog.set_level(logging.INFO)
    full = [False]

    def write(path: Path, text: bytes) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace_file(path, text)

    folder = tmp_path / "folder"
    state, node = StateFile(folder / "state.json", replace_file=write), lived()
    for _ in range(2):
        await state.save(node.memory)
    folder.mkdir()
    full[0] = True
    await state.save(node.memory)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    full[0] = False
    for _ in range(2):
        await state.save(node.memory)
    await state.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert os.listdir(folder) == ["state.json"]


async def test_a_disk_that_hangs_is_waited_for_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A write that does not end is left behind at its deadline, and the next ones do not wait for it; when it has
    ended the newest is written."""
    caplog.set_level(logging.INFO)
    goes_on, path = threading.Event(), tmp_path / "state.json"
    writes: list[bytes] = []

    def write(path: Path, text: bytes) -> None:
        writes.append(text)
        goes_on.wait()
        replace_file(path, text)

    state, node = StateFile(path, deadline_seconds=0.05, replace_file=write), lived()
    for _ in range(3):
        node.collect()
        await state.save(node.memory)
    assert len(writes) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    goes_on.set()
    async with asyncio.timeout(20):
        while not path.exists() or path.read_bytes() != encode(node.memory, read_boot_id()):
            await state.save(node.memory)
            await asyncio.sleep(0.01)
    await state.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


@dataclass
class Disk:
    """A disk that may not write, not remove, or not end a write."""

    writes: bool = True
    removes: bool = True
    hangs: bool = False
    killed: bool = False
    """The process that writes was killed: nothing of it reaches the disk any more."""
    released: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    file_lock: FileLock | None = None

    def replace_file(self, path: Path, text: bytes) -> None:
        if self.hangs:
            self.released.wait()
        with self.lock:
            if self.killed or not self.writes:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            replace_file(path, text)

    def remove_file(self, path: Path) -> None:
        with self.lock:
            if self.killed or not self.removes:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            path.unlink(missing_ok=True)

    def kill(self) -> None:
        with self.lock:
            self.killed = True
        self.released.set()
        if self.file_lock is not None:
            self.file_lock.release()  # as the kernel does

    def state_file(self, path: Path) -> StateFile:
        self.file_lock = FileLock(lock_path(path))
        return StateFile(
            path,
            replace_file=self.replace_file,
            remove_file=self.remove_file,
            deadline_seconds=60.0,
            load_seconds=60.0,
            lock=self.file_lock,
        )


PAGE = Exposition(native(("accounting", "health"), process_metrics=False))


def own_counters(page: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The counters that gpumap keeps itself."""
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {(one.name, frozenset(one.labels.items())): one.value for one in samples if COUNTERS.fullmatch(one.name)}


@dataclass
class Agent:
    """The loop over a test node, with a state file."""

    node: TestNode
    state: StateFile
    loop: Collector = field(init=False)
    snapshots: list[Snapshot] = field(default_factory=list)

    async def start(self) -> Agent:
        memory = await self.state.load(self.node.later(0.0))
        observe = self.node.observe
        sources = Sources(
            Source(lambda: observe().nvml),
            ProcSource(lambda: observe().procfs),
            lambda: answer(self.node.observe_identity()),
            Source(self.node.observe_kubelet),
        )
        self.loop = Collector(
            sources,
            RULES,
            interval_seconds=5.0,
            publish=self.snapshots.append,
            clock=lambda: self.node.now,
            memory=memory,
            keep=self.state.save,
        )
        return self

    async def page(self, seconds: float = 5.0) -> str:
        """Let time pass and collect once."""
        self.node.clock += seconds
        self.node.gpus[0].millijoules = (self.node.gpus[0].millijoules or 0) + 1000
        await self.loop.collect()
        return PAGE.render(self.snapshots[-1]).decode()


T = TypeVar("T")


def answer(observed: Observed[T] | Failed) -> SourceAnswer[T]:
    if isinstance(observed, Failed):
        raise SourceError(observed.complaints[0].reason, "in this test")
    return SourceAnswer(observed.value)


@dataclass
class Source(Generic[T]):
    """NVML or the kubelet of a test node."""

    observe: Callable[[], Observed[T] | Failed]

    async def read(self, *_: float) -> SourceAnswer[T]:
        return answer(self.observe())

    async def close(self) -> bool:
        return True

    async def wait_until_back(self) -> None:
        await asyncio.Event().wait()


@dataclass
class ProcSource:
    observe: Callable[[], Observed[ProcTable] | Failed]
    is_real: bool = True

    def clock_ticks(self) -> int | None:
        return None

    def read(self, *_: object) -> SourceAnswer[ProcTable]:
        return answer(self.observe())


async def lives(directory: Path, data: st.DataObject) -> None:
    """A node whose disk fails now and then, whose gpumap is killed, started again or replaced, and which may reboot."""
    node, path, disk = lived(now().monotonic), directory / "state.json", Disk()
    agent = await Agent(node, disk.state_file(path)).start()
    seen: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for _ in range(data.draw(st.integers(2, 12))):
        if disk.hangs and data.draw(st.booleans()):
            disk.released.set()
        disk.hangs = data.draw(st.sampled_from([False] * 5 + [True]))
        disk.writes, disk.removes = data.draw(st.booleans()), data.draw(st.booleans())
        agent.state.deadline_seconds = 0.02 if disk.hangs else 60.0  # a busy machine is no disk that hangs
        page = own_counters(await agent.page(data.draw(st.sampled_from([1.0, 5.0, 300.0, 700.0]))))
        for series, value in page.items():
            assert value >= seen.get(series, 0.0) or value == 0, f"{series} fell from {seen[series]} to {value}"
        seen |= page
        if data.draw(st.sampled_from([False, False, True])):  # both at once, as in a roll-out with maxSurge
            after = await Agent(node, (disk_after := Disk()).state_file(path)).start()
            assert own_counters(await after.page()) == {}
            disk.kill()
            agent.loop.close()
            agent, disk = after, disk_after
        elif data.draw(st.booleans()):
            disk.kill()
            agent.loop.close()
            if data.draw(st.sampled_from([False, False, True])) and path.exists():
                path.write_bytes(re.sub(rb'"boot_id":"[^"]*"', b'"boot_id":"an earlier one"', path.read_bytes()))
            agent = await Agent(node, (disk := Disk()).state_file(path)).start()
    disk.kill()
    agent.loop.close()


@settings(max_examples=examples(200))
@given(st.data())
def test_no_counter_falls_to_an_older_value(data: st.DataObject) -> None:
    """Whatever the disk does, a counter never falls to a value other than 0."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        asyncio.run(lives(Path(directory), data))


async def test_counters_of_before_a_crash_are_not_taken_up(tmp_path: Path) -> None:
    """After a crash of the machine the disk has an older file than the last scrape."""
    path, node = tmp_path / "state.json", lived(now().monotonic)
    agent = await Agent(node, StateFile(path)).start()
    await agent.page()
    older = path.read_text()
    await agent.page(55.0)
    await agent.state.close()
    assert BOOT is not None
    path.write_text(older.replace(BOOT, "an earlier boot"))
    page = own_counters(await (await Agent(node, StateFile(path)).start()).page())
    assert page
    assert set(page.values()) == {0.0}


async def test_two_agents_on_one_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second serves no counters while the first runs, and starts at 0 when it has ended; then the file is its."""
    caplog.set_level(logging.INFO)
    path, node = tmp_path / "state.json", lived(now().monotonic)
    first = await Agent(node, StateFile(path)).start()
    for _ in range(4):
        before = own_counters(await first.page())
    second = await Agent(node, StateFile(path)).start()
    for _ in range(2):
        page = await second.page()
        assert own_counters(page) == {}
        assert second.snapshots[-1].containers, "the rest of the page is there"
        after = own_counters(await first.page())
        assert all(after[series] >= value for series, value in before.items())
        before = after
    await first.state.close()
    assert path.read_bytes() == encode(first.loop._memory, BOOT), "the first one's counters are in the file"
    begun = own_counters(await second.page())
    assert begun.keys() >= {series for series in before if "xid" not in series[0]}
    assert set(begun.values()) == {0.0}
    risen = own_counters(await second.page())
    assert max(risen.values()) > 0
    await second.state.close()
    third = own_counters(await (await Agent(node, StateFile(path)).start()).page())
    assert all(third[series] >= value for series, value in risen.items())
    told = [said for one in caplog.records if "gpumap" in (said := one.getMessage()) and str(path) in said]
    assert told == [
        f"no counters on the page: another gpumap uses the state file path={path}",
        f"counters start at 0: the other gpumap ended path={path}",
    ]


def test_a_gpumap_that_is_killed_holds_no_file(tmp_path: Path) -> None:
    """The kernel releases the lock, also if the process could not. Without the lock, the file is not read."""

    def load() -> Memory:
        return asyncio.run(StateFile(path).load(node.now))

    path, node = tmp_path / "state.json", lived(now().monotonic)
    path.write_bytes(encode(node.memory, BOOT))
    script = (
        "import sys, time, pathlib; from gpumap.agent.state_file import FileLock\n"
        "lock = FileLock(pathlib.Path(sys.argv[1])); print(lock.take(), flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script, f"{path}.lock"], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert load() == Memory()
        other.kill()
    assert load().ledger.charges


@pytest.mark.parametrize("removes", [True, False])
async def test_a_disk_that_turns_read_only(removes: bool, tmp_path: Path) -> None:
    """The file is removed if possible. Otherwise the page has no counters until the file expires."""
    disk, path, node = Disk(), tmp_path / "state.json", lived(now().monotonic)
    agent = await Agent(node, disk.state_file(path)).start()
    assert own_counters(await agent.page())
    disk.writes, disk.removes = False, removes
    page = await agent.page()
    assert bool(own_counters(page)) == removes
    assert agent.snapshots[-1].containers, "the rest of the page is there"
    assert path.exists() != removes
    assert own_counters(await agent.page(USABLE_SECONDS))
    disk.kill()
    assert (await StateFile(path).load(node.now)) == Memory(), "then the file has expired"


class Down:
    """NVML and a kubelet that do not answer."""

    async def read(self, *_: float) -> SourceAnswer[Any]:
        raise SourceError("down", "in this test")

    async def close(self) -> bool:
        return True

    async def wait_until_back(self) -> None:
        await asyncio.Event().wait()


class NoProcesses:
    """/proc, which cannot be read, and pod identity neither."""

    is_real = True

    def clock_ticks(self) -> int | None:
        return None

    def read(self, *_: object) -> SourceAnswer[Any]:
        raise SourceError("down", "in this test")


async def test_what_a_page_shows_has_been_saved() -> None:
    """Each collection's memory is kept before its snapshot is published."""
    happened: list[object] = []

    async def keep(memory: Memory) -> bool:
        await asyncio.sleep(0)
        happened.append(memory.ledger.at)
        return True

    node, proc = lived(), NoProcesses()

    def publish(_: Snapshot) -> None:
        happened.append("page")

    loop = Collector(
        Sources(Down(), proc, proc.read, Down()),
        RULES,
        interval_seconds=1.0,
        publish=publish,
        clock=lambda: node.now,
        memory=node.memory,
        keep=keep,
    )
    snapshot = await loop.collect()
    await loop.collect()
    loop.close()
    assert [snapshot.accounts[0].name] == [POD.full()], "it began with what it was given"
    first, page, second, again = happened
    assert isinstance(first, Moment)
    assert isinstance(second, Moment)
    assert (page, again) == ("page", "page")


def test_where_the_file_is_to_be_is_checked_at_the_start(tmp_path: Path) -> None:
    """A folder in its place, or none around it, is a mistake in the command line."""
    assert settle("--state-file", str(tmp_path / "new")).state_file == tmp_path / "new"
    assert settle().state_file is None
    for wrong in (tmp_path, tmp_path / "missing" / "state.json"):
        with pytest.raises(UsageError, match=r"^--state-file .*(is a directory|parent directory)"):
            settle("--state-file", str(wrong))


# --- the whole of it --------------------------------------------------------------------------------------------------


async def test_a_service_goes_on_where_it_was(directory: Path, library: Path) -> None:
    """Started again, `gpumap serve` goes on from its sums: what the GPU used meanwhile is nobody's, the time is a gap.
    When the folder goes away under it, it serves on, and says so once."""
    machine, folder, uuid = Node(directory, library, PlainProcesses(directory / "proc")), directory / "kept", card(1)
    folder.mkdir()
    flags = ("--state-file", str(folder / "state.json"))
    gpu = machine.driver.gpus[1]
    async with machine.kubelet:
        machine.run(machine.admit("a", main=[uuid]).cgroup("main"), 1, GIB, 50)
        async with serve(machine, *flags) as agent:
            await agent.until(lambda page: (page.value(HELD, pod="a") or 0) > 0.3, "the time held is not charged")
            gpu.energy_millijoules = 1_005_000
            machine.tell_driver()
            page = await agent.until(lambda page: page.value(DEVICE_ENERGY, uuid=uuid) == 1005, "no energy")
            assert (page.value(ENERGY, pod="a"), page.value(UNATTRIBUTED, uuid=uuid)) == (5.0, 0.0)
        gpu.energy_millijoules = 1_012_000
        machine.tell_driver()
        async with serve(machine, *flags) as agent:
            again = await agent.until(lambda page: page.collections >= 1, "no page")
            assert (again.value(HELD, pod="a") or 0) >= (page.value(HELD, pod="a") or 0) > 0.3
            assert (again.value(ENERGY, pod="a"), again.value(UNATTRIBUTED, uuid=uuid)) == (5.0, 7.0)
            assert (again.value(GAP, uuid=uuid) or 0) > 0
            shutil.rmtree(folder)
            later = await agent.later(4)
            assert (later.value(HELD, pod="a") or 0) > (again.value(HELD, pod="a") or 0)
            assert agent.log.count("cannot write the state file") == 1


@contextlib.contextmanager
def running(folder: Path, number: int) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """The demo with a state file until it is killed. Gives its URL once it serves."""
    log = folder / f"log{number}"
    flags = ("--listen", "127.0.0.1:0", "--interval", "100ms", "--state-file", str(folder / "state"))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(GPUMAP), "demo", *flags], env=environment(TMPDIR=str(folder)), stdout=output, stderr=subprocess.STDOUT
        )

    try:
        yield process, f"http://{listening(process, log)}", log
    finally:
        process.kill()
        process.wait()


def counters(url: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """gpumap's own counters that shall never go back; none while the driver does not answer, as on a busy machine."""
    try:
        page = fetch(f"{url}/metrics")[0]
    except OSError:
        return {}
    families = text_string_to_metric_families(page)
    samples = [sample for family in families for sample in family.samples]
    if not any(one.name == "gpumap_source_up" and one.labels["source"] == "nvml" and one.value for one in samples):
        return {}
    return {(one.name, frozenset(one.labels.items())): one.value for one in samples if COUNTERS.fullmatch(one.name)}


def test_no_counter_goes_back_when_gpumap_is_killed(directory: Path) -> None:
    """Killed at any moment, gpumap goes on from what it has shown, or more; the time between is in the gap."""
    chance = random.Random(6)
    seen: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for number in range(5):
        with running(directory, number) as (process, url, log):
            wait_for("page", lambda url=url: "yes" if counters(url) else None, process, log)  # type: ignore[misc]
            until = time.monotonic() + chance.uniform(0.3, 0.8)
            while time.monotonic() < until:
                if not (page := counters(url)):
                    continue
                for series, value in page.items():
                    assert value >= seen.get(series, 0.0), f"{series} went back"
                assert page.keys() >= seen.keys(), "what stood is kept for minutes"
                seen |= page
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        assert "Traceback" not in log.read_text()
    gaps = [value for (name, _), value in seen.items() if name == GAP]
    assert gaps
    assert min(gaps) > 0
    charged = [value for (name, _), value in seen.items() if name == HELD]
    assert max(charged) > 1.0, "five lives of a third of a second and more"
