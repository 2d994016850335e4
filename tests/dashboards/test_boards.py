"""Dashboards of the field against gpumap with every dialect on: each panel's queries answer, or are listed as those
that cannot, with the reason; docs/how-to/replace/README.md has the sums.

A file of tests/boards/ is a dashboard: its panels with their queries as they were published. Grafana's variables are
filled in as "All" does: any value, but the label must be there. `="$x"` is asked as `=~"$x"`: for every choice at once.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NotRequired, TypedDict

import pytest

from tests.fleet import Fleet, running_fleet

BOARDS = Path(__file__).parents[1] / "boards"
INDEX = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "replace" / "README.md"
NAMES = {
    "12239": "[12239](https://grafana.com/grafana/dashboards/12239), dcgm-exporter",
    "14574": "[14574](https://grafana.com/grafana/dashboards/14574), nvidia_gpu_exporter",
    "arms-gpu-app": "ARMS, GPU APP",
    "arms-gpu-node": "ARMS, GPU Node",
}
TIMES = {"__rate_interval": "30s", "__interval": "5s", "__range": "30s"}
WINDOW_SECONDS = 5.0
SETTLE_SECONDS = 1.5


class Panel(TypedDict):
    panel: str
    queries: list[str]
    cannot: NotRequired[str]
    """Why it has no answer."""
    partly: NotRequired[str]
    """What its answer is without."""


def read(board: Path) -> list[Panel]:
    panels: list[Panel] = json.loads(board.read_text(encoding="utf-8"))
    return panels


def fill_in(query: str) -> str:
    """The query as Grafana would send it, with "All" chosen."""
    for name, value in TIMES.items():
        query = re.sub(rf"\$(?:{name}\b|\{{{name}\}})", value, query)
    query = re.sub(r'(?<![!=~])=(?=\s*"\$)', "=~", query)
    return re.sub(r"\$(?:\w+|\{\w+(?::\w+)?\})", ".+", query)


CASES = [
    pytest.param(panel, query, id=f"{board.stem}-{panel['panel']}-{number}")
    for board in sorted(BOARDS.glob("*.json"))
    for panel in read(board)
    for number, query in enumerate(panel["queries"])
]


@pytest.fixture(name="fleet", scope="module")
def run_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), "dialects") as fleet:
        yield fleet


@pytest.mark.parametrize(("panel", "query"), CASES)
def test_a_panel_answers_or_is_said_not_to(fleet: Fleet, panel: Panel, query: str) -> None:
    """Asked over a range, as a panel does: it has points, or none where the board's file says that it cannot."""
    end = fleet["dialects"].last_whole(SETTLE_SECONDS)
    asked = {"query": fill_in(query), "start": str(end - WINDOW_SECONDS), "end": str(end), "step": "1"}
    series = fleet["dialects"].api("query_range", **asked)["result"]
    points = [value for one in series for _, value in one["values"] if not math.isnan(float(value))]
    assert bool(points) == ("cannot" not in panel)


def summary() -> str:
    """Return the table of docs/how-to/replace/README.md: how many panels a board has, and those without data."""
    rows = ["| board | panels | without data |", "|---|---|---|"]
    for board in sorted(BOARDS.glob("*.json")):
        panels = read(board)
        missing = [one["panel"] for one in panels if "cannot" in one]
        rows.append(f"| {NAMES[board.stem]} | {len(panels)} | {', '.join(missing) or 'none'} |")
    return "\n".join(rows)


def test_the_index_tells_which_panels_answer() -> None:
    """docs/how-to/replace/README.md has the number of panels of each board, and those without data."""
    page = INDEX.read_text(encoding="utf-8")
    assert summary() in page, f"write there:\n{summary()}"
