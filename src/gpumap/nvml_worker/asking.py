"""What a refused call costs: one value, one GPU, or nothing but the asking. One thread at a time uses an `Asking`."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from gpumap.nvml_worker.codes import GONE, NO_DATA, UNINITIALIZED, UNSUPPORTED
from gpumap.nvml_worker.library import RefusedError

T = TypeVar("T")


class Asking:
    """The calls of one reading. `refusals` are those worth telling, `answered` is how many were not refused."""

    def __init__(self) -> None:
        self._unsupported: set[tuple[str, str]] = set()
        self._refused: dict[tuple[str, int], None] = {}
        self.answered = 0

    @property
    def refusals(self) -> tuple[tuple[str, int], ...]:
        return tuple(self._refused)

    def begin(self) -> None:
        self._refused.clear()
        self.answered = 0

    def forget(self) -> None:
        """Ask again also what was not supported."""
        self._unsupported.clear()

    def ask(self, function: Callable[..., T], *arguments: object, on: str = "gpu") -> T | None:
        """What the function returns; `None` where NVML refuses. `on` tells GPUs' handles from MIG devices'.

        Raises `RefusedError` where the refusal says that the whole GPU is gone, or the driver.
        """
        key = function.__name__, on
        if key in self._unsupported:
            return None
        try:
            value = function(*arguments)
        except RefusedError as refused:
            if refused.code in GONE or refused.code in UNINITIALIZED:
                raise
            if refused.code in UNSUPPORTED:
                self._unsupported.add(key)
            elif refused.code not in NO_DATA:
                self._refused[refused.call, refused.code] = None
            return None
        self.answered += 1
        return value

    def ask_newest(self, functions: Sequence[Callable[..., T]], *arguments: object, on: str = "gpu") -> T | None:
        """As `ask`, of the first function that is supported: newest first."""
        for function in functions:
            value = self.ask(function, *arguments, on=on)
            if (function.__name__, on) not in self._unsupported:
                return value
        return None
