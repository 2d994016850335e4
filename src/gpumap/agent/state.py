"""What survives a restart, as JSON: the counters of accounting and of XID errors, peaks and last activity.

The structs below declare the file: encoder, decoder and validation come from them. `decode` trusts nothing. A text with
another layout raises ValueError, and nothing of it is used. A row with an impossible value is left out, and `encode`
does not write such a row either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Generic, NamedTuple, NoReturn, TypeVar

import msgspec

from gpumap.agent.join import Memory
from gpumap.agent.join.accounting import KEPT_SECONDS, Charge, GpuCounters, Key, Ledger, elapsed
from gpumap.agent.join.usage import UseMemory
from gpumap.agent.join.xids import ContainerXidMemory, GpuXidMemory, XidMemory
from gpumap.model.observations import ContainerName, Moment, PodUid
from gpumap.model.readings import Uuid

VERSION = 1
USABLE_SECONDS = 600.0
"""How long after its saving a state may be taken up. It is longer than the kubelet's longest pause between two starts
of a container (300 s). After that time no restart takes up the file, and newer counters may be served without it."""
_NUMBER_MAX = 1e24
"""A terabyte for a thousand years is 3e22 byte-seconds."""
_COUNT_MAX = 2**64 - 1
"""NVML's own counters have 64 bits."""

K = TypeVar("K")
V = TypeVar("V")
RowT = TypeVar("RowT", bound="Row")
Count = Annotated[int, msgspec.Meta(ge=0)]
Number = Annotated[float, msgspec.Meta(ge=0, le=_NUMBER_MAX)]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON object. No number in the file is negative or absurdly large."""

    def __post_init__(self) -> None:
        """Raise ValueError for an impossible number.

        msgspec checks the bounds only when it decodes. It does not refuse NaN, and has no bounds above 2**63.
        """
        for name, value in zip(self.__struct_fields__, msgspec.structs.astuple(self), strict=True):
            if value is not None and value.__class__ is not str:
                _check(name, value)


def _check(name: str, value: object) -> None:
    if isinstance(value, tuple):
        for item in value:
            _check(name, item)
    elif isinstance(value, float) and not 0 <= value <= _NUMBER_MAX:
        raise ValueError(f"{name} is not a valid number")
    elif isinstance(value, int) and not 0 <= value <= _COUNT_MAX:
        raise ValueError(f"{name} is not a count")


class GpuRow(Row, frozen=True, kw_only=True):
    uuid: str
    gap_seconds: Number
    unattributed_millijoules: Count | None
    counter_millijoules: Count | None


class ContainerRow(Row, frozen=True, kw_only=True):
    namespace: str
    pod: str
    container: str
    uuid: str
    gpu: str
    allocated_gpu_seconds: Number | None
    sm_seconds: Number | None
    memory_byte_seconds: Number | None
    energy_millijoules: Count | None
    unseen_seconds: Number


class GpuXidsRow(Row, frozen=True, kw_only=True):
    uuid: str
    errors: tuple[tuple[Count, Count], ...]
    blind_seconds: Number
    open_seconds: Number | None
    listened: bool
    last_code: Count | None = None
    """Files of older versions have neither this nor `heard_at`."""
    heard_at: tuple[tuple[Count, Number], ...] | None = None


class ContainerXidsRow(Row, frozen=True, kw_only=True):
    namespace: str
    pod: str
    container: str
    uuid: str
    errors: tuple[tuple[Count, Count], ...]
    unseen_seconds: Number


class UseRow(Row, frozen=True, kw_only=True):
    namespace: str
    pod: str
    container: str
    uuid: str
    pod_uid: str | None
    profile: str
    peak_bytes: Count | None
    rested_seconds: float
    """Since its last activity."""
    unmeasured_seconds: Number
    """Since its SM time was last known."""
    kept_seconds: Number
    """How long gpumap keeps it, if the container is not present again."""
    seen_seconds: Number | None = None
    """Since gpumap first saw it; null if it was there when gpumap first looked."""


RawRow = dict[str, object]
T = TypeVar("T", RawRow, msgspec.Raw)


class Document(Row, Generic[T], frozen=True, kw_only=True):
    """The file. Rows are encoded and validated one by one, because one bad row must not cost the others."""

    version: Count
    saved_at: Number
    boot_id: str | None
    boot_seconds: Number
    gpus: list[T]
    away_gpus: list[T]
    containers: list[T]
    gpu_xids: list[T]
    container_xids: list[T]
    uses: list[T] = []
    """Files of older versions do not have it."""

    @property
    def number_of_rows(self) -> int:
        lists = (self.gpus, self.away_gpus, self.containers, self.gpu_xids, self.container_xids, self.uses)
        return sum(len(rows) for rows in lists)


class OutdatedError(ValueError):
    """The state is intact, but newer counters may have been served since."""


class State(NamedTuple):
    """The saved counters, set to this machine's clock."""

    ledger: Ledger
    xids: XidMemory
    uses: Mapping[Key, UseMemory]
    away_seconds: float
    """How long ago they were saved."""
    left_out: int
    """Number of rows with an impossible value."""


# --- writing ----------------------------------------------------------------------------------------------------------


def worth_saving(memory: Memory) -> bool:
    """Whether there is anything to lose."""
    ledger = memory.ledger
    return ledger.at is not None and bool(ledger.gpus or ledger.charges or ledger.away or memory.xids.gpus)


def usable_until(memory: Memory) -> float:
    """Return when the saved memory expires, on the clock of `elapsed`."""
    return elapsed(memory.ledger.at or Moment(0.0, 0.0)) + USABLE_SECONDS


def encode(memory: Memory, boot_id: str | None) -> bytes:
    """Write the memory of a collection. Without the machine's boot id, no gpumap takes it up."""
    ledger, xids = memory.ledger, memory.xids
    at = ledger.at or Moment(0.0, 0.0)
    document = Document[msgspec.Raw](
        version=VERSION,
        saved_at=max(at.wall, 0.0),
        boot_id=boot_id,
        boot_seconds=elapsed(at),
        gpus=_raw(ledger.gpus, _gpu_row),
        away_gpus=_raw(ledger.away, _gpu_row),
        containers=_raw(ledger.charges, lambda key, charge: _container_row(key, charge, at.monotonic)),
        gpu_xids=_raw(xids.gpus, lambda uuid, gpu: _gpu_xids_row(uuid, gpu, at.monotonic)),
        container_xids=_raw(xids.containers, lambda key, one: _container_xids_row(key, one, at.monotonic)),
        uses=_raw(memory.uses, lambda key, use: _use_row(key, use, at)),
    )
    return msgspec.json.encode(document)


def _raw(values: Mapping[K, V], row_of: Callable[[K, V], Row]) -> list[msgspec.Raw]:
    """Encode values as rows. A value with an impossible number gets no row."""
    rows = []
    for key, value in values.items():
        try:
            rows.append(msgspec.Raw(msgspec.json.encode(row_of(key, value))))
        except ValueError:
            continue
    return rows


def _gpu_row(uuid: Uuid, gpu: GpuCounters) -> GpuRow:
    return GpuRow(
        uuid=uuid,
        gap_seconds=gpu.gap_seconds,
        unattributed_millijoules=gpu.unattributed_millijoules,
        counter_millijoules=gpu.counter_millijoules,
    )


def _container_row(key: Key, charge: Charge, now: float) -> ContainerRow:
    name, uuid = key
    return ContainerRow(
        **name._asdict(),
        uuid=uuid,
        gpu=charge.gpu,
        allocated_gpu_seconds=charge.allocated_gpu_seconds,
        sm_seconds=charge.sm_seconds,
        memory_byte_seconds=charge.memory_byte_seconds,
        energy_millijoules=charge.energy_millijoules,
        unseen_seconds=max(now - charge.seen_at, 0.0),
    )


def _gpu_xids_row(uuid: Uuid, gpu: GpuXidMemory, now: float) -> GpuXidsRow:
    settled = gpu.settled_until
    return GpuXidsRow(
        uuid=uuid,
        errors=tuple(sorted(gpu.errors.items())),
        blind_seconds=gpu.blind_seconds,
        open_seconds=None if settled is None else max(now - settled, 0.0),
        listened=gpu.listened,
        last_code=gpu.last_code,
        heard_at=tuple(sorted(gpu.heard_at.items())),
    )


def _container_xids_row(key: Key, one: ContainerXidMemory, now: float) -> ContainerXidsRow:
    name, uuid = key
    return ContainerXidsRow(
        **name._asdict(),
        uuid=uuid,
        errors=tuple(sorted(one.errors.items())),
        unseen_seconds=max(now - one.seen_at, 0.0),
    )


def _use_row(key: Key, use: UseMemory, at: Moment) -> UseRow:
    name, uuid = key
    return UseRow(
        **name._asdict(),
        uuid=uuid,
        pod_uid=use.pod_uid,
        profile=use.profile,
        peak_bytes=use.peak_bytes,
        rested_seconds=at.wall - use.last_active,
        unmeasured_seconds=max(elapsed(at) - elapsed(use.measured), 0.0),
        kept_seconds=max(use.kept_until - at.monotonic, 0.0),
        seen_seconds=None if use.first_seen is None else max(elapsed(at) - elapsed(use.first_seen), 0.0),
    )


# --- reading back -----------------------------------------------------------------------------------------------------


def decode(text: bytes, now: Moment, boot_id: str | None) -> State:
    """Read a saved state. Counters continue at `now`: the time since the saving is a gap without a listener.

    Raises OutdatedError if it is of another boot, or too old. Raises ValueError if it is no state.
    """
    document = _document(text)
    away = _seconds_away(document, now, boot_id)
    stopped = now.monotonic - away
    gpus = _rows(document.gpus, GpuRow)
    away_gpus = _rows(document.away_gpus, GpuRow)
    containers = _rows(document.containers, ContainerRow)
    gpu_xids = _rows(document.gpu_xids, GpuXidsRow)
    container_xids = _rows(document.container_xids, ContainerXidsRow)
    use_rows = _rows(document.uses, UseRow)
    # gpumap could not see containers while it was away: that time does not make them expire.
    ledger = Ledger(
        at=Moment(stopped, now.wall - away, now.asleep),
        charges={_key(row): _charge(row, now.monotonic) for row in containers},
        gpus={Uuid(row.uuid): _gpu_counters(row) for row in gpus},
        away={Uuid(row.uuid): _gpu_counters(row) for row in away_gpus},
    )
    xids = XidMemory(
        gpus={Uuid(row.uuid): _gpu_xid_memory(row, stopped) for row in gpu_xids},
        containers={_key(row): _container_xid_memory(row, now.monotonic) for row in container_xids},
    )
    uses = {_key(row): _use_memory(row, now, away) for row in use_rows}
    valid = len(gpus) + len(away_gpus) + len(containers) + len(gpu_xids) + len(container_xids) + len(use_rows)
    return State(ledger, xids, uses, away, left_out=document.number_of_rows - valid)


class _Head(Row, frozen=True, kw_only=True):
    version: Count


def _document(text: bytes) -> Document[RawRow]:
    try:
        raw = json.loads(text, parse_constant=_refuse)
        version = msgspec.convert(raw, _Head).version
        if version != VERSION:
            raise ValueError(f"it is of version {version}, not {VERSION}")
        return msgspec.convert(raw, Document[RawRow])
    except RecursionError as error:
        raise ValueError("it has too many nested levels") from error
    except msgspec.ValidationError as error:
        raise ValueError(_explain(str(error))) from error


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"has {word}")


_KINDS: Mapping[object, str] = {Count: "count", Number: "valid number", str | None: "text"}


def _explain(error: str) -> str:
    """Name the field of the document that msgspec refuses, and what it must be."""
    match = re.search(r"(?:field `|`\$\.)(\w+)`$", error)
    kinds = {field.name: _KINDS.get(field.type, "list") for field in msgspec.structs.fields(Document)}
    if match and match[1] in kinds:
        return f"{match[1]} is not a {kinds[match[1]]}"
    return error if " is not a " in error else "it is not laid out as it should be"


def _seconds_away(document: Document[RawRow], now: Moment, boot_id: str | None) -> float:
    """Return the age of the state. Within one boot it is exact, even if the wall clock was changed."""
    if boot_id is None or document.boot_id != boot_id:
        raise OutdatedError("it may be from an earlier boot")
    away = elapsed(now) - document.boot_seconds
    if away < 0.0:
        raise OutdatedError("it was saved later than now")
    if away > USABLE_SECONDS:
        raise OutdatedError(f"it was saved more than {USABLE_SECONDS:g} s ago")
    return away


def _rows(raw: Iterable[RawRow], kind: type[RowT]) -> list[RowT]:
    """Return the valid rows."""
    rows = []
    for row in raw:
        try:
            rows.append(msgspec.convert(row, kind))
        except msgspec.ValidationError:
            continue
    return rows


def _key(row: ContainerRow | ContainerXidsRow | UseRow) -> Key:
    return ContainerName(row.namespace, row.pod, row.container), Uuid(row.uuid)


def _gpu_counters(row: GpuRow) -> GpuCounters:
    return GpuCounters(row.gap_seconds, row.unattributed_millijoules, row.counter_millijoules)


def _charge(row: ContainerRow, now: float) -> Charge:
    return Charge(
        gpu=Uuid(row.gpu),
        allocated_gpu_seconds=row.allocated_gpu_seconds,
        sm_seconds=row.sm_seconds,
        memory_byte_seconds=row.memory_byte_seconds,
        energy_millijoules=row.energy_millijoules,
        seen_at=now - row.unseen_seconds,
    )


def _gpu_xid_memory(row: GpuXidsRow, stopped: float) -> GpuXidMemory:
    return GpuXidMemory(
        errors=dict(row.errors),
        blind_seconds=row.blind_seconds,
        settled_until=None if row.open_seconds is None else stopped - row.open_seconds,
        listened=row.listened,
        last_code=row.last_code,
        heard_at=dict(row.heard_at or ()),
    )


def _container_xid_memory(row: ContainerXidsRow, now: float) -> ContainerXidMemory:
    return ContainerXidMemory(dict(row.errors), kept_until=now + KEPT_SECONDS, seen_at=now - row.unseen_seconds)


def _use_memory(row: UseRow, now: Moment, away: float) -> UseMemory:
    unmeasured = away + row.unmeasured_seconds
    seen = None if row.seen_seconds is None else away + row.seen_seconds
    return UseMemory(
        pod_uid=None if row.pod_uid is None else PodUid(row.pod_uid),
        profile=row.profile,
        peak_bytes=row.peak_bytes,
        last_active=now.wall - away - row.rested_seconds,
        measured=Moment(now.monotonic - unmeasured, now.wall - unmeasured, now.asleep),
        kept_until=now.monotonic + row.kept_seconds,
        first_seen=None if seen is None else Moment(now.monotonic - seen, now.wall - seen, now.asleep),
    )
