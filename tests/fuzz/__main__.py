"""`python -m tests.fuzz`, or `make fuzz ARGS="--minutes 60"`: looks for inputs that break a parser.

It divides the time among the targets, and ends with 1 if it found a crash. Every crash is a file below
tests/fuzz/crashes. Commit it with the fix: `tests/fuzz/test_short.py` replays it for ever.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fuzz.run import Child, Report
    from tests.fuzz.target import Target

GRACE_SECONDS = 300.0
"""For the last input of a run, on a busy machine."""
SECONDS_MIN = 2.0


def _atheris() -> Any:
    """Import atheris, if it is installed. Prepare it to follow gpumap's code, before that is imported."""
    try:
        import atheris
    except ImportError:
        return None
    with open(os.devnull, "w") as quiet:
        kept, sys.stderr = sys.stderr, quiet  # it names each module
        try:
            with atheris.instrument_imports(include=["gpumap"], enable_loader_override=False):
                import tests.fuzz.table  # noqa: F401
        finally:
            sys.stderr = kept
    return atheris


def fuzz(targets: list[Target], minutes: float, jobs: int, seed: int, atheris: Any) -> list[Report]:
    """Run the targets, `jobs` at a time, in about this time together."""
    from tests.fuzz.run import start

    seconds = max(60 * minutes * jobs / len(targets), SECONDS_MIN)
    print(f"{'target':26} {'inputs':>9} {'places':>7} {'kept':>6}  crashes", flush=True)
    waiting = list(targets)
    running: dict[int, Child] = {}
    reports: list[Report] = []
    deadlines: dict[int, float] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            child = start(waiting.pop(0), seconds, seed, atheris)
            running[child.pid] = child
            deadlines[child.pid] = time.monotonic() + seconds + GRACE_SECONDS
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            reports.append(running.pop(pid).report(status))
            print(_row(reports[-1]), flush=True)
            continue
        time.sleep(0.1)
        for late in [one for one in running if time.monotonic() > deadlines[one]]:
            os.kill(late, signal.SIGKILL)
    return reports


def _row(report: Report) -> str:
    places = "" if report.places is None else str(report.places)
    row = (
        f"{report.target:26} {report.runs:>9} {places:>7} {report.kept or '':>6}  {len(report.crashes) or ''}".rstrip()
    )
    return "\n    ".join([row, *report.crashes])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("targets", metavar="TARGET", nargs="*", help="Only these. (default: all)")
    parser.add_argument("--minutes", type=float, default=10.0, help="Time for all targets. (default: 10)")
    parser.add_argument("--jobs", type=int, default=2, help="Processes at the same time. (default: 2)")
    parser.add_argument("--seed", type=int, default=1, help="Another number gives other inputs. (default: 1)")
    parser.add_argument("--list", action="store_true", help="Print the targets, and exit.")
    given = parser.parse_args()
    atheris = None if given.list else _atheris()
    from tests.fuzz.table import TARGETS

    if unknown := sorted(set(given.targets) - TARGETS.keys()):
        parser.error(f"unknown target {unknown[0]}; --list prints them")
    chosen = [TARGETS[name] for name in given.targets or TARGETS]
    if given.list:
        for target in chosen:
            print(f"{target.name:26} {(target.run.__doc__ or '').strip().partition(chr(10))[0]}")
        return 0
    if atheris is None:
        print("atheris is not installed for this Python: inputs do not follow the coverage.")
    reports = fuzz(chosen, given.minutes, given.jobs, given.seed, atheris)
    crashes = sum(len(one.crashes) for one in reports)
    print(f"{sum(one.runs for one in reports)} inputs, {crashes} crashes")
    return 1 if crashes else 0


if __name__ == "__main__":
    sys.exit(main())
