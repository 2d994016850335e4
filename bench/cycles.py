"""P6, P9, P12, G1: CPU time of collections, all processes of a contestant together; contestants run side by side."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from bench import usage
from bench.contestants import Contestant, gpumap, has_nvitop, nvitop
from bench.figures import Figure, missing
from bench.node import LARGE, SMALL, Shape, node
from gpumap.agent.flags import DEFAULT_GROUPS
from gpumap.agent.metrics import GROUPS

WARM_UP_SECONDS = 3.0
P6_LIMITS = {SMALL: 0.10, LARGE: 0.05}
P6_INTERVALS = {SMALL: 0.5, LARGE: 1.0}
P9_LIMITS = {1: 0.10, 15: 0.35}


def cpu_over(contestants: Sequence[Contestant], seconds: float) -> tuple[list[float], float]:
    """CPU time of each over a window, and how long it was; its edges lie between collections, wherever that is."""
    pids = [contestant.pids for contestant in contestants]
    started, before = time.monotonic(), [usage.cpu_seconds(each) for each in pids]
    time.sleep(seconds)
    after = [usage.cpu_seconds(each) for each in pids]
    return [late - early for late, early in zip(after, before, strict=True)], time.monotonic() - started


def cycle(_: frozenset[str]) -> Iterator[Figure]:
    """P6."""
    for shape, limit in P6_LIMITS.items():
        what, interval = f"CPU of a cycle : nvitop-exporter, {shape}", P6_INTERVALS[shape]
        if not has_nvitop():
            yield missing("P6", what, limit)
            continue
        with node(shape) as made, gpumap(made, f"{interval * 1000:.0f}ms") as ours, nvitop(made, interval) as other:
            time.sleep(WARM_UP_SECONDS)
            (seen, theirs), lasted = cpu_over((ours, other), 20.0)
        cycles = lasted / interval
        absolute = f"{seen / cycles * 1e3:.2f} : {theirs / cycles * 1e3:.1f} ms, at {interval:g} s"
        if not made.real_processes:
            absolute += "; processes are files here, which nvitop does not read"
        yield Figure("P6", what, seen / theirs, limit, absolute)


def steady(_: frozenset[str]) -> Iterator[Figure]:
    """P9: all four at once, in one window."""
    if not has_nvitop():
        yield from (missing("P9", _steady_name(interval), limit) for interval, limit in P9_LIMITS.items())
        return
    with node(SMALL) as made, contextlib.ExitStack() as stack:
        enter = stack.enter_context
        pairs = [(enter(gpumap(made, f"{s}s")), enter(nvitop(made, float(s)))) for s in P9_LIMITS]
        time.sleep(WARM_UP_SECONDS)
        used, lasted = cpu_over([one for pair in pairs for one in pair], 60.0)
    for (interval, limit), seen, theirs in zip(P9_LIMITS.items(), used[::2], used[1::2], strict=True):
        absolute = f"{seen / lasted:.3%} : {theirs / lasted:.3%} of a core"
        yield Figure("P9", _steady_name(interval), seen / theirs, limit, absolute)


def _steady_name(interval: int) -> str:
    return f"steady CPU at {interval} s : nvitop-exporter, {SMALL}"


DOUBLED = {
    "processes": SMALL._replace(processes_per_gpu=2 * SMALL.processes_per_gpu),
    "pods": SMALL._replace(pods_per_gpu=2 * SMALL.pods_per_gpu, other_pods=2 * SMALL.other_pods),
    "GPUs, pods, processes, series": SMALL._replace(gpus=2 * SMALL.gpus, other_pods=2 * SMALL.other_pods),
}


def doubled(_: frozenset[str]) -> Iterator[Figure]:
    """P12."""
    shapes: list[Shape] = [SMALL, *DOUBLED.values()]
    with contextlib.ExitStack() as stack:
        ours = [stack.enter_context(gpumap(stack.enter_context(node(shape)), "500ms")) for shape in shapes]
        time.sleep(WARM_UP_SECONDS)
        used, lasted = cpu_over(ours, 15.0)
    cycles = lasted / 0.5
    for name, seen in zip(DOUBLED, used[1:], strict=True):
        absolute = f"{seen / cycles * 1e3:.2f} : {used[0] / cycles * 1e3:.2f} ms"
        yield Figure("P12", f"CPU of a cycle, twice the {name} : once, {SMALL}", seen / used[0], 2.2, absolute)


GROUPS_INTERVAL_SECONDS = 0.5
GROUPS_SECONDS = 60.0
_ANY = 'gpumap_source_up{source="nvml"} 1'
"""A line of a page with any groups."""


def groups(_: frozenset[str]) -> Iterator[Figure]:
    """G1: the saving of a left-out group of families, in one window, against the mean of two runs that leave out
    nothing. The difference of these two is the noise."""
    kinds = {"one of all groups": DEFAULT_GROUPS, "another of all groups": DEFAULT_GROUPS}
    kinds |= {f"without {left_out}": _without(left_out) for left_out in DEFAULT_GROUPS}
    kinds |= {f"with {more} too": (*DEFAULT_GROUPS, more) for more in GROUPS if more not in DEFAULT_GROUPS}
    interval = f"{GROUPS_INTERVAL_SECONDS * 1000:.0f}ms"
    with node(SMALL) as made, contextlib.ExitStack() as stack:
        enter = stack.enter_context
        ours = [enter(gpumap(made, interval, *_collecting(kept), sign=_ANY)) for kept in kinds.values()]
        time.sleep(WARM_UP_SECONDS)
        seen, lasted = cpu_over(ours, GROUPS_SECONDS)
        kilobytes = [len(one.page().encode()) // 1000 for one in ours]
    full = (seen[0] + seen[1]) / 2
    milliseconds = 1e3 * GROUPS_INTERVAL_SECONDS / lasted
    for name, used, size in zip(kinds, seen, kilobytes, strict=True):
        absolute = f"{used * milliseconds:.2f} : {full * milliseconds:.2f} ms, {size} : {kilobytes[0]} kB"
        yield Figure("G1", f"CPU of a cycle, {name} : all groups, {SMALL}", used / full, None, absolute)


def _without(group: str) -> tuple[str, ...]:
    return tuple(one for one in DEFAULT_GROUPS if one != group)


def _collecting(kept: Sequence[str]) -> list[str]:
    return [f"--collect={group}" for group in kept]
