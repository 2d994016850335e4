"""What a refused call costs: one value, one GPU, or only the call. One thread at a time uses an `NvmlCalls`."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import pynvml

from gpumap.agent.nvml_worker.library import RefusedError

T = TypeVar("T")

RETRY_SECONDS = 180.0
SOON_SECONDS = 2.0
"""What was there before and is refused is asked for again after so long, then after twice as long each time."""

UNSUPPORTED = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    }
)
"""The GPU or its driver cannot tell, or not just now: asked again after `RETRY_SECONDS`."""
NO_DATA = frozenset({pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_NO_DATA, pynvml.NVML_ERROR_NOT_READY})
"""Nothing to tell just now."""
STALE = frozenset({pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_NOT_FOUND})
"""Of a MIG device's handle: it is no more."""
GONE = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_GPU_NOT_FOUND})
"""In any call: the GPU is lost or needs a reset, and no other call on it will do better."""
UNINITIALIZED = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)
"""In any call: the library has lost its driver and must be initialised anew."""
LOST_TOUCH = frozenset({pynvml.NVML_ERROR_OPERATING_SYSTEM, pynvml.NVML_ERROR_INVALID_STATE, pynvml.NVML_ERROR_UNKNOWN})
"""Where every call says so: as UNINITIALIZED. One call that says so may only be an odd call."""


_OF_MIG = ("mig", "gpu instance")
"""How `on` begins for MIG devices."""


class NvmlCalls:
    """The calls of one reading. `refusals` are those worth telling, `answered` is how many were not refused.

    "Not supported" is worth telling only for what was there before.

    `learned` is whether this reading found something that is not supported.
    `forgotten` counts how often it was forgotten what is not supported.
    `refused_with` is the code of the call that was asked last, 0 where it was answered or not asked at all.
    """

    def __init__(self) -> None:
        self._unsupported: set[tuple[str, str]] = set()
        self._known: set[tuple[str, str]] = set()  # what was there before
        self._ask_again_at = 0.0
        self._lost = False  # whether something that was there before is refused since it was last asked for
        self._pause = SOON_SECONDS
        self._refused: dict[tuple[str, int], None] = {}
        self.answered = 0
        self.refused_with = 0
        self.learned = False
        self.forgotten = 0

    @property
    def refusals(self) -> tuple[tuple[str, int], ...]:
        return tuple(self._refused)

    def begin(self) -> None:
        if self._unsupported and time.monotonic() >= self._ask_again_at:
            self._unsupported.clear()
            self.forgotten += 1
            self._pause = min(2 * self._pause, RETRY_SECONDS) if self._lost else SOON_SECONDS
            self._lost = False
        self._refused.clear()
        self.answered = 0
        self.learned = False

    def forget(self) -> None:
        """Ask again also what was not supported. What was there before may be missing now: that is no fault."""
        self._unsupported.clear()
        self._known.clear()
        self.forgotten += 1

    def forget_mig_devices(self) -> None:
        """Ask them again also what they did not support; what the card does not, stands."""
        self._unsupported = {key for key in self._unsupported if not key[1].startswith(_OF_MIG)}

    def withdraw(self, before: tuple[tuple[str, int], ...]) -> None:
        """Report only what was refused when `refusals` was `before`. The rest was of a device that is gone."""
        self._refused = dict.fromkeys(before)

    def ask(
        self, function: Callable[..., T], *arguments: object, on: str = "gpu", privileged: bool = False
    ) -> T | None:
        """What the function returns; `None` where NVML refuses. `on` tells GPUs' handles from MIG devices'.

        A call that is `privileged` and not permitted is no fault: its value is absent, and it is not asked again.
        Raises `RefusedError` where the refusal says that the whole GPU is gone, or the driver.
        """
        self.refused_with = 0
        key = function.__name__, on
        if key in self._unsupported:
            return None
        try:
            value = function(*arguments)
        except RefusedError as refused:
            self.take(refused, key, privileged=privileged)
            return None
        self.answered += 1
        if value is not None:
            self._known.add(key)
        return value

    def take(self, refused: RefusedError, key: tuple[str, str], *, privileged: bool = False) -> None:
        """A refusal of what `key` names, for what it costs. Raises it where that is the whole GPU."""
        if refused.code in GONE or refused.code in UNINITIALIZED:
            raise refused
        self.refused_with = refused.code
        if refused.code in UNSUPPORTED or (privileged and refused.code == pynvml.NVML_ERROR_NO_PERMISSION):
            self._do_not_ask(key)
            if key in self._known and not key[1].startswith(_OF_MIG):  # one MIG device may lack what another has
                self._refused[refused.call, refused.code] = None
        elif refused.code not in NO_DATA:
            self._refused[refused.call, refused.code] = None

    def _do_not_ask(self, key: tuple[str, str]) -> None:
        now = time.monotonic()
        if not self._unsupported:
            self._ask_again_at = now + RETRY_SECONDS
        self._unsupported.add(key)
        self.learned = True
        if key in self._known:
            self._lost = True
            self._ask_again_at = min(self._ask_again_at, now + self._pause)

    def know(self, keys: Iterable[tuple[str, str]]) -> None:
        """These were answered, by another call than `ask`."""
        self._known.update(keys)

    def never_supported(self, function: Callable[..., object], on: str) -> bool:
        """Whether NVML says that it does not support this, and has never answered it. MIG devices may differ."""
        key = function.__name__, on
        return key in self._unsupported and (key not in self._known or on.startswith(_OF_MIG))

    def is_supported(self, key: tuple[str, str]) -> bool:
        """As far as is known."""
        return key not in self._unsupported

    def ask_newest(self, functions: Sequence[Callable[..., T]], *arguments: object, on: str = "gpu") -> T | None:
        """As `ask`, of the first function that is supported: newest first.

        One that has answered before is not replaced by an older one, whose value may mean something else.
        """
        for function in functions:
            value = self.ask(function, *arguments, on=on)
            key = function.__name__, on
            if key not in self._unsupported or key in self._known:
                return value
        return None
