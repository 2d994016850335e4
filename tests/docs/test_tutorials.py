"""The queries and files of the tutorials work, on the demo and in a real Prometheus."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.demo_process import demo
from tests.fences import read_blocks
from tests.prometheus import eventually, prometheus
from tests.promtool import assert_parses

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorial"
DEMO = (TUTORIALS / "demo.md").read_text(encoding="utf-8")
CLUSTER = (TUTORIALS / "cluster.md").read_text(encoding="utf-8")
QUERIES = [block.body for block in read_blocks(DEMO, "promql")]


@pytest.fixture(name="url", scope="module")
def run_demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with demo(tmp_path_factory.mktemp("demo"), "--interval", "1s") as url:
        yield url


def test_a_prometheus_answers_the_queries(url: str, tmp_path: Path) -> None:
    """By the tutorial's configuration: memory by namespace, and the holder that does not compute."""
    (block,) = read_blocks(DEMO, "yaml")
    config = yaml.safe_load(block.body.replace("localhost:9401", urllib.parse.urlsplit(url).netloc).replace("5s", "1s"))
    by_namespace, idle = QUERIES
    with prometheus(tmp_path, config=config) as server:
        eventually(lambda: "research" in server.by("namespace", by_namespace))
        eventually(lambda: "notebook-idle" in server.by("pod", idle))


def test_the_cluster_installs_the_file_of_the_guide() -> None:
    """Both have the same values file, so that a change to one is a change to both."""
    guide = (TUTORIALS.parent / "how-to" / "install" / "gpu-operator.md").read_text(encoding="utf-8")
    first = [
        next(one.body for one in read_blocks(text, "yaml") if one.words == {"values"}) for text in (CLUSTER, guide)
    ]
    assert first[0] == first[1]


def test_the_first_alert_parses(tmp_path: Path) -> None:
    """promtool reads the expression of the cluster tutorial's alert."""
    (rule,) = [
        document
        for block in read_blocks(CLUSTER, "yaml")
        if (document := yaml.safe_load(block.body)).get("spec", {}).get("groups")
    ]
    (group,) = rule["spec"]["groups"]
    assert_parses([one["expr"] for one in group["rules"]], tmp_path)
