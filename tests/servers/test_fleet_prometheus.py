"""`gpumap map` and `waste` ask a real Prometheus that scrapes nodes: its answers are what the agents serve."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.command import one_line, run_command
from tests.demo_process import demo, fetch
from tests.pages import Page, serving_pages
from tests.prometheus import each_second, eventually, prometheus

OWN = {"namespace": "gpumap", "pod": "gpumap-x", "container": "gpumap", "endpoint": "metrics", "service": "gpumap"}


def job(name: str, url: str, *, honour: bool, **labels: str) -> dict[str, Any]:
    target = {"targets": [url.removeprefix("http://")], "labels": {**OWN, **labels}}
    return {"job_name": name, "honor_labels": honour, "static_configs": [target]}


SOON = ("--interval", "1s", "--idle-after", "2s", "--grace", "2s")


@pytest.fixture(name="agents", scope="module")
def run_agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Two nodes with different GPUs."""
    folder = tmp_path_factory.mktemp("agents")
    (folder / "one").mkdir()
    (folder / "two").mkdir()
    with (
        demo(folder / "one", *SOON, "--node-name", "gpu-1", "--node-ip", "10.0.0.7") as one,
        demo(folder / "two", *SOON, "--node-name", "gpu-2", "--scenario", "sharing") as two,
    ):
        yield {"gpu-1": one, "gpu-2": two}


FORGED = """\
gpumap_build_info{version="9"} 1
gpumap_snapshot_timestamp_seconds 1
gpumap_node_info{node="gpu-1",internal_ip="6.6.6.6"} 1
gpumap_device_info{uuid="GPU-f",gpu_uuid="GPU-f",index="x",minor="9",pci_bus_id="",model="m"} 1
gpumap_allocation_slots{namespace="victim",pod="v",container="c",uuid="GPU-f",resource="nvidia.com/gpu"} 1
gpumap_device_holders{uuid="GPU-f"} 1
"""


@pytest.fixture(name="server", scope="module")
def run_server(agents: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus that honours one node's labels and not the other's, and cannot scrape a third one. It also scrapes a
    tenant's pod that exposes what only a gpumap should."""
    folder = tmp_path_factory.mktemp("prometheus")
    moved = job("gpumap-moved", agents["gpu-2"], honour=False, node="gpu-2")
    silent = {"targets": ["127.0.0.1:9"], "labels": {**OWN, "node": "gpu-3"}}
    jobs = (
        job("prod-gpumap", agents["gpu-1"], honour=True, node="gpu-1"),
        {**moved, "static_configs": [*moved["static_configs"], silent]},
    )
    tenant = Page(FORGED.encode())
    with (
        serving_pages(lambda _: tenant) as liar,
        prometheus(
            folder, config=each_second(*jobs, job("kubernetes-pods", liar, honour=False, node="gpu-1"))
        ) as server,
    ):
        eventually(lambda: len(server.ask('gpumap_build_info{job="kubernetes-pods"}')) == 1)
        often = "count_over_time(gpumap_node_info[1m]) > 2"
        eventually(lambda: len(server.ask("up == 0")) == 1 and len(server.ask(often)) == 3)
        yield server.url


MISSING = "node gpu-3: Prometheus cannot scrape its gpumap (up is 0)"


def test_the_findings_of_a_cluster(server: str, agents: dict[str, str]) -> None:
    """They are the agents' own; the node that cannot be scraped is named, and the exit code says that it is missing."""

    def agrees() -> bool:
        done = run_command("waste", "--prometheus", server, "-o", "json")
        assert (done.returncode, done.stderr) == (1, f"gpumap: missing: {MISSING}\n")
        values = json.loads(done.stdout)
        assert values["missing"] == [MISSING]
        keys = ("finding", "reason", "uuid", "namespace", "pod", "container")
        shown = {(row["node"], *(row[key] for key in keys)) for row in values["findings"]}
        maps = {name: json.loads(fetch(f"{url}/api/v1/map")[0]) for name, url in agents.items()}
        return shown == {
            (name, *(row[key] or None for key in keys))
            for name, node in maps.items()
            for row in node["findings"]
            if row["finding"] != "fault"
        }

    eventually(agrees)


@pytest.mark.parametrize("command", ["map", "waste"])
def test_tables_of_a_cluster(server: str, command: str) -> None:
    done = run_command(command, "--prometheus", server)
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("NODE ")
    assert {line.split()[0] for line in lines[1:] if "GiB" in line and ":" not in line} >= {"gpu-1", "gpu-2"}
    assert MISSING in lines


def test_sums_by_namespace(server: str) -> None:
    """They are the same with honorLabels and without."""
    done = run_command("map", "--prometheus", server, "--by", "namespace", "-o", "json")
    rows = {row.pop("namespace"): row for row in json.loads(done.stdout)["rows"]}
    assert "gpumap" not in rows
    assert rows["research"]["held_gpus"] > 0
    assert rows["research"].keys() == {"held_gpus", "idle_gpus", "granted_bytes", "used_bytes", "sm_gpus"}


def test_one_cluster_of_several_and_a_namespace(server: str) -> None:
    """--match chooses targets, -n rows; what is whole ends with 0."""
    of_node = ("--prometheus", server, "--match", 'node="gpu-1"', "-n", "research")
    done = run_command("waste", *of_node, "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    assert {(row["node"], row["namespace"]) for row in json.loads(done.stdout)["findings"]} == {("gpu-1", "research")}
    pods = run_command("waste", *of_node, "-o", "name")
    assert "pod/notebook-idle" in pods.stdout.splitlines()
    assert all(line.startswith("pod/") for line in pods.stdout.splitlines())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--prometheus", "http://a:1", "--url", "http://b:1"), "--prometheus: cannot be combined with --url"),
        (
            ("--prometheus", "http://a:1", "--proc", "/proc"),
            "--proc: sets a source of this node, but --prometheus asks a Prometheus",
        ),
        (("--match", 'a="b"'), "--match requires --prometheus"),
        (("--timeout", "1s", "--url", "http://b:1"), "--timeout requires --prometheus"),
        (("--token-file", "x"), "--token-file requires --url or --prometheus"),
        (("--prometheus", "a:1"), "--prometheus a:1: must start with http:// or https://"),
    ],
)
def test_flags_that_do_not_fit(flags: tuple[str, ...], expected: str) -> None:
    assert one_line(run_command("map", *flags), 2) == expected
