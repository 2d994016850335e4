"""Holds values of a GPU that change slowly, so that not each reading asks the driver for them.

They are limits, ECC counts, remapped rows, retired pages, errors of NVLinks and the state of the fabric. A held value
is at most as old as the request allows. It belongs to one handle: it is dropped with it, and so with a fault of the
GPU. Values of a reading with a refusal are not held. While a fault is near, nothing is held.
"""

import math
import time
from collections.abc import Callable
from typing import Any

from gpumap.agent.nvml_worker.calls import NvmlCalls
from gpumap.agent.nvml_worker.processes import FULL_RATIO

FAULTS = "row_remap_pending", "row_remap_failure", "retired_pages_pending"
"""Fields that show a fault while they are true."""


class SlowValues:
    """The slow values of one handle. One thread at a time uses it."""

    def __init__(self, calls: NvmlCalls) -> None:
        self._calls = calls
        self._last_values: dict[str, Any] = {}
        self._read_at = -math.inf
        """When values that can be held were read."""
        self._key: object = None
        self._signs: object = None
        self._near_until = 0.0
        """Until then a fault may change more values."""

    def read(
        self,
        ask: Callable[[], dict[str, Any]],
        *,
        key: object,
        signs: object,
        fault_near: bool,
        interval_seconds: float,
        hold_seconds: float,
    ) -> dict[str, Any]:
        """Return the values: the held ones, unless the next reading would be too late for them.

        `key` are the conditions under which they were read. `signs` change with a fault. If they or a value changes,
        or with `fault_near`, each reading asks again for `hold_seconds`. It also does so while a value shows a fault.
        """
        monotonic = time.monotonic()
        if fault_near or self._signs not in (None, signs):
            self._near_until = monotonic + hold_seconds
        self._signs = signs
        # The next reading may come a tenth of the interval late.
        fresh = monotonic - self._read_at + interval_seconds * FULL_RATIO <= hold_seconds
        if fresh and key == self._key and monotonic >= self._near_until:
            return self._last_values
        incomplete = self._calls.incomplete
        values = ask()
        if values != self._last_values and key == self._key:
            self._near_until = monotonic + hold_seconds
        faulty = any(values.get(name) for name in FAULTS)
        self._read_at = -math.inf if faulty or self._calls.incomplete != incomplete else monotonic
        self._last_values, self._key = values, key
        return values
