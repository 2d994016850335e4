"""Tries mutants of the pure rooms, and writes what the tests did not notice into mutation/result.json.

`python -m mutation` tries 20 more mutants of each module, drawn by chance with a fixed seed. `python -m mutation pods
--sample 0` tries all of one module; `--survivors` tries again those that survived. The exit code is 1 if one survives
without a reason in mutation/explained.toml.
"""

import argparse
import hashlib
import json
import random
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mutation.mutants import Mutant, mutants_of
from mutation.report import RESULT, explained
from mutation.trial import ROOT, Room, in_room

HERE = Path(__file__).resolve().parent


def rooms() -> dict[str, tuple[list[str], list[str]]]:
    """Return the modules and the tests of each room, by their paths in the repository."""
    settings = tomllib.loads((HERE / "rooms.toml").read_text(encoding="utf-8"))
    return {
        name: (
            [str(path.relative_to(ROOT)) for pattern in room["modules"] for path in sorted(ROOT.glob(pattern))],
            room["tests"],
        )
        for name, room in settings.items()
        if isinstance(room, dict)
    }


def order_of(module: str, mutants: Sequence[Mutant]) -> list[Mutant]:
    """Return the mutants of a module in an order by chance, always the same."""
    seed = tomllib.loads((HERE / "rooms.toml").read_text(encoding="utf-8"))["seed"]
    shuffled = list(mutants)
    random.Random(f"{seed} {module}").shuffle(shuffled)
    return shuffled


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mutation", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("modules", nargs="*", help="a part of a module's path, such as join/pods; else all")
    parser.add_argument("--sample", type=int, default=20, help="more mutants of each module; 0: all (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="start no mutant of a room after this time (%(default)s)"
    )
    parser.add_argument("--survivors", action="store_true", help="only those that survived the last time")
    parser.add_argument("--quick", action="store_true", help="do not try first the modules as they are")
    parser.add_argument("--tests", nargs="+", help="these files instead of the room's; nothing is written")
    parser.add_argument("--match", default="", help="only mutants with this in their name; nothing is written")
    asked = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    open_ones = 0
    for modules, tests in rooms().values():
        chosen = [one for one in modules if not asked.modules or any(part in one for part in asked.modules)]
        plan = [(one, mutants) for one in chosen if (mutants := _to_try(one, results.get(one), asked))]
        if not plan:
            continue

        def work(room: Room, plan: Sequence[tuple[str, list[Mutant]]] = plan) -> None:
            nonlocal open_ones
            deadline = time.monotonic() + asked.seconds
            if not asked.match and not asked.quick and not asked.tests and room.notices(plan[0][0], None):
                raise RuntimeError(f"{plan[0][0]}: the tests fail when gpumap is imported again, without a mutant")
            for module, mutants in plan:
                survivors, tried = [], 0
                for mutant in mutants:
                    if time.monotonic() > deadline:
                        break
                    tried += 1
                    if not room.notices(module, mutant):
                        survivors.append(mutant.key)
                        reason = explained().get(module, {}).get(mutant.key)
                        open_ones += reason is None
                        room.say(f"{module}:{mutant.line}: {mutant.key}{f' ({reason})' if reason else ''}")
                room.say(f"{module}: a test noticed {tried - len(survivors)} of {tried}")
                if not asked.match and not asked.tests:
                    results[module] = _merged(module, results.get(module), mutants[:tried], survivors)
                    RESULT.write_text(json.dumps(dict(sorted(results.items())), indent=1, ensure_ascii=False) + "\n")

        in_room(modules, asked.tests or tests, work)
    return 1 if open_ones else 0


def _to_try(module: str, result: dict[str, Any] | None, asked: argparse.Namespace) -> list[Mutant]:
    mutants = mutants_of((ROOT / module).read_text(encoding="utf-8"))
    if asked.match:
        return [one for one in mutants if asked.match in one.key]
    if asked.survivors:
        return [one for one in mutants if result and one.key in result["survivors"]]
    known = result["tried"] if result and result["source"] == _checksum(module) else 0
    left = order_of(module, mutants)[known:]
    return left[: asked.sample] if asked.sample else left


def _merged(module: str, old: dict[str, Any] | None, tried: Sequence[Mutant], survivors: list[str]) -> dict[str, Any]:
    """Add what was tried now to what was tried before of the same source."""
    mutants = mutants_of((ROOT / module).read_text(encoding="utf-8"))
    again = {one.key for one in tried}
    same = old is not None and old["source"] == _checksum(module)
    before = old["survivors"] if old else []
    if not same and old and not again <= {*before}:
        old, before = None, []  # the result is of other code
    fresh = len(again - {*before}) if old else len(again)
    return {
        "mutants": len(mutants),
        "tried": (old["tried"] if old else 0) + fresh,
        "survivors": sorted({one for one in before if one not in again} | {*survivors}),
        "source": _checksum(module),
    }


def _checksum(module: str) -> str:
    return hashlib.sha256((ROOT / module).read_bytes()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
