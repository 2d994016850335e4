"""Which gpumaps a server scrapes, what tells them apart, and which of them are of one node. Pure.

A node is its name, and the labels that its targets have besides those of a scrape: `cluster` and the like. Targets that
know the same GPU are of one node all the same: a GPU is in one machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpumap.cli.fleet.families import NODE_INFO, Scraped, Selection
from gpumap.cli.fleet.values import Told

Key = tuple[str, ...]
"""A target's values of the labels that tell targets apart."""

_NAME = "__name__"
_NODE = "node"
_OF_A_SCRAPE = frozenset(
    {_NAME, "job", "instance", "endpoint", "service", "namespace", "pod", "container", _NODE, "exported_node"}
)
_OF_A_REPLICA = frozenset({"prometheus_replica", "replica", "__replica__", "rule_replica", "receive_replica"})
"""What operators, Thanos and Cortex call the label in which two servers that scrape the same differ."""
_NO_CARDS: Mapping[Key, Mapping[str, str]] = {}
_FIRST = ("instance", "job", "cluster")
"""Tried first, as they mostly are enough."""


class Target(NamedTuple):
    """A gpumap that is scraped. `interval_seconds` is about the time between scrapes; `None` where it is not known."""

    labels: Mapping[str, str]
    collected_at: float
    interval_seconds: float | None = None


class Node(NamedTuple):
    """A node, and its targets, the one that collected last first. `shown` is its name where others have it too."""

    name: str
    shown: str
    internal_ip: str | None
    keys: tuple[Key, ...]


def selection_of(rows: Sequence[Mapping[str, str]], match: str) -> Selection:
    """What to ask by: as few labels as tell these targets apart."""
    labels = frozenset(name for row in rows for name in row) - {_NAME}
    whole = len({_named(row) for row in rows})
    key: list[str] = []
    groups = 1
    for name in _candidates(labels):
        if groups == whole:
            break
        found = len({tuple(row.get(one, "") for one in (*key, name)) for row in rows})
        if found > groups:
            key.append(name)
            groups = found
    return Selection(match, tuple(key), labels)


def key_of(labels: Mapping[str, str], selection: Selection) -> Key:
    return tuple(labels.get(name, "") for name in selection.key)


def targets_by_key(
    rows: Iterable[tuple[Mapping[str, str], float]], spacings: Mapping[Key, float], selection: Selection
) -> dict[Key, Target]:
    """The newest of each: two servers may have scraped it."""
    found: dict[Key, Target] = {}
    for labels, collected_at in rows:
        key = key_of(labels, selection)
        if key not in found or found[key].collected_at < collected_at:
            found[key] = Target(labels, collected_at, spacings.get(key) or None)
    return found


def scraped_by_key(targets: Mapping[Key, Target], names: Mapping[Key, tuple[str, str]]) -> dict[Key, Scraped]:
    """What rows that tell their target in part are placed by."""
    newest = sorted(targets, key=lambda key: (-targets[key].collected_at, key))
    return {key: Scraped(frozenset(targets[key].labels), names[key][0]) for key in newest}


def names_of(targets: Mapping[Key, Target], infos: Told) -> dict[Key, tuple[str, str]]:
    """Name and address of each target's node, as gpumap says; else as the target is called."""
    told: dict[Key, tuple[str, str]] = {}
    width = len(NODE_INFO.by)
    for row in sorted(infos.values):
        name, address = row[:width]
        told.setdefault(row[width:], (name, address))
    return {key: told.get(key, (_called(target.labels), "")) for key, target in targets.items()}


def _called(labels: Mapping[str, str]) -> str:
    return labels.get(_NODE) or labels.get("instance") or "?"


def nodes_of(
    targets: Mapping[Key, Target],
    names: Mapping[Key, tuple[str, str]],
    gpus: Mapping[str, Collection[Key]],
    cards: Mapping[Key, Mapping[str, str]] = _NO_CARDS,
) -> list[Node]:
    """Targets by node, in the order of what they are called. `gpus` are the targets that know each GPU; `cards` the
    GPUs of each by index: at one place there are no two, so that targets which say otherwise are of two nodes."""
    groups: dict[tuple[str, Key], list[Key]] = {}
    for key, target in targets.items():
        groups.setdefault((names[key][0], _apart(target.labels)), []).append(key)
    merged = [of_node for keys in _merged(groups, names, gpus) for of_node in _divided(keys, targets, cards)]
    of_name: dict[str, list[list[Key]]] = {}
    for keys in merged:
        of_name.setdefault(names[keys[0]][0], []).append(keys)
    found = []
    for name, several in of_name.items():
        prefixes = _prefixes([targets[keys[0]].labels for keys in several])
        for keys, prefix in zip(several, prefixes, strict=True):
            address = next((names[key][1] for key in keys if names[key][1]), None)
            found.append(Node(name, f"{prefix}{name}", address, tuple(keys)))
    return sorted(found, key=lambda node: (node.shown, node.keys))


class Down(NamedTuple):
    """A node whose gpumap does not answer; `shown` is its name where others have it too."""

    name: str
    shown: str


def down_nodes(rows: Iterable[Mapping[str, str]], targets: Mapping[Key, Target], nodes: Iterable[Node]) -> list[Down]:
    """The nodes of targets that do not answer, without those that answer by another one."""
    answering = {(target.labels.get("instance", ""), _apart(target.labels)) for target in targets.values()}
    of_name: dict[str, dict[Key, Mapping[str, str]]] = {}
    for node in nodes:
        for key in node.keys:
            of_name.setdefault(node.name, {}).setdefault(_apart(targets[key].labels), targets[key].labels)
    found: dict[tuple[str, Key], Mapping[str, str]] = {}
    for row in rows:
        name, apart = _called(row), _apart(row)
        if apart not in of_name.get(name, {}) and (row.get("instance", ""), apart) not in answering:
            found[name, apart] = row
    for (name, apart), row in found.items():
        of_name.setdefault(name, {})[apart] = row
    shown = []
    for name, apart in found:
        prefixes = dict(zip(of_name[name], _prefixes(list(of_name[name].values())), strict=True))
        shown.append(Down(name, f"{prefixes[apart]}{name}"))
    return sorted(shown, key=lambda down: down.shown)


def _divided(keys: list[Key], targets: Mapping[Key, Target], cards: Mapping[Key, Mapping[str, str]]) -> list[list[Key]]:
    """Targets whose cards may be in one machine, each time the newest first."""
    found: list[tuple[dict[str, str], list[Key]]] = []
    for key in sorted(keys, key=lambda key: (-targets[key].collected_at, key)):
        own = cards.get(key, {})
        for places, members in found:
            if all(places.get(index, uuid) == uuid for index, uuid in own.items()):
                places.update(own)
                members.append(key)
                break
        else:
            found.append((dict(own), [key]))
    return [members for _, members in found]


def _candidates(labels: Collection[str]) -> Iterator[str]:
    others = sorted({*labels} - {*_FIRST, *_OF_A_REPLICA, _NODE})
    yield from (name for name in (*_FIRST, *others, _NODE) if name in labels)


def _named(labels: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """All that tells a target from others."""
    return frozenset((name, value) for name, value in labels.items() if name not in _OF_A_REPLICA)


def _apart(labels: Mapping[str, str]) -> Key:
    """What is not of a scrape: nodes of one name that differ in it are two."""
    return tuple(
        part
        for name in sorted({*labels} - _OF_A_SCRAPE - _OF_A_REPLICA)
        for part in (name, labels[name])
        if labels[name]
    )


def _merged(
    groups: Mapping[tuple[str, Key], list[Key]],
    names: Mapping[Key, tuple[str, str]],
    gpus: Mapping[str, Collection[Key]],
) -> list[list[Key]]:
    """Groups of one node name that know the same GPU are one."""
    group_of = {key: group for group, keys in groups.items() for key in keys}
    into: dict[tuple[str, Key], tuple[str, Key]] = {}

    def root(group: tuple[str, Key]) -> tuple[str, Key]:
        while group in into:
            group = into[group]
        return group

    for knowing in gpus.values():
        keys = [key for key in knowing if key in group_of]
        if len(keys) < 2:
            continue
        by_name: dict[str, tuple[str, Key]] = {}
        for key in keys:
            ours = root(group_of[key])
            first = root(by_name.setdefault(names[key][0], ours))
            if first != ours:
                into[ours] = first
    found: dict[tuple[str, Key], list[Key]] = {}
    for group, members in groups.items():
        found.setdefault(root(group), []).extend(members)
    return list(found.values())


def _prefixes(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """What stands before a name that several nodes have: their clusters, or all labels in which they differ; where that
    is none, their jobs, or what they are reached at."""
    if len(rows) == 1:
        return [""]
    names = sorted({name for row in rows for name in row} - _OF_A_SCRAPE - _OF_A_REPLICA)
    differing = [name for name in names if len({row.get(name) for row in rows}) > 1]
    for name in ("cluster", *(() if differing else ("job", "instance"))):
        if len({row.get(name) for row in rows}) == len(rows):
            differing = [name]
            break
    return ["".join(f"{row[name]}/" for name in differing if row.get(name)) for row in rows]
