"""P6, P9, P12, G1: CPU time of collections, all processes of a contestant together; contestants run side by side."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench import usage
from bench.contestants import Contestant, gpumap, has_nvitop, nvitop, scrape
from bench.figures import Figure, mean, microseconds, missing, noise, percentile
from bench.load import Target
from bench.node import LARGE, MIG, SMALL, BenchNode, Shape, node
from bench.usage import MIB
from gpumap.agent.flags import DEFAULT_GROUPS, FLAGS
from gpumap.agent.metrics import GROUPS

WARM_UP_SECONDS = 3.0
P6_LIMITS = {SMALL: 0.12, LARGE: 0.05}
P6_INTERVALS = {SMALL: 0.5, LARGE: 1.0}
P9_LIMITS = {1: 0.12, 15: 0.30}
JOBS_INTERVAL_SECONDS, JOBS_SECONDS = 5, 120.0
JOBS_LIMIT = 3.9
"""A collection each 0.75 s in half of the time is 3.83."""


@dataclass(frozen=True)
class Spent:
    """What a contestant used in a window: CPU seconds of its first process and of the others, and for what."""

    first: float
    others: float
    collections: float
    calls: int
    seconds: float

    @property
    def cpu(self) -> float:
        return self.first + self.others

    @property
    def of_one(self) -> float:
        """CPU seconds of a collection, by those that were made: a busy contestant makes fewer than it should."""
        return self.cpu / self.collections

    @property
    def of_core(self) -> float:
        return self.cpu / self.seconds


def spent_over(contestants: Sequence[Contestant], seconds: float, scrape_seconds: float = 0.0) -> list[Spent]:
    """What each used over a window. With `scrape_seconds` each is scraped so often."""
    before, started = [_totals(one) for one in contestants], time.monotonic()
    while (rest := started + seconds - time.monotonic()) > 0:
        time.sleep(min(rest, scrape_seconds or rest))
        for one in contestants if scrape_seconds else ():
            one.page()
    after, lasted = [_totals(one) for one in contestants], time.monotonic() - started
    differences = [
        [late - early for late, early in zip(*pair, strict=True)] for pair in zip(after, before, strict=True)
    ]
    return [Spent(first, rest, made, int(calls), lasted) for first, rest, made, calls in differences]


def _totals(one: Contestant) -> tuple[float, float, float, float]:
    first, *rest = one.pids
    return usage.cpu_seconds([first]), usage.cpu_seconds(rest), one.collections(), float(one.calls.total())


def cycle(_: frozenset[str]) -> Iterator[Figure]:
    """P6."""
    for shape, limit in P6_LIMITS.items():
        what, interval = f"CPU of a collection : nvitop-exporter, {shape}", P6_INTERVALS[shape]
        if not has_nvitop():
            yield missing("P6", what, limit)
            continue
        with node(shape) as made, contextlib.ExitStack() as stack:
            copies = [stack.enter_context(gpumap(made, f"{interval * 1000:.0f}ms")) for _ in range(2)]
            other = stack.enter_context(nvitop(made, interval))
            time.sleep(WARM_UP_SECONDS)
            *ours, theirs = spent_over((*copies, other), 20.0)
        each = [one.of_one for one in ours]
        service = mean([one.first / one.collections for one in ours]) * 1e3
        worker = mean([one.others / one.collections for one in ours]) * 1e3
        absolute = f"{service:.2f} + {worker:.2f} : {theirs.of_one * 1e3:.1f} ms (service + worker), at {interval:g} s"
        if not made.real_processes:
            absolute += "; processes are files here, which nvitop does not read"
        yield Figure("P6", what, mean(each) / theirs.of_one, limit, absolute, noise=noise(each))
        yield _calls(shape, ours, theirs)


def _calls(shape: Shape, ours: Sequence[Spent], theirs: Spent) -> Figure:
    each = [one.calls / one.collections / shape.gpus for one in (*ours, theirs)]
    absolute = f"{each[0]:.1f} : {each[2]:.1f} a collection; by default {each[0] * 60 / DEFAULT_SECONDS:.0f} a minute"
    return Figure("P6", f"driver calls of a GPU : nvitop-exporter, {shape}", each[0] / each[2], None, absolute)


DEFAULT_SECONDS = float(next(flag.default for flag in FLAGS if flag.name == "--interval").removesuffix("s"))


def steady(_: frozenset[str]) -> Iterator[Figure]:
    """P9."""
    yield from _against_nvitop()
    yield _with_jobs()


def _against_nvitop() -> Iterator[Figure]:
    """All at once, in one window."""
    if not has_nvitop():
        yield from (missing("P9", _steady_name(interval), limit) for interval, limit in P9_LIMITS.items())
        return
    with node(SMALL) as made, contextlib.ExitStack() as stack:
        enter = stack.enter_context
        three = [(*(enter(gpumap(made, f"{s}s")) for _ in range(2)), enter(nvitop(made, float(s)))) for s in P9_LIMITS]
        time.sleep(WARM_UP_SECONDS)
        spent = spent_over([one for each in three for one in each], 75.0)  # whole intervals of both
    for number, (interval, limit) in enumerate(P9_LIMITS.items()):
        *ours, theirs = (one.of_core for one in spent[3 * number : 3 * number + 3])
        absolute = f"{mean(ours):.3%} : {theirs:.3%} of a core"
        yield Figure("P9", _steady_name(interval), mean(ours) / theirs, limit, absolute, noise=noise(ours))


def _steady_name(interval: int) -> str:
    return f"steady CPU at {interval} s : nvitop-exporter, {SMALL}"


def _with_jobs() -> Figure:
    """Short jobs let gpumap collect faster, for at most half of the time."""
    with node(SMALL) as quiet, node(SMALL) as busy, contextlib.ExitStack() as stack:
        ours = [stack.enter_context(gpumap(made, f"{JOBS_INTERVAL_SECONDS}s")) for made in (quiet, quiet, busy, busy)]
        time.sleep(WARM_UP_SECONDS)
        stack.enter_context(_jobs(busy))
        spent = spent_over(ours, JOBS_SECONDS)
    rates = [each.collections for each in spent]
    without, with_jobs = (mean([each.of_core for each in pair]) for pair in (spent[:2], spent[2:]))
    what = f"collections with a job of 1 s each 20 s : without, {SMALL}, at {JOBS_INTERVAL_SECONDS} s"
    absolute = f"{mean(rates[2:]):.0f} : {mean(rates[:2]):.0f} in {JOBS_SECONDS:.0f} s, {with_jobs:.3%} : {without:.3%}"
    return Figure(
        "P9",
        what,
        mean(rates[2:]) / mean(rates[:2]),
        JOBS_LIMIT,
        f"{absolute} of a core",
        noise=noise([each.of_core for each in spent[2:]]),
    )


@contextlib.contextmanager
def _jobs(made: BenchNode) -> Iterator[None]:
    """Let a job of a second run each 20 s meanwhile, at all moments of an interval."""
    is_over, started = threading.Event(), time.monotonic()

    def run() -> None:
        for number in itertools.count():
            start = started + number * 20.0 + number * 3.1 % JOBS_INTERVAL_SECONDS
            if is_over.wait(max(start - time.monotonic(), 0.0)):
                return
            made.run_job(1.0)

    thread = threading.Thread(target=run, name="jobs")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


GROWN: dict[str, tuple[Shape, Shape, float, tuple[str, ...]]] = {
    "twice the processes": (SMALL, SMALL._replace(processes_per_gpu=2 * SMALL.processes_per_gpu), 2, ()),
    "twice the pods": (SMALL, SMALL._replace(pods_per_gpu=2 * SMALL.pods_per_gpu, other_pods=32), 2, ()),
    "four times the replicas": (SMALL, SMALL._replace(slots_per_gpu=16), 4, ()),
    "twice the GPUs": (SMALL, SMALL._replace(gpus=2 * SMALL.gpus, other_pods=32), 2, ()),
    "twice the MIG GPUs": (MIG._replace(gpus=8, other_pods=8), MIG, 2, ()),
    "all pods of 250": (MIG, MIG._replace(other_pods=138), 250 / 128, ()),
    "twice the MIG GPUs, each dialect": (MIG._replace(gpus=8, other_pods=8), MIG, 2, ("--dialect", "all")),
}
"""Once, more, how much more work that is, and with which flags."""
P12_INTERVAL_SECONDS = 1.0


def growth(_: frozenset[str]) -> Iterator[Figure]:
    """P12: CPU of a collection and a page, and memory, of more of one kind against once. Two copies of once."""
    for name, (once, more, factor, flags) in GROWN.items():
        with contextlib.ExitStack() as stack:
            ours = []
            for shape in (once, once, more):
                made = stack.enter_context(node(shape, plain=True))
                ours.append(stack.enter_context(gpumap(made, f"{P12_INTERVAL_SECONDS:g}s", *flags)))
            time.sleep(WARM_UP_SECONDS)
            *copies, grown = (one.of_one for one in spent_over(ours, P12_SECONDS, P12_INTERVAL_SECONDS))
            sizes = [usage.memory_bytes(one.pids) / MIB for one in ours]
            series = [one.page().count("\n") for one in ours]
        absolute = (
            f"{grown * 1e3:.1f} : {mean(copies) * 1e3:.1f} ms, {sizes[2]:.1f} : {mean(sizes[:2]):.1f} MiB, "
            f"{series[2]} : {series[0]} lines"
        )
        what = f"CPU of a collection and page, {name} : once, {once}"
        yield Figure("P12", what, grown / mean(copies), 1.1 * factor, absolute, noise=noise(copies))
    yield _scrapes_meanwhile()


P12_SECONDS = 12.0


def _scrapes_meanwhile() -> Figure:
    """The largest node, scraped all the time while it collects twice a second, against when it does not."""
    shape = MIG._replace(other_pods=138)
    with node(shape, plain=True) as made, contextlib.ExitStack() as stack:
        copies = [stack.enter_context(gpumap(made, "500ms")) for _ in range(2)]
        idle = stack.enter_context(gpumap(made, "1m"))
        targets = [Target(one.port, requests=100) for one in (*copies, idle)]
        *busy, quiet = (percentile(each, 99) for each in scrape(*targets, rounds=2, pace_seconds=0.05))
    what = f"scrape p99 while it collects twice a second : once a minute, {shape} MIG, 250 pods"
    absolute = f"{microseconds(mean(busy))} : {microseconds(quiet)}"
    return Figure("P12", what, mean(busy) / quiet, None, absolute, noise=noise(busy))


GROUPS_INTERVAL_SECONDS = 0.5
GROUPS_SECONDS = 40.0
_ANY = 'gpumap_source_up{source="nvml"} 1'
"""A line of a page with any groups."""


def groups(_: frozenset[str]) -> Iterator[Figure]:
    """G1: the saving of a left-out group of families, in one window, against the mean of two that leave out nothing."""
    kinds = {"one of all groups": DEFAULT_GROUPS, "another of all groups": DEFAULT_GROUPS}
    kinds |= {f"without {left_out}": _without(left_out) for left_out in DEFAULT_GROUPS}
    kinds |= {f"with {more} too": (*DEFAULT_GROUPS, more) for more in GROUPS if more not in DEFAULT_GROUPS}
    interval = f"{GROUPS_INTERVAL_SECONDS * 1000:.0f}ms"
    with node(SMALL) as made, contextlib.ExitStack() as stack:
        enter = stack.enter_context
        ours = [enter(gpumap(made, interval, *_collecting(kept), sign=_ANY)) for kept in kinds.values()]
        time.sleep(WARM_UP_SECONDS)
        seen = [one.of_one for one in spent_over(ours, GROUPS_SECONDS)]
        kilobytes = [len(one.page().encode()) // 1000 for one in ours]
    full = mean(seen[:2])
    for name, used, size in zip(kinds, seen, kilobytes, strict=True):
        absolute = f"{used * 1e3:.2f} : {full * 1e3:.2f} ms, {size} : {kilobytes[0]} kB"
        what = f"CPU of a collection, {name} : all groups, {SMALL}"
        yield Figure("G1", what, used / full, None, absolute, noise=noise(seen[:2]))


def _without(group: str) -> tuple[str, ...]:
    return tuple(one for one in DEFAULT_GROUPS if one != group)


def _collecting(kept: Sequence[str]) -> list[str]:
    return [f"--collect={group}" for group in kept]
