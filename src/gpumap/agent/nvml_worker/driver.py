"""Keeps the worker in step with the driver: its devices, open device files, reinitialization for lost GPUs, and a
shutdown that may hang.

The kernel reports what NVML does not.
"""

import os
import threading
from collections.abc import Callable

BOUND = "/sys/bus/pci/drivers/nvidia"
"""Links to the devices that the module drives (nv-pci.c: the pci_driver has the name of the module)."""
DEVICES = "/dev/nvidia"
"""Prefix of the driver's device files: nvidiactl, nvidia0, nvidia-uvm, nvidia-caps/…"""
LONGEST_TIMES = 64
"""Limit of the first pause: the longest pause between two reinitializations."""


def bound_devices() -> frozenset[str]:
    """Return the PCI addresses of the driver's devices; none if sysfs does not list them.

    A GPU disappears from the list as soon as its unbind begins (kernel, drivers/base/dd.c, __device_release_driver).
    The unbind ends when no process holds the GPU (nv-pci.c, nv_pci_remove_helper, which waits for that).
    """
    try:
        names = os.listdir(BOUND)
    except OSError:
        return frozenset()
    return frozenset(name for name in names if ":" in name)


def holds_devices() -> bool:
    """Return whether this process has a device of the driver open, or mapped, which also keeps it open."""
    if any(_link(name).startswith(DEVICES) for name in os.listdir("/proc/self/fd")):
        return True
    with open("/proc/self/maps", errors="replace") as maps:
        return any(line.rpartition(" ")[2].startswith(DEVICES) for line in maps)


def _link(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""  # the descriptor of the listing itself


class ReinitBackoff:
    """Decides when to initialize NVML again to look for lost GPUs: a GPU may be healthy after a reset.

    The cost is for the healthy GPUs: for a moment no thread listens to them, and their GPM values start again. So it
    happens after 1, 2, 4, … 64 minutes, and soon again if other GPUs are lost. All times are of one monotonic clock.
    """

    def __init__(self, first_seconds: float) -> None:
        self._first = self._pause = first_seconds
        self._lost: frozenset[int] = frozenset()
        self._since = 0.0

    def is_due(self, lost: frozenset[int], monotonic: float) -> bool:
        """Return whether to do it now; then the caller does it. `lost` are indices, `monotonic` is the current time."""
        if lost != self._lost:
            self._lost, self._since, self._pause = lost, monotonic, self._first
        if not lost or monotonic - self._since < self._pause:
            return False
        self._since = monotonic
        self._pause = min(2 * self._pause, LONGEST_TIMES * self._first)
        return True


def close_within(close: Callable[[], bool], seconds: float) -> bool:
    """Return whether `close` has released everything in time. It runs in its own thread, because it may hang for ever:
    then do not call this again."""
    released: list[bool] = []
    thread = threading.Thread(target=lambda: released.append(close()), name="letting-go", daemon=True)
    thread.start()
    thread.join(seconds)
    return any(released)
