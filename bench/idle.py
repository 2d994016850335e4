"""`python -m bench.idle [WORD …]`: whether gpumap finds the holders that rest, and accuses none that works.

It prints a table of the cases of `tests/lives.py`, or those with a word in their names. Nodes live there with simulated
jobs and a model of the driver, `SamplingDriver`. A missed goal is a ✘, never a failure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from bench.figures import table_of
from gpumap.agent.collect import BURST_INTERVAL_SECONDS
from tests.lives import CASES, INTERVAL_SECONDS, RESTS, WORK_SECONDS, Case, Result, Shares

LITTLE = f"work of less than {WORK_SECONDS} s"
HEAD = (
    "case",
    *("rest", "idle", "maybe_idle", "not judged", "not found"),
    *("work", "idle", "maybe_idle", "not judged"),
    *("collections", "fast", "goal", ""),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.idle", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only cases with one of these words")
    parser.add_argument("--lives", type=int, default=3, help="lives of each case, with the seeds 0, 1, … (default: 3)")
    parser.add_argument("--minutes", type=float, default=120.0, help="length of a life (default: 120)")
    parser.add_argument("--idle-after", type=float, default=300.0, help="seconds (default: 300)")
    args = parser.parse_args()
    rows: list[Sequence[str]] = []
    for case in CASES:
        if args.words and not any(word in case.name for word in args.words):
            continue
        result = case.result(range(args.lives), args.idle_after, 60.0 * args.minutes)
        rows += case_rows(case, result)
        print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    print(f"\n{args.lives} lives of {args.minutes:g} minutes each, --idle-after {args.idle_after:g}s")
    print("rest, work: snapshots of holders that rest, or work\n")
    print(table_of(HEAD, rows))
    return 0


def case_rows(case: Case, result: Result) -> Iterator[Sequence[str]]:
    """Yield the row of a case, and one for holders that work too little to count as work."""
    yield (
        case.name,
        *(str(result.resting.total()), *shares(result.resting), percent(result.resting, "none")),
        *(str(result.working.total()), *shares(result.working)),
        f"{result.collections * INTERVAL_SECONDS / result.seconds:.1f}×",
        f"{result.fast_collections * BURST_INTERVAL_SECONDS / result.seconds:.0%}",
        case.goal,
        "✔" if case.is_reached(result) else "✘",
    )
    if result.little:
        yield (f"- {LITTLE}", *[""] * 5, str(result.little.total()), *shares(result.little), *[""] * 4)


def shares(verdicts: Shares) -> Sequence[str]:
    """Return the parts of snapshots that are `idle`, `maybe_idle` and not judged."""
    reasons = verdicts.keys() - {*RESTS, "none"}
    return *(percent(verdicts, kind) for kind in RESTS), percent(verdicts, *reasons)


def percent(verdicts: Shares, *words: str) -> str:
    return f"{verdicts.ratio(*words):.1%}" if verdicts else "–"


if __name__ == "__main__":
    sys.exit(main())
