"""gpumap's own boards: no panel is without data on simulated nodes, and what it shows is true.

Every query goes to a real Prometheus that scrapes the nodes as the chart has it, with Grafana's variables filled in.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest

from tests.dashboards.board_servers import CLUSTER, OWN_POD, Servers, fill_in, running_servers
from tests.dashboards.own_boards import ASKED, BOARDS, Asked, Json, each_panel, each_target, name
from tests.prometheus import Prometheus, eventually

SETTLE_SECONDS = 2.0
WINDOW_SECONDS = 10.0
SOMETIMES = {"cluster"}
"""Columns that are there only where the reader's Prometheus has the label."""
SHARED = {"node": "demo-node", "namespace": "recsys", "pod": "ranker"}
"""A pod on a card that two share."""
RARE = (
    "gpumap_container_unassigned_use > 0",
    "gpumap_container_xid_errors_total > 0",
    "gpumap_gpu_fault_info",
    'gpumap_finding_memory_bytes{finding="idle"}',
    "gpumap_unmatched_slots > 0",
)
"""What some panels are about, and no pod of a healthy card has."""


@pytest.fixture(name="servers", scope="module")
def run_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with running_servers(tmp_path_factory.mktemp("boards")) as servers:
        yield servers


@pytest.fixture(name="places", scope="module")
def find_places(servers: Servers) -> Sequence[Mapping[str, str]]:
    """Values for the variables: a pod on a shared card, then those with a rare value."""
    matchers = ", ".join(f'{name}="{value}"' for name, value in SHARED.items())
    found = []
    for query in (f"gpumap_allocation_info{{{matchers}}}", *RARE):
        for labels, _ in servers.plain.ask(query):
            place = {name: labels[name] for name in SHARED if name in labels}
            uuid = labels.get("uuid") or labels.get("gpu_uuid")
            found.append({**place, **({"uuid": uuid, "gpu": uuid} if uuid else {})})
    return found


def answer(server: Prometheus, target: Json, chosen: Mapping[str, str]) -> list[dict[str, str]]:
    """The labels of each series that has a value which is a number."""
    query, end = fill_in(target["expr"], chosen), time.time() - SETTLE_SECONDS
    if target["instant"]:
        return [labels for labels, value in server.ask(query, time=str(end)) if not math.isnan(value)]
    over = {"start": str(end - WINDOW_SECONDS), "end": str(end), "step": "1"}
    series = server.api("query_range", query=query, **over)["result"]
    return [one["metric"] for one in series if any(not math.isnan(float(value)) for _, value in one["values"])]


@each_target
def test_every_query_has_an_answer(servers: Servers, asked: Asked) -> None:
    """With all chosen, every query of every panel has data, and the labels that its legend names."""
    answers: list[dict[str, str]] = []

    def answered() -> bool:
        answers[:] = answer(servers.plain, asked.target, {})
        return bool(answers)

    eventually(answered, about=lambda: asked.target["expr"])
    there = {label for labels in answers for label in labels}
    assert set(re.findall(r"{{(\w+)}}", asked.target.get("legendFormat", ""))) <= there


@each_target
def test_a_choice_is_obeyed(servers: Servers, places: Sequence[Mapping[str, str]], asked: Asked) -> None:
    """With one of each chosen, there is an answer, and it is of nothing else."""
    variables = {one["name"] for one in asked.board["templating"]["list"]}
    for place in places:
        chosen = {name: value for name, value in place.items() if name in variables}
        wanted = {**chosen, "uuid": place["uuid"], "gpu_uuid": place["gpu"]} if "gpu" in chosen else chosen
        if answers := answer(servers.plain, asked.target, chosen):
            break
    assert answers
    for labels in answers:
        if asked.board["uid"] == "gpumap-health" and "pod" in labels:
            continue  # a container's device is no GPU where it is a MIG device
        assert {name: labels[name] for name in wanted if name in labels}.items() <= wanted.items()


@each_target
def test_a_cluster_with_a_name_answers_too(servers: Servers, asked: Asked) -> None:
    """Where Prometheus has the label `cluster` and one is chosen, the same queries have data, each thing once."""
    answers: list[dict[str, str]] = []

    def answered() -> bool:
        answers[:] = answer(servers.twice, asked.target, {"cluster": CLUSTER})
        return bool(answers)

    eventually(answered, about=lambda: asked.target["expr"])
    assert not any({"job", "instance"} & labels.keys() for labels in answers)
    assert not any({*OWN_POD.values()} & {*labels.values()} for labels in answers)


RECORDED = [asked for asked in ASKED if re.search(r"\w:gpumap_", asked.target["expr"])]


@pytest.mark.parametrize("asked", RECORDED, ids=name)
def test_fleets_need_nothing_but_the_records(servers: Servers, asked: Asked) -> None:
    """On a server that has only what rules/fleet.yaml records, the queries that take records have answers too."""
    alone = re.sub(r"(?<![\w:])gpumap_(?=\w+\{)", "nowhere_", asked.target["expr"])
    eventually(lambda: bool(answer(servers.plain, {**asked.target, "expr": alone}, {})), about=lambda: alone)


TOTALS = {
    "gpumap-app": ("Pods that hold a GPU", "GPUs held", "Granted memory"),
    "gpumap-node": ("Devices", "Memory"),
    "gpumap-fleet": ("Nodes", "GPUs", "GPUs held"),
    "gpumap-health": ("GPUs",),
}


@pytest.mark.parametrize(("uid", "title"), [(uid, title) for uid, titles in TOTALS.items() for title in titles])
def test_a_node_that_is_scraped_twice_counts_once(servers: Servers, uid: str, title: str) -> None:
    """Totals are the same, whether one or three targets report a node, one of them of gpumap's own pod."""
    (query,) = (
        panel["targets"][0]["expr"]
        for panel in BOARDS[uid]["panels"]
        if panel["title"] == title and panel["type"] == "stat"
    )
    filled = fill_in(query, {"node": "sharing-node"})  # where nothing comes and goes
    eventually(lambda: servers.plain.value(filled) == servers.twice.value(filled), about=lambda: filled)


def test_hours_of_a_node_that_is_scraped_twice_are_charged_once(servers: Servers) -> None:
    """What is held is nearly the same in both, and not twice as much: they began to scrape one after the other."""
    (query,) = (
        panel["targets"][0]["expr"]
        for panel in BOARDS["gpumap-chargeback"]["panels"]
        if panel["title"] == "GPU-hours held"
    )
    filled = fill_in(query, {"node": "sharing-node"})
    eventually(lambda: 0.6 < servers.twice.value(filled) / servers.plain.value(filled) < 1.6, about=lambda: filled)


def test_memory_that_compute_instances_share_is_granted_once(servers: Servers) -> None:
    """Of two that hold one GPU instance's memory together, each counts with half of it, also where one is chosen."""
    (query,) = (
        panel["targets"][0]["expr"] for panel in BOARDS["gpumap-app"]["panels"] if panel["title"] == "Granted memory"
    )
    whole = servers.plain.value('max(gpumap_container_allocated_gpu_memory_bytes{namespace="mig", pod="compute-a"})')
    assert servers.plain.value(fill_in(query, {"namespace": "mig", "pod": "compute-.*"})) == whole
    assert servers.plain.value(fill_in(query, {"namespace": "mig", "pod": "compute-a"})) == whole / 2


def pairs() -> dict[str, tuple[str, str]]:
    """The records that boards take, each with its matchers and with what a board takes in its place."""
    found = {}
    for asked in RECORDED:
        expr = asked.target["expr"]
        for match in re.finditer(r"max by \([^)]*\) \(([\w:]+:(?:sum|count|rate5m))\{([^}]*)\} or ", expr):
            found[match[1]] = (match[2], inside(expr[match.end() :]))
    return found


def inside(text: str) -> str:
    """Up to the bracket that closes one which was opened before."""
    depth = 0
    for at, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth < 0:
            return text[:at]
    raise ValueError(text)


@pytest.mark.parametrize("record", pairs())
def test_a_record_is_what_a_board_takes_in_its_place(servers: Servers, record: str) -> None:
    """rules/fleet.yaml and the boards mean the same by the same words, at the moment of which the record is."""
    where, raw = pairs()[record]

    def asked(query: str, moment: str) -> dict[tuple[str, ...], float]:
        return {
            tuple(name for label, name in sorted(labels.items()) if label != "__name__"): value
            for labels, value in servers.plain.ask(fill_in(query, {}), time=moment)
        }

    def alike() -> bool:
        """A scrape may end after the rules have been evaluated, and be of a moment before: then the next one counts."""
        moment = str(servers.plain.value(f"max(timestamp({record}))"))
        expected = asked(raw, moment)
        return bool(expected) and asked(f"{record}{{{where}}}", moment) == pytest.approx(expected)

    eventually(alike, about=lambda: (record, raw))


def query_of(uid: str, title: str, column: str, **chosen: str) -> str:
    """What a table of a board asks for a column."""
    (panel,) = (one for one in BOARDS[uid]["panels"] if one["title"] == title and one["type"] == "table")
    titles = panel["transformations"][1]["options"]["renameByName"]
    (letter,) = (name.removeprefix("Value #") for name, shown in titles.items() if shown == column)
    (query,) = (target["expr"] for target in panel["targets"] if target["refId"] == letter)
    return fill_in(query, chosen)


def test_the_longest_idle_do_no_work(servers: Servers) -> None:
    """No row is of a container that computes on the device at that moment, while others of the node do."""
    idle = query_of("gpumap-fleet", "Longest idle", "GPUs")
    working = "gpumap_container_sm_utilization_ratio > 0"
    assert len(servers.plain.ask(idle)) > 1
    assert len(servers.plain.ask(working)) > 1
    assert servers.plain.ask(f"{idle} and on (node, namespace, pod, container, uuid) {working}") == []


@pytest.mark.parametrize("label", ["namespace", "node"])
def test_findings_are_added_up(servers: Servers, label: str) -> None:
    """Each finding of the fleet is in one row for its namespace, and in one for its node."""
    every, counted = (
        "gpumap_finding_since_timestamp_seconds",
        query_of("gpumap-fleet", f"Findings by {label}", "Findings"),
    )
    rows = f"count by ({label}, finding) ({every})"
    eventually(
        lambda: (
            servers.plain.value(f"count(({counted}) == on ({label}, finding) {rows})")
            == servers.plain.value(f"count({rows})")
        ),
        about=lambda: servers.plain.ask(counted),
    )


def test_each_sharer_of_a_card_has_its_own_value(servers: Servers, places: Sequence[Mapping[str, str]]) -> None:
    """Two pods on one card: the table shows what each uses, and neither shows the card's."""
    panel = next(one for one in BOARDS["gpumap-app"]["panels"] if one["type"] == "table")
    query = query_of("gpumap-app", panel["title"], "Used", uuid=places[0]["uuid"])
    used = servers.plain.by("pod", query)
    assert used == {"ranker": 11 * 2**30, "recommender": 19 * 2**30}


@each_panel
def test_columns_of_tables_are_there(servers: Servers, board: Json, panel: Json) -> None:
    """What a table orders, renames or hides is a column of its answers; what it formats is one of its titles."""
    if panel["type"] != "table":
        return
    one = len(panel["targets"]) == 1
    columns = {"Time"} | {"Value" if one else f"Value #{target['refId']}" for target in panel["targets"]}
    for target in panel["targets"]:
        for labels in answer(servers.plain, target, {}):
            columns |= labels.keys()
    organize = panel["transformations"][1]["options"]
    named = organize["indexByName"].keys() | organize["excludeByName"].keys()
    assert named - columns <= SOMETIMES
    titles = set(organize["renameByName"].values())
    overridden = {one["matcher"]["options"] for one in panel["fieldConfig"]["overrides"]}
    assert overridden | {order["displayName"] for order in panel["options"]["sortBy"]} <= titles
    assert columns - organize["renameByName"].keys() <= organize["excludeByName"].keys()


VARIABLES = [
    pytest.param(variable, id=f"{uid}-{variable['name']}")
    for uid, board in BOARDS.items()
    for variable in board["templating"]["list"]
    if variable["type"] == "query"
]


@pytest.mark.parametrize("variable", VARIABLES)
def test_there_is_something_to_choose(servers: Servers, variable: Json) -> None:
    """Each variable's query has values; clusters only where there is such a label."""
    match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
    assert match
    for server, expected in ((servers.plain, variable["name"] != "cluster"), (servers.twice, True)):
        found = server.api(f"label/{match[2]}/values", **{"match[]": fill_in(match[1], {})})
        assert bool(found) == expected
