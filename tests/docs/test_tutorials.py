"""The commands and queries of the tutorials print what the tutorials show, on the demo and in a real Prometheus."""

from __future__ import annotations

import re
import shlex
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.command import run_command
from tests.demo_process import demo, fetch
from tests.fences import read_blocks
from tests.prometheus import eventually, prometheus
from tests.promtool import assert_parses

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorial"
DEMO = (TUTORIALS / "demo.md").read_text(encoding="utf-8")
CLUSTER = (TUTORIALS / "cluster.md").read_text(encoding="utf-8")
URL = "http://localhost:9401"
COMMAND = "$ .venv/bin/gpumap "
SHOWN = [block.body for block in read_blocks(DEMO, "console") if block.body.startswith(COMMAND)]
QUERIES = [block.body for block in read_blocks(DEMO, "promql")]


@pytest.fixture(name="url", scope="module")
def run_demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with demo(tmp_path_factory.mktemp("demo"), "--interval", "1s") as url:
        yield url


def titles(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: shown.splitlines()[0].split()[2])
def test_a_command_prints_the_table_that_is_shown(url: str, shown: str) -> None:
    """The columns are those of the tutorial; what the pods do at that moment may differ."""
    line, header, *rows = shown.splitlines()
    pods = {word for row in rows for word in row.split() if word in ("greedy", "squatter", "ranker", "trainer")}
    assert pods

    def is_printed() -> bool:  # a squatter needs two snapshots, and the demo's kubelet restarts now and then
        done = run_command(*shlex.split(line.removeprefix(COMMAND).replace(URL, url)))
        assert done.returncode == 0, done
        assert titles(done.stdout.splitlines()[0]) == titles(header)
        return all(pod in done.stdout for pod in pods)

    eventually(is_printed)


def test_the_page_has_the_series_that_are_shown(url: str) -> None:
    """The labels of each sample of the tutorial are on /metrics of the demo."""
    samples = re.findall(r"^(gpumap_\w+\{.*\}) \d+$", DEMO, re.MULTILINE)
    assert samples
    page, _ = fetch(f"{url}/metrics")
    assert all(f"\n{sample} " in page for sample in samples)


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
