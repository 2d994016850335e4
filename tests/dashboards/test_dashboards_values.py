"""What the boards say of what does not happen in a minute of simulated nodes: played series, asked by promtool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from gpumap.model.names import FINDINGS
from tests.dashboards.board_servers import RECORDS, fill_in
from tests.dashboards.own_boards import BOARDS
from tests.promtool import Asked, assert_answers

Values = Mapping[str, str]
"""promtool's notation, by series; a sample each minute."""

DRIVER_DOWN: Values = {
    'gpumap_gpu_up{node="blind",gpu_uuid="GPU-a"}': "1x30 stale",
    'gpumap_gpu_up{node="blind",gpu_uuid="GPU-b"}': "1x30 stale",
    'gpumap_source_up{node="blind",source="nvml"}': "1x30 0x60",
    'gpumap_gpu_up{node="lost",gpu_uuid="GPU-c"}': "1x90",
    'gpumap_gpu_up{node="lost",gpu_uuid="GPU-d"}': "0x90",
    'gpumap_source_up{node="lost",source="nvml"}': "1x90",
    'gpumap_source_up{node="without",source="nvml"}': "0x90",
    'gpumap_gpu_up{node="gone",gpu_uuid="GPU-e"}': "1x20 stale",
    'gpumap_source_up{node="gone",source="nvml"}': "1x20 stale",
}
"""Nodes: one with a driver that fails as a whole, one that loses a GPU, one without any, and one that is taken away."""
FAILS = [
    ("gpumap-fleet", "Nodes", 3, 2),
    ("gpumap-fleet", "GPUs", 5, 4),
    ("gpumap-fleet", "GPUs not answering", 1, 3),
    ("gpumap-health", "GPUs", 5, 4),
    ("gpumap-health", "GPUs not answering", 1, 3),
]


@pytest.mark.parametrize(("uid", "title", "before", "after"), FAILS)
@pytest.mark.parametrize("rules", [(), (RECORDS,)], ids=["raw", "recorded"])
def test_a_driver_that_is_down_hides_no_gpu(
    tmp_path: Path, uid: str, title: str, before: int, after: int, rules: Sequence[Path]
) -> None:
    """Its node's GPUs are there and do not answer; those of a node that was taken away are gone."""
    query = stat(uid, title)
    prove(tmp_path, DRIVER_DOWN, [(query, "19m", {"{}": before}), (query, "80m", {"{}": after})], rules)


def test_gpus_of_a_driver_that_is_down_are_listed(tmp_path: Path) -> None:
    """They have a row each that says 0, without names that no source reports now; GPUs that are well have theirs."""
    named = {'gpumap_device_info{node="lost",uuid="GPU-c",gpu_uuid="GPU-c",index="3",model="H"}': "1x90"}
    (query,) = (
        target["expr"]
        for panel in BOARDS["gpumap-health"]["panels"]
        if panel["title"] == "GPUs" and panel["type"] == "table"
        for target in panel["targets"]
        if "gpumap_gpu_up" in target["expr"]
    )
    listed = {
        '{node="blind",gpu_uuid="GPU-a"}': 0,
        '{node="blind",gpu_uuid="GPU-b"}': 0,
        '{node="lost",gpu_uuid="GPU-c",index="3",model="H"}': 1,
        '{node="lost",gpu_uuid="GPU-d"}': 0,
    }
    prove(tmp_path, {**DRIVER_DOWN, **named}, [(query, "80m", listed)])


ECC = 'gpumap_gpu_ecc_errors_total{node="n",gpu_uuid="GPU-a",type="uncorrected",location="dram"}'
XID = 'gpumap_gpu_xid_errors_total{node="n",gpu_uuid="GPU-a"}'
MEMORY, HEARD = "Memory errors, uncorrected", "XID errors"
HISTORIES = [
    pytest.param(MEMORY, ECC, "120x60", 0, id="long ago"),
    pytest.param(MEMORY, ECC, "120x20 _x12 120x30", 0, id="a gap where the range begins"),
    pytest.param(MEMORY, ECC, "_x35 120x30", 0, id="a card that is new here"),
    pytest.param(MEMORY, ECC, "120x35 121x30", 1, id="one"),
    pytest.param(MEMORY, ECC, "0x33 3x4 8x30", 8, id="the first ones of a card"),
    pytest.param(MEMORY, ECC, "120x35 118x30", 0, id="a fall"),
    pytest.param(HEARD, XID, "7x60", 0, id="heard long ago"),
    pytest.param(HEARD, XID, "7x35 9x30", 2, id="two"),
    pytest.param(HEARD, XID, "_x35 1x30", 1, id="a series that begins with its first error"),
]


@pytest.mark.parametrize(("title", "series", "values", "expected"), HISTORIES)
def test_errors_are_those_of_the_time_range(
    tmp_path: Path, title: str, series: str, values: str, expected: int
) -> None:
    """Of the driver's counts what they rose by, of gpumap's own also the first: ten minutes before the fortieth."""
    prove(tmp_path, {series: values}, [(stat("gpumap-health", title), "40m", {"{}": expected})])


IDLE = (
    'gpumap_finding_gpus{node="n",finding="idle",reason="no_process",namespace="ml",pod="p",container="c",uuid="GPU-a"}'
)
MAYBE_IDLE = IDLE.replace('"idle"', '"maybe_idle"')
JUDGED: Values = {
    'gpumap_finding_judged{node="n",finding="idle"}': "3x60",
    'gpumap_finding_judged{node="m",finding="idle"}': "0x60",
}
UNJUDGED, UNSUPPORTED = (
    f'gpumap_finding_unjudged{{node="n",finding="idle",reason="{reason}"}}'
    for reason in ("unknown_work", "not_supported")
)
GRANTED = 'gpumap_finding_judged{node="n",finding="unused"}'
HELD_IDLE, UNUSED = ("gpumap-app", "GPUs held idle"), ("gpumap-fleet", "Granted, unused")
JUDGEMENTS: Sequence[tuple[str, tuple[str, str], Values, Mapping[str, float]]] = [
    ("none is idle", HELD_IDLE, JUDGED, {"{}": 0}),
    ("what is not supported is not missing", HELD_IDLE, {**JUDGED, UNSUPPORTED: "2x60"}, {"{}": 0}),
    ("maybe_idle is not idle", HELD_IDLE, {**JUDGED, MAYBE_IDLE: "0.5x60"}, {"{}": 0}),
    ("one is not judged", HELD_IDLE, {**JUDGED, UNJUDGED: "1x60"}, {}),
    ("one is idle, and one is not judged", HELD_IDLE, {**JUDGED, UNJUDGED: "1x60", IDLE: "0.5x60"}, {"{}": 0.5}),
    ("no node is scraped", HELD_IDLE, {}, {}),
    ("no grant is known", UNUSED, {**JUDGED, GRANTED: "0x60"}, {}),
    ("none is unused", UNUSED, {**JUDGED, GRANTED: "2x60"}, {"{}": 0}),
]


@pytest.mark.parametrize(("panel", "series", "expected"), [pytest.param(*row, id=name) for name, *row in JUDGEMENTS])
def test_a_sum_of_findings_is_0_only_if_all_are_judged(
    tmp_path: Path, panel: tuple[str, str], series: Values, expected: Mapping[str, float]
) -> None:
    """Otherwise it is unknown."""
    prove(tmp_path, series, [(stat(*panel), "30m", expected)])


def test_what_is_not_judged_is_listed_by_reason(tmp_path: Path) -> None:
    """Numbers of all nodes are added up; a node that two jobs scrape counts once."""
    unjudged = 'gpumap_finding_unjudged{{node="{}",instance="{}",finding="idle",reason="{}"}}'
    counts = {("n", "a", "unknown_work"): 2, ("n", "b", "unknown_work"): 2, ("m", "c", "unknown_work"): 1}
    counts |= {("m", "c", "not_supported"): 7}
    (table,) = (panel for panel in BOARDS["gpumap-fleet"]["panels"] if panel["title"] == "Not judged")
    expected = {f'{{finding="idle",reason="{reason}"}}': n for reason, n in (("unknown_work", 3), ("not_supported", 7))}
    series = {unjudged.format(*labels): f"{count}x60" for labels, count in counts.items()}
    prove(tmp_path, series, [(table["targets"][0]["expr"], "30m", expected)])


def test_maybe_idle_has_words_and_a_color_of_its_own() -> None:
    """In each table of findings."""
    overrides = [
        {prop["id"]: prop["value"] for prop in override["properties"]}
        for board in BOARDS.values()
        for panel in board["panels"]
        if panel["type"] == "table"
        for override in panel["fieldConfig"]["overrides"]
        if override["matcher"]["options"] == "Finding"
    ]
    assert overrides
    for override in overrides:
        (words,) = (mapping["options"] for mapping in override["mappings"])
        assert {*words} == {*FINDINGS}
        assert words["maybe_idle"]["text"] == "may be idle"
        assert words["maybe_idle"]["color"] not in {words[kind]["color"] for kind in words if kind != "maybe_idle"}


def test_a_fault_has_no_pod(tmp_path: Path) -> None:
    """Also if the scrape has no honorLabels, which gives its series the labels of gpumap's own pod."""
    own = 'namespace="gpumap",pod="gpumap-x",container="gpumap"'
    fault = f'gpumap_finding_gpus{{node="n",finding="fault",reason="lost",{own},uuid="GPU-a"}}'
    (table,) = (
        panel for panel in BOARDS["gpumap-fleet"]["panels"] if panel["title"] == "Findings" and "targets" in panel
    )
    expected = {'{node="n",finding="fault",reason="lost",uuid="GPU-a"}': 1.0}
    prove(tmp_path, {fault: "1x60"}, [(table["targets"][1]["expr"], "30m", expected)])


def test_a_gpu_with_several_faults_is_one_row(tmp_path: Path) -> None:
    """Boards count it once, and show its worst reason. GPUs without a uuid count in the row of each reason."""
    counted = {("lost", "GPU-a"): 1, ("xid_79", "GPU-a"): 0, ("lost", ""): 2, ("hung", ""): 1}
    series: dict[str, str] = {}
    for (reason, uuid), number in counted.items():
        labels = f'node="n",finding="fault",reason="{reason}",uuid="{uuid}"'
        series[f"gpumap_finding_gpus{{{labels}}}"] = f"{number}x60"
        series[f"gpumap_finding_since_timestamp_seconds{{{labels}}}"] = "600x60"
    panels = {(uid, panel["title"]): panel for uid, board in BOARDS.items() for panel in board["panels"]}
    by_node = panels["gpumap-fleet", "Findings by node"]["targets"]
    faults = panels["gpumap-health", "Faults and recovery"]["targets"]
    rows = ('{node="n",reason="lost",uuid="GPU-a"}', '{node="n",reason="lost"}', '{node="n",reason="hung"}')
    of_node = '{node="n",finding="fault"}'
    asked: list[Asked] = [
        (stat("gpumap-health", "GPUs with a fault"), "30m", {"{}": 4}),
        (by_node[0]["expr"], "30m", {of_node: 3}),
        (by_node[1]["expr"], "30m", {of_node: 4}),
        (faults[0]["expr"], "30m", dict.fromkeys(rows, 1200)),
        (faults[1]["expr"], "30m", dict(zip(rows, (1, 2, 1), strict=True))),
    ]
    prove(tmp_path, series, asked)


def stat(uid: str, title: str) -> str:
    (query,) = (
        panel["targets"][0]["expr"]
        for panel in BOARDS[uid]["panels"]
        if panel["title"] == title and panel["type"] == "stat"
    )
    return fill_in(query, {})


def prove(folder: Path, series: Values, asked: Sequence[Asked], rules: Sequence[Path] = ()) -> None:
    """Each query, at its moment, has these series with these values, says promtool."""
    of_gpumap = {name.replace("{", '{job="gpumap",', 1): values for name, values in series.items()}
    filled = ((fill_in(query, {}), moment, expected) for query, moment, expected in asked)
    assert_answers(folder, of_gpumap, *filled, rules=rules)
