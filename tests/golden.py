"""A capture is a test: a folder of what the sources said, and the page that it must give.

`make golden` (`python -m tests.golden`) writes each capture's pages again, and tests/dialects/*.prom; `git diff` is the
review. The format of a capture is reported in docs/dev/captures.md.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import pickle
from functools import cache
from pathlib import Path

from gpumap.agent.dialects import DIALECTS
from gpumap.agent.exposition import Exposition
from gpumap.agent.flags import ALL_DIALECTS
from gpumap.lab.capture import format as on_disk
from gpumap.lab.capture import replay
from gpumap.model.snapshot import Snapshot
from tests import dialect_samples

CAPTURES = Path(__file__).parent / "captures"
DIALECTS_PAGE = "dialects.prom"
SNAPSHOTS_FOLDER = "TEST_SNAPSHOTS_FOLDER"
"""Environment variable: the folder in which the processes of one test run share the snapshots of captures."""


def captures() -> list[Path]:
    """Every capture folder."""
    return sorted(path.parent for path in CAPTURES.glob("*/capture.json"))


@cache
def snapshots(capture: Path) -> tuple[Snapshot, ...]:
    """Return what the real sources make of a capture, frame by frame. The processes of a test run replay it once."""
    run = os.environ.get(SNAPSHOTS_FOLDER)
    if run is None:
        return tuple(asyncio.run(replay.snapshots(on_disk.load(capture))))
    with (Path(run) / f"{capture.name}.pickle").open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if content := file.read():
            stored: tuple[Snapshot, ...] = pickle.loads(content)
            return stored
        replayed = tuple(asyncio.run(replay.snapshots(on_disk.load(capture))))
        file.write(pickle.dumps(replayed))
        return replayed


def page(capture: Path) -> bytes:
    """Replay a capture through the real sources."""
    return Exposition(replay.families()).render(snapshots(capture)[-1])


def dialects_page(capture: Path) -> bytes:
    """What every dialect of `--dialect all` makes of a capture, all at once."""
    every = (family for name in ALL_DIALECTS for family in DIALECTS[name].families)
    families = [family for family in every if family.name not in replay.CLOCK_DEPENDENT]
    return Exposition(families).render(snapshots(capture)[-1])


def main() -> None:
    """Write every golden page again."""
    for capture in captures():
        (capture / on_disk.EXPECTED).write_bytes(page(capture))
        (capture / DIALECTS_PAGE).write_bytes(dialects_page(capture))
        print(capture.name)
    dialect_samples.write_pages()


if __name__ == "__main__":
    main()
