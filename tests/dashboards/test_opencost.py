"""The rules for OpenCost: promtool's unit tests, and the worked example of docs/how-to/opencost.md on its series."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from gpumap.agent.dialects.dcgm import BEFORE_4_9, SINCE_4_9
from tests.dcgm_exporter import RENAMED
from tests.fences import read_blocks
from tests.promtool import accepted, assert_answers, assert_parses

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "rules" / "opencost.yaml"
BY_USE = ROOT / "deploy" / "opencost-by-use.yaml"
TESTS = ROOT / "tests" / "rules" / "opencost.test.yaml"
PAGE = (ROOT / "docs" / "how-to" / "opencost.md").read_text(encoding="utf-8")
PRICE = 2
ASKED = (
    'avg(avg_over_time(container_gpu_allocation{container!="", container!="POD", node!=""}[1h]))'
    " by (container, pod, namespace, node)"
)
"""What OpenCost asks of the hour (pkg/costmodel/allocation.go), with no label for the cluster."""


class Charged(NamedTuple):
    """A row of the example: GPUs and cost by share, then by use."""

    who: str
    gpus: float
    cost: float
    used_gpus: float
    used_cost: float


def example() -> list[Charged]:
    table = PAGE.split("\n| container | what it holds |", 1)[1].split("\n\n", 1)[0]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return [Charged(cells[0], *(float(cell) for cell in cells[2:])) for cells in rows]


def test_promtool_accepts_the_rules_and_their_tests() -> None:
    """Records of given series: several GPUs, parts, MIG, a reservation, unknown shares, two targets and clusters."""
    accepted("check", "rules", "--lint=none", RULES)
    accepted("test", "rules", TESTS, cwd=TESTS.parent)


@pytest.mark.parametrize("by_use", [False, True], ids=["by share", "by use"])
def test_opencost_charges_what_the_example_says(tmp_path: Path, *, by_use: bool) -> None:
    """What OpenCost's own query returns on the played series is the table's column of GPUs, row by row."""
    rules = BY_USE if by_use else RULES
    played: dict[str, Any] = yaml.safe_load(TESTS.read_text(encoding="utf-8"))["tests"][0]
    expected = {
        f'{{namespace="{namespace}",pod="{pod}",container="main",node="node-1"}}': (
            row.used_gpus if by_use else row.gpus
        )
        for row in example()
        if "/" in row.who
        for namespace, pod in [row.who.split("/")]
        if by_use or row.gpus  # OpenCost has no series of a share that is unknown
    }
    series = {one["series"]: one["values"] for one in played["input_series"]}
    assert_answers(tmp_path, series, (f"round({ASKED}, 0.0001)", "70m", expected), rules=[rules], interval="15s")


def test_the_dialect_has_what_the_page_says() -> None:
    """Each series that the page promises of the dialect `dcgm` is its own; none of the renamed ones is dcgm49's."""
    table = PAGE.split("\n| OpenCost's column |", 1)[1].split("\n\n", 1)[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    promised = {name for _, series, origin in cells if "dialect `dcgm`" in origin for name in names_of(series)}
    dcgm = {family.name for family in BEFORE_4_9}
    assert len(promised) > 8
    assert promised <= dcgm
    assert not (promised & RENAMED.keys()) & {family.name for family in SINCE_4_9}
    missing = {name for _, series, origin in cells if origin == "none" for name in names_of(series)}
    assert missing
    assert not missing & dcgm


def names_of(cell: str) -> Iterator[str]:
    """The series of a cell: `DCGM_FI_DEV_A`, `_B`, `DCGM_FI_PROF_{C,D}` and `DCGM_FI_DEV_*_VIOLATION` are several."""
    prefix = ""
    for text in re.findall("`([A-Z_{},*]+)`", cell):
        name = text if text.startswith("DCGM_") else prefix + text
        prefix = "_".join(name.split("_")[:3])
        parts = [part.strip("{}").split(",") for part in re.split(r"({[^}]*})", name)]
        for chosen in itertools.product(*parts):
            pattern = re.compile(re.escape("".join(chosen)).replace(r"\*", "[A-Z_]+"))
            found = [family.name for family in BEFORE_4_9 if pattern.fullmatch(family.name)]
            yield from found or ["".join(chosen)]


def test_the_queries_of_the_page_are_promql(tmp_path: Path) -> None:
    """Those that show a wrong set-up."""
    queries = [block.body for block in read_blocks(PAGE, "promql")]
    assert len(queries) == 2
    assert_parses(queries, tmp_path)


def test_the_sums_of_the_example_add_up() -> None:
    """Each cost is GPUs at the price; the charged GPUs and the idle ones are those of the node."""
    *rows, total = example()
    for row in (*rows, total):
        assert row.cost == pytest.approx(row.gpus * PRICE)
        assert row.used_cost == pytest.approx(row.used_gpus * PRICE)
    for column in ("gpus", "cost", "used_gpus", "used_cost"):
        assert sum(getattr(row, column) for row in rows) == pytest.approx(getattr(total, column))
    assert total.gpus == total.used_gpus == 5
    assert re.search(rf"five GPUs at {PRICE}\.00 an hour each", PAGE)


def test_the_rule_by_use_replaces_that_by_share() -> None:
    """Its file has the same record in a group of the same name, and nothing else."""
    (own,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    (other,) = yaml.safe_load(BY_USE.read_text(encoding="utf-8"))["groups"]
    assert other["name"] == own["name"]
    assert [rule["record"] for rule in other["rules"]] == [own["rules"][0]["record"]]
