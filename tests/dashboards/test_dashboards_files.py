"""The files of gpumap's boards: they are the code's, whole, and ask for nothing that gpumap does not have."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path

import yaml

from boards.__main__ import FOLDER, files
from tests.dashboards.board_servers import RECORDS
from tests.dashboards.own_boards import BOARDS, Asked, Json, each_board, each_panel, each_target
from tests.dashboards.promql_names import LABELS, assert_known, selectors

UNITS = {"short", "none", "bytes", "Bps", "percentunit", "watt", "celsius", "s", "kwatth", "ops"}
"""Those of Grafana's units (packages/grafana-data, valueFormats) that the boards use."""
MADE = {"device", "team", "$label"}
"""Labels that queries make."""


def test_the_files_are_what_the_code_says() -> None:
    """The boards of charts/gpumap/dashboards are what `make boards` writes, byte for byte, and there are no others."""
    on_disk = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    assert on_disk == files(), "make boards"
    assert (Path(__file__).resolve().parents[2] / "dashboards").resolve() == FOLDER


@each_board
def test_a_board_is_whole(board: Json) -> None:
    """Fixed uid, tag, links to the others, no data source of its own, ids once, panels side by side."""
    assert re.fullmatch(r"gpumap-[a-z]+", board["uid"])
    assert "gpumap" in board["tags"]
    assert board["editable"]
    assert board["links"][0]["tags"] == ["gpumap"]
    assert "__inputs" not in board
    names = [one["name"] for one in board["templating"]["list"]]
    assert names[:2] == ["datasource", "cluster"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for one, other in combinations([panel["gridPos"] for panel in board["panels"]], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in board["panels"])
    used = set(re.findall(r"\$\{?([a-z_]+)", json.dumps(board["panels"])))
    assert used - {"__field", "__data", "__url_time_range", "__rate_interval", "__range"} <= set(names)


@each_panel
def test_a_panel_is_whole(board: Json, panel: Json) -> None:
    """It says what it shows and what absent means, has a unit that Grafana knows, and asks the chosen data source."""
    assert len(panel["description"]) > 20
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
    letters = [target["refId"] for target in panel["targets"]]
    assert len(set(letters)) == len(letters)
    told = panel["fieldConfig"]
    assert told["defaults"]["noValue"] in ("unknown", "none")
    units = {one["value"] for over in told["overrides"] for one in over["properties"] if one["id"] == "unit"}
    assert units | {told["defaults"]["unit"]} <= UNITS


@each_panel
def test_links_lead_to_boards_that_are_there(board: Json, panel: Json) -> None:
    """A row's or series' link names a board of these, and variables which that board has."""
    links = [link for over in panel["fieldConfig"]["overrides"] for one in over["properties"] for link in linked(one)]
    for link in [*links, *panel["fieldConfig"]["defaults"].get("links", ())]:
        match = re.fullmatch(r"/d/([a-z-]+)\?(.+)", link["url"])
        assert match
        there = {one["name"] for one in BOARDS[match[1]]["templating"]["list"]}
        assert set(re.findall(r"var-(\w+)=", match[2])) <= there


def linked(told: Json) -> list[Json]:
    links: list[Json] = told["value"] if told["id"] == "links" else []
    return links


@each_target
def test_names_are_those_of_gpumap(asked: Asked) -> None:
    """Every series asked for is of a family of gpumap's, a record, or a neighbour's, and of the chosen cluster."""
    expr = asked.target["expr"]
    assert_known(expr, records(), MADE)
    assert all('cluster=~"$cluster"' in matchers for _, matchers in selectors(expr))


@each_board
def test_gpumaps_own_pod_is_nobody(board: Json) -> None:
    """No query uses what a job without honorLabels reports of pods: `pod` is gpumap's own there."""
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    asked += [one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    for expr in asked:
        for name, matchers in selectors(expr):
            if "pod" in LABELS.get(name, ()):
                assert 'exported_pod=""' in matchers, name


def records() -> set[str]:
    rules = yaml.safe_load(RECORDS.read_text(encoding="utf-8"))
    return {rule["record"] for group in rules["groups"] for rule in group["rules"] if "record" in rule}


def test_the_docs_have_every_board() -> None:
    docs = FOLDER.parents[2] / "docs"
    page = (docs / "how-to" / "boards.md").read_text(encoding="utf-8")
    for uid, board in BOARDS.items():
        assert f"`{uid}`" in page
        assert all(f"`{one['name']}`" in page for one in board["templating"]["list"])
