"""NVML's field values: all that is wanted of a GPU in one call, into an array that is laid out once a change.

The call succeeds although a value failed: each has its own code (nvml.h, nvmlFieldValue_t). One thread at a time asks.
"""

import math
from collections.abc import Sequence
from ctypes import Array
from struct import Struct

from gpumap.agent.nvml_worker.asking import NvmlCalls
from gpumap.agent.nvml_worker.codes import INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, UNKNOWN, UNSUPPORTED
from gpumap.agent.nvml_worker.library import Handle, Library, RefusedError
from gpumap.agent.nvml_worker.structs import VALUE_FIELDS, FieldValue

CALL = "nvmlDeviceGetFieldValues"

# nvml.h, NVML_FI_DEV_*
MEMORY_TEMPERATURE = 82
CORRECTED_VOLATILE, UNCORRECTED_VOLATILE, CORRECTED_AGGREGATE, UNCORRECTED_AGGREGATE = 3, 4, 5, 6
RETIRED_SINGLE_BIT, RETIRED_DOUBLE_BIT, RETIRED_PENDING = 29, 30, 31
PCIE_REPLAYS = 94
REMAPPED_CORRECTABLE, REMAPPED_UNCORRECTABLE, REMAP_PENDING, REMAP_FAILURE = 142, 143, 144, 145
RECOVERY_ACTION = 230
PCIE_TRANSMIT, PCIE_RECEIVE = 197, 198
NVLINK_TRANSMIT, NVLINK_RECEIVE = 138, 139

Values = dict[int, float]
"""By field, those that were told."""

_ALL_LINKS = 0xFFFF_FFFF  # nvml.h: "A link ID of UINT_MAX returns aggregate value summed up across all links"
_SCOPES = {NVLINK_TRANSMIT: _ALL_LINKS, NVLINK_RECEIVE: _ALL_LINKS}
_ROW = Struct("@24xIIQ")  # nvmlFieldValue_t from valueType on, its value read as a whole number of 64 bits
_WHOLE_TYPES = frozenset(VALUE_FIELDS.index(name) for name in ("ulVal", "ullVal"))
_NARROW_TYPES = frozenset(VALUE_FIELDS.index(name) for name in ("uiVal", "siVal", "usVal"))
_TRAFFIC = frozenset({PCIE_TRANSMIT, PCIE_RECEIVE, NVLINK_TRANSMIT, NVLINK_RECEIVE})


def flag(number: float | None) -> bool | None:
    return None if number is None else bool(number)


def whole(number: float | None) -> int | None:
    return None if number is None else int(number)


class FieldValues:
    """Those of one GPU. What it does not support is left out of the next call, until `NvmlCalls.forget`."""

    def __init__(self, library: Library, asking: NvmlCalls, gpu: Handle) -> None:
        self._library = library
        self._asking = asking
        self._gpu = gpu
        self._wanted: tuple[int, ...] = ()
        self._forgotten = -1
        self._asked: list[int] = []
        self._array = _array([])

    def read(self, wanted: tuple[int, ...]) -> Values:
        """A value that is refused costs itself. Raises `RefusedError` where the GPU is gone."""
        if wanted is not self._wanted or self._asking.forgotten != self._forgotten:
            self._lay_out(wanted)
        told: Values = {}
        if not self._asked or self._asking.ask(self._field_values) is None:
            return told
        odd: list[tuple[int, FieldValue]] = []
        for place, (value_type, code, whole) in enumerate(_ROW.iter_unpack(self._array)):
            if code == 0 and value_type in _WHOLE_TYPES:
                told[self._asked[place]] = whole
            else:
                odd.append((self._asked[place], self._array[place]))
        if odd:
            self._take(odd, told)
        return told

    def _take(self, odd: Sequence[tuple[int, FieldValue]], told: Values) -> None:
        """What was refused, or is of a rarer type."""
        new = False
        for field, row in odd:
            try:
                told[field] = _number(field, row)
            except RefusedError as refused:
                self._asking.take(refused, _key(field))
                new = new or refused.code in UNSUPPORTED
        if new:
            self._lay_out(self._wanted)

    def _field_values(self) -> bool:
        self._library.ask(CALL, self._gpu, len(self._asked), self._array)
        return True

    def _lay_out(self, wanted: tuple[int, ...]) -> None:
        self._wanted, self._forgotten = wanted, self._asking.forgotten
        self._asked = [field for field in wanted if self._asking.is_supported(_key(field))]
        self._array = _array(self._asked)


def ask_field(library: Library, gpu: Handle, field: int) -> float:
    """A single one. Raises `RefusedError`."""
    array = _array([field])
    library.ask(CALL, gpu, 1, array)
    return _number(field, array[0])


def _array(fields: Sequence[int]) -> Array[FieldValue]:
    return (FieldValue * len(fields))(*[FieldValue(field, _SCOPES.get(field, 0)) for field in fields])


def _number(field: int, row: FieldValue) -> float:
    """Raises `RefusedError` with the value's own code, or with ours where it is told and cannot be used."""
    code = row.nvmlReturn or _misfit(field, row.valueType)
    if code:
        # Drivers that do not know a field say "invalid argument" of it: for us, not supported.
        raise RefusedError(f"{CALL}({field})", NOT_SUPPORTED if code == INVALID_ARGUMENT else code)
    number: float = getattr(row.value, VALUE_FIELDS[row.valueType])
    if not math.isfinite(number):
        raise RefusedError(f"{CALL}({field})", NOT_FOUND)  # nothing to tell just now
    return number


def _misfit(field: int, value_type: int) -> int:
    """The code for a value whose type will not do, 0 where it will."""
    if value_type >= len(VALUE_FIELDS):
        return UNKNOWN  # a type that nvml.h has not had yet
    # 32 bits of bytes wrap in less than 0.1 s on a busy PCIe 5 x16 link, and of NVLink's KiB in 5 s: what is made of
    # such a counter is wrong at any interval, and looks right.
    return NOT_SUPPORTED if value_type in _NARROW_TYPES and field in _TRAFFIC else 0


def _key(field: int) -> tuple[str, str]:
    return CALL, f"field {field}"
