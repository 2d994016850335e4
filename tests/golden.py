"""A capture is a test: a folder of what the sources said, and the page that it must give.

`make golden` (`python -m tests.golden`) writes each capture's `expected.prom` anew; `git diff` is the review. The
format of a capture is told in docs/captures.md.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from gpumap.capture import format as on_disk
from gpumap.capture import replay

CAPTURES = Path(__file__).parent / "captures"


def captures() -> list[Path]:
    """Every capture folder."""
    return sorted(path.parent for path in CAPTURES.glob("*/capture.json"))


def page(capture: Path) -> bytes:
    """Replay a capture through the real sources."""
    return asyncio.run(replay.page(on_disk.load(capture)))


def main() -> None:
    """Write every golden page anew."""
    for capture in captures():
        (capture / on_disk.EXPECTED).write_bytes(page(capture))
        print(capture.name)


if __name__ == "__main__":
    main()
