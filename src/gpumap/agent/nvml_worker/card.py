"""The group `card`: properties and settings of a card, and its total errors. Only dialects show it.

Values that do not change while the handle is valid are read once and kept with it. All calls are on the card, also if
it is partitioned.
"""

from ctypes import byref, c_uint
from typing import NamedTuple

import pynvml

from gpumap.agent.nvml_worker.calls import NvmlCalls
from gpumap.agent.nvml_worker.field_values import Values, flag, whole
from gpumap.agent.nvml_worker.library import Handle, Library
from gpumap.model.readings import COMPUTE_MODES, GpuReading

CLOCKS = (
    ("graphics", pynvml.NVML_CLOCK_GRAPHICS),
    ("sm", pynvml.NVML_CLOCK_SM),
    ("memory", pynvml.NVML_CLOCK_MEM),
    ("video", pynvml.NVML_CLOCK_VIDEO),
)
_CLOCKS_ON = tuple((domain, number, f"max clock {domain}") for domain, number in CLOCKS)
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


class _Made(NamedTuple):
    """Constant values, among them the power limits that a user cannot set."""

    vbios_version: str
    compute_capability: str
    max_clocks_hertz: tuple[tuple[str, float], ...]
    power_limits_watts: tuple[tuple[str, float], ...]


class CardOfGpu:
    """Reads the card of one handle. One thread at a time uses it."""

    def __init__(self, library: Library, calls: NvmlCalls, gpu: Handle) -> None:
        self._library = library
        self._calls = calls
        self._gpu = gpu
        self._made: _Made | None = None
        self._last = _Made("", "", (), ())
        self._forgotten = calls.forgotten

    def add_to(self, reading: GpuReading, values: Values) -> GpuReading:
        """Return the reading with the group `card`. `values` are the field values.

        Raises `RefusedError` if the GPU is gone.
        """
        made = self._read_made()
        mode = self._calls.ask(self._compute_mode)
        requested = self._calls.ask(self._requested_power_limit)
        set_to = () if requested is None else (("requested", requested),)
        return reading._replace(
            ecc_totals=tuple(
                [(kind, since, int(values[field])) for kind, since, field in _ECC_TOTALS if field in values]
            ),
            retired_pages_pending=flag(values.get(pynvml.NVML_FI_DEV_RETIRED_PENDING)),
            compute_mode=None if mode is None else word_of(COMPUTE_MODES, mode),
            power_limits_watts=set_to + made.power_limits_watts,
            max_clocks_hertz=made.max_clocks_hertz,
            vbios_version=made.vbios_version,
            compute_capability=made.compute_capability,
            pcie_replays=whole(values.get(pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER)),
        )

    def _read_made(self) -> _Made:
        """Keep the values once the driver has reported every part, or does not support it."""
        if self._made is not None and self._forgotten == self._calls.forgotten:
            return self._made
        self._forgotten, before = self._calls.forgotten, self._calls.refusals
        made = _Made(
            self._calls.ask(self._library.vbios_version, self._gpu) or self._last.vbios_version,
            self._calls.ask(self._library.compute_capability, self._gpu) or self._last.compute_capability,
            self._max_clocks(),
            self._power_limits(),
        )
        self._last = made
        self._made = made if self._calls.refusals == before else None
        return made

    def _max_clocks(self) -> tuple[tuple[str, float], ...]:
        clocks = [(name, self._calls.ask(self._max_clock, number, on=on)) for name, number, on in _CLOCKS_ON]
        return tuple([(domain, hertz) for domain, hertz in clocks if hertz is not None])

    def _power_limits(self) -> tuple[tuple[str, float], ...]:
        default = self._calls.ask(self._default_power_limit)
        span = self._calls.ask(self._power_limit_range)
        limits = () if default is None else (("default", default),)
        return limits if span is None else (*limits, ("min", span[0]), ("max", span[1]))

    # --- single questions, each of which raises `RefusedError` ---

    def _compute_mode(self) -> int:
        return self._library.ask_number("nvmlDeviceGetComputeMode", self._gpu)

    def _requested_power_limit(self) -> float:
        return self._library.ask_number("nvmlDeviceGetPowerManagementLimit", self._gpu) / 1000

    def _max_clock(self, domain: int) -> float:
        megahertz = c_uint()
        self._library.ask("nvmlDeviceGetMaxClockInfo", self._gpu, domain, byref(megahertz))
        return megahertz.value * 1e6

    def _default_power_limit(self) -> float:
        return self._library.ask_number("nvmlDeviceGetPowerManagementDefaultLimit", self._gpu) / 1000

    def _power_limit_range(self) -> tuple[float, float]:
        least, most = c_uint(), c_uint()
        self._library.ask("nvmlDeviceGetPowerManagementLimitConstraints", self._gpu, byref(least), byref(most))
        return least.value / 1000, most.value / 1000
