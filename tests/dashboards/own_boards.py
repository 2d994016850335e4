"""gpumap's own boards as their code makes them, and what tests ask of each: board, panel, query."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from boards.__main__ import files

Json = dict[str, Any]


class Asked(NamedTuple):
    board: Json
    panel: Json
    target: Json


def name(asked: Asked) -> str:
    return f"{asked.board['uid']}-{asked.panel['id']}{asked.target['refId']}-{asked.panel['title']}"


def read() -> dict[str, Json]:
    return {board["uid"]: board for board in map(json.loads, files().values())}


BOARDS = read()
PANELS = [
    pytest.param(board, panel, id=f"{uid}-{panel['id']}-{panel['title']}")
    for uid, board in BOARDS.items()
    for panel in board["panels"]
    if panel["type"] != "row"
]
ASKED = [
    Asked(board, panel, target)
    for board in BOARDS.values()
    for panel in board["panels"]
    for target in panel.get("targets", ())
]
each_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
each_panel = pytest.mark.parametrize(("board", "panel"), PANELS)
each_target = pytest.mark.parametrize("asked", ASKED, ids=name)
