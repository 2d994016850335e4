"""One judgement: at each moment of the demo the findings are the same on every surface, and unknown is unknown on each.

The moments are simulated: the demo's frames through the real sources, as fast as they go. Each is a node of its own,
whose page a real Prometheus scrapes and whose map an agent's clients read.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from gpumap.agent.exposition import Exposition
from gpumap.agent.published import published
from gpumap.lab.capture import replay
from gpumap.lab.capture.format import About, Capture
from gpumap.lab.demo import frames
from gpumap.lab.demo.scenario import default_scenario, load_scenario, parse_scenario
from gpumap.lab.demo.scenario_model import Scenario
from gpumap.model.findings import SUMS, judged_kinds
from gpumap.model.names import FINDINGS
from gpumap.model.node import encode
from gpumap.model.snapshot import Snapshot
from tests.command import run_command
from tests.pages import Page, serving_pages
from tests.prometheus import Prometheus, chart_job, each_second, eventually, prometheus
from tests.test_fleet import PAGE, named


class Run(NamedTuple):
    """An agent that starts at `first` seconds of a play and collects every five seconds. `looks`: when it is asked."""

    scenario: Scenario
    first: int
    looks: Mapping[str, int]


DEMO = default_scenario()
RESTART, OUTAGE = "{from: 3m, until: 3m10s}", "{from: 3m, until: 4m55s}"
NOBODYS = "  - {model: NVIDIA H100 80GB HBM3, memory: 81559MiB, resource: none} # of no plugin\n\nkubelet:"
RUNS = (
    Run(
        DEMO,
        0,
        {
            **{"agent-starts": 0, "pod-starts": 15, "pod-has-started": 60, "gpu-is-lost": 130, "gpu-needs-reset": 155},
            **{"kubelet-is-away": 180, "kubelet-lists-static-pods": 190, "kubelet-is-back": 240},
        },
    ),
    Run(DEMO, 200, {"agent-restarts": 205, "agent-has-watched": 330}),
    Run(parse_scenario(DEMO.text.replace("\nkubelet:", NOBODYS)), 200, {"gpu-is-left-out": 330}),
    Run(parse_scenario(DEMO.text.replace(RESTART, OUTAGE)), 0, {"kubelet-is-away-for-long": 280}),
    Run(parse_scenario(re.sub(r"  away:\n.*\n", "", DEMO.text)), 0, {"holders-idle": 330}),
    Run(load_scenario(Path("sharing")), 0, {"sharing-starts": 5, "sharing-unused": 130}),
    Run(load_scenario(Path("faults")), 0, {"faults-last": 605}),
)
MOMENTS = [name for run in RUNS for name in run.looks]
SHOWN = ("finding", "reason", "namespace", "pod", "container", "uuid", "since", "gpus", "memory_bytes")
"""What series have of a finding."""


@pytest.fixture(name="nodes", scope="module")
def make_nodes() -> dict[str, Snapshot]:
    """Each moment as a node of its own."""
    nodes: dict[str, Snapshot] = {}
    for run in RUNS:
        times = range(run.first, max(run.looks.values()) + 5, 5)
        played = tuple(frames.frame(run.scenario, time - 5, time) for time in times)
        found = asyncio.run(replay.snapshots(Capture(About(run.scenario.node), played)))
        nodes |= {name: named(found[times.index(time)], name) for name, time in run.looks.items()}
    return nodes


@pytest.fixture(name="agents", scope="module")
def run_agents(nodes: dict[str, Snapshot]) -> Iterator[str]:
    """What the nodes serve, below their names."""

    def answer(path: str) -> Page:
        _, name, *what = path.split("/")
        if what:
            return Page(encode(published(nodes[name], 5.0)), "application/json")
        return Page(Exposition(PAGE).render(nodes[name]))

    with serving_pages(answer) as address:
        yield f"http://{address}"


@pytest.fixture(name="server", scope="module")
def run_server(agents: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    config = each_second(chart_job({name: f"{agents}/{name}" for name in MOMENTS}))
    with prometheus(folder, config=config) as server:
        # An answer is of a whole second of the server's clock: what came within it is not seen yet.
        eventually(lambda: len(server.ask("gpumap_snapshot_timestamp_seconds offset 2s")) == len(MOMENTS))
        yield server


def printed(*words: str) -> Any:
    done = run_command(*words, "-o", "json")
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def rows(findings: Iterable[Mapping[str, Any]], *more: str) -> list[str]:
    """The findings as series have them, except those of GPUs."""
    shown = (*SHOWN, *more)
    return sorted(str([one[name] or None for name in shown]) for one in findings if one["finding"] != "fault")


def summed(server: Prometheus, node: str, name: str) -> float | None:
    """The sum as a board asks for it: 0 only if the node can judge all of its kinds."""
    there = f'node="{node}"'
    kinds = f'{there},finding=~"{"|".join(SUMS[name].kinds)}"'
    judged = kinds.replace("maybe_idle", "idle")
    missing = f'gpumap_finding_unjudged{{{judged},reason!="not_supported"}}'
    if "unused" in kinds or "over" in kinds:
        grants = f'gpumap_finding_judged{{{there},finding="over"}} == 0'
        missing += f' or gpumap_finding_judged{{{there},finding="idle"}} > 0 and on() {grants}'
    series = {"gpus": "gpumap_finding_gpus", "memory_bytes": "gpumap_finding_memory_bytes"}.get(SUMS[name].field)
    found = f"sum({series}{{{kinds}}})" if series else f"count(gpumap_finding_since_timestamp_seconds{{{kinds}}})"
    answer = server.ask(f"{found} > 0 or 0 * (count(gpumap_finding_judged{{{judged}}}) unless count({missing}))")
    return round(answer[0][1], 3) if answer else None


@pytest.mark.parametrize("moment", MOMENTS)
def test_findings_are_equal_everywhere(
    moment: str, nodes: dict[str, Snapshot], agents: str, server: Prometheus
) -> None:
    """Those of the map, of `waste` of the agent, of `waste` and `map` of the server, and PromQL over the series."""
    node = published(nodes[moment])
    own = msgspec.to_builtins(node)
    of_server = ("--prometheus", server.url, "--match", f'node="{moment}"')
    by_agent = printed("waste", "--url", f"{agents}/{moment}")
    by_server = printed("waste", *of_server)
    (mapped,) = printed("map", "--all", *of_server)["nodes"]
    assert {one["timestamp"] for one in (by_agent, *by_server["nodes"], mapped)} == {node.timestamp}
    assert rows(by_server["findings"]) == rows(by_agent["findings"]) == rows(own["findings"])
    assert rows(by_server["findings"], "device") == rows(by_agent["findings"], "device")
    assert rows(mapped["findings"]) == rows(own["findings"])
    without_faults = {name: value for name, value in own["finding_sums"].items() if name != "faults"}
    assert by_server["sums"] == by_agent["sums"] == without_faults
    assert {name: summed(server, moment, name) for name in SUMS if name != "faults"} == without_faults
    assert mapped["judged"] == own["judged"]
    unknown = {kind for one in by_server["unjudged_sentences"] for kind in one.partition(":")[0].split(", ")}
    assert {kind for kind in FINDINGS if kind in unknown} == {*FINDINGS[1:]} - judged_kinds(node)


def test_the_moments_show_what_they_are_for(nodes: dict[str, Snapshot]) -> None:
    """Otherwise equality would prove little: findings of every kind but stalled, and all unknown at some time."""
    judged = {name: judged_kinds(nodes[name].node) for name in MOMENTS}
    assert "idle" not in judged["agent-starts"]
    assert "unused" not in judged["agent-restarts"]
    assert "unused" in judged["agent-has-watched"]
    assert "squatter" not in judged["kubelet-is-away"]
    assert judged["kubelet-is-away-for-long"] <= {"fault", "unexplained"}
    assert judged["holders-idle"] >= {*FINDINGS} - {"stalled"}
    kinds = {one.finding for snapshot in nodes.values() for one in snapshot.node.findings or ()}
    assert kinds == {*FINDINGS} - {"stalled", "maybe_idle"}


def test_the_sums_of_a_cluster_are_those_of_its_nodes(server: Prometheus, nodes: dict[str, Snapshot]) -> None:
    found = printed("waste", "--prometheus", server.url)
    by_node = {row.pop("node"): row for row in found["by_node"]}
    for name, snapshot in nodes.items():
        own = published(snapshot).finding_sums
        assert by_node.get(name, own) == {key: own[key] for key in by_node.get(name, own)}
    for key in ("squatter_bytes", "leftover_bytes", "idle_holders", "unused_bytes"):
        values = [published(one).finding_sums[key] or 0 for one in nodes.values()]
        assert found["sums"][key] == sum(values)
        assert sum(row[key] or 0 for row in found["by_namespace"]) == sum(values)
