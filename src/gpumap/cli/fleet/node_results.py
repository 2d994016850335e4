"""What was found of each node: its targets and its document, out of a server's answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpumap.cli.fleet.cluster import Cluster, cards, group_by_family, knowers
from gpumap.cli.fleet.documents import document_of
from gpumap.cli.fleet.families import DEVICE_INFO, HOLDER_COUNT, Family
from gpumap.cli.fleet.merging import rows_by_target, told_of_node
from gpumap.cli.fleet.targets import Key, Node, Target, nodes_of
from gpumap.cli.fleet.values import NOTHING, Told
from gpumap.model.document import Document


class Found(NamedTuple):
    """A node. `cluster` is what its document was made of, and maybe of other nodes too."""

    node: Node
    document: Document
    cluster: Cluster


class Answers(NamedTuple):
    """What a server told of these targets, by families. `by_target`: each row tells its target."""

    targets: Mapping[Key, Target]
    names: Mapping[Key, tuple[str, str]]
    asked: Sequence[Family]
    told: Mapping[str, Told]
    by_target: bool


def found_in(answers: Answers) -> list[Found]:
    """The nodes, in the order of what they are called."""
    cluster = _cluster(answers)
    nodes = nodes_of(answers.targets, answers.names, knowers(cluster), cards(cluster))
    if not answers.by_target:
        return [Found(node, document_of(node, answers.targets, cluster), cluster) for node in nodes]
    rows = rows_by_target(answers.told, answers.asked)
    found = []
    for node in nodes:
        own = group_by_family(told_of_node(node, rows, answers.asked))
        found.append(Found(node, document_of(node, answers.targets, own), own))
    return found


def are_mixed(answers: Answers) -> bool:
    """Whether several targets tell of one device, and their rows cannot be told apart."""
    teller: dict[str, Key] = {}
    for family in (DEVICE_INFO, HOLDER_COUNT):
        width = len(family.by)
        for row in answers.told.get(family.name, NOTHING).values:
            if teller.setdefault(row[0], row[width:]) != row[width:]:
                return not answers.by_target
    return False


def duplicate_devices(found: Sequence[Found]) -> dict[str, list[str]]:
    """Devices that more than one node has, which cannot be, and the nodes."""
    names: dict[str, list[str]] = {}
    for one in found:
        for device in one.document["devices"]:
            names.setdefault(device["uuid"], []).append(one.node.shown)
    return {uuid: several for uuid, several in names.items() if len(several) > 1}


def _cluster(answers: Answers) -> Cluster:
    if not answers.by_target:
        return group_by_family(answers.told)
    return group_by_family({family.name: answers.told[family.name] for family in answers.asked if family.of_target})
