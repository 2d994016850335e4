"""Draw gpumap's Grafana boards for docs/how-to/boards.md, with the answers of a real Prometheus.

It is no Grafana: curves, numbers and tables are drawn here, and photographed in Chromium. `make pictures` runs it.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.board_answers import Cells, Curve, cells, curves, number
from tests.browser.browser import chromium
from tests.dashboards.boards_world import running_world
from tests.prometheus import Prometheus

Json = dict[str, Any]
Line = tuple[tuple[float, float], ...]
ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures" / "boards"
WIDTH, UNIT_HEIGHT = 1240, 33
SECONDS = 360.0
"""How long the nodes run first."""
CHOSEN: Mapping[str, Mapping[str, str]] = {
    "gpumap-app": {"node": "demo-node"},
    "gpumap-node": {"node": "demo-node"},
    "gpumap-health": {"node": "demo-node"},
}
COLOURS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#b877d9", "#8ab8ff", "#ff7383", "#96d98d", "#ffb357", "#ca95e5")
NAMED = {"green": "#73bf69", "yellow": "#f2cc0c", "red": "#f2495c"}
LEGENDS = 4
STYLE = f"""
body {{ margin: 0; background: #111217; color: #ccccdc; font: 12px sans-serif; width: {WIDTH}px; }}
header {{ padding: 10px 12px 4px; font-size: 16px; }} header small {{ color: #8e8e9b; font-size: 12px; }}
main {{ position: relative; }} section {{ position: absolute; background: #181b1f; border-radius: 2px;
 box-sizing: border-box; padding: 5px 8px; overflow: hidden; }}
h2 {{ font: 13px sans-serif; margin: 2px; color: #ddd; }}
h3 {{ position: absolute; margin: 0; font: 600 13px sans-serif; padding: 9px 10px 0; }}
b {{ display: block; text-align: center; font: 26px sans-serif; padding-top: 22px; }}
table {{ border-collapse: collapse; width: 100%; }} th {{ text-align: left; font-weight: 600; color: #6e9fff; }}
td, th {{ padding: 2px 5px; white-space: nowrap; border-bottom: 1px solid #26282d; font-size: 11px; }}
.n {{ text-align: right; }} i {{ font-style: normal; color: #8e8e9b; }} svg {{ display: block; }}
ul {{ margin: 2px 4px; padding: 0; list-style: none; font-size: 11px; }} li {{ white-space: nowrap; overflow: hidden; }}
li u {{ display: inline-block; width: 12px; height: 3px; margin: 0 6px 3px 0; }}
li i {{ float: right; padding-left: 8px; }}
s {{ display: inline-block; height: 9px; text-decoration: none; margin-right: 5px; background: #73bf69; }}
"""


def page(server: Prometheus, board: Json, seconds: float) -> str:
    chosen = CHOSEN.get(board["uid"], {})
    parts = [section(server, panel, chosen, seconds) for panel in board["panels"]]
    tall = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"]) * UNIT_HEIGHT
    what = ", ".join(f"{name}: {value}" for name, value in chosen.items()) or "all nodes"
    head = f"<header>{escape(board['title'])} <small>{escape(what)}</small></header>"
    body = f'{head}<main style="height:{tall}px">{"".join(parts)}</main>'
    return f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{body}"


def section(server: Prometheus, panel: Json, chosen: Mapping[str, str], seconds: float) -> str:
    place = panel["gridPos"]
    wide, high = place["w"] * WIDTH // 24, place["h"] * UNIT_HEIGHT
    at = f"left:{place['x'] * WIDTH // 24 + 2}px;top:{place['y'] * UNIT_HEIGHT}px"
    if panel["type"] == "row":
        return f'<h3 style="{at}">{escape(panel["title"])}</h3>'
    inside = {
        "stat": lambda: big(panel, number(server, panel, chosen)),
        "timeseries": lambda: plot(panel, curves(server, panel, chosen, seconds), wide - 24, high - 40),
        "state-timeline": lambda: lanes(curves(server, panel, chosen, seconds), wide - 24, high - 40),
        "table": lambda: rows(panel, cells(server, panel, chosen), (high - 55) // 20),
    }[panel["type"]]()
    size = f"width:{wide - 4}px;height:{high - 4}px"
    return f'<section style="{at};{size}"><h2>{escape(panel["title"])}</h2>{inside}</section>'


def big(panel: Json, value: float | None) -> str:
    told = panel["fieldConfig"]["defaults"]
    colour = shade(told, value) if panel["options"]["colorMode"] != "none" else "#eee"
    return f'<b style="color:{colour}">{escape(said(value, told))}</b>'


def shade(told: Json, value: float | None) -> str:
    """The colour of a value, by the thresholds of a panel or column."""
    steps = told["thresholds"]["steps"]
    reached = [
        step["color"] for step in steps if step["value"] is None or (value is not None and value >= step["value"])
    ]
    return NAMED.get(reached[-1], "#ccc")


def plot(panel: Json, found: Sequence[Curve], wide: int, high: int) -> str:
    told = panel["fieldConfig"]["defaults"]
    high -= (min(len(found), LEGENDS) + (len(found) > LEGENDS)) * 16
    stacked = told["custom"]["stacking"]["mode"] == "normal"
    lines = stack(found) if stacked else [one.points for one in found]
    if not lines:
        return f"<b>{told['noValue']}</b>"
    top = told.get("max") or max(value for line in lines for _, value in line) * 1.05 or 1.0
    times = [at for line in lines for at, _ in line]
    begin, end = min(times), max(max(times), min(times) + 1)
    left = 62
    marks = "".join(grid(told, top, share, left, wide, high) for share in (0.0, 0.5, 1.0))
    paths = []
    for i, line in reversed(list(enumerate(lines))):
        colour = COLOURS[i % len(COLOURS)]
        for piece in pieces(line):
            spots = [
                (left + (at - begin) / (end - begin) * (wide - left), 6 + (1 - min(value / top, 1)) * (high - 12))
                for at, value in piece
            ]
            through = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
            if stacked:
                area = f"{spots[0][0]:.1f},{high - 6} {through} {spots[-1][0]:.1f},{high - 6}"
                paths.append(f'<polygon points="{area}" fill="{colour}"/>')
            else:
                paths.append(f'<polyline points="{through}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
    return f'<svg width="{wide}" height="{high}">{"".join(paths)}{marks}</svg>{names(found, told)}'


def pieces(line: Line) -> Iterator[Line]:
    """A line's parts: where a point is missing there is a gap."""
    step = min((later[0] - sooner[0] for sooner, later in pairwise(line)), default=0.0)
    begin = 0
    for i, (sooner, later) in enumerate(pairwise(line), start=1):
        if later[0] - sooner[0] > 1.5 * step:
            yield line[begin:i]
            begin = i
    yield line[begin:]


def grid(told: Json, top: float, share: float, left: int, wide: int, high: int) -> str:
    y = 6 + (1 - share) * (high - 12)
    text = f'<text x="{left - 6}" y="{y + 4:.0f}" fill="#8e8e9b" font-size="10" text-anchor="end">'
    line = f'<line x1="{left}" x2="{wide}" y1="{y:.0f}" y2="{y:.0f}" stroke="#8886" stroke-width="0.5"/>'
    return f"{line}{text}{escape(said(top * share, told))}</text>"


def stack(found: Sequence[Curve]) -> list[Line]:
    """Each curve upon those before it; where one has no point it adds nothing."""
    sums = dict.fromkeys(sorted({at for one in found for at, _ in one.points}), 0.0)
    lines = []
    for one in found:
        for at, value in one.points:
            sums[at] += value
        lines.append(tuple(sums.items()))
    return lines


def names(found: Sequence[Curve], told: Json) -> str:
    lines = [
        f'<li><i>{escape(said(one.points[-1][1], told))}</i><u style="background:{COLOURS[i % len(COLOURS)]}"></u>'
        f"{escape(one.legend)}</li>"
        for i, one in enumerate(found[:LEGENDS])
    ]
    if len(found) > LEGENDS:
        lines.append(f"<li><i></i>and {len(found) - LEGENDS} more</li>")
    return f"<ul>{''.join(lines)}</ul>"


def lanes(found: Sequence[Curve], wide: int, high: int) -> str:
    """A line for each series, green where it is 1 and red where it is 0."""
    if not found:
        return "<b>unknown</b>"
    times = [at for one in found for at, _ in one.points]
    begin, end = min(times), max(max(times), min(times) + 1)
    left, each = 110, high / len(found)
    step = (wide - left) / max(len(one.points) for one in found) + 0.6
    parts = []
    for i, one in enumerate(sorted(found, key=lambda curve: curve.legend)):
        parts.append(f'<text x="{left - 6}" y="{i * each + each / 2 + 4:.0f}" fill="#aaa" font-size="10"')
        parts.append(f' text-anchor="end">{escape(one.legend)}</text>')
        for at, value in one.points:
            x, colour = left + (at - begin) / (end - begin) * (wide - left - step), NAMED["green" if value else "red"]
            parts.append(f'<rect x="{x:.1f}" y="{i * each + 1:.1f}" width="{step:.1f}" height="{each - 2:.1f}"')
            parts.append(f' fill="{colour}" shape-rendering="crispEdges"/>')
    return f'<svg width="{wide}" height="{high}">{"".join(parts)}</svg>'


def rows(panel: Json, found: Cells, most: int) -> str:
    told = panel["fieldConfig"]["defaults"]
    if not found.rows:
        return f"<b>{told['noValue']}</b>"
    formats = {
        one["matcher"]["options"]: {"noValue": "", **{each["id"]: each["value"] for each in one["properties"]}}
        for one in panel["fieldConfig"]["overrides"]
    }
    columns = zip(found.titles, zip(*found.rows, strict=True), strict=True)
    numeric = {title for title, values in columns if any(isinstance(value, float) for value in values)}
    bars = {title for title, told in formats.items() if told.get("custom.cellOptions", {}).get("type") == "gauge"}
    head = "".join(
        f'<th class="{"n" if title in numeric - bars else ""}">{escape(title)}</th>' for title in found.titles
    )
    lines = []
    for row in found.rows[:most]:
        line = "".join(cell(value, formats.get(title, {})) for title, value in zip(found.titles, row, strict=True))
        lines.append(f"<tr>{line}</tr>")
    more = f"<i>and {len(found.rows) - most} more</i>" if len(found.rows) > most else ""
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>{more}"


def cell(value: str | float | None, told: Json) -> str:
    if not isinstance(value, float):
        return f"<td>{escape(value or '')}</td>"
    text, style = escape(said(value, told)), ""
    kind = told.get("custom.cellOptions", {}).get("type")
    colour = shade(told, value) if "thresholds" in told else NAMED["green"]
    if kind == "color-text":
        style = f' style="color:{colour}"'
    if kind == "gauge":
        text = f'<s style="width:{min(max(value, 0), 1) * 45:.0f}px;background:{colour}"></s>{text}'
        return f"<td>{text}</td>"
    return f'<td class="n"{style}>{text}</td>'


def said(value: float | None, told: Json) -> str:
    """A value in its unit, about as Grafana says it."""
    if value is None:
        return str(told["noValue"])
    decimals = told.get("decimals")
    match told.get("unit", "short"):
        case "percentunit":
            return f"{value * 100:.{0 if decimals is None else decimals}f}%"
        case "bytes" | "Bps" as unit:
            return scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB")) + ("/s" if unit == "Bps" else "")
        case "s" if value >= 60:
            return f"{value / 60:.1f} min"
        case "s" if value < 1:
            return f"{value * 1000:.3g} ms"
        case "watt":
            return scaled(value, 1000, ("W", "kW", "MW"))
        case unit:
            sign = {"celsius": " °C", "s": " s", "kwatth": " kWh", "ops": "/s"}.get(unit, "")
            plain = f"{value:.{decimals}f}" if decimals is not None else f"{value:.3g}"
            return plain + sign


def scaled(value: float, base: int, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if abs(value) < base:
            return f"{value:.3g} {unit}"
        value /= base
    return f"{value:.3g} {units[-1]}"


async def photograph(pages: Mapping[str, str]) -> None:
    async with chromium() as browser:
        for name, html in pages.items():
            tab = await browser.new_page(viewport={"width": WIDTH, "height": 600})
            await tab.set_content(html)
            await tab.screenshot(path=PICTURES / f"{name}.png", full_page=True)
            await tab.close()
            print(PICTURES / f"{name}.png")


def drawn(server: Prometheus) -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "dashboards").glob("*.json")):
        board: Json = json.loads(path.read_text(encoding="utf-8"))
        yield board["uid"], page(server, board, SECONDS)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gpumap-boards-") as folder, running_world(Path(folder), "2s") as world:
        time.sleep(SECONDS)
        asyncio.run(photograph(dict(drawn(world.plain))))


if __name__ == "__main__":
    main()
