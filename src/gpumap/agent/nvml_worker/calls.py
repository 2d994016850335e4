"""What a refused call affects: one value, one GPU, or only the call. One thread at a time uses an `NvmlCalls`."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import pynvml

from gpumap.agent.nvml_worker.library import PreparedCall, RefusedError

T = TypeVar("T")

RETRY_SECONDS = 180.0
SOON_SECONDS = 2.0
"""First pause before a refused value that existed before is requested again. Each next pause is twice as long."""

UNSUPPORTED = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    }
)
"""The GPU or its driver has no answer now. Asked again after `RETRY_SECONDS`."""
NO_DATA = frozenset({pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_NO_DATA, pynvml.NVML_ERROR_NOT_READY})
"""No value at this moment."""
STALE = frozenset({pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_NOT_FOUND})
"""For the handle of a MIG device: the device no longer exists."""
GONE = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_GPU_NOT_FOUND})
"""In any call: the GPU is lost or needs a reset. Every other call on it fails, too."""
UNINITIALIZED = frozenset(
    {pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}
)
"""In any call: the library has lost its driver and must be initialized again."""
LOST_TOUCH = frozenset({pynvml.NVML_ERROR_OPERATING_SYSTEM, pynvml.NVML_ERROR_INVALID_STATE, pynvml.NVML_ERROR_UNKNOWN})
"""Only if every call returns them, as UNINITIALIZED. A single call may return them for another reason."""


_OF_MIG = ("mig", "gpu instance")
"""Prefix of the keys of MIG devices."""


class NvmlCalls:
    """The calls of one reading. `refusals` are those to report, each with its last code; `answered`: not all were
    refused.

    "Not supported" is reported only for a value that existed before.

    `learned`: this reading found something that is not supported. `forgotten` counts how often that knowledge was
    dropped. `refused_with` is the code of the last call; 0 if it was answered or not made. `incomplete` counts
    the refusals after which the next reading asks again, also those that are not reported.
    """

    def __init__(self) -> None:
        self._unsupported: set[str] = set()
        self._known: set[str] = set()  # values that existed before
        self._ask_again_at = 0.0
        self._lost = False  # whether a value that existed before is refused since the last request
        self._pause = SOON_SECONDS
        self._refused: dict[str, int] = {}
        self.answered = False
        self.refused_with = 0
        self.incomplete = 0
        self.learned = False
        self.forgotten = 0

    @property
    def refusals(self) -> dict[str, int]:
        return dict(self._refused)

    def begin(self) -> None:
        if self._unsupported and time.monotonic() >= self._ask_again_at:
            self._unsupported.clear()
            self.forgotten += 1
            self._pause = min(2 * self._pause, RETRY_SECONDS) if self._lost else SOON_SECONDS
            self._lost = False
        self._refused.clear()
        self.answered = False
        self.learned = False

    def forget(self) -> None:
        """Ask again also for what was not supported. A value that existed before may now be missing without a fault."""
        self._unsupported.clear()
        self._known.clear()
        self.forgotten += 1

    def forget_mig_devices(self) -> None:
        """Ask MIG devices again also for what they did not support. What the card does not support stays."""
        self._unsupported = {key for key in self._unsupported if not key.startswith(_OF_MIG)}

    def withdraw(self, earlier: dict[str, int]) -> None:
        """Drop the refusals that came after `earlier`: they are of a device that no longer exists."""
        self._refused = dict(earlier)

    def ask(self, call: PreparedCall[T]) -> T | None:
        """Return the value; `None` if NVML refuses. Raises `RefusedError` if the GPU or the driver is gone."""
        return self.attempt(call.key, call.once)

    def ask_first(self, calls: Sequence[PreparedCall[T]]) -> T | None:
        """Like `ask`, with the first supported call. No other replaces it: its value may mean something else."""
        for call in calls:
            value = self.ask(call)
            if call.key not in self._unsupported or call.key in self._known:
                return value
        return None

    def attempt(self, key: str, make_calls: Callable[[], T], *, privileged: bool = False) -> T | None:
        """Like `ask`, with a function that makes one or several calls for a value and raises `RefusedError`.

        If they are `privileged`, a lack of permission is not a fault: the value is absent, and not asked for again.
        """
        self.refused_with = 0
        if key in self._unsupported:
            return None
        try:
            value = make_calls()
        except RefusedError as refused:
            self.take(refused, key, privileged=privileged)
            return None
        self.answered = True
        if value is not None:
            self._known.add(key)
        return value

    def take(self, refused: RefusedError, key: str, *, privileged: bool = False) -> None:
        """Handle a refusal of what `key` names. Raise it if it affects the whole GPU."""
        if refused.code in GONE or refused.code in UNINITIALIZED:
            raise refused
        self.refused_with = refused.code
        if refused.code in UNSUPPORTED or (privileged and refused.code == pynvml.NVML_ERROR_NO_PERMISSION):
            self._do_not_ask(key)
            if key in self._known and not key.startswith(_OF_MIG):  # one MIG device may lack what another has
                self._refused[refused.call] = refused.code
            return
        self.incomplete += 1
        if refused.code not in NO_DATA:
            self._refused[refused.call] = refused.code

    def _do_not_ask(self, key: str) -> None:
        monotonic = time.monotonic()
        if not self._unsupported:
            self._ask_again_at = monotonic + RETRY_SECONDS
        self._unsupported.add(key)
        self.learned = True
        if key in self._known:
            self._lost = True
            self._ask_again_at = min(self._ask_again_at, monotonic + self._pause)

    def know(self, keys: Iterable[str]) -> None:
        """Record that these were answered by another call than `ask`."""
        self._known.update(keys)

    def never_supported(self, call: PreparedCall[T]) -> bool:
        """Return whether NVML does not support this and never answered it. MIG devices may differ."""
        return call.key in self._unsupported and (call.key not in self._known or call.key.startswith(_OF_MIG))

    def is_supported(self, key: str) -> bool:
        """Return whether it is supported, as far as known."""
        return key not in self._unsupported
