"""What outlives a restart, as JSON: the counters of accounting and of XID errors.

What is read back is not trusted. A text that is not laid out as it was written raises ValueError, and nothing of it is
used; a row that has a value that cannot be is left out alone, and is not written either.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, NoReturn, TypeVar

from gpumap.agent.join import Memory
from gpumap.agent.join.ledger import KEPT_SECONDS, Charge, GpuCounters, Key, Ledger, elapsed
from gpumap.agent.join.xids import ContainerXidMemory, GpuXidMemory, XidMemory
from gpumap.model.observations import ContainerName, Moment
from gpumap.model.readings import Uuid

T = TypeVar("T")
K = TypeVar("K")
VERSION = 1
AWAY_SECONDS_MAX = 31 * 86400.0
"""Longer than a node is away. More is not believed of wall clocks, of which either may have been wrong."""
_NUMBER_MAX = 1e24
"""A terabyte for a thousand years is 3e22 byte-seconds."""
_COUNT_MAX = 2**64 - 1
"""NVML's own counters have no more."""


class State(NamedTuple):
    """What was saved, set on this machine's clock. `away_seconds` is how long ago, `left_out` how many rows have a
    value that cannot be."""

    ledger: Ledger
    xids: XidMemory
    away_seconds: float
    left_out: int


def worth_saving(memory: Memory) -> bool:
    """Whether there is anything to lose."""
    return memory.ledger.at is not None and bool(memory.ledger.gpus or memory.ledger.charges or memory.ledger.away)


def encode(memory: Memory, boot_id: str | None = None) -> bytes:
    """Write down what `decode` reads. `memory` is that of a collection, `boot_id` the machine's if it tells one."""
    ledger, xids = memory.ledger, memory.xids
    at = ledger.at or Moment(0.0, 0.0)
    document = {
        "version": VERSION,
        "saved_at": max(at.wall, 0.0),
        "boot_id": boot_id,
        "boot_seconds": elapsed(at),
        "gpus": _sound((_book_object(*item) for item in ledger.gpus.items()), _book),
        "away_gpus": _sound((_book_object(*item) for item in ledger.away.items()), _book),
        "containers": _sound((_charge_object(*item, at.monotonic) for item in ledger.charges.items()), _charge),
        "gpu_xids": _sound((_gpu_xids_object(*item, at.monotonic) for item in xids.gpus.items()), _gpu_xids),
        "container_xids": _sound(
            (_container_xids_object(*item, at.monotonic) for item in xids.containers.items()), _container_xids
        ),
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _sound(rows: Iterable[Mapping[str, object]], read: Callable[[_Row, _Clock], object]) -> list[Mapping[str, object]]:
    """Those that can be read back: one odd value costs no other row."""
    return [row for row in rows if _read_row(_Row(row), read, _Clock(0.0, 0.0)) is not None]


def _book_object(uuid: Uuid, book: GpuCounters) -> Mapping[str, object]:
    return {
        "uuid": uuid,
        "gap_seconds": book.gap_seconds,
        "unattributed_millijoules": book.unattributed_millijoules,
        "counter_millijoules": book.counter_millijoules,
    }


def _charge_object(key: Key, charge: Charge, now: float) -> Mapping[str, object]:
    return {
        **_key_object(key),
        "gpu": charge.gpu,
        "allocated_gpu_seconds": charge.allocated_gpu_seconds,
        "sm_seconds": charge.sm_seconds,
        "memory_byte_seconds": charge.memory_byte_seconds,
        "energy_millijoules": charge.energy_millijoules,
        "unseen_seconds": max(now - charge.seen_at, 0.0),
    }


def _gpu_xids_object(uuid: Uuid, gpu: GpuXidMemory, now: float) -> Mapping[str, object]:
    settled = gpu.settled_until
    return {
        "uuid": uuid,
        "errors": _pairs(gpu.errors),
        "blind_seconds": gpu.blind_seconds,
        "open_seconds": None if settled is None else max(now - settled, 0.0),
        "listened": gpu.listened,
        "last_code": gpu.last_code,
        "heard_at": [[code, moment] for code, moment in sorted(gpu.heard_at.items())],
    }


def _container_xids_object(key: Key, one: ContainerXidMemory, now: float) -> Mapping[str, object]:
    return {**_key_object(key), "errors": _pairs(one.errors), "unseen_seconds": max(now - one.seen_at, 0.0)}


def _pairs(errors: Mapping[int, int]) -> list[list[int]]:
    return [[code, count] for code, count in sorted(errors.items())]


def _key_object(key: Key) -> Mapping[str, object]:
    name, uuid = key
    return {"namespace": name.namespace, "pod": name.pod, "container": name.container, "uuid": uuid}


# --- reading back -----------------------------------------------------------------------------------------------------


def decode(text: bytes, now: Moment, boot_id: str | None = None) -> State:
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
    away = _seconds_away(document, now, boot_id)
    clock = _Clock(now.monotonic, now.monotonic - away)
    gpus, bad_gpus = _read(document, "gpus", _book, clock)
    away_gpus, bad_away = _read(document, "away_gpus", _book, clock)
    charges, bad_charges = _read(document, "containers", _charge, clock)
    gpu_xids, bad_gpu_xids = _read(document, "gpu_xids", _gpu_xids, clock)
    container_xids, bad_container_xids = _read(document, "container_xids", _container_xids, clock)
    return State(
        Ledger(at=Moment(clock.stopped, now.wall - away, now.asleep), charges=charges, gpus=gpus, away=away_gpus),
        XidMemory(gpus=gpu_xids, containers=container_xids),
        away,
        bad_gpus + bad_away + bad_charges + bad_gpu_xids + bad_container_xids,
    )


def _seconds_away(document: _Row, now: Moment, boot_id: str | None) -> float:
    """In the same boot, exact, whatever was done to the wall clock. Else by the wall clock, if that can be."""
    saved_at, uptime = document.take("saved_at", _number), document.take("boot_seconds", _number)
    same_boot = boot_id is not None and document.optional("boot_id", _text) == boot_id
    if same_boot and elapsed(now) >= uptime:
        return elapsed(now) - uptime
    away = now.wall - saved_at
    return away if 0.0 <= away <= AWAY_SECONDS_MAX else 0.0


class _Clock(NamedTuple):
    """Monotonic: now, and when counting stopped."""

    now: float
    stopped: float


def _read(
    document: _Row, name: str, read: Callable[[_Row, _Clock], tuple[K, T]], clock: _Clock
) -> tuple[dict[K, T], int]:
    """A list's rows by what they are of, and how many had to be left out."""
    rows = document.rows(name)
    found = [one for row in rows if (one := _read_row(row, read, clock)) is not None]
    return dict(found), len(rows) - len(found)


def _read_row(row: _Row, read: Callable[[_Row, _Clock], T], clock: _Clock) -> T | None:
    try:
        return read(row, clock)
    except ValueError:
        return None


def _book(row: _Row, _: _Clock) -> tuple[Uuid, GpuCounters]:
    return row.take("uuid", _uuid), GpuCounters(
        gap_seconds=row.take("gap_seconds", _number),
        unattributed_millijoules=row.optional("unattributed_millijoules", _count),
        counter_millijoules=row.optional("counter_millijoules", _count),
    )


def _charge(row: _Row, clock: _Clock) -> tuple[Key, Charge]:
    return _key(row), Charge(
        gpu=row.take("gpu", _uuid),
        allocated_gpu_seconds=row.optional("allocated_gpu_seconds", _number),
        sm_seconds=row.optional("sm_seconds", _number),
        memory_byte_seconds=row.optional("memory_byte_seconds", _number),
        energy_millijoules=row.optional("energy_millijoules", _count),
        seen_at=_seen_at(row, clock),
    )


def _seen_at(row: _Row, clock: _Clock) -> float:
    """While gpumap was away nobody looked: that time does not make a container expire."""
    return clock.now - row.take("unseen_seconds", _number)


def _gpu_xids(row: _Row, clock: _Clock) -> tuple[Uuid, GpuXidMemory]:
    open_seconds = row.optional("open_seconds", _number)
    return row.take("uuid", _uuid), GpuXidMemory(
        errors=row.take("errors", _errors),
        blind_seconds=row.take("blind_seconds", _number),
        settled_until=None if open_seconds is None else clock.stopped - open_seconds,
        listened=row.take("listened", _truth),
        last_code=row.newer("last_code", _count),
        heard_at=row.newer("heard_at", _moments) or {},
    )


def _container_xids(row: _Row, clock: _Clock) -> tuple[Key, ContainerXidMemory]:
    return _key(row), ContainerXidMemory(
        row.take("errors", _errors), kept_until=clock.now + KEPT_SECONDS, seen_at=_seen_at(row, clock)
    )


def _key(row: _Row) -> Key:
    name = ContainerName(row.take("namespace", _text), row.take("pod", _text), row.take("container", _text))
    return name, row.take("uuid", _uuid)


class _Row:
    """A JSON object, whose fields are read by what they must be."""

    def __init__(self, value: object) -> None:
        if not isinstance(value, Mapping):
            raise ValueError("it is not laid out as it should be")
        self._fields = value

    def take(self, name: str, read: Callable[[object], T]) -> T:
        try:
            return read(self._fields.get(name))
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error

    def optional(self, name: str, read: Callable[[object], T]) -> T | None:
        return None if self._fields.get(name, ...) is None else self.take(name, read)

    def newer(self, name: str, read: Callable[[object], T]) -> T | None:
        """A field that files of before do not have."""
        return None if self._fields.get(name) is None else self.take(name, read)

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
    return {_count(code): _count(errors) for code, errors in _list_of_pairs(value)}


def _moments(value: object) -> Mapping[int, float]:
    return {_count(code): _number(moment) for code, moment in _list_of_pairs(value)}


def _list_of_pairs(value: object) -> list[list[object]]:
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise ValueError("is not a list of pairs")
    return value


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"has {word}")
