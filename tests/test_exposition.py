"""Both page formats: what any parser of them reads back is what the snapshot says, digit for digit."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.samples import Sample

from gpumap.agent.exposition import Exposition
from gpumap.agent.metrics import GROUPS, native, self_families
from gpumap.model.families import Family, NumberedFamilies, Series
from gpumap.model.node import Pod
from gpumap.model.snapshot import Snapshot
from tests.promtool import promtool
from tests.snapshots import busy_node, empty_node, with_node

EVERYTHING = (*native(GROUPS, process_metrics=True), *self_families("1.2.3", "3.11.7"))
AWKWARD = {
    "quotes": 'say "hi"',
    "backslashes": "C:\\new\\table\\",
    "newlines": "one\ntwo\r\nthree",
    "a backslash before an n": "\\n",
    "control characters": "".join(map(chr, (*range(0x20), 0x7F, 0x85))),
    "other line ends": "a\u2028b\u2029c\x0bd\x0ce",
    "the longest name": "x" * 253,
    "right to left": "\u202eمرحبا\u202c",
    "what looks like syntax": '{a="b"} 1 # EOF',
    "nothing": "",
    "spaces": "  a  ",
    "beyond the basic plane": "\U0001f600\U0010ffff",
}


def family(*series: Series, name: str = "thing", kind: str = "gauge", labels: tuple[str, ...] = ("a",)) -> Family:
    return Family(name, kind, "Some help.", labels, lambda snapshot: series)  # type: ignore[arg-type]


def page(*families: Family, openmetrics: bool = False, snapshot: Snapshot | None = None) -> str:
    return Exposition(families, openmetrics=openmetrics).render(snapshot or empty_node()).decode()


def samples(text: str, *, openmetrics: bool) -> list[Sample]:
    parse = parse_openmetrics if openmetrics else parse_text
    return [sample for one in parse(text) for sample in one.samples]


def expected(snapshot: Snapshot) -> list[tuple[str, dict[str, str], float]]:
    """What the page must say, read from the families directly."""
    return [
        (one.name + series.suffix, dict(zip(one.labels, series.labels, strict=True)), series.value)
        for one in EVERYTHING
        for series in one.read(snapshot)
    ]


both_formats = pytest.mark.parametrize("openmetrics", [False, True], ids=["text", "openmetrics"])


@both_formats
@given(value=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_label_value_comes_back(value: str, openmetrics: bool) -> None:
    text = page(family(Series((value,), 1), Series((value + "x",), 2)), openmetrics=openmetrics)
    read = [(sample.labels["a"], sample.value) for sample in samples(text, openmetrics=openmetrics)]
    assert read == [(value, 1), (value + "x", 2)]


@both_formats
def test_what_utf8_cannot_carry_is_spelled_out(openmetrics: bool) -> None:
    """File names that are no UTF-8 (lone surrogates in Python) neither break the page nor become one and the same."""
    text = page(family(Series(("a\udcff",), 1), Series(("a\udcfe",), 2)), openmetrics=openmetrics)
    read = [(sample.labels["a"], sample.value) for sample in samples(text, openmetrics=openmetrics)]
    assert read == [("a\\udcff", 1), ("a\\udcfe", 2)]


@both_formats
@given(value=st.floats(allow_nan=False))
def test_floats_come_back_exactly(value: float, openmetrics: bool) -> None:
    """A parser reads back the very same float, infinities too."""
    (sample,) = samples(page(family(Series(("x",), value)), openmetrics=openmetrics), openmetrics=openmetrics)
    assert sample.value == value


FEW_DIGITS = st.decimals(-(10**18), 10**18, places=6).map(float)
"""Numbers as gpumap measures them, beside any that there are."""


@given(values=st.lists(st.one_of(st.floats(), FEW_DIGITS, st.integers(), st.booleans()), min_size=1, max_size=8))
def test_numbers_are_written_as_python_writes_them(values: list[float]) -> None:
    """A number has every digit and Python's notation, whatever other numbers are in its family."""
    series = [Series((str(number),), value) for number, value in enumerate(values)]
    answer = [line.rsplit(" ", 1)[1] for line in page(family(*series)).splitlines()[2:]]
    named = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf", "True": "1", "False": "0"}
    assert answer == [named.get(repr(value), repr(value)) for value in values]


def test_labels_may_look_like_a_place_for_a_number() -> None:
    """A percent sign in a label comes back, also from lines that were kept while other series came and went."""
    kept: list[Series] = []
    made = Exposition([Family("thing", "gauge", "Some help.", ("a",), lambda _: kept)])
    for values in (("%b", "100%", "%%s\n%b"), ("100%",), ("%d", "100%", "%b")):
        kept[:] = [Series((value,), number) for number, value in enumerate(values)]
        for _ in range(2):
            read = samples(made.render(empty_node()).decode(), openmetrics=False)
            assert [(sample.labels["a"], sample.value) for sample in read] == [*zip(values, (0, 1, 2), strict=False)]


@both_formats
def test_counters_end_in_total(openmetrics: bool) -> None:
    """A counter's samples end in _total; only OpenMetrics leaves it off the family's name."""
    text = page(family(Series(("x",), 3), name="things_total", kind="counter"), openmetrics=openmetrics)
    name = "things" if openmetrics else "things_total"
    wanted = f'# HELP {name} Some help.\n# TYPE {name} counter\nthings_total{{a="x"}} 3\n'
    assert text == wanted + "# EOF\n" * openmetrics
    assert [sample.name for sample in samples(text, openmetrics=openmetrics)] == ["things_total"]


@both_formats
def test_a_counter_of_another_name_is_unknown_to_openmetrics(openmetrics: bool) -> None:
    """Dialects have counters that do not end in _total: OpenMetrics knows no such ones, and reads them as unknown."""
    text = page(family(Series(("x",), 3), name="things", kind="counter"), openmetrics=openmetrics)
    kind = "unknown" if openmetrics else "counter"
    assert text == f'# HELP things Some help.\n# TYPE things {kind}\nthings{{a="x"}} 3\n' + "# EOF\n" * openmetrics
    assert [sample.value for sample in samples(text, openmetrics=openmetrics)] == [3]


def test_a_gauge_may_end_in_total() -> None:
    """OpenMetrics drops _total only from the name of a counter. Gauges of dialects have such names too."""
    text = page(family(Series(("x",), 3), name="memory_total"), openmetrics=True)
    assert text == '# HELP memory_total Some help.\n# TYPE memory_total gauge\nmemory_total{a="x"} 3\n# EOF\n'


@pytest.mark.parametrize("labels", [(), ("x", "y")])
def test_a_series_has_a_value_for_each_label(labels: tuple[str, ...]) -> None:
    """A family that returns too few or too many values is an error: no value gets a wrong label."""
    with pytest.raises(ValueError, match="argument 2"):
        page(family(Series(labels, 1)))


@both_formats
def test_optional_empty_labels_are_left_out(openmetrics: bool) -> None:
    """The line does not have a label without a value; other families write it."""
    made = family(Series(("", "y"), 1), Series(("x", ""), 2), labels=("a", "b"))
    text = page(replace(made, optional_labels=frozenset("a")), openmetrics=openmetrics)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines == ['thing{b="y"} 1', 'thing{a="x",b=""} 2']
    assert [one.labels for one in samples(text, openmetrics=openmetrics)] == [{"b": "y"}, {"a": "x", "b": ""}]
    assert 'thing{a=""} 1' in page(family(Series(("",), 1)), openmetrics=openmetrics)


@both_formats
def test_summaries_have_sum_and_count(openmetrics: bool) -> None:
    """A summary's two samples are below one HELP and TYPE."""
    series = (Series(("x",), 0.5, "_sum"), Series(("x",), 2, "_count"))
    text = page(family(*series, kind="summary"), openmetrics=openmetrics)
    assert text.startswith(
        '# HELP thing Some help.\n# TYPE thing summary\nthing_sum{a="x"} 0.5\nthing_count{a="x"} 2\n'
    )
    assert [sample.name for sample in samples(text, openmetrics=openmetrics)] == ["thing_sum", "thing_count"]


@both_formats
def test_help_is_escaped(openmetrics: bool) -> None:
    """Help comes back as it was; OpenMetrics escapes quotes in it, the text format does not."""
    text = 'One\\two \\n "three"\nfour.'
    shown = Exposition([replace(family(Series(("x",), 1)), help=text)], openmetrics=openmetrics).render(empty_node())
    parse = parse_openmetrics if openmetrics else parse_text
    assert [one.documentation for one in parse(shown.decode())] == [text]
    assert (b'\\"three\\"' in shown) == openmetrics


def test_a_family_without_samples_leaves_no_trace() -> None:
    """A family without a sample has no HELP and no TYPE; a label-less family has no braces."""
    assert page(family()) == ""
    assert page(family(), openmetrics=True) == "# EOF\n"
    assert page(family(Series((), 1), labels=())).endswith("\nthing 1\n")


@both_formats
def test_families_with_numbers_in_their_names_come_last(openmetrics: bool) -> None:
    """Their names depend on the snapshot: each has its own HELP and TYPE, and is absent without samples."""
    made = [family(Series(("x",), 1), Series(("y",), 2), name="thing_0"), family(name="thing_1")]
    made.append(family(Series(("z",), 3), name="thing_2"))
    numbered = NumberedFamilies("thing_<n>", "gauge", "Some help.", ("a",), lambda _: made)
    exposition = Exposition([numbered, family(Series(("x",), 4))], openmetrics=openmetrics)
    wanted = (
        '# HELP thing Some help.\n# TYPE thing gauge\nthing{a="x"} 4\n'
        '# HELP thing_0 Some help.\n# TYPE thing_0 gauge\nthing_0{a="x"} 1\nthing_0{a="y"} 2\n'
        '# HELP thing_2 Some help.\n# TYPE thing_2 gauge\nthing_2{a="z"} 3\n'
    )
    assert exposition.render(empty_node()).decode() == wanted + "# EOF\n" * openmetrics


def test_every_native_family_is_on_the_busy_page() -> None:
    """The snapshot that these tests render leaves out no family, so that what they say holds for all of them."""
    snapshot = busy_node(4, 3)
    assert [one.name for one in EVERYTHING if not list(one.read(snapshot))] == []


@both_formats
def test_the_whole_page_comes_back(openmetrics: bool) -> None:
    """prometheus_client's parser finds on a full page exactly the samples of the families, none more, none less."""
    snapshot = busy_node(4, 3)
    read = samples(page(*EVERYTHING, openmetrics=openmetrics, snapshot=snapshot), openmetrics=openmetrics)
    assert [(sample.name, sample.labels, sample.value) for sample in read] == expected(snapshot)


def test_a_suffix_may_change_on_a_kept_line() -> None:
    """Two samples of a summary may have the same labels: a line is kept only for the same suffix."""
    kept: list[Series] = []
    exposition = Exposition([Family("thing", "summary", "Some help.", ("a",), lambda _: kept)])
    for suffix in ("_sum", "_count", "_sum"):
        kept[:] = [Series(("x",), 1, suffix)]
        assert exposition.render(empty_node()).endswith(f'\nthing{suffix}{{a="x"}} 1\n'.encode())


def test_nothing_stale_is_left_after_churn() -> None:
    """Kept line beginnings never show a pod of before, and do not pile up as pods come and go."""
    kept = Exposition(EVERYTHING)
    chance = random.Random(1)
    full = busy_node(gpus=4)
    for generation in range(20):
        containers = [
            structs.replace(one, pod=f"p-{generation}-{number}")
            for number, one in enumerate(full.containers)
            if chance.random() < 0.5
        ]
        pods = tuple(Pod(*one.pod_name, "") for one in containers)
        now = replace(with_node(full, pods=pods, unmatched=()), containers=tuple(containers), processes=())
        assert kept.render(now) == Exposition(EVERYTHING).render(now)
        assert sum(len(lines.labels) for lines in kept._last_lines) == len(expected(now))


@both_formats
def test_self_metrics_exist_when_everything_has_failed(openmetrics: bool) -> None:
    """With no source up the page is valid and still says so."""
    text = page(*EVERYTHING, openmetrics=openmetrics, snapshot=empty_node())
    read = samples(text, openmetrics=openmetrics)
    assert {sample.labels["source"]: sample.value for sample in read if sample.name == "gpumap_source_up"} == {
        "kubelet": 0,
        "nvml": 0,
        "procfs": 0,
        "pod_identity": 0,
    }
    assert {sample.name for sample in read if not sample.name.startswith("gpumap_source_")} == {
        "gpumap_node_info",
        "gpumap_build_info",
        "gpumap_snapshot_timestamp_seconds",
        "gpumap_collections_total",
        "gpumap_capability",
    }


def test_promtool_reports_nothing() -> None:
    """`promtool check metrics` reads the full native page, with every family on it, and reports nothing."""
    done = promtool("check", "metrics", page=page(*EVERYTHING, snapshot=busy_node(4, 3)))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
