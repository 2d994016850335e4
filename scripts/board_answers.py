"""What Prometheus answers to the panels of a board, in the shape that a picture shows: curves, and rows of tables."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tests.dashboards.boards_world import fill_in
from tests.prometheus import Prometheus

Json = dict[str, Any]
POINTS = 150


class Curve(NamedTuple):
    legend: str
    points: tuple[tuple[float, float], ...]


class Cells(NamedTuple):
    titles: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]


def curves(server: Prometheus, panel: Json, chosen: Mapping[str, str], seconds: float) -> list[Curve]:
    """Each series by its legend, the greatest last value first."""
    found, end = [], time.time() - 2
    over = {"start": str(end - seconds), "end": str(end), "step": str(max(1.0, seconds / POINTS))}
    for target in panel["targets"]:
        query = fill_in(target["expr"], chosen)
        for series in server.api("query_range", query=query, **over)["result"]:
            points = tuple((at, float(value)) for at, value in series["values"] if not math.isnan(float(value)))
            if points:
                found.append(Curve(legend(target["legendFormat"], series["metric"]), points))
    return sorted(found, key=lambda curve: -curve.points[-1][1])


def legend(form: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), form).strip()


def number(server: Prometheus, panel: Json, chosen: Mapping[str, str]) -> float | None:
    rows = server.ask(fill_in(panel["targets"][0]["expr"], chosen))
    return rows[0][1] if rows else None


def cells(server: Prometheus, panel: Json, chosen: Mapping[str, str]) -> Cells:
    """The answers joined as Grafana's merge does: by the labels that all of them have."""
    answers = {f"Value #{target['refId']}": server.ask(fill_in(target["expr"], chosen)) for target in panel["targets"]}
    if len(answers) == 1:
        (only,) = answers.values()
        return arranged(panel, [{**labels, "Value": value} for labels, value in only])
    shared = sorted(set.intersection(*(set(labels) for answer in answers.values() for labels, _ in answer)))
    rows: dict[tuple[str, ...], dict[str, str | float]] = {}
    for name, answer in answers.items():
        for labels, value in answer:
            row = rows.setdefault(tuple(labels[label] for label in shared), {})
            row.update({**labels, name: value})
    return arranged(panel, list(rows.values()))


def arranged(panel: Json, rows: Sequence[Mapping[str, str | float]]) -> Cells:
    """Columns in their order and under their titles, without those that no row has; sorted."""
    organize = panel["transformations"][1]["options"]
    shown = [
        name for name in organize["indexByName"] if any(name in row for row in rows) and name != "uuid"
    ]  # a uuid needs much room and does not help the reader of a picture
    titles: Mapping[str, str] = organize["renameByName"]
    (order,) = panel["options"]["sortBy"]
    (by,) = (name for name, title in titles.items() if title == order["displayName"])

    def key(row: Mapping[str, str | float]) -> tuple[bool, str | float]:
        return by in row, row.get(by, 0.0)

    ordered = sorted(rows, key=key, reverse=order["desc"])
    return Cells(
        tuple(titles[name] for name in shown), tuple(tuple(row.get(name) for name in shown) for row in ordered)
    )
