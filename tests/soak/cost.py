"""Whether an agent costs as much at the end as after its warm-up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from tests.soak import node
from tests.soak.watch import Usage

GPUS = len(node.GPUS)
LEAK_KIB = 0.75
"""A collection may leave so much memory behind: three quarters of the leak that must be found."""
WARM_UP, WARM_UP_SECONDS = 0.2, 4500.0
"""A part of the run, and a time of the fast clock: the history has an hour, and counters may live as long."""
LEAST_SAMPLES = 12


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """The growth per collection: the median of the slopes between samples that are an eighth of the run apart.

    A few steps or peaks do not change it, because Python's allocator grows in steps of 1 to 2 MiB. A leak changes each
    of them.
    """
    later = samples[len(samples) // 8 :]
    pairs = zip(samples, later, strict=False)
    slopes = sorted((end[1] - begin[1]) / (end[0] - begin[0]) for begin, end in pairs if end[0] > begin[0])
    return slopes[len(slopes) // 2]


def warm(samples: Sequence[Usage]) -> Sequence[Usage]:
    """Samples after the warm-up of the process that they begin with."""
    late = [one for one in samples if one.at >= samples[0].at + WARM_UP_SECONDS]
    return late[int(len(late) * WARM_UP) :]


def growth(usage: Sequence[Usage]) -> Iterator[str]:
    """What an agent that was never restarted has more of at its end."""
    for part in ("service", "worker"):
        if (found := memory_slope(usage, part)) is not None and found > LEAK_KIB:
            yield f"memory of the {part} grows by {found:.2f} KiB per collection"
        life = longest_life(usage, part)
        yield from _floor(f"descriptors of the {part}", [one.descriptors[part] for one in life])
        # While a call hangs, another thread reads the other GPUs. The worker keeps it for the next time.
        yield from _floor(
            f"threads of the {part}", [one.threads[part] for one in life], GPUS if part == "worker" else 0
        )
    yield from _floor("children", [one.children for one in warm(usage)])
    yield from _floor("temporary files", [one.files for one in warm(usage)])


def longest_life(usage: Sequence[Usage], part: str) -> Sequence[Usage]:
    """The samples of the process of that kind that lived longest, after its warm-up."""
    lives = [list(life) for _, life in groupby((u for u in usage if part in u.threads), lambda one: one.pids[part])]
    return warm(max(lives, key=len, default=[]))


def memory_slope(usage: Sequence[Usage], part: str) -> float | None:
    """The growth per collection in KiB; None if there are too few samples."""
    samples = [
        (one.collections, float(one.memory_kib[part])) for one in longest_life(usage, part) if part in one.memory_kib
    ]
    return slope(samples) if len(samples) >= LEAST_SAMPLES else None


def _floor(what: str, counts: Sequence[int], slack: int = 0) -> Iterator[str]:
    """A leak raises the least count; connections that come and go do not."""
    third = len(counts) // 3
    if third and min(counts[-third:]) > min(counts[:third]) + slack:
        yield f"{what}: at least {min(counts[:third])} after the warm-up, at least {min(counts[-third:])} at the end"
