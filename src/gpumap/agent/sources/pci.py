"""NVIDIA's GPUs on PCI, below /sys: also those that NVML does not list, because their driver could not start them.

It lists names at most once a minute, and reads what never changes of a new function once. The driver of a function
that NVML does not list is read each time, because a virtual machine may get it. A read of `driver_override` may wait
for a lock of the kernel: it has a thread of its own, and no collection waits for the read of an earlier one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from gpumap.agent.executors import SerialExecutor
from gpumap.agent.sources.processes import open_folder, read_text
from gpumap.model.device_ids import pci_address
from gpumap.model.observations import PciFunction, SourceAnswer, SourceError

RELIST_SECONDS = 60.0
_NVIDIA, _CLASSES = "0x10de", ("0x0300", "0x0302")
"""Vendor, and the classes of GPUs: display and 3D controllers. Bridges and audio functions have others."""


class PciSource:
    """Reads `root` (`/sys`)."""

    def __init__(self, root: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._folder = root / "bus/pci/devices"
        self._monotonic = monotonic
        self._executor = SerialExecutor("gpumap-pci")
        self._is_reading = False
        self.answer: tuple[PciFunction, ...] | None = None
        """That of the last read; `None` if it failed."""
        self._listed_at: float | None = None
        self._functions: dict[str, PciFunction | None] = {}
        """By name; `None` is no GPU of NVIDIA's."""

    async def read(self, in_nvml: Collection[str], timeout_seconds: float) -> SourceAnswer[tuple[PciFunction, ...]]:
        """Return the GPUs. Those with an address that is not `in_nvml` have their drivers. Raises SourceError."""
        self.answer = None
        if self._is_reading:
            raise SourceError("deadline_exceeded", f"{self._folder}: an earlier read has not ended")
        self.answer = await self._executor.run(partial(self._read_functions, in_nvml), timeout_seconds)
        return SourceAnswer(self.answer)

    def close(self) -> None:
        self._executor.close()

    def _read_functions(self, in_nvml: Collection[str]) -> tuple[PciFunction, ...]:
        self._is_reading = True
        try:
            monotonic = self._monotonic()
            if self._listed_at is None or monotonic - self._listed_at >= RELIST_SECONDS:
                self._functions = {
                    name: self._functions[name] if name in self._functions else self._identify(name)
                    for name in sorted(os.listdir(self._folder))
                }
                self._listed_at = monotonic
            functions = [function for function in self._functions.values() if function]
            known = (gpu if gpu.address in in_nvml else self._read_driver(gpu) for gpu in functions)
            return tuple(function for function in known if function)
        except OSError as error:
            raise SourceError("unreadable", f"{error.filename or self._folder}: {error.strerror}") from error
        finally:
            self._is_reading = False

    def _identify(self, name: str) -> PciFunction | None:
        """Return a GPU of NVIDIA's; `None` for other functions, virtual ones, and one that is gone."""
        try:
            with open_folder(self._folder / name) as folder:
                if read_text("vendor", folder).strip() != _NVIDIA:
                    return None
                class_code = read_text("class", folder).strip()[:6]
                if class_code not in _CLASSES or _linked("physfn", folder):
                    return None
                address = pci_address(name)
                return PciFunction(address, read_text("device", folder).strip(), class_code) if address else None
        except FileNotFoundError:
            return None

    def _read_driver(self, function: PciFunction) -> PciFunction | None:
        """Return a function with its driver; `None` if it is gone."""
        try:
            with open_folder(self._folder / function.address) as folder:
                driver = _linked("driver", folder)
                override = "" if driver not in ("", "nvidia") else read_text("driver_override", folder).strip()
        except FileNotFoundError:
            return None
        return function._replace(driver=driver, driver_override=override.replace("(null)", ""))


def _linked(name: str, folder: int) -> str:
    """Return the last step of a link; empty if there is none."""
    try:
        return os.path.basename(os.readlink(name, dir_fd=folder))
    except FileNotFoundError:
        return ""
