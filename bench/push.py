"""P14: from an assignment in the kubelet to /metrics, pushed by inotify and polled, the same assignments for both."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator

from bench.contestants import ROOT, Contestant, gpumap
from bench.figures import Figure, median, noise
from bench.node import SMALL, node

ROUNDS = 40
LIMIT = 0.05
SHORTEST_SECONDS = 0.5
"""Between two assignments; longer by parts of a second, so that they fall evenly between two collections."""


def push(_: frozenset[str]) -> Iterator[Figure]:
    """P14. Counted from the checkpoint's rename, which the kubelet does before it creates the container."""
    pushed: list[float] = []
    polled: list[float] = []
    pauses = [SHORTEST_SECONDS + number / ROUNDS for number in range(ROUNDS)]
    random.Random(14).shuffle(pauses)
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(node(SMALL))
        seen_pushed = stack.enter_context(_sight(stack.enter_context(gpumap(made, "1s"))))
        seen_polled = stack.enter_context(_sight(stack.enter_context(gpumap(made, "1s", "--no-push"))))
        for pause in pauses:
            place = made.withdraw()
            time.sleep(pause)
            made.assign(place)
            assigned = time.monotonic()
            # One after the other, so that only one page is looked at while it counts.
            pushed.append(_ask(seen_pushed, place.pod.name) - assigned)
            polled.append(_ask(seen_polled, place.pod.name) - assigned)
            made.start(place)
    seen, theirs = median(pushed), median(polled)
    apart = noise((median(pushed[::2]), median(pushed[1::2])))  # another copy would take the cores when it counts
    absolute = f"{seen * 1e3:.1f} : {theirs * 1e3:.0f} ms"
    what = f"assignment to page, p50 : polling at 1 s, {SMALL}"
    yield Figure("P14", what, seen / theirs, LIMIT, absolute, noise=apart)


@contextlib.contextmanager
def _sight(contestant: Contestant) -> Iterator[subprocess.Popen[str]]:
    """A process that looks at the page: this one has the kubelet in it, which must not wait."""
    command = [sys.executable, "-m", "bench.sight", str(contestant.port)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as looking:
        try:
            yield looking
        finally:
            looking.kill()


def _ask(looking: subprocess.Popen[str], word: str) -> float:
    assert looking.stdin is not None
    assert looking.stdout is not None
    print(word, file=looking.stdin, flush=True)
    return float(looking.stdout.readline())
