"""Which gpumaps a Prometheus scrapes, and of which node each is.

All queries of an answer are for one moment, by the server's clock. A node is identified by the name that its gpumap
reports, and by those labels of its targets that are not of a scrape, such as `cluster`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpumap.cli.sources.prometheus import Prometheus, Row, together
from gpumap.model.errors import FatalError
from gpumap.model.formatting import cut_off
from gpumap.model.grouping import grouped

SNAPSHOT = "gpumap_snapshot_timestamp_seconds"
"""Each gpumap has exactly one, with the labels of its target."""
CONTAINER = ("namespace", "pod", "container")
OWN_LABELS = frozenset(
    {
        *(*CONTAINER, "uuid", "finding", "reason", "source", "node", "internal_ip", "gpu_uuid", "index", "minor"),
        *("pci_bus_id", "model", "mig_profile", "gpu_instance_id", "compute_instance_id", "owner"),
    }
)
"""Labels of gpumap's own. With `honorLabels` they replace those of the target; without, they are `exported_…`."""
SCRAPE_LABELS = frozenset({"__name__", "job", "instance", "endpoint", "service"})
_REPLICA_LABELS = frozenset({"prometheus_replica", "replica", "__replica__", "rule_replica", "receive_replica"})
"""Names that operators, Thanos and Cortex give the label in which two servers that scrape the same differ."""
_SEEN_FOR, _KNOWN_FOR = "5m", "1h"
"""How far a server looks back for a series' newest sample, by default; and for a gpumap that does not answer."""
_EXACT_MAX = 1 << 53
"""Whole numbers up to here are exact in a server's floats; none of gpumap's is larger."""
_IN_NUMBERS = "0123456789+-.eE"
"""Python also reads "1_0" and digits of other scripts as numbers."""
_TEXT_CHARACTERS = 40
_INVALID_SHOWN = 3

Place = frozenset[tuple[str, str]]
"""The labels of a target, without those that series of gpumap may have too."""


class Target(NamedTuple):
    """A scraped gpumap. `interval_seconds` is about the time between its collections; `None` if unknown."""

    labels: Mapping[str, str]
    collected_at: float
    interval_seconds: float | None

    @property
    def place(self) -> Place:
        return place_of(self.labels)


class ScrapedNode(NamedTuple):
    """A node with its targets, the one that collected last first. `name` is unique."""

    name: str
    internal_ip: str
    targets: tuple[Target, ...]


class Cluster(NamedTuple):
    """What a server scrapes. `down` are nodes with a gpumap that does not answer, `invalid` are series without a
    value."""

    nodes: tuple[ScrapedNode, ...]
    down: tuple[str, ...]
    invalid: tuple[str, ...]
    moment: int

    @property
    def place_labels(self) -> list[str]:
        """The names of the labels that distinguish targets."""
        return sorted({name for node in self.nodes for target in node.targets for name, _ in target.place})


async def scraped_cluster(server: Prometheus, match: str) -> Cluster:
    """Ask for the gpumaps and the names of their nodes. Raises FatalError if there are none."""
    moment = await _server_time(server)
    series = f"{SNAPSHOT}{braced(match)}"
    snapshots, spacings, infos, unreachable = await together(
        [
            server.instant(series, moment),
            server.instant(f"idelta({series}[{_SEEN_FOR}])", moment),
            server.instant(f"gpumap_node_info{braced(match)}", moment),
            server.instant(f"up{braced(match)} == 0", moment),
        ]
    )
    # An hour of samples is read only if some target does not answer.
    down = await server.instant(_down_question(match), moment) if unreachable else []
    if not snapshots:
        silent_targets = f"; {len(down)} gpumap targets do not answer it" if down else ""
        matching = f" matching {match}" if match else ""
        raise FatalError(f"no gpumap series at {server.url}{matching}{silent_targets}")
    intervals = {place_of(row.labels): number_of(row) for row in spacings}
    targets: dict[Place, Target] = {}
    for row in snapshots:
        place, collected_at = place_of(row.labels), number_of(row)
        if collected_at is not None and (place not in targets or targets[place].collected_at < collected_at):
            targets[place] = Target(row.labels, collected_at, intervals.get(place) or None)
    nodes, down_names = _nodes(targets.values(), {place_of(row.labels): row.labels for row in infos}, down)
    invalid = tuple(invalid_row(SNAPSHOT, row) for row in snapshots if number_of(row) is None)
    return Cluster(nodes, down_names, invalid, moment)


async def _server_time(server: Prometheus) -> int:
    """Return the time by the server's clock: ours may differ."""
    rows = await server.instant("vector(time())")
    value = number_of(rows[0]) if rows else None
    if value is None:
        raise FatalError(f"{server.url} did not return its time")
    return int(value)


def _down_question(match: str) -> str:
    """Return PromQL for targets that do not answer: of the last hour's gpumaps, and of jobs that have only gpumaps."""
    up, snapshot = f"up{braced(match)}", f"{SNAPSHOT}{braced(match)}"
    known = f"{up} == 0 and on (job, instance) last_over_time({snapshot}[{_KNOWN_FOR}])"
    own_job = f"count by (job) ({up} == 1) == count by (job) ({snapshot})"
    return f"({known}) or ({up} == 0 and on (job) ({own_job}))"


def _nodes(
    targets: Iterable[Target], infos: Mapping[Place, Mapping[str, str]], down: Iterable[Row]
) -> tuple[tuple[ScrapedNode, ...], tuple[str, ...]]:
    """Return the nodes, and the names of those that are down. A node with another target that answers is not down."""
    newest_first = sorted(targets, key=lambda target: (-target.collected_at, sorted(target.place)))
    groups = grouped(((_node_name(infos.get(t.place, t.labels)), _cluster_labels(t.labels)), t) for t in newest_first)
    answering = {(target.labels.get("instance"), _cluster_labels(target.labels)) for target in newest_first}
    down_groups = dict.fromkeys(
        group
        for row in down
        if (group := (_node_name(row.labels), _cluster_labels(row.labels))) not in groups
        and (row.labels.get("instance"), group[1]) not in answering
    )
    names = _unique_names([*groups, *down_groups])
    nodes = []
    for group, members in groups.items():
        addresses = (own_value(infos[target.place], "internal_ip") for target in members if target.place in infos)
        nodes.append(ScrapedNode(names[group], next(filter(None, addresses), ""), tuple(members)))
    return tuple(sorted(nodes, key=lambda node: node.name)), tuple(sorted(names[group] for group in down_groups))


def _node_name(labels: Mapping[str, str]) -> str:
    return own_value(labels, "node") or labels.get("instance") or "?"


def _cluster_labels(labels: Mapping[str, str]) -> Place:
    """Return the labels that are not of a scrape: nodes of one name that differ in them are two."""
    return frozenset((name, value) for name, value in place_of(labels) if name not in SCRAPE_LABELS)


def _unique_names(groups: Iterable[tuple[str, Place]]) -> dict[tuple[str, Place], str]:
    """Return a name for each node. If several have it, their clusters precede it, or all labels in which they
    differ."""
    names: dict[tuple[str, Place], str] = {}
    for name, places in grouped(groups).items():
        labels = [dict(place) for place in places]
        differing = sorted(key for key in set().union(*labels) if len({row.get(key) for row in labels}) > 1)
        if len({row.get("cluster") for row in labels}) == len(labels):
            differing = ["cluster"] if len(labels) > 1 else []
        for place, row in zip(places, labels, strict=True):
            names[name, place] = "".join(f"{row[key]}/" for key in differing if row.get(key)) + name
    return names


# --- series -----------------------------------------------------------------------------------------------------------


def braced(*matchers: str) -> str:
    """Return matchers in braces; nothing if all are empty."""
    return f"{{{','.join(filter(None, matchers))}}}" if any(matchers) else ""


def labels_by(own_labels: Iterable[str], other_labels: Iterable[str]) -> str:
    """Return the labels of `by (…)`: gpumap's own ones, which may be `exported_…`, and others."""
    return ", ".join(
        dict.fromkeys([*(name for label in own_labels for name in (label, f"exported_{label}")), *other_labels])
    )


def place_of(labels: Mapping[str, str]) -> Place:
    """Return the labels of a series' target that no family of gpumap has."""
    ignored = OWN_LABELS | _REPLICA_LABELS | {"__name__"}
    return frozenset(
        (name, value)
        for name, value in labels.items()
        if value and name not in ignored and not name.startswith("exported_")
    )


def own_value(labels: Mapping[str, str], name: str) -> str:
    """Return the value of one of gpumap's own labels."""
    return labels.get(f"exported_{name}") or labels.get(name, "")


def own_values(labels: Mapping[str, str], names: Iterable[str], target: Target) -> tuple[str, ...]:
    """Return the values of gpumap's own labels. If a scrape has moved one of them to `exported_…`, a label of the
    target that is not moved was empty."""
    is_moved = any(f"exported_{name}" in labels for name in names)
    stored = (f"exported_{name}" if is_moved and name in target.labels else name for name in names)
    return tuple(labels.get(name, "") for name in stored)


def number_of(row: Row, *, is_whole: bool = False) -> float | None:
    """Return the value of a row; `None` if gpumap cannot have written it."""
    text = row.points[0][1]
    try:
        value = math.nan if text.strip(_IN_NUMBERS) else float(text)
    except ValueError:
        return None
    return value if 0 <= value <= _EXACT_MAX and not (is_whole and math.modf(value)[0]) else None


def invalid_row(name: str, row: Row) -> str:
    """Return a row without a value, in words."""
    named = ", ".join(f"{label}={value}" for label, value in sorted(row.labels.items()))
    return f"{name}{{{named}}} is {cut_off(row.points[0][1], _TEXT_CHARACTERS)}"


def left_out(rows: Sequence[str]) -> Iterator[str]:
    """Return a sentence for each of the first rows without a value."""
    for row in rows[:_INVALID_SHOWN]:
        yield f"left out, because it is not valid: {row}"
    if len(rows) > _INVALID_SHOWN:
        yield f"{len(rows) - _INVALID_SHOWN} more such series"
