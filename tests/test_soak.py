"""The soak itself: its judges find what they are for, its plan depends on the seed only, and it ends well."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from gpumap.model.terms import ContainerName, PodUid
from tests import laws
from tests.demo_process import environment
from tests.exposed import Page
from tests.laws import Span, Window
from tests.soak import cost
from tests.soak.clock import now
from tests.soak.node import AGENTS, CARDS, GPUS, Grant, Pod, SoakNode, Truth
from tests.soak.plan import FAULTS, Plan
from tests.soak.watch import Usage
from tests.soak.window import make_window
from tests.tools import tool

MINUTES = 10.0
WHOLE, OTHER = GPUS[1], GPUS[2]
STEADY = AGENTS[0]


@pytest.fixture(name="node")
def make_node(directory: Path, library: Path) -> SoakNode:
    return SoakNode(directory, library, Random(1))


def truthful(window: Window) -> Page:
    """The page of a gpumap that knows everything."""
    page = Page("")
    for (family, labels), fact in laws.facts(window).items():
        page.samples[family][labels] = fact.value
    return page


def window_of(node: SoakNode, since: Truth, *, listed: Truth | None = None, has_list: bool = True) -> Window:
    """The window from a truth until now."""
    history = [*node.history]
    truths = history[history.index(since) :]
    lists = truths if listed is None else history[history.index(listed) :]
    return make_window(STEADY, Span(since.ended, now().wall), truths, lists, has_list=has_list)


def judged(page: Page, window: Window) -> str:
    return "\n".join([*laws.wrong(page, window), *laws.missing(page, window)])


HOLDER, SQUATTER = ContainerName("ml", "holder", "c0"), ContainerName("ml", "squatter", "c0")


def start_two_pods(node: SoakNode) -> None:
    """A holder of a whole GPU that runs, and a pod that uses it beside the kubelet."""
    grant = Grant(CARDS[1], WHOLE, (0,), 1)
    for name, grants in ((HOLDER, {"c0": grant}), (SQUATTER, {})):
        pod = Pod.granted(name.namespace, name.pod, PodUid(f"{name.pod}-uid"), {"c0": name.pod * 8}, grants)
        with node.change(pods={**node.truth.pods, pod.uid: pod}):
            pass
        node.start_process(pod, "c0", WHOLE)


def test_the_true_page_breaks_no_law(node: SoakNode) -> None:
    """It has what was granted and what is used, and a page without that breaks one."""
    start_two_pods(node)
    window = window_of(node, node.truth)
    page = truthful(window)
    assert judged(page, window) == ""
    used = {one.pod.name: one.memory_bytes for one in node.truth.processes.values() if one.pod}
    for name in (HOLDER, SQUATTER):
        assert page.value(laws.USED, **laws.labels_of(name, WHOLE)) == used[name.pod]
    assert page.value(laws.ALLOCATION, **laws.labels_of(HOLDER, WHOLE)) == 1
    assert page.value(laws.UNASSIGNED, **laws.labels_of(SQUATTER, WHOLE)) == 1
    assert laws.UNASSIGNED in judged(Page(""), window)


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
        node = SoakNode(folder, library, Random(seed))
        async with node.kubelet:
            await Plan(node, [], node.random, pace=0.0).play(len(FAULTS))
        return [(one.pods, one.processes, one.instances, one.faults, one.recovering) for one in node.history]

    first = await states(tmp_path / "a", 7)
    assert len(first) > 100
    assert first == await states(tmp_path / "b", 7)
    assert first != await states(tmp_path / "c", 8)


@pytest.mark.e2e
def test_ten_minutes_of_it() -> None:
    """gpumap breaks no law, and costs as much at the end, while everything around it breaks."""
    tool("promtool")
    command = (sys.executable, "-m", "tests.soak", "--minutes", str(MINUTES))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
