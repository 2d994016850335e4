"""Prepared calls keep their buffers: what an earlier answer wrote must not look like a later one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from gpumap.agent.nvml_worker.calls import NvmlCalls
from gpumap.agent.nvml_worker.field_values import FieldValues
from gpumap.agent.nvml_worker.library import Handle, Library, RefusedError
from gpumap.model.readings import DeviceMemory
from tests.standin import Code

GPU = Handle(None)


class Functions(Library):
    """A library with one function for every name."""

    def __init__(self, answer: Callable[..., int]) -> None:
        super().__init__()
        self.answer = answer

    def function(self, name: str) -> Callable[..., int]:
        return self.answer


def test_a_refused_call_leaves_no_trace_in_a_structure() -> None:
    """A driver may write to it and refuse: the next call has the version again, and no value of the refused one."""
    codes = iter([0, Code.UNKNOWN, 0])
    given = []

    def answer(_: object, out: Any) -> int:
        info = out._obj
        given.append((info.version, info.total, info.used))
        info.version, info.total, info.used = 0, 80, 7
        return next(codes)

    call, _ = Functions(answer).memory(GPU)
    assert call.once() == DeviceMemory(80, 7, 0, 0)
    with pytest.raises(RefusedError):
        call.once()
    assert call.once() == DeviceMemory(80, 7, 0, 0)
    assert given == [(pynvml.nvmlMemory_v2, 0, 0)] * 3


def test_a_field_that_is_not_written_has_no_value() -> None:
    """Not the one of the reading before, and not 0."""
    written = [True, False, True]

    def answer(_: object, count: int, rows: Any) -> int:
        for row in rows[:count]:
            if row.fieldId == 142 or written[0]:
                row.valueType, row.value.uiVal, row.nvmlReturn = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 3, 0
        del written[0]
        return 0

    calls = NvmlCalls()
    fields, wanted = FieldValues(Functions(answer), calls, GPU), (142, 143)
    assert fields.read(wanted) == {142: 3, 143: 3}
    assert fields.read(wanted) == {142: 3}
    assert fields.read(wanted) == {142: 3, 143: 3}
    assert calls.refusals == {}
