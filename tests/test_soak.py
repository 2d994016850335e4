"""The soak itself: its judges find what they are for, its plan depends on the seed only, and it ends well."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.agent import Page
from tests.demo_process import environment
from tests.soak import cost, laws
from tests.soak.plan import FAULTS, Plan
from tests.soak.watch import Usage
from tests.soak.world import AGENTS, GPUS, Pod, Truth, World
from tests.tools import tool

MINUTES = 10.0
WHOLE, OTHER = GPUS[1], GPUS[2]
STEADY = AGENTS[0]

LEAK = """
import random, re, sys
from pathlib import Path
kept = []
for collection in range(6000):
    garbage = [bytes(random.randrange(4000)) for _ in range(100)]
    kept.append(random.randbytes(int(sys.argv[1])))
    if collection % 50 == 0:
        print(re.search(r"^Anonymous: +(\\d+)", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)[1])
"""
"""A process that works, and keeps so many bytes of each collection."""


@pytest.fixture(name="world")
def make_world(directory: Path, library: Path) -> World:
    return World(directory, library, Random(1))


def truthful(truth: Truth) -> Page:
    """The page of a gpumap that knows everything."""
    page = Page("")
    for (name, labels), fact in laws.facts(truth).items():
        page.samples.setdefault(name, {})[labels] = fact.value
    for leaf in truth.leaves:
        own = page.by(laws.BY_OWNER, "owner", uuid=leaf)
        name, labels = laws.key(laws.BY_OWNER, uuid=leaf, owner="unaccounted")
        page.samples[name][labels] = truth.used_bytes(leaf) - sum(own.values())
    return page


def judged(page: Page, truths: list[Truth]) -> str:
    window = laws.Window(STEADY, truths, truths, truths)
    return "\n".join([*laws.wrong(page, window), *laws.missing(page, STEADY, truths)])


def set_value(name: str, value: float | None, **labels: str) -> Callable[[Page], None]:
    """A lie: another value of a sample, or a sample that is not on the page."""

    def lie(page: Page) -> None:
        one = laws.key(name, **labels)[1]
        page.samples.setdefault(name, {}).pop(one, None)
        if value is not None:
            page.samples[name][one] = value

    return lie


HOLDER = {"namespace": "ml", "pod": "holder", "container": "c0"}
SQUATTER = {"namespace": "ml", "pod": "squatter", "container": "c0"}
LIES: dict[str, tuple[Callable[[Page], None], str]] = {
    "memory that no owner has": (set_value(laws.BY_OWNER, 7, uuid=WHOLE, owner="host"), "L1"),
    "another's memory": (set_value(laws.USED, 1 << 40, **HOLDER, uuid=WHOLE), "L4"),
    "idle while it runs": (set_value(laws.USED, 0, **HOLDER, uuid=WHOLE), "L10"),
    "an honest container accused": (set_value(laws.UNASSIGNED, 1, **HOLDER, uuid=WHOLE), "L10"),
    "a squatter that is not accused": (set_value(laws.UNASSIGNED, None, **SQUATTER, uuid=WHOLE), "is absent"),
    "a device that it does not hold": (set_value(laws.ALLOCATION, 1, **HOLDER, uuid=OTHER), "L6"),
    "a holder that is missing": (set_value(laws.ALLOCATION, None, **HOLDER, uuid=WHOLE), "is absent"),
    "a pod that never was": (set_value(laws.USED, 5, namespace="ml", pod="x", container="c0", uuid=WHOLE), "L6"),
    "an old value": (set_value(laws.DEVICE_USED, 5, uuid=OTHER), "L6"),
    "a GPU that is missing": (set_value(laws.UP, None, gpu_uuid=OTHER), "is absent"),
    "a GPU that is assigned twice": (
        set_value("gpumap_container_allocated_gpus", 1.5, **HOLDER, uuid=WHOLE),
        "L9",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_on_the_page_is_found(world: World, lie: str) -> None:
    """The true page breaks no law; each lie breaks the law that forbids it."""
    pods = _two_pods(world)
    truth = world.truth
    page = truthful(truth)
    assert judged(page, [truth]) == ""
    tell, law = LIES[lie]
    tell(page)
    assert law in judged(page, [truth])
    assert pods[0].grants["c0"].leaf == WHOLE


def _two_pods(world: World) -> tuple[Pod, Pod]:
    """A holder of a whole GPU that runs, and a pod that uses it beside the kubelet."""
    while True:
        holder = world.start_pod(idle=True)
        grant = holder.grants.get("c0")
        if grant is not None and grant.leaf == WHOLE and len(holder.containers) == 1:
            break
        world.stop_pod(holder)
    world.stop_pod(holder)
    holder = replace(holder, namespace="ml", name="holder")
    squatter = replace(holder, uid=world.start_pod(idle=True).uid, name="squatter", grants={})
    with world.change(pods={pod.uid: pod for pod in (holder, squatter)}):
        pass
    world.start_process(holder, "c0")
    world.start_process(squatter, "c0", WHOLE)
    return holder, squatter


def test_while_a_truth_changes_both_are_right(world: World) -> None:
    """A page made while a process ends may have its memory or not; nothing may be missing that was there all the
    time. A value that was never true is wrong all the same."""
    _two_pods(world)
    before = world.truth
    world.end_process(max(before.processes))
    after = world.truth
    both = world.during((before.ended + after.began) / 2, after.ended)
    assert both == [before, after]
    for truth in both:
        assert judged(truthful(truth), both) == ""
    assert "L6" in judged(truthful(before), [after])
    assert "is absent" in judged(Page(""), both)


def test_an_allocation_ends_with_its_list(world: World) -> None:
    """It may be on the page while the List before the fault is young, and not longer (L6)."""
    _two_pods(world)
    listed = world.truth
    with world.breaks(AGENTS, ("kubelet", "no kubelet")):
        pass
    page = Page("")
    name, labels = laws.key(laws.ALLOCATION, **HOLDER, uuid=WHOLE)
    page.samples[name] = {labels: 1.0}
    now = [world.truth]
    assert "younger" not in "\n".join(laws.wrong(page, laws.Window(STEADY, now, now, [listed, *now])))
    assert "younger" in "\n".join(laws.wrong(page, laws.Window(STEADY, now, now, now)))


def test_a_pod_of_an_old_list_is_not_accused(world: World) -> None:
    """After a fault of the kubelet, a deleted pod may keep its allocation, but an accusation needs a List of now."""
    _, squatter = _two_pods(world)
    listed = world.truth
    with world.change(pods={uid: pod for uid, pod in listed.pods.items() if uid != squatter.uid}):
        pass
    page = Page("")
    name, labels = laws.key(laws.UNASSIGNED, **SQUATTER, uuid=WHOLE)
    page.samples[name] = {labels: 1.0}
    now = [world.truth]
    assert "not guilty" in "\n".join(laws.wrong(page, laws.Window(STEADY, now, [listed, *now], now)))


def test_a_fault_excuses_its_own_part_only(world: World) -> None:
    """While a GPU is lost, its values may not be on the page, and those of the others must be (L7)."""
    _two_pods(world)
    with world.breaks(AGENTS, (WHOLE, f"lost {WHOLE}")):
        pass
    truth = world.truth
    page = truthful(truth)
    assert "is lost" in judged(page, [truth])
    for name, rows in page.samples.items():
        if name not in (laws.ALLOCATION, "gpumap_allocation_slots"):
            page.samples[name] = {labels: value for labels, value in rows.items() if WHOLE not in dict(labels).values()}
    assert judged(page, [truth]) == ""
    del page.samples[laws.DEVICE_USED][laws.key("", uuid=OTHER)[1]]
    assert f'{laws.DEVICE_USED}{{uuid="{OTHER}"}} is absent' in judged(page, [truth])


@pytest.mark.parametrize(("leaked_bytes", "found"), [(0, False), (1024, True)])
def test_a_leak_of_a_kibibyte_is_found(leaked_bytes: int, found: bool) -> None:
    """It is found in a real process, however fast that is, and nothing is found in one that leaks nothing."""
    command = (sys.executable, "-c", LEAK, str(leaked_bytes))
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    usage = [
        Usage(
            300.0 * number, 50.0 * number, {"service": int(kib)}, {"service": 9}, {"service": 3}, 1, 0, {"service": 1}
        )
        for number, kib in enumerate(done.stdout.split())
    ]
    assert bool(list(cost.growth(usage))) is found


@pytest.mark.parametrize(("leaked_kib", "found"), [(0, False), (1, True)])
def test_a_step_of_memory_is_no_leak(leaked_kib: int, found: bool) -> None:
    """Memory that is flat, but for two steps of 2 MiB and noise, leaks nothing; with a leak it is found."""
    steps = [46_000 + 2_000 * (number > 60) + 2_000 * (number > 90) + 150 * (number % 3) for number in range(120)]
    samples = [(50.0 * number, kib + 50.0 * number * leaked_kib) for number, kib in enumerate(steps)]
    assert (cost.slope(samples) > cost.LEAK_KIB) is found


@pytest.mark.parametrize("descriptors", [True, False])
def test_a_descriptor_and_a_thread_too_many_are_found(descriptors: bool) -> None:
    """Those that come and go are no leak; one that stays for ever is."""

    def usage(leaked: int) -> list[Usage]:
        counts = [{"service": 9 + number % 3 + leaked * (number > 70)} for number in range(100)]
        same, base = {"service": 9}, Usage(0.0, 0.0, {}, {}, {}, 1, 0, {"service": 1})
        pairs = [(one, same) if descriptors else (same, one) for one in counts]
        return [
            replace(base, at=300.0 * number, descriptors=opened, threads=running)
            for number, (opened, running) in enumerate(pairs)
        ]

    assert not list(cost.growth(usage(0)))
    assert list(cost.growth(usage(1)))


async def test_a_seed_has_one_plan(tmp_path: Path, library: Path) -> None:
    """The same seed makes the same node in the same states; another one makes others."""

    async def states(folder: Path, seed: int) -> list[object]:
        world = World(folder, library, Random(seed))
        async with world.kubelet:
            await Plan(world, [], world.random, pace=0.0).play(len(FAULTS))
        return [(one.pods, one.processes, one.instances, one.faults, one.recovering) for one in world.history]

    first = await states(tmp_path / "a", 7)
    assert len(first) > 100
    assert first == await states(tmp_path / "b", 7)
    assert first != await states(tmp_path / "c", 8)


@pytest.mark.e2e
def test_ten_minutes_of_it() -> None:
    """gpumap breaks no law, and costs no more at the end, while everything around it breaks."""
    tool("promtool")
    command = (sys.executable, "-m", "tests.soak", "--minutes", str(MINUTES))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
