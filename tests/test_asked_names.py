"""What is asked of a Prometheus server is what gpumap's page has: the names of families, and their labels."""

import re

import pytest

from gpumap.agent.metrics import GROUPS, native, self_families
from gpumap.cli.bill.promql import COUNTERS
from gpumap.cli.commands.map_sums import COLUMNS, Grouping, SumColumn
from gpumap.cli.sources.scraped_findings import FAMILIES
from gpumap.cli.sources.scraped_nodes import OWN_LABELS, SNAPSHOT
from gpumap.model.families import Family

WRITTEN = {
    one.name: one
    for one in (*native(GROUPS, process_metrics=True), *self_families("1.2.3", "3.11.7"))
    if isinstance(one, Family)
}
ASKED = {family.name: family.labels for family in FAMILIES} | {counter.name: counter.keys for counter in COUNTERS}


@pytest.mark.parametrize("name", ASKED)
def test_each_queried_family_is_on_the_page(name: str) -> None:
    """With the labels by which its series are distinguished. Of series with information, not all are needed."""
    assert {*ASKED[name]} <= {*WRITTEN[name].labels}
    assert name.endswith("_info") or {*ASKED[name]} == {*WRITTEN[name].labels}


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.key)
def test_each_sum_is_of_families_on_the_page(column: SumColumn) -> None:
    question = column.question(Grouping("", "instance", ("instance",)), "node")
    for name in re.findall(r"gpumap_\w+", question):
        assert {*WRITTEN[name].labels} <= OWN_LABELS | {"node"}


def test_a_bill_reads_counters() -> None:
    assert {WRITTEN[one.name].kind for one in COUNTERS} == {"counter"}


def test_every_gpumap_is_known_by_a_series_without_labels() -> None:
    assert WRITTEN[SNAPSHOT].labels == ()
