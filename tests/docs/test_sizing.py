"""The budget of series holds on every capture. cost.md says what the rules read and record."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings

from gpumap.agent.exposition import Exposition
from gpumap.agent.flags import DEFAULT_GROUPS
from gpumap.agent.metrics import GROUPS, native, self_families
from gpumap.model.snapshot import Snapshot
from tests import golden
from tests.demo_process import fetch
from tests.docs import sized
from tests.examples import examples
from tests.generated import runs
from tests.nodes import TestNode
from tests.test_budget import MOST

ROOT = Path(__file__).resolve().parents[2]
DOCS = (ROOT / "docs" / "explanation" / "cost.md").read_text()
DEFAULT = (*native(DEFAULT_GROUPS, process_metrics=False), *self_families("1", "3.11"))
CODEC = {family.name for family in GROUPS["codec"]}


@pytest.mark.parametrize("node", sized.NODES)
def test_the_formula_holds_on_the_nodes(node: str) -> None:
    """The formula of sizing.md, made of whole cards, is no less than the default groups of a node."""
    parts = sized.by_part(sized.pages()[node, True])
    assert sized.by_default(node) == sum(parts[part] for part in ("agent", *DEFAULT_GROUPS))
    there, most = sized.bearers(sized.pages()[node, False]), sized.each("whole")
    assert sized.by_default(node) <= sum(number * there[of] for of, number in most.items())


def check_budget(page: str) -> None:
    """No more series than the numbers that a version may ever have by default."""
    there, counted = sized.bearers(page), Counter(sized.by_bearer(page))
    del counted["XID code"]
    named = {"agent": "agent", "GPU": "gpu", "device": "leaf", "holding": "container", "pod": "pod"}
    assert counted.total() <= sum(MOST[name] * there[of] for of, name in named.items())


@pytest.mark.parametrize("capture", golden.captures(), ids=lambda capture: capture.name)
def test_the_budget_holds_on_every_capture(capture: Path) -> None:
    page = (capture / "expected.prom").read_text()
    check_budget("\n".join(line for line in page.splitlines() if not is_extra(line)))


@settings(max_examples=examples(60))
@given(runs(lambda _, snapshot: check_budget(Exposition(DEFAULT).render(snapshot).decode())))
def test_the_budget_holds_on_nodes_made_by_chance(run: list[Snapshot | TestNode]) -> None:
    """Nor has a node with any sharing, any faults and anybody's processes."""


def is_extra(line: str) -> bool:
    """A family that is off by default, on the captures' pages all the same."""
    name = re.split(r"[ {]", line, maxsplit=1)[0]
    return name in CODEC or name.startswith("gpumap_process_")


def test_the_least_choice_is_what_the_agent_serves_with_it(tmp_path: Path) -> None:
    """The flags of the table's smallest row, tried."""
    with sized.playing(tmp_path, "whole", "--collect", "allocation", "--collect", "use") as url:
        counted = len(list(sized.series(fetch(f"{url}/metrics")[0])))
    assert counted == sized.choices()["least"][0]


def test_what_mimir_limits_is_counted_in_the_rules() -> None:
    """Chunks that one rule reads of a holding, and the groups."""
    files = [yaml.safe_load(file.read_text())["groups"] for file in sorted((ROOT / "rules").glob("*.yaml"))]
    rules = [rule for groups in files for group in groups for rule in group["rules"]]
    selections = max(len(re.findall(r'gpumap_container_\w+\{[^}]*exported_pod=""\}', rule["expr"])) for rule in rules)
    said = re.search(r"fetched_chunks_per_query` \| ([\d ]+) \| (\d+) for each holding: enough for ([\d ]+)", DOCS)
    assert said is not None
    default, chunks, enough = (int(number.replace(" ", "")) for number in said.groups())
    assert chunks == 2 * selections
    assert enough == default // chunks
    assert f"each of {sum(map(len, files))} groups" in DOCS


def test_the_rules_record_as_many_series_as_is_said() -> None:
    """The formula of the fleet's records is made of how many of them there are by each level."""
    groups = yaml.safe_load((ROOT / "rules" / "fleet.yaml").read_text())["groups"]
    levels = Counter(rule["record"].partition(":")[0] for group in groups for rule in group["rules"])
    said = re.search(
        r"^    (\d+) × namespaces \+ (\d+) × nodes \+ models of GPU \+ (\d+)$",
        DOCS,
        re.M,
    )
    assert said is not None
    wasted = levels.pop("cluster_namespace_finding") * 7  # an unmatched one has neither GPUs nor bytes
    levels["cluster_namespace"] += wasted
    by = ("cluster_namespace", "cluster_node", "cluster")
    assert [int(number) for number in said.groups()] == [levels[level] for level in by]
    assert levels.total() == sum(levels[level] for level in by) + 2, "by model, and the helper"
