"""What keeps the worker in step with the driver: which devices it drives, whether we hold any, when NVML is initialised
again to look for lost GPUs, and a shutdown of NVML that may hang.

The kernel reports what NVML does not.
"""

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

BOUND = "/sys/bus/pci/drivers/nvidia"
"""A link for each device that the module drives (nv-pci.c: the pci_driver's name is the module's)."""
DEVICES = "/dev/nvidia"
"""How the names of the driver's devices begin: nvidiactl, nvidia0, nvidia-uvm, nvidia-caps/…"""
LONGEST_TIMES = 64
"""Of the first pause: the longest one between two re-initialisations."""


def bound_devices() -> frozenset[str]:
    """PCI addresses of what the driver drives; none where sysfs does not tell.

    A GPU that is to be unbound is missing as soon as that begins (kernel, drivers/base/dd.c, __device_release_driver),
    and is unbound when nobody holds it any more (nv-pci.c, nv_pci_remove_helper, which waits for that).
    """
    try:
        names = os.listdir(BOUND)
    except OSError:
        return frozenset()
    return frozenset(name for name in names if ":" in name)


def holds_devices() -> bool:
    """Whether this process has a device of the driver open, or mapped, which keeps it open."""
    return any(_link(name).startswith(DEVICES) for name in os.listdir("/proc/self/fd")) or _maps_devices()


def _link(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""  # that of the listing itself


def _maps_devices() -> bool:
    with open("/proc/self/maps", errors="replace") as maps:
        return any(line.rpartition(" ")[2].startswith(DEVICES) for line in maps)


class ReinitBackoff:
    """When to initialise NVML again to look for GPUs that are lost: one that was reset meanwhile may be well.

    It costs the GPUs that are well: for a moment no thread listens to them, and their GPM values begin again. So it is
    done after 1, 2, 4, … 64 minutes, and soon again if others are lost. Times are of one monotonic clock.
    """

    def __init__(self, first_seconds: float) -> None:
        self._first = self._pause = first_seconds
        self._lost: frozenset[int] = frozenset()
        self._since = 0.0

    def is_due(self, lost: frozenset[int], now: float) -> bool:
        """Whether to do it now: who is due does it. `lost` are indices."""
        if lost != self._lost:
            self._lost, self._since, self._pause = lost, now, self._first
        if not lost or now - self._since < self._pause:
            return False
        self._since = now
        self._pause = min(2 * self._pause, LONGEST_TIMES * self._first)
        return True


class Shutdown:
    """Runs `close`, which returns whether it has released everything, in a thread of its own: it may hang for ever."""

    def __init__(self, close: Callable[[], bool]) -> None:
        self._close = close
        self._begin: SimpleQueue[None] = SimpleQueue()
        self._done: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def within(self, seconds: float) -> bool:
        """Whether it is done by then. If not, it may hang for ever: this is not to be asked again."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="letting-go", daemon=True)
            self._thread.start()
        self._begin.put(None)
        try:
            return self._done.get(timeout=seconds)
        except Empty:
            return False

    def _run(self) -> None:
        while True:
            self._begin.get()
            self._done.put(self._close())
