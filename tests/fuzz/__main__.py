"""`python -m tests.fuzz`, or `make fuzz ARGS="--minutes 60"`: looks for inputs that break a parser.

It divides the time among the targets. Each runs in a process of its own: it may hang, or take all memory. With atheris
(libFuzzer) the choices of Hypothesis follow the coverage, and `.fuzz/TARGET` keeps them for later runs. Without it, and
for slow targets, they are random. The exit code is 1 if there was a crash. Every crash is a file below
tests/fuzz/crashes. Commit it with the fix: `tests/fuzz/test_short.py` replays it for ever.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fuzz.target import Target

GRACE_SECONDS = 300.0
"""For the last input of a run, on a busy machine."""
SECONDS_MIN = 2.0
HANG_SECONDS = 60
"""libFuzzer ends a run of one input after this time. Work is limited by lines; this is for a loop in C."""
MEMORY_BYTES_MAX = 6 << 30
CHOICES_BYTES = 8192
"""The choices that make one input."""


def import_atheris() -> Any:
    """Import atheris, if it is installed: it has no wheel for every Python. It then follows gpumap's code."""
    try:
        import atheris
    except ImportError:
        return None
    quiet = contextlib.redirect_stderr(io.StringIO())  # it names each module
    with quiet, atheris.instrument_imports(include=["gpumap"], enable_loader_override=False):
        import tests.fuzz.table  # noqa: F401
    return atheris


def fuzz(target: Target, seconds: float, seed: int, atheris: Any, output: int) -> None:
    """Run one target for a time, in this process. What it prints goes to the file with the number `output`."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, resource.getrlimit(resource.RLIMIT_AS)[1]))
    warnings.simplefilter("ignore")
    if target.slow or atheris is None:
        fuzz_at_random(target, seconds, seed)
        os._exit(0)  # the end waits for no thread and no process of the target
    else:
        fuzz_guided(target, seconds, seed, atheris)


def fuzz_at_random(target: Target, seconds: float, seed: int) -> None:
    run, random, end = catching(target), Random(seed), time.monotonic() + seconds
    runs = 0
    while runs == 0 or time.monotonic() < end:
        run(random.randbytes(CHOICES_BYTES))
        runs += 1
    print(f"stat::number_of_executed_units: {runs}", flush=True)


def fuzz_guided(target: Target, seconds: float, seed: int, atheris: Any) -> None:
    folder = Path(".fuzz") / target.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "first").write_bytes(Random(seed).randbytes(CHOICES_BYTES))
    flags = {
        "max_total_time": max(int(seconds), 1),
        "max_len": CHOICES_BYTES,
        "len_control": 0,
        "timeout": HANG_SECONDS,
        "report_slow_units": HANG_SECONDS,  # a busy machine is slow, too
        "rss_limit_mb": 4096,
        "seed": seed,
        "print_final_stats": 1,
        "detect_leaks": 0,
        "reload": 0,
    }
    atheris.Setup(["fuzz", *(f"-{flag}={value}" for flag, value in flags.items()), str(folder)], catching(target))
    atheris.Fuzz()


def catching(target: Target) -> Callable[[bytes], object]:
    """Return a function that makes an input of bytes and runs the target. It prints the first crash of each cause."""
    from hypothesis import given

    from tests.fuzz.target import attempt, keep_crash

    crashes: set[Path] = set()

    @given(data=target.inputs())
    def run(data: bytes) -> None:
        try:
            attempt(target, data)
        except Exception as error:
            path = keep_crash(target, data, error)
            if path not in crashes:
                logging.exception("CRASH %s", path)
            crashes.add(path)

    fuzz_one_input: Callable[[bytes], object] = run.hypothesis.fuzz_one_input  # type: ignore[attr-defined]
    return fuzz_one_input


def report(target: Target, seconds: float, seed: int, atheris: Any) -> tuple[int, bool]:
    """Run a target in a process. Print its row. Return how many inputs it ran, and whether it broke."""
    with tempfile.TemporaryFile() as file:
        arguments = (target, seconds, seed, atheris, file.fileno())
        child = multiprocessing.get_context("fork").Process(target=fuzz, args=arguments)
        child.start()
        child.join(seconds + GRACE_SECONDS)
        if child.exitcode is None:
            child.kill()
            child.join()
        file.seek(0)
        output = file.read().decode(errors="replace")

    def last_number(pattern: str) -> str:
        numbers: list[str] = re.findall(pattern, output)
        return numbers[-1] if numbers else ""

    runs = last_number(r"stat::number_of_executed_units: +(\d+)")
    crashes = re.findall(r"^ERROR:root:CRASH[\s\S]*?(?=^\S+:|\Z)", output, re.MULTILINE)
    print(
        f"{target.name:26} {runs:>9} {last_number(r'cov: ([0-9]+)'):>7}  {len(crashes) or ''}".rstrip(),
        *crashes,
        sep="\n",
    )
    if child.exitcode:
        print(f"    the run ended with {child.exitcode}: {output[-600:]}")
    return int(runs or 0), bool(crashes or child.exitcode)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("targets", metavar="TARGET", nargs="*", help="Only these. (default: all)")
    parser.add_argument("--minutes", type=float, default=10.0, help="Time for all targets. (default: 10)")
    parser.add_argument("--jobs", type=int, default=2, help="Processes at the same time. (default: 2)")
    parser.add_argument("--seed", type=int, default=1, help="Another number gives other inputs. (default: 1)")
    parser.add_argument("--list", action="store_true", help="Print the targets, and exit.")
    args = parser.parse_args()
    atheris = None if args.list else import_atheris()
    from tests.fuzz.table import TARGETS

    if unknown := sorted(set(args.targets) - TARGETS.keys()):
        parser.error(f"unknown target {unknown[0]}; --list prints them")
    names = args.targets or [*TARGETS]
    if args.list:
        for name in names:
            print(f"{name:26} {(TARGETS[name].read.__doc__ or '').strip().partition(chr(10))[0]}")
        return 0
    print(f"{'target':26} {'inputs':>9} {'places':>7}  crashes", flush=True)
    seconds = max(60 * args.minutes * args.jobs / len(names), SECONDS_MIN)
    with ThreadPoolExecutor(args.jobs) as pool:
        reports = [*pool.map(lambda name: report(TARGETS[name], seconds, args.seed, atheris), names)]
    broken = sum(is_broken for _, is_broken in reports)
    print(f"{sum(runs for runs, _ in reports)} inputs, {broken} targets broke")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
