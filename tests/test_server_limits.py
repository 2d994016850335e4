"""gpumap's pages and rules fit the default limits of Mimir and Prometheus' operator, and a ruler over several clusters.

Mimir's defaults: https://grafana.com/docs/mimir/latest/configure/configuration-parameters/, block `limits`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gpumap.agent.dialects import DIALECTS
from gpumap.agent.flags import ALL_DIALECTS
from gpumap.agent.metrics import GROUPS, native, self_families
from gpumap.lab.capture.format import EXPECTED
from gpumap.model.families import Family, NumberedFamilies
from tests import golden
from tests.prometheus import target_labels

LABEL_NAMES_MAX = 30
"""`max_label_names_per_series`, with the metric's name."""
LABEL_NAME_LENGTH_MAX = 1024
"""`max_label_name_length`."""
LABEL_VALUE_LENGTH_MAX = 2048
"""`max_label_value_length`, also of the metric's name."""
METADATA_LENGTH_MAX = 1024
"""`max_metadata_length`: Mimir cuts a longer HELP."""
GROUPS_MAX = 70
"""`ruler_max_rule_groups_per_tenant`. tests/deploy/test_chart_rules.py counts the rules of a group."""
SERVERS_LABELS = ("__name__", "job", *target_labels("a-node"), "cluster", "prometheus", "prometheus_replica")
"""The chart's monitors, the operator (external labels) and the administrator add these to each series."""
PAGES = (*golden.captures(), Path(__file__).parent / "dialects")
RULES = sorted((Path(__file__).parents[1] / "rules").glob("*.yaml"))
OF_ONE_CLUSTER = "autoscaling.yaml"
"""docs/how-to/autoscale.md: evaluate it in each cluster."""
KEEPS_LABELS = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")
AGGREGATIONS = "sum|min|max|avg|group|count|stddev|stdvar|quantile|topk|bottomk|count_values"
OTHERS = "without|ignoring|absent|absent_over_time|scalar|vector"
LOSES_LABELS = re.compile(rf"\b(?:(?:{AGGREGATIONS})\s*\(|(?:{OTHERS})\b)")


def families() -> Iterator[Family | NumberedFamilies]:
    yield from native(GROUPS, process_metrics=True)
    yield from self_families("1.2.3", "3.11.7")
    for name in dict.fromkeys((*ALL_DIALECTS, *DIALECTS)):
        yield from DIALECTS[name].families


def exposed(folder: Path) -> Iterator[str]:
    """The pages that a scrape may return as one: a capture's two pages, or each dialect's own."""
    files = [folder / EXPECTED, folder / golden.DIALECTS_PAGE]
    if files[0].exists():
        yield "".join(file.read_text() for file in files)
    else:
        yield from (file.read_text() for file in sorted(folder.glob("*.prom")))


def samples(page: str) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    """Each sample's name and labels. The server drops empty labels."""
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            yield sample.name, tuple(sorted((name, value) for name, value in sample.labels.items() if value))


def clauses_without(label: str, expression: str) -> list[str]:
    """Return the parts of an expression after which its series may lack the label."""
    lost = [match[0] for match in KEEPS_LABELS.finditer(expression) if label not in re.split(r"[\s,]+", match[1])]
    return lost + [match[0] for match in LOSES_LABELS.finditer(expression)]


@pytest.mark.parametrize("family", [*families()], ids=lambda family: family.name)
def test_a_family_fits_the_limits(family: Family | NumberedFamilies) -> None:
    """Labels with those of the servers, their names, the metric's name, and HELP."""
    labels = {*family.labels, *SERVERS_LABELS}
    assert len(labels) <= LABEL_NAMES_MAX
    assert max(map(len, labels)) <= LABEL_NAME_LENGTH_MAX
    assert len(family.name) <= METADATA_LENGTH_MAX
    assert len(family.help) <= METADATA_LENGTH_MAX


@pytest.mark.parametrize("folder", PAGES, ids=lambda folder: folder.name)
def test_a_page_fits_the_limits(folder: Path) -> None:
    """No sample exists twice, no label value is too long, and no series has too many labels."""
    for page in exposed(folder):
        counts = Counter(samples(page))
        assert counts
        assert [sample for sample, count in counts.items() if count > 1] == []
        for name, labels in counts:
            assert len({*dict(labels), *SERVERS_LABELS}) <= LABEL_NAMES_MAX, name
            assert max(len(value.encode()) for value in (name, *dict(labels).values())) <= LABEL_VALUE_LENGTH_MAX, name


def test_the_groups_of_all_files_fit_one_tenant() -> None:
    """Their names differ too: a ruler keeps the groups of one namespace by name."""
    names = [group["name"] for file in RULES for group in yaml.safe_load(file.read_text())["groups"]]
    assert len({*names}) == len(names) <= GROUPS_MAX


@pytest.mark.parametrize("file", [file for file in RULES if file.name != OF_ONE_CLUSTER], ids=lambda file: file.name)
def test_a_rule_keeps_the_cluster(file: Path) -> None:
    """A ruler over several clusters must not add them up, match them with each other, or lose which one it is."""
    for group in yaml.safe_load(file.read_text())["groups"]:
        for rule in group["rules"]:
            assert clauses_without("cluster", rule["expr"]) == [], rule


@pytest.mark.parametrize(
    ("expression", "lost"),
    [
        ("sum by (cluster, node) (a * on (cluster, node) group_left (uuid) b)", []),
        ("rate(a_count[5m]) / count_over_time(sum_total[1h])", []),
        ("sum by (node) (a)", ["by (node)"]),
        ("max(a)", ["max("]),
        ("a and on (uuid, clusters) b", ["on (uuid, clusters)"]),
        ("sum without (pod) (a)", ["without"]),
        ("absent(up)", ["absent"]),
    ],
)
def test_a_lost_label_is_found(expression: str, lost: list[str]) -> None:
    """The check above reports each aggregation and each match that drops the label, and no other part."""
    assert clauses_without("cluster", expression) == lost
