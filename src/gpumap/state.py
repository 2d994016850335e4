"""What outlives a restart, as JSON: the counters of accounting and of XID errors.

What is read back is not trusted: whatever is not as it was written raises ValueError, and nothing of it is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn, TypeVar

from gpumap.join import Memory
from gpumap.join.ledger import Charge, GpuBook, Key, Ledger
from gpumap.join.usage import KEPT_SECONDS
from gpumap.join.xids import ContainerXidMemory, GpuXidMemory, XidMemory
from gpumap.model import ContainerName, Moment, Uuid

T = TypeVar("T")
VERSION = 1
OLDEST_SECONDS = 366 * 86400.0
"""Longer than a node is away. What is older was written by a clock that was wrong, and would make a gap of decades."""
_NUMBER_MAX = 1e24
"""A terabyte for a thousand years is 3e22 byte-seconds."""
_COUNT_MAX = 2**63


class State(NamedTuple):
    """What was saved, set on this machine's clock. `away_seconds` is how long ago."""

    ledger: Ledger
    xids: XidMemory
    away_seconds: float


def worth_saving(memory: Memory) -> bool:
    """Whether there is anything to lose."""
    return memory.ledger.at is not None and bool(memory.ledger.gpus or memory.ledger.charges or memory.ledger.away)


def encode(memory: Memory) -> bytes:
    """Write down what `decode` reads. `memory` is that of a collection."""
    ledger, xids = memory.ledger, memory.xids
    at = ledger.at or Moment(0.0, 0.0)
    document = {
        "version": VERSION,
        "saved_at": at.wall,
        "gpus": [_book_object(uuid, book) for uuid, book in ledger.gpus.items()],
        "away_gpus": [_book_object(uuid, book) for uuid, book in ledger.away.items()],
        "containers": [_charge_object(key, charge) for key, charge in ledger.charges.items()],
        "gpu_xids": [_gpu_xids_object(uuid, gpu, at.monotonic) for uuid, gpu in xids.gpus.items()],
        "container_xids": [
            {**_key_object(key), "errors": sorted(one.errors.items())} for key, one in xids.containers.items()
        ],
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _book_object(uuid: Uuid, book: GpuBook) -> Mapping[str, object]:
    return {
        "uuid": uuid,
        "gap_seconds": book.gap_seconds,
        "unattributed_millijoules": book.unattributed_millijoules,
        "counter_millijoules": book.counter_millijoules,
    }


def _charge_object(key: Key, charge: Charge) -> Mapping[str, object]:
    return {
        **_key_object(key),
        "gpu": charge.gpu,
        "allocated_gpu_seconds": charge.allocated_gpu_seconds,
        "sm_seconds": charge.sm_seconds,
        "memory_byte_seconds": charge.memory_byte_seconds,
        "energy_millijoules": charge.energy_millijoules,
    }


def _gpu_xids_object(uuid: Uuid, gpu: GpuXidMemory, now: float) -> Mapping[str, object]:
    settled = gpu.settled_until
    return {
        "uuid": uuid,
        "errors": sorted(gpu.errors.items()),
        "blind_seconds": gpu.blind_seconds,
        "open_seconds": None if settled is None else max(now - settled, 0.0),
        "listened": gpu.listened,
    }


def _key_object(key: Key) -> Mapping[str, object]:
    name, uuid = key
    return {"namespace": name.namespace, "pod": name.pod, "container": name.container, "uuid": uuid}


# --- reading back -----------------------------------------------------------------------------------------------------


def decode(text: bytes, now: Moment) -> State:
    """Read what was saved, so that counting goes on at `now`: the time since is gap, and nobody listened in it.

    Raises ValueError.
    """
    try:
        document = _Row(json.loads(text, parse_constant=_refuse))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    version = document.take("version", _count)
    if version != VERSION:
        raise ValueError(f"it is of version {version}, not {VERSION}")
    saved_at = document.take("saved_at", _number)
    away = max(now.wall - saved_at, 0.0)
    if away > OLDEST_SECONDS:
        raise ValueError("by its time it is more than a year old")
    stopped = now.monotonic - away
    kept_until = now.monotonic + KEPT_SECONDS
    gpus, away_gpus = (
        {row.take("uuid", _uuid): _book(row) for row in document.rows(name)} for name in ("gpus", "away_gpus")
    )
    charges = {_key(row): _charge(row, kept_until) for row in document.rows("containers")}
    gpu_xids = {row.take("uuid", _uuid): _gpu_xids(row, stopped) for row in document.rows("gpu_xids")}
    container_xids = {
        _key(row): ContainerXidMemory(row.take("errors", _errors), kept_until)
        for row in document.rows("container_xids")
    }
    return State(
        Ledger(at=Moment(stopped, saved_at, now.asleep), charges=charges, gpus=gpus, away=away_gpus),
        XidMemory(gpus=gpu_xids, containers=container_xids),
        away,
    )


def _book(row: _Row) -> GpuBook:
    return GpuBook(
        gap_seconds=row.take("gap_seconds", _number),
        unattributed_millijoules=row.optional("unattributed_millijoules", _count),
        counter_millijoules=row.optional("counter_millijoules", _count),
    )


def _charge(row: _Row, kept_until: float) -> Charge:
    return Charge(
        gpu=row.take("gpu", _uuid),
        allocated_gpu_seconds=row.optional("allocated_gpu_seconds", _number),
        sm_seconds=row.optional("sm_seconds", _number),
        memory_byte_seconds=row.optional("memory_byte_seconds", _number),
        energy_millijoules=row.optional("energy_millijoules", _count),
        kept_until=kept_until,
    )


def _gpu_xids(row: _Row, stopped: float) -> GpuXidMemory:
    open_seconds = row.optional("open_seconds", _number)
    return GpuXidMemory(
        errors=row.take("errors", _errors),
        blind_seconds=row.take("blind_seconds", _number),
        settled_until=None if open_seconds is None else stopped - open_seconds,
        listened=row.take("listened", _truth),
    )


def _key(row: _Row) -> Key:
    name = ContainerName(row.take("namespace", _text), row.take("pod", _text), row.take("container", _text))
    return name, row.take("uuid", _uuid)


class _Row:
    """A JSON object, whose fields are read by what they must be."""

    def __init__(self, value: object) -> None:
        if not isinstance(value, dict):
            raise ValueError("it is not laid out as it should be")
        self._fields = value

    def take(self, name: str, read: Callable[[object], T]) -> T:
        try:
            return read(self._fields.get(name))
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error

    def optional(self, name: str, read: Callable[[object], T]) -> T | None:
        return None if self._fields.get(name, ...) is None else self.take(name, read)

    def rows(self, name: str) -> list[_Row]:
        return self.take(name, _rows)


def _rows(value: object) -> list[_Row]:
    if not isinstance(value, list):
        raise ValueError("is not a list")
    return [_Row(item) for item in value]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("is not a text")
    return value


def _uuid(value: object) -> Uuid:
    return Uuid(_text(value))


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("is not true or false")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _COUNT_MAX:
        raise ValueError("is not a count")
    return value


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _NUMBER_MAX:
        raise ValueError("is not a number that it can be")
    return float(value)


def _errors(value: object) -> Mapping[int, int]:
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise ValueError("is not a list of pairs")
    return {_count(code): _count(errors) for code, errors in value}


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"has {word}")
