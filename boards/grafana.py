"""What Grafana's JSON of a board looks like: written for Grafana 10 and later, the same for the same board.

The fields are those of Grafana's dashboard schema, version 39 (grafana/grafana, kinds/dashboard); what it fills in
itself is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from boards.panels import Board, Choice, Curves, Key, Link, Panel, Row, Stat, States, Steps, Table, Variable

Json = dict[str, Any]

SCHEMA_VERSION = 39
COLUMNS = 24
"""The width of Grafana's grid."""
TAG = "gpumap"
SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
ALL: Json = {"selected": True, "text": ["All"], "value": ["$__all"]}


def render(board: Board) -> str:
    return json.dumps(dashboard(board), indent=1, ensure_ascii=False) + "\n"


def dashboard(board: Board) -> Json:
    numbered: list[Json] = []
    for number, panel in enumerate(lay_out(board.rows), start=1):
        numbered.append({"id": number, **panel})
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.about,
        "tags": [TAG, "gpu", "kubernetes"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "timezone": "browser",
        "time": {"from": board.since, "to": "now"},
        "links": [other_boards()],
        "annotations": {"list": []},
        "templating": {
            "list": [
                data_source(),
                *(query_variable(variable) for variable in board.variables),
                *(text_variable(choice) for choice in board.choices),
            ]
        },
        "panels": numbered,
    }


def other_boards() -> Json:
    """Links to all boards with gpumap's tag, with what is chosen here."""
    return {
        "type": "dashboards",
        "title": "gpumap",
        "tags": [TAG],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def data_source() -> Json:
    return {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus", "hide": 0}


def query_variable(variable: Variable) -> Json:
    """All is `.*`, which also fits series without the label."""
    return {
        "type": "query",
        "name": variable.name,
        "label": variable.label,
        "datasource": SOURCE,
        "definition": variable.query,
        "query": {"qryType": 1, "query": variable.query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "refresh": 2,  # when the time range changes
        "sort": 7,  # numbers in names as numbers
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": ALL,
        "hide": 0,
    }


def text_variable(choice: Choice) -> Json:
    current = {"selected": True, "text": choice.value, "value": choice.value}
    return {
        "type": "textbox",
        "name": choice.name,
        "label": choice.label,
        "description": choice.about,
        "query": choice.value,
        "current": current,
        "options": [current],
        "hide": 0,
    }


def lay_out(rows: Iterable[Row]) -> Iterator[Json]:
    """Panels from left to right; a new line where one does not fit; a heading above each row."""
    top = 0
    for row in rows:
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
        yield {"type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []}
        top, left, height = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left, height = top + height, 0, 0
            yield shown(panel, {"h": panel.height, "w": panel.width, "x": left, "y": top})
            left, height = left + panel.width, max(height, panel.height)
        top += height


def shown(panel: Panel, place: Json) -> Json:
    match panel:
        case Stat():
            kind, own = "stat", stat(panel)
        case Curves():
            kind, own = "timeseries", curves(panel)
        case States():
            kind, own = "state-timeline", states(panel)
        case Table():
            kind, own = "table", table(panel)
        case _:
            raise TypeError(f"no such panel: {panel}")
    return {
        "type": kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        **own,
    }


def stat(panel: Stat) -> Json:
    return {
        "targets": [target(0, panel.query, instant=True)],
        "fieldConfig": {"defaults": defaults(panel), "overrides": []},
        "options": {
            "colorMode": "value" if panel.steps else "none",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
            "textMode": "value",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
    }


def curves(panel: Curves) -> Json:
    custom: Json = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.stacked else 5,
        "showPoints": "never",
        "spanNulls": False,  # a gap is what is not known
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "line" if panel.steps else "off"},
    }
    field = {**defaults(panel), "color": {"mode": "palette-classic"}, "min": 0, "custom": custom}
    if panel.most is not None:
        field["max"] = panel.most
    if panel.link is not None:
        field["links"] = [data_link(panel.link, lambda label: f"${{__field.labels.{label}}}")]
    return {
        "targets": [target(number, query.expr, query.legend) for number, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": field, "overrides": []},
        "options": {
            "legend": {
                "displayMode": "table",
                "placement": "bottom",
                "showLegend": True,
                "calcs": ["lastNotNull", "max"],
                "sortBy": "Last *",
                "sortDesc": True,
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def states(panel: States) -> Json:
    words = {"0": {"text": panel.bad, "index": 0}, "1": {"text": panel.good, "index": 1}}
    mapped = {"mappings": [{"type": "value", "options": words}]}
    return {
        "targets": [target(0, panel.query.expr, panel.query.legend)],
        "fieldConfig": {
            "defaults": {**defaults(panel), **mapped, "custom": {"fillOpacity": 70, "lineWidth": 0}},
            "overrides": [],
        },
        "options": {
            "showValue": "never",
            "mergeValues": True,
            "rowHeight": 0.8,
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "single", "sort": "none"},
        },
    }


def table(panel: Table) -> Json:
    titles = {key.label: key.title for key in panel.keys}
    hidden = {"Time": True}
    for number, column in enumerate(panel.columns):
        name = value_name(number, of=len(panel.columns))
        if column.title:
            titles[name] = column.title
        else:
            hidden[name] = True
    organize = {
        "excludeByName": hidden,
        "indexByName": {name: number for number, name in enumerate(titles)},
        "renameByName": titles,
    }
    return {
        "targets": [target(number, column.expr, instant=True) for number, column in enumerate(panel.columns)],
        "transformations": [{"id": "merge", "options": {}}, {"id": "organize", "options": organize}],
        "fieldConfig": {
            "defaults": {**defaults(panel), "custom": {"align": "auto", "filterable": True}},
            "overrides": [*key_overrides(panel.keys), *formatted(panel)],
        },
        "options": {
            "showHeader": True,
            "cellHeight": "sm",
            "sortBy": [{"displayName": panel.sorted_by, "desc": not panel.rising}],
            "footer": {"show": False, "reducer": ["sum"], "fields": ""},
        },
    }


def value_name(number: int, of: int) -> str:
    """The name that Grafana gives a column of values: with its query's letter, where there are several."""
    return "Value" if of == 1 else f"Value #{letter(number)}"


def key_overrides(keys: Sequence[Key]) -> Iterator[Json]:
    for key in keys:
        if key.link is not None:
            link = data_link(key.link, lambda label: f"${{__data.fields.{label}}}")
            yield override(key.title, {"links": [link]})
        if key.words:
            words = {
                value: {"text": text, "color": color, "index": index}
                for index, (value, text, color) in enumerate(key.words)
            }
            mappings = [{"type": "value", "options": words}]
            yield override(key.title, {"mappings": mappings, "custom.cellOptions": {"type": "color-text"}})


def formatted(panel: Table) -> Iterator[Json]:
    for column in panel.columns:
        if not column.title:
            continue
        options: Json = {"unit": column.unit}
        if column.decimals is not None:
            options["decimals"] = column.decimals
        if column.steps:
            options["thresholds"] = thresholds(column.steps)
        if column.gauge:
            options |= {"min": 0, "max": 1, "custom.cellOptions": {"type": "gauge", "mode": "basic"}}
        elif column.steps:
            options["custom.cellOptions"] = {"type": "color-text"}
        yield override(column.title, options)


def override(title: str, options: Mapping[str, Any]) -> Json:
    properties = [{"id": name, "value": value} for name, value in options.items()]
    return {"matcher": {"id": "byName", "options": title}, "properties": properties}


def data_link(link: Link, value: Callable[[str], str]) -> Json:
    """Grafana puts its own root before it. The cluster goes along as it is chosen, and so does the time."""
    chosen_there = "".join(f"&var-{variable}={value(label)}" for variable, label in link.chosen)
    along = "${datasource:queryparam}&${cluster:queryparam}&${__url_time_range}"
    return {"title": link.title, "url": f"/d/{link.board}?{along}{chosen_there}"}


def defaults(panel: Panel) -> Json:
    field: Json = {
        "unit": panel.unit,
        "noValue": panel.absent,
        "color": {"mode": "thresholds"},
        "thresholds": thresholds(panel.steps),
    }
    if panel.decimals is not None:
        field["decimals"] = panel.decimals
    return field


def thresholds(steps: Steps) -> Json:
    rising = [{"color": color, "value": value} for value, color in steps]
    return {"mode": "absolute", "steps": [{"color": "green", "value": None}, *rising]}


def target(number: int, expr: str, legend: str = "", *, instant: bool = False) -> Json:
    fields: Json = {"refId": letter(number), "datasource": SOURCE, "editorMode": "code", "expr": expr}
    if instant:
        return {**fields, "instant": True, "range": False, "format": "table"}
    return {**fields, "instant": False, "range": True, "legendFormat": legend}


def letter(number: int) -> str:
    return chr(ord("A") + number)
