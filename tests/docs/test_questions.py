"""The pages that answer one question: their commands run on the demo, and their queries and configurations work."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumap.cli.bill.counting import Increases, Request, bill_of
from gpumap.cli.bill.promql import ENERGY, HELD, MEMORY, NOT_MEASURED, UNATTRIBUTED, USED, USED_OF_MIG, Growth
from gpumap.cli.bill.table import bill_table
from gpumap.cli.table import Shape
from tests.command import run_command
from tests.dashboards.test_fleet_rules import capture_pages, with_rules
from tests.demo_process import demo
from tests.deploy.chart import CHART, container_of, helm, settings
from tests.docs.test_commands import COMMANDS
from tests.fences import Block, read_blocks
from tests.pages import serving_pages
from tests.prometheus import Prometheus, chart_job, each_second, eventually, prometheus

ROOT = Path(__file__).resolve().parents[2]
GPU_HOUR, KWH = 3600, 3_600_000
DOCS = ROOT / "docs" / "how-to"
PAGES = [DOCS / f"{name}.md" for name in ("whole-cluster", "find-waste", "charge-teams")]
COLLECTORS = DOCS / "send-elsewhere.md"
OPENCOST_RULES = ROOT / "rules" / "opencost.yaml"


def test_the_bill_on_the_page_is_one_that_the_command_prints() -> None:
    """Its table and the lines below have the form and the sums of `gpumap bill`."""
    gpu, mig = ("ml", "trainer", "main", "GPU-1"), ("serving", "web", "main", "MIG-1")
    growth: Growth = {
        HELD: {gpu: 5952.0 * GPU_HOUR, mig: 744.0 * GPU_HOUR},
        USED: {gpu: 4210.37 * GPU_HOUR},
        USED_OF_MIG: {},
        ENERGY: {gpu: 2419.8 * KWH},
        MEMORY: {},
        UNATTRIBUTED: {("GPU-1",): 118.42 * KWH},
        NOT_MEASURED: {},
    }
    request = Request("namespace", "", None, "", 2.5, "2026-10-01T00:00:00Z", "2026-11-01T00:00:00Z", 60)
    bill = bill_of("http://prometheus:9090", request, Increases(growth, 0, ()), {})
    printed = [line.rstrip() for line in bill_table(bill, Shape()).splitlines()]
    page = (DOCS / "charge-teams.md").read_text(encoding="utf-8")
    assert "\n".join(printed) in page


@pytest.fixture(name="agent", scope="module")
def run_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The demo's node."""
    with demo(tmp_path_factory.mktemp("agent"), "--interval", "1s", "--idle-after", "5s") as url:
        yield url


INDEX = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
ASKED = [
    tuple(line.split()) for line in re.findall(r"`gpumap (\w+ --url URL[^`]*)`", INDEX.partition("## First steps")[0])
]


def test_six_questions_are_asked() -> None:
    assert [words[0] for words in ASKED] == ["waste", "waste", "waste", "doctor", "check", "waste"]


@pytest.mark.parametrize("words", ASKED, ids=" ".join)
def test_a_question_is_answered_on_the_demo(agent: str, words: tuple[str, ...]) -> None:
    """Each command of docs/README.md; `check` exits with 1, because the demo's GPUs have faults."""
    expected = {"check": "GPU ", "doctor": "row_remap_pending", "waste": "squatter"}[words[0]]

    def answered() -> bool:
        done = run_command(*(agent if word == "URL" else word for word in words))
        return done.returncode == (words[0] == "check") and expected in done.stdout

    eventually(answered, about=lambda: words)


def test_scripts_read_fields_of_the_map() -> None:
    """The schema of `/api/v1/map` has each field that the jq command reads."""
    schema = (ROOT / "docs" / "reference" / "map.schema.json").read_text(encoding="utf-8")
    (command,) = (command for command in COMMANDS if re.match("curl .* jq -r", command.line))
    fields = re.findall(r"\.([a-z_]+)", command.line.partition("jq -r")[2])
    assert len(fields) > 5
    assert [name for name in fields if f'"{name}"' not in schema] == []


def test_the_pages_filter_knows_the_address() -> None:
    """The address in whole-cluster.md has a filter of the live page."""
    script = "".join(file.read_text() for file in (ROOT / "src/gpumap/agent/web/page").glob("*.js"))
    assert "/#q=gpu:" in PAGES[0].read_text(encoding="utf-8")
    assert re.search(r"\bgpu:", script)


@pytest.fixture(name="server", scope="module")
def run_server(agent: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the demo and a node for each capture, with the fleet's and OpenCost's rules."""
    folder = tmp_path_factory.mktemp("server")
    (opencost := folder / "opencost.yaml").write_text(
        OPENCOST_RULES.read_text().replace("interval: 1m", "interval: 1s")
    )
    with serving_pages(capture_pages().__getitem__) as address:
        nodes = {path[1:]: f"http://{address}{path}" for path in capture_pages()} | {"demo-node": agent}
        config = each_second(chart_job(nodes), rule_files=[with_rules(folder), str(opencost)])
        config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        with prometheus(folder, config=config) as found:
            yield found


def queries() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for block in read_blocks(page.read_text(encoding="utf-8"), "promql"):
            yield f"{page.name}:{block.line}", block.body


@pytest.mark.parametrize(("place", "query"), list(queries()))
def test_a_query_is_answered(server: Prometheus, place: str, query: str) -> None:
    eventually(lambda: server.ask(query) != [], about=lambda: place)


def fence(word: str) -> Block:
    (found,) = (block for block in read_blocks(COLLECTORS.read_text(encoding="utf-8"), "yaml") if block.words == {word})
    return found


def test_datadogs_check_is_in_the_pods_annotations(tmp_path: Path) -> None:
    """Helm renders it for the chart's container and port, as JSON. Each name in it is a family of gpumap."""
    (values := tmp_path / "values.yaml").write_text(fence("values").body)
    done = helm("template", "gpumap", CHART, "--values", values, *settings(()))
    assert done.returncode == 0, done.stderr
    manifests: dict[str, dict[str, Any]] = {one["kind"]: one for one in yaml.safe_load_all(done.stdout) if one}
    container = container_of(manifests)
    annotations = manifests["DaemonSet"]["spec"]["template"]["metadata"]["annotations"]
    check = json.loads(annotations[f"ad.datadoghq.com/{container['name']}.checks"])["openmetrics"]
    (instance,) = check["instances"]
    assert instance["openmetrics_endpoint"] == f"http://%%host%%:{container['ports'][0]['containerPort']}/metrics"
    reference = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    counters = set(re.findall(r"^\| `(gpumap_\w+)_total`", reference, re.MULTILINE))
    others = set(re.findall(r"^\| `(gpumap_\w+)(?<!_total)`", reference, re.MULTILINE))
    assert set(instance["metrics"]) <= others | counters
    assert set(instance["metrics"]) & counters, "the page explains how counters are named"


def test_opencosts_rules_record_each_share_once(server: Prometheus) -> None:
    """What the rules record is what containers hold, under the labels that OpenCost reads."""
    held = 'sum(gpumap_container_allocated_gpus{node!="demo-node"})'
    eventually(lambda: server.ask(held) != [] and server.ask('container_gpu_allocation{node="demo-node"}') != [])
    recorded = 'sum(container_gpu_allocation{node!="demo-node"})'
    eventually(lambda: server.value(recorded) == pytest.approx(server.value(held)))
    for labels, _ in server.ask("container_gpu_allocation"):
        assert set(labels) == {"__name__", "namespace", "pod", "container", "node"}
    eventually(lambda: server.ask('DCGM_FI_PROF_GR_ENGINE_ACTIVE{node="demo-node"}') != [])
