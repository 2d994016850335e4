"""Write the boards: `make boards`."""

from __future__ import annotations

from pathlib import Path

from boards import app, chargeback, fleet, health, node
from boards.grafana import render

FOLDER = Path(__file__).resolve().parent.parent / "charts" / "gpumap" / "dashboards"
BOARDS = (app.BOARD, node.BOARD, fleet.BOARD, health.BOARD, chargeback.BOARD)


def files() -> dict[str, str]:
    """Each board's file: its name and text."""
    return {f"{board.uid}.json": render(board) for board in BOARDS}


if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
