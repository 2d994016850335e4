"""The dialect dcgm49: what the dialect dcgm has, with the names, labels and units since dcgm-exporter 4.9."""

from decimal import Decimal

import pytest
from hypothesis import given, settings
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpumap.agent.dialects.dcgm import BEFORE_4_9, SINCE_4_9
from gpumap.agent.exposition import Exposition
from gpumap.model.families import Family
from gpumap.model.snapshot import Snapshot
from tests.dcgm_exporter import MIB, RENAMED, Renamed
from tests.dcgm_nodes import sample_node
from tests.examples import examples
from tests.generated import nodes
from tests.nodes import TestNode
from tests.snapshots import busy_node

DRIVER_LABEL = {"DCGM_FI_DRIVER_VERSION": "DCGM_FI_SYSTEM_DRIVER_VERSION"}
BYTES = {name for name, (_, factor) in RENAMED.items() if factor == MIB}
"""Before 4.9 whole MiB, rounded down."""
NOT_RENAMED = {
    *(f"DCGM_FI_DEV_ECC_{bits}_{since}_TOTAL" for bits in ("SBE", "DBE") for since in ("VOL", "AGG")),
    *(
        f"DCGM_FI_DEV_{reason}_VIOLATION"
        for reason in ("POWER", "THERMAL", "SYNC_BOOST", "BOARD_LIMIT", "LOW_UTIL", "RELIABILITY")
    ),
}

Rows = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(families: tuple[Family, ...], snapshot: Snapshot) -> Rows:
    """Every sample, by the name of its family and its labels."""
    text = Exposition(families).render(snapshot).decode()
    names = {family.name.removesuffix("_total"): family.name for family in families}
    return {
        (names[family.name], frozenset(sample.labels.items())): sample.value
        for family in parse_text(text)
        for sample in family.samples
    }


def check(snapshot: Snapshot) -> None:
    before, since = read(BEFORE_4_9, snapshot), read(SINCE_4_9, snapshot)
    assert len(before) == len(since)
    for (name, labels), value in before.items():
        renamed, factor = RENAMED.get(name, Renamed(name))
        key = renamed, frozenset((DRIVER_LABEL.get(label, label), of) for label, of in labels)
        found = since[key]
        if name in BYTES:
            assert found // MIB == value
        else:
            assert found == pytest.approx(float(Decimal(value) * factor), rel=1e-9, abs=1e-7)


def test_the_sample_node_has_the_same_rows() -> None:
    check(sample_node())
    check(busy_node(gpus=4, sharing=3))


@settings(max_examples=examples(100))
@given(nodes())
def test_every_node_has_the_same_rows(truth: TestNode) -> None:
    """One value has one meaning, under either name: the same owners, and the value in the other unit."""
    check(truth.collect())


def test_every_field_has_its_name_since_4_9() -> None:
    """As in the table of what NVIDIA renamed; types are the same. What is not in the table keeps its name."""
    for before, since in zip(BEFORE_4_9, SINCE_4_9, strict=True):
        assert (before.name in RENAMED) is not (before.name in NOT_RENAMED)
        assert since.name == RENAMED.get(before.name, Renamed(before.name)).name
        assert since.kind == before.kind
        assert [DRIVER_LABEL.get(label, label) for label in before.labels] == list(since.labels)
