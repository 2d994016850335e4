"""A target: a function of gpumap that takes foreign bytes, with examples, the errors that it may raise, and its limits.

`attempt` asserts what holds for every target: only declared errors, one answer for the same bytes, and limited work.
Work is the number of lines of Python that run. A clock would measure the machine.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
import tracemalloc
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from hypothesis import strategies as st

from gpumap import __file__ as package
from tests.fuzz.changes import BYTES_MAX, Change

SOURCES = Path(package).parent
CRASHES = Path(__file__).with_name("crashes")
LINES_BASE = 200_000
MEMORY_BASE_BYTES, MEMORY_PER_BYTE = 64 << 20, 2_000
MEASURED_SHARE = 8
"""Of so many inputs, one runs twice. The second run is measured."""
_MEASURED_FOLDERS = (str(SOURCES), str(Path(yaml.__file__).parent))
"""Folders with parsers that are written in Python."""


@dataclass(frozen=True)
class Target:
    """`read` decodes bytes, asserts what must hold for the result, and returns it.

    `lines_per_byte` limits the work for large inputs. A `slow` target starts processes or sockets: it runs fewer
    inputs, without coverage, and once. What it reaches is not seen, so `modules` names it.
    """

    name: str
    read: Callable[[bytes], object]
    examples: Callable[[], Iterable[bytes]]
    change: Change
    raises: tuple[type[Exception], ...]
    lines_per_byte: int
    slow: bool
    modules: frozenset[str]

    def inputs(self) -> st.SearchStrategy[bytes]:
        """Return changed examples."""
        examples = [data for data in self.examples() if len(data) <= BYTES_MAX]
        return st.sampled_from(examples).flatmap(self.change).map(lambda data: data[:BYTES_MAX])

    def crash_files(self) -> list[Path]:
        """Return the inputs that once broke the target. Tests replay them for ever."""
        return sorted((CRASHES / self.name).glob("*"))


def target(
    examples: Callable[[], Iterable[bytes]],
    change: Change,
    *raises: type[Exception],
    lines_per_byte: int = 100,
    slow: bool = False,
    modules: Iterable[str] = (),
) -> Callable[[Callable[[bytes], object]], Target]:
    """Make a target of a function. `read_a_thing` becomes the target "a-thing"."""

    def make_target(read: Callable[[bytes], object]) -> Target:
        name = read.__name__.removeprefix("read_").replace("_", "-")
        return Target(name, read, examples, change, raises, lines_per_byte, slow, frozenset(modules))

    return make_target


class BrokenRuleError(AssertionError):
    """A target broke one of the rules that hold for all."""


def attempt(target: Target, data: bytes, *, measured: bool | None = None) -> None:
    """Run the target. By default some inputs run a second time, measured. Raises what the target must not raise."""
    answer = _answer(target, data)
    if measured is None:
        measured = zlib.crc32(data) % MEASURED_SHARE == 0
    if measured and not target.slow:
        again = _measured_answer(target, data)
        if answer != again and repr(answer) != repr(again):  # NaN is not equal to itself
            raise BrokenRuleError(f"{target.name}: the same bytes gave two answers")


def keep_crash(target: Target, data: bytes, error: BaseException) -> Path:
    """Write the input of a crash into the folder of its target. One with the same cause replaces it."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename}:{frame.lineno}" for frame in frames if str(SOURCES) in frame.filename]
    cause = f"{type(error).__name__} {places[-1] if places else frames[-1].lineno}"
    path = CRASHES / target.name / hashlib.sha256(cause.encode()).hexdigest()[:12]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _answer(target: Target, data: bytes) -> object:
    try:
        return target.read(data)
    except target.raises as error:
        if not isinstance(error, RecursionError):
            return f"{type(error).__name__}: {error}"
        raise


def _measured_answer(target: Target, data: bytes) -> object:
    """Run the target. Raises BrokenRuleError if the work is more than its limits allow."""
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    tracemalloc.start()
    trace_before = sys.gettrace()
    sys.settrace(
        lambda frame, event, argument: count if frame.f_code.co_filename.startswith(_MEASURED_FOLDERS) else None
    )
    try:
        answer = _answer(target, data)
    finally:
        sys.settrace(trace_before)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    lines_max = LINES_BASE + target.lines_per_byte * len(data)
    memory_max = MEMORY_BASE_BYTES + MEMORY_PER_BYTE * len(data)
    if lines > lines_max or peak_bytes > memory_max:
        raise BrokenRuleError(
            f"{target.name}: {lines} lines and {peak_bytes} bytes of memory for {len(data)} bytes; "
            f"at most {lines_max} and {memory_max}"
        )
    return answer
