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
from gpumap.agent.nvml_worker.library import Handle, Library, PreparedCall, RefusedError, key_of

CALL = "nvmlDeviceGetFieldValues"

Values = dict[int, float]
"""By field, those that the driver reported."""

_ALL_LINKS = 0xFFFF_FFFF  # nvml.h: "A link ID of UINT_MAX returns aggregate value summed up across all links"
_SCOPES = {
    pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX: _ALL_LINKS,
    pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX: _ALL_LINKS,
}
_FieldValue: Any = pynvml.c_nvmlFieldValue_t
_SKIPPED = f"{_FieldValue.valueType.offset}x"  # before valueType, nvmlReturn and the value
_VALUE_FIELDS = tuple(name for name, _ in pynvml.c_nvmlValue_t._fields_)
"""Fields of the union by nvmlValueType_t, in its order."""
_UNSIGNED = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "I4x",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "Q",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "Q",
}
"""The formats of the types that most fields have."""
_NOT_AVAILABLE = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: pynvml.NVML_VALUE_NOT_AVAILABLE_uint.value,
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value,
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value,
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: 0xFFFF,
}
"""-1 of the type (nvml.h, NVML_VALUE_NOT_AVAILABLE). No field can have a negative number of the other types."""
_NOTHING: int = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value
"""No value of any type: not a number as a double."""
_MAYBE_NOT_AVAILABLE = frozenset(_NOT_AVAILABLE.values())
_NARROW_TYPES = frozenset(
    {pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, pynvml.NVML_VALUE_TYPE_SIGNED_INT, pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT}
)


class FieldValues:
    """Field values of one GPU. The next call leaves out unsupported fields, until `NvmlCalls.forget`.

    A driver reports a field always with the same type. So one `Struct` decodes all of them, until a type is another.
    """

    def __init__(self, library: Library, calls: NvmlCalls, gpu: Handle) -> None:
        self._function = library.function(CALL)
        self._calls = calls
        self._gpu = gpu
        self._lay_out(())

    def read(self, fields: tuple[int, ...]) -> Values:
        """Return the values. A refused value affects only itself. Raises `RefusedError` if the GPU is gone."""
        if fields is not self._fields or self._calls.forgotten != self._forgotten:
            self._lay_out(fields)
        if not self._asked:
            return {}
        self._bytes[:] = self._unwritten
        if self._calls.ask(self._call) is None:
            return {}
        row = self._rows.unpack(self._array)
        if row[::3] != self._types:
            self._learn(row[::3])
            row = self._rows.unpack(self._array)
        numbers = row[2::3]
        if self._known and not any(row[1::3]) and _MAYBE_NOT_AVAILABLE.isdisjoint(numbers):
            return dict(zip(self._asked, numbers, strict=True))
        return self._check_values(row[1::3], numbers)

    def _check_values(self, codes: Sequence[int], numbers: Sequence[int]) -> Values:
        """Return the values if one is new, was refused, is not available or has a rarer type."""
        values: Values = {}
        learned = False
        for index, field in enumerate(self._asked):
            kind, number = self._types[index], numbers[index]
            if codes[index] == 0 and kind in _UNSIGNED and number != _NOT_AVAILABLE[kind] and not _misfit(field, kind):
                values[field] = number
                continue
            try:
                values[field] = _value(field, self._array[index])
            except RefusedError as refused:
                self._calls.take(refused, _key(field))
                learned = learned or refused.code in UNSUPPORTED
        self._calls.know([_key(field) for field in values])
        self._known = len(values) == len(self._asked) and _UNSIGNED.keys() >= set(self._types)
        if learned:
            self._lay_out(self._fields)
        return values

    def _lay_out(self, fields: tuple[int, ...]) -> None:
        self._fields, self._forgotten = fields, self._calls.forgotten
        self._asked = [field for field in fields if self._calls.is_supported(_key(field))]
        self._array = _array(self._asked)
        self._bytes = memoryview(self._array).cast("B")
        for row in self._array:
            row.value.ullVal = _NOTHING  # a row that the driver does not write has no value
        self._unwritten = bytes(self._array)
        self._call = PreparedCall(CALL, self._function, (self._gpu, len(self._asked), self._array), lambda: True)
        self._learn((0,) * len(self._asked))

    def _learn(self, types: tuple[int, ...]) -> None:
        # The layout of the array: for each field its type, its code, and its number if the type is unsigned.
        rows = "".join([f"{_SKIPPED}II{_UNSIGNED.get(kind, 'Q')}" for kind in types])
        self._types, self._rows = types, Struct(f"@{rows}")
        self._known = False
        """Whether all values are unsigned numbers that `NvmlCalls` knows."""


def ask_field(library: Library, gpu: Handle, field: int) -> float:
    """Return a single value. Raises `RefusedError`."""
    array = _array([field])
    library.ask(CALL, gpu, 1, array)
    return _value(field, array[0])


def _array(fields: Sequence[int]) -> Array[Any]:
    array: Array[Any] = (_FieldValue * len(fields))(*[_FieldValue(field, _SCOPES.get(field, 0)) for field in fields])
    return array


def _value(field: int, row: Any) -> float:
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


def _key(field: int) -> str:
    return key_of(CALL, f"field {field}")
