"""A target: a function of gpumap that takes foreign bytes, with examples, the errors that it may raise, and its limits.

`attempt` runs it once and asserts what holds for every target: only declared errors, one line each, and the same answer
again. `measured` counts its work: the lines of Python that it runs. A clock would measure the machine.
"""

from __future__ import annotations

import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from gpumap import __file__ as package
from tests.fuzz.mutators import BYTES_MAX, Mutate

SOURCES = str(Path(package).parent)
_COUNTED = (SOURCES, str(Path(yaml.__file__).parent))
"""Folders with parsers that are written in Python."""
LINES_BASE = 200_000
MEMORY_BASE_BYTES = 64 << 20
AGAIN_ONE_OF = 8
"""Of so many inputs, one runs twice."""


@dataclass(frozen=True)
class Target:
    """`run` decodes bytes, asserts what must hold for the result, and returns it.

    `modules` are the modules of gpumap whose parsers it reaches. `lines_per_byte` and `memory_per_byte` limit the work
    for large inputs. A `slow` target starts processes or sockets: it runs fewer inputs, and without coverage.
    """

    name: str
    run: Callable[[bytes], object]
    seeds: Callable[[], Iterable[bytes]]
    mutate: Mutate
    modules: tuple[str, ...]
    raises: tuple[type[Exception], ...] = (ValueError,)
    lines_per_byte: int = 100
    memory_per_byte: int = 2_000
    slow: bool = False
    repeatable: bool = field(default=True)
    """Whether the same bytes give an equal answer."""


class FoundError(AssertionError):
    """A target broke one of its rules."""


def attempt(target: Target, data: bytes) -> str:
    """Run the target, some inputs twice. Return "" or the name of the declared error. Raises what it must not raise."""
    answer, error = _once(target, data)
    if target.repeatable and zlib.crc32(data) % AGAIN_ONE_OF == 0:
        again, other = _once(target, data)
        if error != other or not _equal(answer, again):
            raise FoundError(f"{target.name}: the same bytes gave two answers")
    return error.partition(":")[0]


def _once(target: Target, data: bytes) -> tuple[object, str]:
    try:
        return target.run(data), ""
    except target.raises as error:
        text = str(error)
        if isinstance(error, RecursionError):
            raise
        return None, f"{type(error).__name__}: {text}"


def _equal(one: object, other: object) -> bool:
    return one is other or one == other or repr(one) == repr(other)  # NaN is not equal to itself


@dataclass(frozen=True, slots=True)
class Work:
    """What one run took."""

    lines: int
    memory_bytes: int
    modules: frozenset[str]


def measured(target: Target, data: bytes, *, memory: bool = False) -> Work:
    """Run the target once and count its work. Raises FoundError if the work is more than its limits allow."""
    lines = 0
    files: set[str] = set()

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(_COUNTED):
            return None
        files.add(name)
        return count

    if memory:
        tracemalloc.start()
    before = sys.gettrace()
    sys.settrace(enter)
    try:
        _once(target, data)
    finally:
        sys.settrace(before)
        peak = tracemalloc.get_traced_memory()[1] if memory else 0
        if memory:
            tracemalloc.stop()
    lines_max = LINES_BASE + target.lines_per_byte * len(data)
    if lines > lines_max:
        raise FoundError(f"{target.name}: {lines} lines for {len(data)} bytes; at most {lines_max}")
    memory_max = MEMORY_BASE_BYTES + target.memory_per_byte * len(data)
    if peak > memory_max:
        raise FoundError(f"{target.name}: {peak} bytes of memory for {len(data)} bytes; at most {memory_max}")
    return Work(lines, peak, frozenset(map(_module, files)))


def _module(file: str) -> str:
    return Path(file).with_suffix("").as_posix().partition("/src/")[2].replace("/", ".")


def cut(data: bytes) -> bytes:
    return data[:BYTES_MAX]
