"""Reads NVML's field values: all wanted fields of a GPU in one call, into an array that changes only with the fields.

The call succeeds even if a value failed: each value has its own code (nvml.h, nvmlFieldValue_t). One thread at a time
uses it.
"""

import math
from collections.abc import Sequence
from ctypes import Array
from struct import Struct
from typing import Any

import pynvml

from gpumap.agent.nvml_worker.calls import UNSUPPORTED, NvmlCalls
from gpumap.agent.nvml_worker.codes import word
from gpumap.agent.nvml_worker.library import Handle, Library, RefusedError

CALL = "nvmlDeviceGetFieldValues"

Values = dict[int, float]
"""By field, those that the driver reported."""

_ALL_LINKS = 0xFFFF_FFFF  # nvml.h: "A link ID of UINT_MAX returns aggregate value summed up across all links"
_SCOPES = {
    pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX: _ALL_LINKS,
    pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX: _ALL_LINKS,
}
_FieldValue: Any = pynvml.c_nvmlFieldValue_t
_ROW = Struct(f"@{_FieldValue.valueType.offset}xIIQ")  # valueType, nvmlReturn, and the value as an integer
_VALUE_FIELDS = tuple(name for name, _ in pynvml.c_nvmlValue_t._fields_)
"""Fields of the union by nvmlValueType_t, in its order."""
_WHOLE_TYPES = frozenset({pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG})
_NOT_AVAILABLE = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: pynvml.NVML_VALUE_NOT_AVAILABLE_uint.value,
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value,
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value,
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: 0xFFFF,
}
"""-1 of the type (nvml.h, NVML_VALUE_NOT_AVAILABLE). No field can have a negative number of the other types."""
_NARROW_TYPES = frozenset(
    {
        pynvml.NVML_VALUE_TYPE_UNSIGNED_INT,
        pynvml.NVML_VALUE_TYPE_SIGNED_INT,
        pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT,
    }
)


def flag(number: float | None) -> bool | None:
    return None if number is None else bool(number)


def whole(number: float | None) -> int | None:
    return None if number is None else int(number)


class FieldValues:
    """Field values of one GPU. The next call leaves out unsupported fields, until `NvmlCalls.forget`."""

    def __init__(self, library: Library, calls: NvmlCalls, gpu: Handle) -> None:
        self._library = library
        self._calls = calls
        self._gpu = gpu
        self._wanted: tuple[int, ...] = ()
        self._forgotten = -1
        self._asked: list[int] = []
        self._array = _array([])

    def read(self, wanted: tuple[int, ...]) -> Values:
        """Return the values. A refused value affects only itself. Raises `RefusedError` if the GPU is gone."""
        if wanted is not self._wanted or self._calls.forgotten != self._forgotten:
            self._lay_out(wanted)
        values: Values = {}
        if not self._asked or self._calls.ask(self._field_values) is None:
            return values
        odd: list[tuple[int, Any]] = []
        for place, (value_type, code, whole) in enumerate(_ROW.iter_unpack(self._array)):
            if code == 0 and value_type in _WHOLE_TYPES and whole != _NOT_AVAILABLE[value_type]:
                values[self._asked[place]] = whole
            else:
                odd.append((self._asked[place], self._array[place]))
        self._calls.know([_key(field) for field in values])
        if odd:
            self._take(odd, values)
        return values

    def _take(self, odd: Sequence[tuple[int, Any]], values: Values) -> None:
        """Handle values that were refused or have a rarer type."""
        new = False
        for field, row in odd:
            try:
                values[field] = _number(field, row)
            except RefusedError as refused:
                self._calls.take(refused, _key(field))
                new = new or refused.code in UNSUPPORTED
        if new:
            self._lay_out(self._wanted)

    def _field_values(self) -> bool:
        self._library.ask(CALL, self._gpu, len(self._asked), self._array)
        return True

    def _lay_out(self, wanted: tuple[int, ...]) -> None:
        self._wanted, self._forgotten = wanted, self._calls.forgotten
        self._asked = [field for field in wanted if self._calls.is_supported(_key(field))]
        self._array = _array(self._asked)


def ask_field(library: Library, gpu: Handle, field: int) -> float:
    """Return a single value. Raises `RefusedError`."""
    array = _array([field])
    library.ask(CALL, gpu, 1, array)
    return _number(field, array[0])


def field_rows(library: Library, gpu: Handle, fields: Sequence[int]) -> list[dict[str, object]]:
    """Return the driver's answer for each field: its code, type, time stamp and value. Raises `RefusedError`."""
    array = _array(fields)
    library.ask(CALL, gpu, len(fields), array)
    return [_plain(row) for row in array]


def _plain(row: Any) -> dict[str, object]:
    if row.nvmlReturn:
        return {"code": word(row.nvmlReturn)}
    name = _VALUE_FIELDS[row.valueType] if row.valueType < len(_VALUE_FIELDS) else None
    value = finite(getattr(row.value, name)) if name else None
    return {"code": "success", "type": name or row.valueType, "value": value, "timestamp_us": row.timestamp}


def finite(value: float) -> float | str:
    """Return a number that JSON supports, else its name."""
    return value if math.isfinite(value) else str(value)


def _array(fields: Sequence[int]) -> Array[Any]:
    array: Array[Any] = (_FieldValue * len(fields))(*[_FieldValue(field, _SCOPES.get(field, 0)) for field in fields])
    return array


def _number(field: int, row: Any) -> float:
    """Raise `RefusedError` with the value's code, or with gpumap's code if the value is not usable."""
    code = row.nvmlReturn or _misfit(field, row.valueType)
    if code == pynvml.NVML_ERROR_INVALID_ARGUMENT:
        code = pynvml.NVML_ERROR_NOT_SUPPORTED  # the answer of drivers that do not know a field
    if code:
        raise RefusedError(f"{CALL}({field})", code)
    number: float = getattr(row.value, _VALUE_FIELDS[row.valueType])
    if not math.isfinite(number) or number < 0 or number == _NOT_AVAILABLE.get(row.valueType):
        raise RefusedError(f"{CALL}({field})", pynvml.NVML_ERROR_NOT_FOUND)  # no value at this moment
    return number


def _misfit(field: int, value_type: int) -> Any:
    """Return the code for a value with an unsuitable type; 0 if the type is suitable."""
    if value_type >= len(_VALUE_FIELDS):
        return pynvml.NVML_ERROR_UNKNOWN  # a type that nvml.h does not have yet
    # 32 bits of NVLink's KiB wrap in 5 s. A value from such a counter is wrong at any interval, but looks right.
    too_narrow = value_type in _NARROW_TYPES and field in _SCOPES
    return pynvml.NVML_ERROR_NOT_SUPPORTED if too_narrow else pynvml.NVML_SUCCESS


def _key(field: int) -> tuple[str, str]:
    return CALL, f"field {field}"
