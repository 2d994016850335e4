"""What a card is made for, and what does not change while its handle is good: asked once, kept with the handle."""

from ctypes import byref, c_uint
from typing import NamedTuple

from gpumap.nvml_worker.asking import Asking
from gpumap.nvml_worker.library import Handle, Library

CLOCKS = (("graphics", 0), ("sm", 1), ("memory", 2), ("video", 3))
"""nvml.h, nvmlClockType_t."""
_CLOCKS_ON = tuple((domain, number, f"max clock {domain}") for domain, number in CLOCKS)


class Card(NamedTuple):
    """The fields of a `GpuReading` of these names; of the power limits those that nobody sets."""

    vbios_version: str
    compute_capability: str
    max_clocks_hertz: tuple[tuple[str, float], ...]
    power_limits_watts: tuple[tuple[str, float], ...]


class CardOfGpu:
    """Of one handle. One thread at a time asks."""

    def __init__(self, library: Library, asking: Asking, gpu: Handle) -> None:
        self._library = library
        self._asking = asking
        self._gpu = gpu
        self._card: Card | None = None
        self._forgotten = asking.forgotten

    def read(self) -> Card:
        """Kept once every part has been told, or is not supported. Raises `RefusedError` where the GPU is gone."""
        if self._card is not None and self._forgotten == self._asking.forgotten:
            return self._card
        self._forgotten, before = self._asking.forgotten, self._asking.refusals
        card = Card(
            self._asking.ask(self._library.vbios_version, self._gpu) or "",
            self._asking.ask(self._library.compute_capability, self._gpu) or "",
            self._max_clocks(),
            self._power_limits(),
        )
        self._card = card if self._asking.refusals == before else None
        return card

    def _max_clocks(self) -> tuple[tuple[str, float], ...]:
        told = [(name, self._asking.ask(self._max_clock, number, on=on)) for name, number, on in _CLOCKS_ON]
        return tuple([(domain, hertz) for domain, hertz in told if hertz is not None])

    def _power_limits(self) -> tuple[tuple[str, float], ...]:
        default = self._asking.ask(self._default_power_limit)
        span = self._asking.ask(self._power_limit_range)
        limits = () if default is None else (("default", default),)
        return limits if span is None else (*limits, ("min", span[0]), ("max", span[1]))

    # --- single questions, each of which raises `RefusedError` ---

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
