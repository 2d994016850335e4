"""The group `card`: properties and settings of a card, and its total errors. Only dialects show it.

Values that do not change while the handle is valid are read once and kept with it. All calls are on the card, also if
it is partitioned.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import pynvml

from gpumap.agent.nvml_worker.calls import NvmlCalls
from gpumap.agent.nvml_worker.field_values import Values, flag, whole
from gpumap.agent.nvml_worker.library import Handle, Library
from gpumap.model.grouping import grouped
from gpumap.model.readings import COMPUTE_MODES

CLOCKS = (
    ("graphics", pynvml.NVML_CLOCK_GRAPHICS),
    ("sm", pynvml.NVML_CLOCK_SM),
    ("memory", pynvml.NVML_CLOCK_MEM),
    ("video", pynvml.NVML_CLOCK_VIDEO),
)
_ECC_TOTALS = (
    ("corrected", "volatile", pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL),
    ("uncorrected", "volatile", pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL),
    ("corrected", "aggregate", pynvml.NVML_FI_DEV_ECC_SBE_AGG_TOTAL),
    ("uncorrected", "aggregate", pynvml.NVML_FI_DEV_ECC_DBE_AGG_TOTAL),
)
CARD_FIELDS = (
    *(field for _, _, field in _ECC_TOTALS),
    pynvml.NVML_FI_DEV_RETIRED_PENDING,
    pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER,
)


def word_of(words: tuple[str, ...], number: int) -> str:
    return words[number] if 0 <= number < len(words) else f"code_{number}"


def hertz(megahertz: int) -> float:
    return megahertz * 1e6


_MILLIWATTS_MAX = 5_000_000
"""No GPU uses that much. A larger value is not of a sensor."""


def watts(milliwatts: int) -> float | None:
    return milliwatts / 1000 if milliwatts <= _MILLIWATTS_MAX else None


def answered(found: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    """Return the named values without those that the driver does not report."""
    return {name: value for name, value in found if value is not None}


def counted(found: Iterable[tuple[str, str, int | None]]) -> dict[str, dict[str, int]]:
    """Return counts of errors by type and place, without those that the driver does not report."""
    known = grouped((kind, (place, count)) for kind, place, count in found if count is not None)
    return {kind: dict(counts) for kind, counts in known.items()}


class _Made(NamedTuple):
    """Constant values, among them the power limits that a user cannot set."""

    vbios_version: str
    compute_capability: str
    max_clocks_hertz: dict[str, float]
    power_limits_watts: dict[str, float]


class CardOfGpu:
    """Reads the card of one handle. One thread at a time uses it."""

    def __init__(self, library: Library, calls: NvmlCalls, gpu: Handle) -> None:
        number = library.number
        self._calls = calls
        self._vbios_version = library.text("nvmlDeviceGetVbiosVersion", gpu)
        self._compute_capability = library.compute_capability(gpu)
        self._max_clocks = [
            (domain, number("nvmlDeviceGetMaxClockInfo", gpu, place, read=hertz, on=f"max clock {domain}"))
            for domain, place in CLOCKS
        ]
        self._compute_mode = number("nvmlDeviceGetComputeMode", gpu, read=lambda mode: word_of(COMPUTE_MODES, mode))
        self._requested_limit = number("nvmlDeviceGetPowerManagementLimit", gpu, read=watts)
        self._default_limit = number("nvmlDeviceGetPowerManagementDefaultLimit", gpu, read=watts)
        self._limits = library.pair(
            "nvmlDeviceGetPowerManagementLimitConstraints", gpu, lambda least, most: (watts(least), watts(most))
        )
        self._made: _Made | None = None
        self._last = _Made("", "", {}, {})
        self._forgotten = calls.forgotten

    def read(self, values: Values) -> dict[str, Any]:
        """Return the fields of the group `card`. `values` are the field values.

        Raises `RefusedError` if the GPU is gone.
        """
        made = self._read_made()
        return {
            "ecc_totals": counted((kind, since, whole(values.get(field))) for kind, since, field in _ECC_TOTALS),
            "retired_pages_pending": flag(values.get(pynvml.NVML_FI_DEV_RETIRED_PENDING)),
            "compute_mode": self._calls.ask(self._compute_mode),
            "power_limits_watts": answered([("requested", self._calls.ask(self._requested_limit))])
            | made.power_limits_watts,
            "max_clocks_hertz": made.max_clocks_hertz,
            "vbios_version": made.vbios_version,
            "compute_capability": made.compute_capability,
            "pcie_replays": whole(values.get(pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER)),
        }

    def _read_made(self) -> _Made:
        """Keep the values once the driver has reported every part, or does not support it."""
        if self._made is not None and self._forgotten == self._calls.forgotten:
            return self._made
        ask = self._calls.ask
        self._forgotten, before = self._calls.forgotten, self._calls.incomplete
        vbios_version, capability = ask(self._vbios_version), ask(self._compute_capability)
        max_clocks = answered([(domain, ask(call)) for domain, call in self._max_clocks])
        default, limits = ask(self._default_limit), ask(self._limits)
        least, most = limits or (None, None)
        self._last = _Made(
            vbios_version or self._last.vbios_version,
            capability or self._last.compute_capability,
            max_clocks,
            answered([("default", default), ("min", least), ("max", most)]),
        )
        self._made = self._last if self._calls.incomplete == before else None
        return self._last
