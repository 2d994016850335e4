"""docs/how-to/scrape.md: each configuration is Prometheus's, and does what is said of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from boards.queries import RECORDS
from tests.dashboards.promql_names import selectors
from tests.demo_process import fetch
from tests.deploy import chart
from tests.docs import sized
from tests.fences import read_blocks
from tests.pages import Page, serving_pages
from tests.prometheus import Prometheus, each_second, eventually, prometheus, settled
from tests.promtool import accepted

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "how-to" / "scrape.md"
RULES = ROOT / "rules"
Kept = tuple[set[str], set[str], int, int]
"""All names, those kept; the number of all series, and of those kept."""


def fences(word: str) -> list[str]:
    """The YAML blocks that have this one word."""
    return [block.body for block in read_blocks(DOCS.read_text(), "yaml") if block.words == {word}]


def read(word: str, part: str = "") -> Any:
    (found,) = (text for text in fences(word) if part in text)
    return yaml.safe_load(found)


@pytest.mark.parametrize("word", ["config", "federation"])
def test_promtool_accepts_the_configurations(tmp_path: Path, word: str) -> None:
    (tmp_path / "fleet.yaml").symlink_to(RULES / "fleet.yaml")
    (tmp_path / "gpumap.json").write_text("[]")
    assert fences(word)
    for number, text in enumerate(fences(word)):
        # Debian's Prometheus is built without Kubernetes' discovery.
        text = text.replace("kubernetes_sd_configs:\n      - role: pod", "file_sd_configs: [{files: [gpumap.json]}]")
        (file := tmp_path / f"{number}.yml").write_text(text)
        assert accepted("check", "config", file).stderr == ""


def test_each_block_is_of_a_kind_that_is_tested() -> None:
    kinds = {word for block in read_blocks(DOCS.read_text(), "yaml") for word in block.words or {""}}
    assert kinds == {"config", "federation", "keep"}


def discovered(address: str, node: str, **changed: str) -> dict[str, object]:
    """A target as Kubernetes' discovery reports a pod's port."""
    labels = {
        "__meta_kubernetes_namespace": "gpumap",
        "__meta_kubernetes_pod_name": f"gpumap-{node}",
        "__meta_kubernetes_pod_node_name": node,
        "__meta_kubernetes_pod_phase": "Running",
        "__meta_kubernetes_pod_container_name": "gpumap",
        "__meta_kubernetes_pod_container_port_name": "metrics",
        "__meta_kubernetes_pod_label_app_kubernetes_io_name": "gpumap",
    }
    told = {f"__meta_kubernetes_pod_{name}": value for name, value in changed.items()}
    return {"targets": [address], "labels": labels | told}


def labels_of_targets(server: Prometheus) -> list[Mapping[str, str]]:
    found = server.api("targets", state="active")["activeTargets"]
    return sorted((target["labels"] for target in found), key=lambda labels: sorted(labels.items()))


def test_the_discovered_pods_are_relabelled_as_the_charts_monitors_do(tmp_path: Path) -> None:
    """The kubernetes_sd_configs' relabelings keep only gpumap's running pods, and leave job, node and instance."""
    (job,) = read("config", "kubernetes_sd_configs")["scrape_configs"]
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    with serving_pages(lambda _: Page(b"gpumap_build_info 1\n")) as address:
        job["static_configs"] = [
            discovered(address, "gpu-1"),
            discovered(address, "gpu-2"),
            discovered(address, "gpu-3", phase="Succeeded"),
            discovered(address, "gpu-4", label_app_kubernetes_io_name="other"),
            discovered(address, "gpu-5", container_port_name="debug"),
        ]
        with prometheus(tmp_path, config=each_second(job)) as server:
            expected = [{"instance": node, "job": "gpumap", "node": node} for node in ("gpu-1", "gpu-2")]
            assert settled(lambda: labels_of_targets(server), expected) == expected
            eventually(lambda: len(server.ask("gpumap_build_info")) == len(expected))
            assert [labels for labels, _ in server.ask("gpumap_build_info")] == [
                {"__name__": "gpumap_build_info", **labels} for labels in expected
            ]


def test_the_pods_that_are_looked_for_are_the_charts() -> None:
    """The label and the port by which pods are kept are those of the chart's DaemonSet."""
    manifests = chart.render()
    labels = manifests["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    (port,) = chart.container_of(manifests)["ports"]
    (job,) = read("config", "kubernetes_sd_configs")["scrape_configs"]
    assert job["relabel_configs"][0]["regex"] == f"{labels['app.kubernetes.io/name']};{port['name']}"


@pytest.fixture(name="kept", scope="module")
def run_kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Kept]]:
    """Names and number of series of each node's page, whole and relabelled, as a Prometheus has them."""
    folder = tmp_path_factory.mktemp("kept")
    pages = {}
    for node in sized.NODES:
        (home := folder / node).mkdir()
        with sized.playing(home, node) as url:
            pages[f"/{node}"] = Page(fetch(f"{url}/metrics")[0].encode())
    rules = read("keep")["metric_relabel_configs"]
    with serving_pages(pages.__getitem__) as address:
        jobs = [
            {
                "job_name": f"{name}-{node}",
                "metrics_path": f"/{node}",
                "honor_labels": True,
                "static_configs": [{"targets": [address]}],
                "metric_relabel_configs": chosen,
            }
            for name, chosen in (("all", []), ("kept", rules))
            for node in sized.NODES
        ]
        with prometheus(folder, config=each_second(*jobs)) as server:
            eventually(lambda: len(server.ask("scrape_samples_scraped > 0")) == len(jobs))

            def names(job: str) -> set[str]:
                return {labels["__name__"] for labels, _ in server.ask(f'count by (__name__) ({{job="{job}"}})')}

            def number(job: str) -> int:
                return int(server.value(f'scrape_samples_post_metric_relabeling{{job="{job}"}}'))

            yield {
                node: (names(f"all-{node}"), names(f"kept-{node}"), number(f"all-{node}"), number(f"kept-{node}"))
                for node in sized.NODES
            }


def test_what_is_kept_is_all_that_the_rules_and_the_bill_read(kept: Mapping[str, Kept]) -> None:
    """Each family that the fleet's or autoscaling's rules, or the bill, ask for is among those kept."""
    asked = "".join(path.read_text() for path in (RULES / "fleet.yaml", RULES / "autoscaling.yaml"))
    asked += "".join(path.read_text() for path in (ROOT / "src" / "gpumap" / "cli" / "bill").glob("*.py"))
    for everything, some, _, _ in kept.values():
        needed = {name for name in everything if name.startswith("gpumap_") and name in asked}
        assert len(needed) > 10
        assert needed <= some


def test_the_alerts_without_data_are_those_that_the_page_names() -> None:
    """An alert reads a series that the page's relabelings drop, if and only if the page names the alert there."""
    keep, drop = (re.compile(rule["regex"]) for rule in read("keep")["metric_relabel_configs"])
    without = set()
    for group in yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            own = [name for name, _ in selectors(rule["expr"]) if name.startswith(("gpumap_", "process_"))]
            if not all(keep.fullmatch(name) and not drop.fullmatch(name) for name in own):
                without.add(rule.get("alert") or rule["record"])
    (part,) = (one for one in DOCS.read_text().split("\n## ") if "```yaml keep" in one)
    assert set(re.findall("`(Gpumap[A-Za-z]+)`", part)) == without


def test_what_is_kept_is_as_much_as_is_said(kept: Mapping[str, Kept]) -> None:
    """The page names the share of whole, shared and MIG devices, as docs/reference/sizing.md has them."""
    share = [100 * some / everything for _, _, everything, some in kept.values()]
    text = " ".join(DOCS.read_text(encoding="utf-8").split())
    (numbers,) = re.findall(
        r"(\d+) % of the series of whole GPUs, (\d+) % of time-sliced ones and (\d+) % of MIG", text
    )
    assert [*map(int, numbers)] == pytest.approx(share, abs=1.0)


def test_a_central_prometheus_federates_what_was_recorded(tmp_path: Path) -> None:
    """It has each record of two clusters once, under the cluster's label, and no series of a pod; boards read them."""
    (job,) = read("federation")["scrape_configs"]
    record = "cluster_namespace:gpumap_pod_info:count"
    exposed = f'{record}{{namespace="forged"}} 3\ngpumap_pod_info{{namespace="a",pod="p"}} 1\n'.encode()
    rule = {"record": record, "expr": "count by (namespace) (gpumap_pod_info)"}
    (tmp_path / "edge.json").write_text(json.dumps({"groups": [{"name": "a", "interval": "1s", "rules": [rule]}]}))
    (edge := tmp_path / "edge").mkdir()
    (central := tmp_path / "central").mkdir()
    with serving_pages(lambda _: Page(exposed)) as page:
        scrape = {"job_name": "page", "honor_labels": True, "static_configs": [{"targets": [page]}]}
        with prometheus(edge, config=each_second(scrape, rule_files=[str(tmp_path / "edge.json")])) as source:
            eventually(lambda: bool(source.ask(f'{record}{{namespace="a"}}')))
            for target in job["static_configs"]:
                target["targets"] = [source.url.removeprefix("http://")]
            job["scrape_interval"] = "1s"
            with prometheus(central, config=each_second(job)) as server:
                query = 'count by (cluster, __name__, namespace) ({__name__=~".*gpumap.*",' + f"{RECORDS}}})"
                expected = [
                    ({"__name__": "cluster_namespace:gpumap_pod_info:count", "cluster": name, "namespace": "a"}, 1.0)
                    for name in ("east", "west")
                ]

                def answer() -> list[tuple[dict[str, str], float]]:
                    return sorted(server.ask(query), key=lambda row: row[0].get("cluster", ""))

                assert settled(answer, expected) == expected
