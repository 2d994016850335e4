"""What is asked of a Prometheus server is what gpumap's page has: the names of families, and their labels."""

import pytest

from gpumap.agent.metrics import GROUPS, native, self_families
from gpumap.cli.bill.promql import COUNTERS
from gpumap.cli.fleet.queries import FAMILIES, NODE_INFO, SNAPSHOT
from gpumap.model.families import Family

WRITTEN = {
    one.name: one
    for one in (*native(GROUPS, process_metrics=True), *self_families("1.2.3", "3.11.7"))
    if isinstance(one, Family)
}
ASKED = {one.name: one.by for one in (*FAMILIES, NODE_INFO)} | {one.name: one.keys for one in COUNTERS}


@pytest.mark.parametrize("name", ASKED)
def test_each_queried_family_is_on_the_page(name: str) -> None:
    """With the labels by which its series are distinguished: none falls away, and none is asked for in vain."""
    assert sorted(ASKED[name]) == sorted(WRITTEN[name].labels)


def test_a_bill_reads_counters() -> None:
    assert {WRITTEN[one.name].kind for one in COUNTERS} == {"counter"}


def test_every_gpumap_is_known_by_a_series_without_labels() -> None:
    assert WRITTEN[SNAPSHOT].labels == ()
