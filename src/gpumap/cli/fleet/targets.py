"""Which gpumaps a server scrapes, what distinguishes them, and which of them belong to one node. Pure.

A node is identified by its name and by those labels of its targets that are not of a scrape, such as `cluster`. Targets
that know the same GPU belong to one node in any case: a GPU is in one machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpumap.cli.fleet.queries import FAMILIES, NODE_INFO, AskedFamily, Selection, TargetLabels
from gpumap.model.grouping import grouped

Labels = tuple[str, ...]
"""Values of labels, in the order of their family."""
Key = tuple[str, ...]
"""A target's values of the labels that distinguish targets."""
Name = tuple[str, str | None]
"""Name and address of a node. The address is "" if gpumap does not know it, `None` without gpumap_node_info."""

OWN_LABELS = frozenset(name for family in FAMILIES for name in family.by) - {"node"}
"""Labels of gpumap's own. With `honorLabels` they replace those of the target."""

_NAME = "__name__"
_NODE = "node"
_OF_A_SCRAPE = frozenset(
    {_NAME, "job", "instance", "endpoint", "service", "namespace", "pod", "container", _NODE, "exported_node"}
)
_OF_A_REPLICA = frozenset({"prometheus_replica", "replica", "__replica__", "rule_replica", "receive_replica"})
"""Names that operators, Thanos and Cortex give the label in which two servers that scrape the same differ."""
_NO_GPUS: Mapping[Key, Mapping[str, str]] = {}
_FIRST = ("instance", "job", "cluster")
"""Tried first: they are usually enough."""


class Target(NamedTuple):
    """A scraped gpumap. `interval_seconds` is about the time between scrapes; `None` if unknown."""

    labels: Mapping[str, str]
    collected_at: float
    interval_seconds: float | None = None


class TargetsOfNode(NamedTuple):
    """A node and its targets, the one that collected last first. `shown` is unique; `name` may not be. `has_info`: a
    target serves gpumap_node_info."""

    name: str
    shown: str
    internal_ip: str | None
    keys: tuple[Key, ...]
    has_info: bool


def selection_of(rows: Sequence[Mapping[str, str]], match: str) -> Selection:
    """Return the selection with as few labels as distinguish these targets."""
    labels = frozenset(name for row in rows for name in row) - {_NAME}
    whole = len({_identity(row) for row in rows})
    key: list[str] = []
    groups = 1
    for name in _candidates(labels):
        if groups == whole:
            break
        distinct = len({tuple(row.get(one, "") for one in (*key, name)) for row in rows})
        if distinct > groups:
            key.append(name)
            groups = distinct
    return Selection(match, tuple(key), labels)


def key_of(labels: Mapping[str, str], selection: Selection) -> Key:
    return tuple(labels.get(name, "") for name in selection.key)


def targets_by_key(
    rows: Iterable[tuple[Mapping[str, str], float]], spacings: Mapping[Key, float], selection: Selection
) -> dict[Key, Target]:
    """Return the newest of each target: two servers may have scraped it."""
    targets: dict[Key, Target] = {}
    for labels, collected_at in rows:
        key = key_of(labels, selection)
        if key not in targets or targets[key].collected_at < collected_at:
            targets[key] = Target(labels, collected_at, spacings.get(key) or None)
    return targets


def labels_by_key(targets: Mapping[Key, Target], names: Mapping[Key, Name]) -> dict[Key, TargetLabels]:
    """Return what finds the target of rows that have only some of its labels."""
    newest = sorted(targets, key=lambda key: (-targets[key].collected_at, key))
    return {key: TargetLabels(frozenset(targets[key].labels), names[key][0]) for key in newest}


def names_of(targets: Mapping[Key, Target], infos: Iterable[Labels]) -> dict[Key, Name]:
    """Return name and address of each target's node, by the rows of gpumap_node_info; else by the target's labels."""
    reported: dict[Key, Name] = {}
    width = len(NODE_INFO.by)
    for row in sorted(infos):
        name, address = row[:width]
        reported.setdefault(row[width:], (name, address))
    return {key: reported.get(key, (_name_of(target.labels), None)) for key, target in targets.items()}


def _name_of(labels: Mapping[str, str]) -> str:
    return labels.get(_NODE) or labels.get("instance") or "?"


def nodes_of(
    targets: Mapping[Key, Target],
    names: Mapping[Key, Name],
    gpus: Mapping[str, Collection[Key]],
    gpus_by_index: Mapping[Key, Mapping[str, str]] = _NO_GPUS,
) -> list[TargetsOfNode]:
    """Group targets by node, in the order of the nodes' shown names.

    `gpus` are the targets that know each GPU, `gpus_by_index` the GPUs of each target. A node has one GPU for an index:
    targets that contradict each other belong to two nodes.
    """
    groups = grouped(((names[key][0], _cluster_labels(target.labels)), key) for key, target in targets.items())
    merged = [of_node for keys in _merged(groups, names, gpus) for of_node in _divided(keys, targets, gpus_by_index)]
    nodes = []
    for name, several in grouped((names[keys[0]][0], keys) for keys in merged).items():
        prefixes = _prefixes([targets[keys[0]].labels for keys in several])
        for keys, prefix in zip(several, prefixes, strict=True):
            address = next((names[key][1] for key in keys if names[key][1]), None)
            has_info = any(names[key][1] is not None for key in keys)
            nodes.append(TargetsOfNode(name, f"{prefix}{name}", address, tuple(keys), has_info))
    return sorted(nodes, key=lambda node: (node.shown, node.keys))


class DownNode(NamedTuple):
    """A node whose gpumap does not answer. `shown` is unique; `name` may not be."""

    name: str
    shown: str


def down_nodes(
    rows: Iterable[Mapping[str, str]], targets: Mapping[Key, Target], nodes: Iterable[TargetsOfNode]
) -> list[DownNode]:
    """Return the nodes of targets that do not answer, without nodes with another target that answers."""
    answering = {(target.labels.get("instance", ""), _cluster_labels(target.labels)) for target in targets.values()}
    of_name: dict[str, dict[Key, Mapping[str, str]]] = {}
    for node in nodes:
        for key in node.keys:
            of_name.setdefault(node.name, {}).setdefault(_cluster_labels(targets[key].labels), targets[key].labels)
    found: dict[tuple[str, Key], Mapping[str, str]] = {}
    for row in rows:
        name, cluster = _name_of(row), _cluster_labels(row)
        if cluster not in of_name.get(name, {}) and (row.get("instance", ""), cluster) not in answering:
            found[name, cluster] = row
    for (name, cluster), row in found.items():
        of_name.setdefault(name, {})[cluster] = row
    shown = []
    for name, cluster in found:
        prefixes = dict(zip(of_name[name], _prefixes(list(of_name[name].values())), strict=True))
        shown.append(DownNode(name, f"{prefixes[cluster]}{name}"))
    return sorted(shown, key=lambda down: down.shown)


def _divided(
    keys: list[Key], targets: Mapping[Key, Target], gpus_by_index: Mapping[Key, Mapping[str, str]]
) -> list[list[Key]]:
    """Group targets whose GPUs can be in one machine, each time the newest first."""
    groups: list[tuple[dict[str, str], list[Key]]] = []
    for key in sorted(keys, key=lambda key: (-targets[key].collected_at, key)):
        own = gpus_by_index.get(key, {})
        for known, members in groups:
            if all(known.get(index, uuid) == uuid for index, uuid in own.items()):
                known.update(own)
                members.append(key)
                break
        else:
            groups.append((dict(own), [key]))
    return [members for _, members in groups]


def _candidates(labels: Collection[str]) -> Iterator[str]:
    others = sorted({*labels} - {*_FIRST, *_OF_A_REPLICA, _NODE})
    yield from (name for name in (*_FIRST, *others, _NODE) if name in labels)


def _identity(labels: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """Return all labels that distinguish a target from others."""
    return frozenset((name, value) for name, value in labels.items() if name not in _OF_A_REPLICA)


def _cluster_labels(labels: Mapping[str, str]) -> Key:
    """Return the labels that are not of a scrape: nodes of one name that differ in them are two."""
    return tuple(
        part
        for name in sorted({*labels} - _OF_A_SCRAPE - _OF_A_REPLICA)
        for part in (name, labels[name])
        if labels[name]
    )


def _merged(
    groups: Mapping[tuple[str, Key], list[Key]],
    names: Mapping[Key, Name],
    gpus: Mapping[str, Collection[Key]],
) -> list[list[Key]]:
    """Join groups of one node name that know the same GPU."""
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
    return list(grouped((root(group), key) for group, members in groups.items() for key in members).values())


def _prefixes(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return what makes a name unique that several nodes have: their clusters, or all labels in which they differ; if
    there are none, their jobs or instances."""
    if len(rows) == 1:
        return [""]
    names = sorted({name for row in rows for name in row} - _OF_A_SCRAPE - _OF_A_REPLICA)
    differing = [name for name in names if len({row.get(name) for row in rows}) > 1]
    for name in ("cluster", *(() if differing else ("job", "instance"))):
        if len({row.get(name) for row in rows}) == len(rows):
            differing = [name]
            break
    return ["".join(f"{row[name]}/" for name in differing if row.get(name)) for row in rows]


# --- the target of a row ----------------------------------------------------------------------------------------------
#
# With `honorLabels` a series' own `pod` replaces that of its target. Without, it is `exported_pod`, but only if the
# target has a `pod`.


def differ_in_own_labels(targets: Iterable[Mapping[str, str]]) -> bool:
    """Whether some targets have a label that series of gpumap have too, and others do not."""
    return len({OWN_LABELS.intersection(labels) for labels in targets}) > 1


def by_targets(family: AskedFamily, rows: Iterable[Mapping[str, str]], selection: Selection) -> Iterator[Labels]:
    """Return the own labels of each row, and those of its target; only its own if targets of several nodes match."""
    honoured = _index(selection, {*family.by})
    moved = _index(selection, frozenset())
    exported = [(name, f"exported_{name}") for name in family.by]
    for labels in rows:
        is_moved = any(name in labels for _, name in exported)
        target = (moved if is_moved else honoured).of(labels)
        known = selection.targets.get(target or ())
        taken = known.labels if is_moved and known else frozenset()
        own = [labels.get(other if name in taken else name, "") for name, other in exported]
        yield (*own, *(target or ()))


class _Index(NamedTuple):
    """Targets by those labels of the key that rows have."""

    names: tuple[str, ...]
    targets: Mapping[Labels, Labels | None]
    key: tuple[str, ...]

    def of(self, labels: Mapping[str, str]) -> Labels | None:
        part = tuple([labels.get(name, "") for name in self.names])
        # A target that is no longer known is not shown: any labels will do.
        return self.targets.get(part, tuple([labels.get(name, "") for name in self.key]))


def _index(selection: Selection, hidden: Iterable[str]) -> _Index:
    """Index by the labels that are not `hidden`. Of targets of one node with equal labels, take the newest."""
    hidden = frozenset(hidden)
    places = [number for number, name in enumerate(selection.key) if name not in hidden]
    found: dict[Labels, Labels | None] = {}
    for key, target in selection.targets.items():
        part = tuple([key[place] for place in places])
        first = found.setdefault(part, key)
        if first is not None and selection.targets[first].node != target.node:
            found[part] = None
    return _Index(tuple(selection.key[place] for place in places), found, selection.key)
