"""gpumap on a live node: its image in its chart's pod, beside pods that come, share, crash and go. No page is false."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cluster import agents, layout
from tests.cluster.agents import AGENTS
from tests.cluster.cases import COMING_AND_GOING, DISTURBANCES, LONG_QUIET_SECONDS, QUIET_SECONDS, Case, still_right
from tests.cluster.delays import measure
from tests.cluster.gpu_node import GpuNode, values
from tests.cluster.judge import Verdict
from tests.cluster.node import LiveNode
from tests.cluster.report import Report

pytestmark = pytest.mark.cluster

AT_ONCE = 8
"""Cases side by side. The node has GPUs for all of them."""


@pytest.fixture(name="run", scope="module")
def run_everything(
    live_node: LiveNode, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[GpuNode, Report]]:
    """All cases, and what was recorded of them. The node is as the last case left it."""
    archive = agents.image(tmp_path_factory)
    report = Report()
    with GpuNode(live_node, archive) as live:
        begun = time.monotonic()

        def run(case: Case) -> None:
            case_begun = time.monotonic()
            try:
                case.run(live)
                report.seconds[case.name] = time.monotonic() - case_begun
            except Exception:
                report.failures[case.name] = traceback.format_exc()

        report.proves = {case.name: case.proves for case in (*COMING_AND_GOING, *DISTURBANCES)}
        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(run, COMING_AND_GOING))
        report.delays = dict(measure(live))
        time.sleep(LONG_QUIET_SECONDS)
        for case in DISTURBANCES:
            run(case)
            time.sleep(QUIET_SECONDS)
        time.sleep(LONG_QUIET_SECONDS - QUIET_SECONDS)
        report.recorded_seconds = time.monotonic() - begun
        report.verdicts = live.judge()
        request.config.get_terminal_writer().write(report.text())
        yield live, report


@pytest.mark.parametrize("name", [case.name for case in (*COMING_AND_GOING, *DISTURBANCES)])
def test_the_page_shows_each_case(run: tuple[GpuNode, Report], name: str) -> None:
    _, report = run
    assert report.failures.get(name) is None, report.failures[name]


@pytest.mark.parametrize("name", [agent.name for agent in AGENTS])
def test_no_page_was_false(run: tuple[GpuNode, Report], name: str) -> None:
    """No page and no map had a false number, owner, row or zero at any moment, and none was incomplete for long."""
    verdict = verdict_of(run[1], name)
    assert not verdict.found, str(verdict)
    assert verdict.pages > 10
    assert verdict.maps > 10
    assert verdict.complete > 10


def verdict_of(report: Report, name: str) -> Verdict:
    return next(verdict for verdict in report.verdicts if verdict.name == name)


def test_the_truth_is_the_runtimes(run: tuple[GpuNode, Report]) -> None:
    """The variables of the processes agree with what containerd lists: pod, container and PID."""
    live, _ = run
    with live.watch.lock:
        living = [one for one in live.watch.truth.processes if one.ended.start > time.time()]
    known = {(one.pid, *(one.name or ())) for one in living}
    listed = [one for one in live.node.containers() if one.namespace == "ml" and not one.is_sandbox]
    assert listed
    assert {(one.pid, one.namespace, one.pod, one.name) for one in listed} <= known
    uids = {pod.uid for pod in live.watch.truth.pods.values()}
    assert {one.pod_uid for one in listed if "-" in one.pod_uid} <= uids


RESTRICTIONS = (
    "Uid:\t0\t0\t0\t0",
    "CapEff:\t0000000000000000",
    "CapBnd:\t0000000000000000",
    "NoNewPrivs:\t1",
    "Seccomp:\t2",
)


def test_gpumap_runs_with_the_charts_restrictions(run: tuple[GpuNode, Report]) -> None:
    """No capability, seccomp, no new privileges, and a root that cannot be written."""
    live, _ = run
    for agent in AGENTS:
        pid = live.watch.agent(agent.name)
        status = live.node.run("cat", f"/proc/{pid}/status")
        for line in RESTRICTIONS:
            assert line in status, f"{agent.name}: {status}"
        mounts = [line.split() for line in live.node.run("cat", f"/proc/{pid}/mounts").splitlines()]
        assert [words[3].split(",")[0] for words in mounts if words[1] == "/"] == ["ro"]


LESS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "no-host-pid": (
        "no process, and so no use of any container",
        lambda text: (
            not values(text, "gpumap_container_gpu_memory_used_bytes")
            and not values(text, "gpumap_device_processes", owner="assigned")
            and bool(values(text, "gpumap_allocation_info"))
        ),
    ),
    "no-checkpoint": (
        "the cards of gpushare are unknown, all other devices are known",
        lambda text: (
            bool(values(text, "gpumap_unmatched_slots", resource=layout.GPUSHARE))
            and not any(values(text, "gpumap_allocation_info", uuid=uuid) for uuid, _ in layout.GPUSHARE_GPUS.values())
            and bool(values(text, "gpumap_allocation_info", uuid=layout.SHARED_GPU))
        ),
    ),
    "no-pod-logs": (
        "pods without the names of their containers",
        lambda text: (
            bool(values(text, "gpumap_container_gpu_memory_used_bytes", container=""))
            and bool(values(text, "gpumap_allocation_info", container="main"))
        ),
    ),
}


@pytest.mark.parametrize("name", LESS)
def test_less_privileges_are_less_knowledge(run: tuple[GpuNode, Report], name: str) -> None:
    """A gpumap that may see less shows less. That it is never wrong is judged as for the others."""
    live, _ = run
    still_right(live)
    what, holds = LESS[name]
    live.until(name, holds, what)
