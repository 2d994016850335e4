"""Runs targets: over a fixed set of inputs, or for a time with atheris (libFuzzer), which follows the coverage.

atheris has no wheel for every Python. Without it, and for slow targets, inputs come from the mutators only.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.mutators import BYTES_MAX
from tests.fuzz.target import Target, attempt

KEPT_BYTES_MAX = 1 << 14
"""A larger mutation is not mutated again."""
CRASHES = Path(__file__).with_name("crashes")


class Crash(NamedTuple):
    data: bytes
    error: BaseException

    def __str__(self) -> str:
        return "".join(traceback.format_exception(self.error))[-3000:]


def crash_files(target: Target) -> list[Path]:
    """Return the inputs that once broke a target. They are replayed for ever."""
    folder = CRASHES / target.name
    return sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def keep(target: Target, crash: Crash) -> Path:
    """Write the input of a crash into the folder of its target. Return its path."""
    path = CRASHES / target.name / hashlib.sha256(crash.data).hexdigest()[:12]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(crash.data)
    return path


def inputs(target: Target, seed: int) -> Iterator[bytes]:
    """Return mutations without end: of the examples, and of earlier mutations. The same seed gives the same ones."""
    chance = random.Random(f"{target.name} {seed}")
    pool = [data for data in target.seeds() if len(data) <= BYTES_MAX]
    kept = len(pool)
    for number in itertools.count():
        data = chance.choice(pool)
        for _ in range(chance.choice((1, 1, 2, 3))):
            data = target.mutate(data, chance)[:BYTES_MAX]
        yield data
        # A mutation of a mutation, now and then: what is strange in two ways.
        if number % 7 == 0 and len(data) <= KEPT_BYTES_MAX:
            if len(pool) < kept + 50:
                pool.append(data)
            else:
                pool[chance.randrange(kept, len(pool))] = data


def run_for(target: Target, seconds: float, seed: int) -> tuple[int, list[Crash]]:
    """Run mutations for a time. Return how many, and the first crash of each kind."""
    found: dict[str, Crash] = {}
    ends = time.monotonic() + seconds
    runs = 0
    for data in inputs(target, seed):
        runs += 1
        if crash := tried(target, data):
            found.setdefault(kind_of(crash), crash)
        if time.monotonic() >= ends:
            break
    return runs, list(found.values())


def tried(target: Target, data: bytes) -> Crash | None:
    try:
        attempt(target, data)
    except (Exception, RecursionError) as error:
        return Crash(data, error)
    return None


def kind_of(crash: Crash) -> str:
    """Return what two crashes with the same cause have in common: the error, and the last place within gpumap."""
    frames = traceback.extract_tb(crash.error.__traceback__)
    places = [f"{frame.filename}:{frame.lineno}" for frame in frames if "/src/gpumap/" in frame.filename]
    return f"{type(crash.error).__name__} {places[-1] if places else frames[-1].lineno}"
