"""What holds of every dialect: its page is valid, whatever the node, on its own and with all the others."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from msgspec import structs
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpumap.agent.dialects import DIALECTS
from gpumap.agent.exposition import Exposition
from gpumap.agent.flags import ALL_DIALECTS, WITH_SHARED_NAMES
from gpumap.agent.metrics import GROUPS, native, self_families
from gpumap.model.families import Family, NumberedFamilies
from gpumap.model.node import Gpu, GpuXids
from gpumap.model.readings import ECC_LOCATIONS, ECC_TYPES, DeviceMemory, GpuReading
from gpumap.model.snapshot import Snapshot
from tests.dialect_pages import DOCS, GOLDEN, documented_lints, golden, lints, shuffled, titans
from tests.dialect_samples import SAMPLES
from tests.examples import examples
from tests.generated import nodes
from tests.nodes import TestNode
from tests.snapshots import DRIVER, busy_node, empty_node, gpu, pascal, with_node
from tests.test_exposition import AWKWARD

NATIVE = (*native(GROUPS, process_metrics=True), *self_families("1.2.3", "3.11.7"))
EVERY: dict[str, tuple[Family | NumberedFamilies, ...]] = {
    "native": NATIVE,
    **{name: dialect.families for name, dialect in DIALECTS.items()},
    "all": (*NATIVE, *(family for name in ALL_DIALECTS for family in DIALECTS[name].families)),
}
IN_THE_SNAPSHOTS_ORDER = {"nvidia-smi"}
"""Its lines follow the snapshot, which the step sorts."""
MEMORY = DeviceMemory(8, 4, 3, 1)
each_dialect = pytest.mark.parametrize("dialect", EVERY)


@cache
def with_everything() -> Snapshot:
    """A node on which every family has a sample, small enough to be parsed in every dialect."""
    return busy_node(gpus=4, sharing=3)


def tell_all(snapshot: Snapshot) -> Snapshot:
    """The same node with GPUs that report everything: every second one is an old card."""
    answer = tuple(_telling(one, gpu(0) if one.index % 2 == 0 else pascal(0)) for one in snapshot.node.gpus)
    xids = tuple(GpuXids(one.uuid, {31: 2, 79: 1}, 0.5, 79) for one in answer)
    return with_node(snapshot, driver=DRIVER, gpus=answer, xids=xids)


def _telling(one: Gpu, like: Gpu) -> Gpu:
    if one.reading is None or like.reading is None:
        return one
    own = {
        name: getattr(one.reading, name) for name in ("index", "uuid", "minor", "memory", "partitioned", "instances")
    }
    return structs.replace(one, reading=structs.replace(like.reading, **own))


def full(snapshot: Snapshot) -> Snapshot:
    """The same node with GPUs and devices of no age: each reports all that any reports."""
    answer = (structs.replace(one, reading=one.reading and _full(one.reading)) for one in snapshot.node.gpus)
    devices = (structs.replace(one, memory=MEMORY) for one in snapshot.node.devices)
    return with_node(snapshot, gpus=tuple(answer), devices=tuple(devices))


def _full(reading: GpuReading) -> GpuReading:
    return structs.replace(
        reading,
        memory=MEMORY,
        retired_pages={"single_bit_ecc": 2, "double_bit_ecc": 0},
        retired_pages_pending=True,
        ecc_errors={kind: dict.fromkeys(ECC_LOCATIONS, 1) for kind in ECC_TYPES},
        ecc_totals={kind: {"volatile": 1, "aggregate": 1} for kind in ECC_TYPES},
    )


def check(families: Iterable[Family | NumberedFamilies], snapshot: Snapshot) -> None:
    """No series twice, each family's head once, and read back by independent parsers, in both formats."""
    families = tuple(families)
    counts = []
    for openmetrics, parse in ((False, parse_text), (True, parse_openmetrics)):
        text = Exposition(families, openmetrics=openmetrics).render(snapshot).decode()
        lines = text.split("\n")[:-1]  # other line ends may be in a label
        series = Counter(line.rpartition(" ")[0] for line in lines if not line.startswith("#"))
        assert [one for one, times in series.items() if times > 1] == []
        heads = Counter(line.split()[2] for line in lines if line.startswith("# TYPE"))
        assert [one for one, times in heads.items() if times > 1] == []
        samples = [sample for family in parse(text) for sample in family.samples]
        same = Counter((sample.name, frozenset((k, v) for k, v in sample.labels.items() if v)) for sample in samples)
        assert [one for one, times in same.items() if times > 1] == [], "an empty label is no label to Prometheus"
        counts.append(len(samples))
        assert len(samples) == len(series)
    assert counts[0] == counts[1]


@each_dialect
@settings(max_examples=examples(40))
@given(truth=nodes())
def test_a_page_is_valid_on_any_node(dialect: str, truth: TestNode) -> None:
    """Whatever containers hold and use, with GPUs that report little and GPUs that report all."""
    snapshot = truth.collect()
    check(EVERY[dialect], snapshot)
    check(EVERY[dialect], tell_all(snapshot))


@each_dialect
@pytest.mark.parametrize("snapshot", [with_everything(), empty_node()], ids=["a busy node", "nothing is known"])
def test_a_page_is_valid(dialect: str, snapshot: Snapshot) -> None:
    """A node with everything, and one where all sources have failed."""
    check(EVERY[dialect], snapshot)


@pytest.mark.parametrize("text", AWKWARD.values(), ids=AWKWARD.keys())
def test_awkward_names_come_back(text: str) -> None:
    """Each label value is escaped, in every dialect that names containers or processes."""
    snapshot = renamed(SHARED, text)
    for page in EVERY.keys() - {"native", *ALL_DIALECTS}:  # the page `all` has these
        check(EVERY[page], snapshot)
    for dialect in filter(names_containers, EVERY.keys() - {"all"}):
        assert text in label_values(dialect, snapshot), dialect


SHARED = busy_node(gpus=3, sharing=2)


@cache
def names_containers(dialect: str) -> bool:
    return bool(label_values(dialect, SHARED) & {part for row in SHARED.containers for part in row.name})


def label_values(dialect: str, snapshot: Snapshot) -> set[str]:
    """The values of all labels on a dialect's page."""
    samples = (sample for family in parse_text(_text(dialect, snapshot)) for sample in family.samples)
    return {value for sample in samples for value in sample.labels.values()}


def renamed(snapshot: Snapshot, text: str) -> Snapshot:
    """The same node, everything on it that has a name named after `text`."""
    return replace(
        snapshot,
        containers=tuple(structs.replace(row, namespace=text, pod=f"{row.pod}{text}") for row in snapshot.containers),
        processes=tuple(
            structs.replace(one, namespace=one.pod and text, pod=one.pod and f"{one.pod}{text}", comm=text)
            for one in snapshot.processes
        ),
    )


@pytest.mark.parametrize("dialect", SAMPLES)
def test_the_page_is_the_one_that_was_reviewed(dialect: str) -> None:
    """Of the node of its reference: names, HELP, TYPE, labels and their order, units, numbers (`make golden`)."""
    assert _text(dialect, SAMPLES[dialect]()) == golden(dialect)


def test_every_dialect_has_such_a_page() -> None:
    assert SAMPLES.keys() == DIALECTS.keys() == {path.stem for path in GOLDEN.glob("*.prom")}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_order_does_not_matter(dialect: str) -> None:
    """The same node is the same page, in whatever order it is reported."""
    for one in (SAMPLES[dialect](), titans(), with_everything()):
        assert sorted(_text(dialect, shuffled(one)).splitlines()) == sorted(_text(dialect, one).splitlines())
        if dialect not in IN_THE_SNAPSHOTS_ORDER:
            assert _text(dialect, shuffled(one)) == _text(dialect, one)


def test_no_two_dialects_emit_one_name() -> None:
    """Each family of the page belongs to one dialect, so that all can be on at once. The two of dcgm-exporter do."""
    assert [name for name, times in Counter(family.name for family in EVERY["all"]).items() if times > 1] == []
    for name in DIALECTS.keys() - {*ALL_DIALECTS}:
        shared = {family.name for family in EVERY["all"]} & {family.name for family in EVERY[name]}
        others = {dialect for dialect in ALL_DIALECTS for family in EVERY[dialect] if family.name in shared}
        assert {name, *others} == {*WITH_SHARED_NAMES}


@each_dialect
def test_a_page_depends_on_the_snapshot_alone(dialect: str) -> None:
    """The same bytes each time, whatever was rendered before."""
    kept = Exposition(EVERY[dialect])
    first = kept.render(with_everything())
    kept.render(empty_node())
    assert kept.render(with_everything()) == first == Exposition(EVERY[dialect]).render(with_everything())


@each_dialect
def test_a_dialect_is_silent_where_nothing_is_known(dialect: str) -> None:
    """With every source down there is no device, no pod and no zero for either: only words on the exporter itself."""
    samples = [sample for family in parse_text(_text(dialect, empty_node())) for sample in family.samples]
    assert {sample.name for sample in samples if sample.labels and not sample.name.startswith("gpumap_")} == set()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_promtool_reports_what_the_docs_list(dialect: str) -> None:
    """dialects.md quotes each lint that a dialect causes, with the names that cause it: these and no others."""
    nodes = tell_all(with_everything()), full(SAMPLES[dialect]())
    found = {line for one in nodes for line in lints(_text(dialect, one))}
    assert sorted(found) == documented_lints(dialect, EVERY[dialect])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_family_has_a_sample(dialect: str) -> None:
    """On one of these nodes; that which has none would be a name without a meaning."""
    text = "".join(_text(dialect, one) for one in (tell_all(with_everything()), full(SAMPLES[dialect]())))
    written = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert [one.name for one in EVERY[dialect] if isinstance(one, Family) and one.name not in written] == []


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_is_described(dialect: str) -> None:
    text = DOCS.read_text().split(f"\n## {dialect}\n", 1)[1].split("\n## ", 1)[0]
    assert "```" in text


def _text(dialect: str, snapshot: Snapshot) -> str:
    return Exposition(EVERY[dialect]).render(snapshot).decode()
