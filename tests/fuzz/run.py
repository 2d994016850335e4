"""Runs one target for some seconds, in a child of this process: a target may hang, or take all memory.

A target runs with atheris if it is installed: libFuzzer keeps inputs that reach new places in `.fuzz/TARGET`, and a
later run begins with them. A slow target, or a Python without atheris, gets mutations of the examples only. Each new
crash is written to `crashes/TARGET`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import resource
import sys
import tempfile
import warnings
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.fuzz.engine import Crash, keep, kind_of, run_for, tried
from tests.fuzz.mutators import BYTES_MAX
from tests.fuzz.target import Target

CORPUS = Path(".fuzz")
MEMORY_BYTES_MAX = 6 << 30
_HANG_SECONDS = 60
"""libFuzzer ends a run of one input after this time. Work is limited by lines; this is for a loop in C."""
_BYTES_ONE_OF = 8
"""Of so many mutations, one is libFuzzer's own: of bytes, and of parts of other inputs."""


class Report(NamedTuple):
    """The result of one run. `places` is libFuzzer's count of the places in gpumap's code that were reached."""

    target: str
    runs: int
    places: int | None
    kept: int
    crashes: tuple[str, ...]


class Child(NamedTuple):
    target: Target
    pid: int
    output: Path

    def report(self, status: int) -> Report:
        """Read what the child printed. One that did not end well is a crash, too: a hang, or memory."""
        output = self.output.read_text(errors="replace")
        self.output.unlink()

        def last(pattern: str) -> int | None:
            found = re.findall(pattern, output)
            return int(found[-1]) if found else None

        crashes = tuple(re.findall(r"^CRASH (\S+ .*)", output, re.MULTILINE))
        if code := os.waitstatus_to_exitcode(status):
            crashes += (f"the run ended with {code}: {output[-600:]}",)
        runs = last(r"stat::number_of_executed_units: +(\d+)")
        return Report(self.target.name, runs or 0, last(r"\bcov: (\d+)"), last(r"\bcorp: (\d+)") or 0, crashes)


def start(target: Target, seconds: float, seed: int, atheris: Any) -> Child:
    """Start a run in a child. `atheris` is the module, or None. The caller waits for the child."""
    number, name = tempfile.mkstemp(prefix="gpumap-fuzz-output-")
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(number)
        return Child(target, pid, Path(name))
    code = 1
    try:
        for stream in (1, 2):
            os.dup2(number, stream)
        code = _run(target, seconds, seed, None if target.slow else atheris)
    finally:
        sys.stdout.flush()
        os._exit(code)


def _run(target: Target, seconds: float, seed: int, atheris: Any) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, resource.getrlimit(resource.RLIMIT_AS)[1]))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if atheris is not None:
        _run_guided(target, seconds, seed, atheris)  # ends the process
    runs, crashes = run_for(target, seconds, seed)
    for crash in crashes:
        _tell(target, crash)
    print(f"stat::number_of_executed_units: {runs}")
    return 0


def _tell(target: Target, crash: Crash) -> None:
    print(f"CRASH {keep(target, crash)} {kind_of(crash)}\n{crash}", flush=True)


def _run_guided(target: Target, seconds: float, seed: int, atheris: Any) -> None:
    found: set[str] = set()

    def one(data: bytes) -> None:
        crash = tried(target, data)
        if crash is not None and kind_of(crash) not in found:
            found.add(kind_of(crash))
            _tell(target, crash)

    def mutate(data: bytes, bytes_max: int, chance: int) -> bytes:
        random = Random(chance)
        if random.randrange(_BYTES_ONE_OF) == 0:
            return bytes(atheris.Mutate(data, bytes_max))
        return target.mutate(data, random)[:bytes_max]

    folder = CORPUS / target.name
    folder.mkdir(parents=True, exist_ok=True)
    for example in target.seeds():
        if len(example) <= BYTES_MAX:
            (folder / hashlib.sha256(example).hexdigest()).write_bytes(example)
    flags = {
        "max_total_time": max(int(seconds), 1),
        "max_len": BYTES_MAX,
        "len_control": 0,
        "timeout": _HANG_SECONDS,
        "report_slow_units": _HANG_SECONDS,  # a busy machine is slow, too
        "rss_limit_mb": 4096,
        "seed": seed,
        "print_final_stats": 1,
        "detect_leaks": 0,
        "reload": 0,
        "artifact_prefix": f"tests/fuzz/crashes/{target.name}-",
    }
    words = [f"-{flag}={value}" for flag, value in flags.items()]
    atheris.Setup(["fuzz", *words, str(folder)], one, custom_mutator=mutate)
    atheris.Fuzz()
