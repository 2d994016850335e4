"""The sums of a cluster, added up by a real Prometheus, are those of the maps of its nodes."""

from __future__ import annotations

import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpumap.agent.exposition import Exposition
from gpumap.agent.published import published
from tests import golden
from tests.command import run_command
from tests.pages import Page, serving_pages
from tests.prometheus import chart_job, eventually, prometheus
from tests.test_fleet import PAGE, named

SNAPSHOT = re.compile(r"^gpumap_snapshot_timestamp_seconds (\S+)$", re.MULTILINE)
TIME = re.compile(r"^(gpumap_\w*timestamp_seconds(?:{.*})?) (\S+)$", re.MULTILINE)
DOWN = "node gone: Prometheus cannot scrape its gpumap (up is 0)"
Document = dict[str, Any]


def collected_now(capture: Path) -> Callable[[], Page]:
    """The page of a node that has always collected just now; its devices are no other one's."""
    message = Exposition(PAGE).render(named(golden.snapshots(capture)[-1], capture.name)).decode()
    message = re.sub(r'uuid="((?:GPU|MIG)[^"]*)', rf'uuid="\1@{capture.name}', message)
    (collected,) = map(float, SNAPSHOT.findall(message))

    def page() -> Page:
        later = time.time() - collected
        return Page(TIME.sub(lambda match: f"{match[1]} {float(match[2]) + later}", message).encode())

    return page


@pytest.fixture(name="server", scope="module")
def run_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that scrapes all captures, and a node that does not answer."""
    pages = {f"/{capture.name}": collected_now(capture) for capture in golden.captures()}
    with serving_pages(lambda path: pages[path]()) as address:
        nodes = {path[1:]: f"http://{address}{path}" for path in pages} | {"gone": "http://127.0.0.1:9"}
        times = {"scrape_interval": "8s", "scrape_timeout": "8s"}
        config = {"global": times, "scrape_configs": [chart_job(nodes)]}
        with prometheus(tmp_path_factory.mktemp("prometheus"), config=config) as server:
            eventually(lambda: len(server.ask("gpumap_snapshot_timestamp_seconds offset 2s")) == len(pages))
            yield server.url


@pytest.fixture(name="nodes", scope="module")
def read_nodes() -> dict[str, Document]:
    """The maps of the captures' nodes."""
    return {
        capture.name: msgspec.to_builtins(published(golden.snapshots(capture)[-1])) for capture in golden.captures()
    }


def asked(*words: str) -> Document:
    done = run_command(*words, "-o", "json")
    assert done.returncode in (0, 1), done.stderr
    values: Document = json.loads(done.stdout)
    return values


def memory_of(device: Document) -> tuple[Any, ...]:
    """Which instance has the memory: compute instances share that of their GPU instance."""
    mig = device["mig"]
    return (device["gpu_uuid"], mig["gpu_instance_id"]) if mig else (device["uuid"],)


def sums_of_maps(nodes: dict[str, Document], by: str) -> dict[str, dict[str, float]]:
    """Add up what the maps of all nodes have."""
    sums: dict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, node in nodes.items():
        sharers = Counter(map(memory_of, node["devices"]))
        for device in node["devices"]:
            for row in device["containers"]:
                group = sums[name if by == "node" else row["namespace"]]
                grant, use = row["grant"] or {}, row["use"] or {}
                group["held_gpus"] += grant.get("gpus") or 0
                group["granted_bytes"] += (grant.get("memory_bytes") or 0) / sharers[memory_of(device)]
                group["used_bytes"] += use.get("memory_bytes") or 0
                group["sm_gpus"] += use.get("sm_ratio") or 0
        for finding in node["findings"]:
            if finding["finding"] == "idle":
                sums[name if by == "node" else finding["namespace"]]["idle_gpus"] += finding["gpus"] or 0
        if by == "node":
            leaves = [one for one in node["devices"] if one["gpu_uuid"] and not one["partitioned"]]
            sums[name]["gpus"] = len(node["gpus"])
            sums[name]["free_devices"] = sum(one["free_ratio"] or 0 for one in leaves)
    return {group: {key: value for key, value in values.items() if value} for group, values in sums.items()}


@pytest.mark.parametrize("by", ["namespace", "node"])
def test_sums_are_those_of_the_maps(server: str, nodes: dict[str, Document], by: str) -> None:
    """Of all captures. Memory of compute instances counts once."""
    answer = asked("map", "--by", by, "--prometheus", server)
    shown = {row.pop(by): {key: value for key, value in row.items() if value} for row in answer["rows"]}
    expected = sums_of_maps(nodes, by)
    differences = {
        group: (shown.get(group), expected.get(group))
        for group in {*shown, *expected}
        if (shown.get(group) or {}) != pytest.approx(expected.get(group) or {}, abs=6e-4)
    }
    assert differences == {}, differences
    assert answer["missing"] == [DOWN]
    held = sum(row.get("held_gpus", 0) for row in expected.values())
    assert answer["sums"]["held_gpus"] == pytest.approx(held, abs=0.1)


def lines_of(*words: str) -> list[str]:
    done = run_command(*words)
    assert (done.returncode, done.stderr) == (1, "")
    return done.stdout.splitlines()


def test_a_screen_and_not_every_node(server: str) -> None:
    """The 40 nodes with the most held GPUs, how many more there are, what is missing, and the sums of all."""
    lines = lines_of("map", "--prometheus", server)
    nodes = len(golden.captures())
    assert lines[0].split() == ["NODE", "GPUS", "HELD", "FREE", "IDLE", "GRANTED", "USED", "SM"]
    assert lines[41:43] == ["", f"{nodes - 40} more nodes: -o wide shows all."]
    assert DOWN in lines
    assert re.match(r"Sum: \d+ GPUS, \S+ HELD, ", lines[-1])
    held = [float(line.split()[2]) for line in lines[1:6]]
    assert held == sorted(held, reverse=True)
    wide = lines_of("map", "--prometheus", server, "-o", "wide")
    assert sum(line.split()[:1] in ([one.name] for one in golden.captures()) for line in wide) == nodes


def test_unknown_is_no_zero(server: str, nodes: dict[str, Document]) -> None:
    """A node with a driver or kubelet that does not answer, or without hostPID, has a dash."""
    rows = {row["node"]: row for row in asked("map", "--prometheus", server)["rows"]}
    assert rows["nvml-down"]["gpus"] is rows["nvml-down"]["used_bytes"] is None
    assert rows["no-pid-visibility"]["used_bytes"] is None
    without_idle = [name for name, row in rows.items() if row["idle_gpus"] == 0]
    assert without_idle
    for name in without_idle:
        assert nodes[name]["finding_sums"]["idle_gpus"] == 0


def test_findings_of_a_screen(server: str) -> None:
    lines = lines_of("waste", "--prometheus", server)
    values = asked("waste", "--prometheus", server)
    assert lines[0].split()[:2] == ["NODE", "FINDING"]
    assert lines[len(values["findings"]) + 1] == ""
    assert DOWN in lines
    assert any(re.search(r"idle, .*not known on \d+ of \d+ nodes: nvml down \(.*nvml-down", line) for line in lines)
    assert lines[-1].startswith("Sum of the findings: ")
    by_node = {row["node"]: row for row in values["by_node"]}
    assert by_node["nvml-down"]["idle_gpus"] is by_node["no-pid-visibility"]["squatter_bytes"] is None
    names = run_command("waste", "--prometheus", server, "-o", "name").stdout.splitlines()
    assert names
    assert all(line.startswith("-n ") and " pod/" in line for line in names)
