"""What a server's answers come to: the map of each node, and what its gpumap does not report. Pure.

A missing series is not 0: if no series names the holders of a device, it is not free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpumap.cli.fleet import families
from gpumap.cli.fleet.cluster import (
    Cluster,
    devices_without_target,
    gpus_by_index,
    group_by_family,
    newest_facts,
    targets_by_device,
)
from gpumap.cli.fleet.families import DEVICE_INFO, HOLDER_COUNT, Family
from gpumap.cli.fleet.node_map import node_map_of
from gpumap.cli.fleet.targets import Key, Name, Node, Target, nodes_of
from gpumap.cli.fleet.values import NO_VALUES, FamilyValues, rows_by_target, values_of_node
from gpumap.model.map import DeviceEntry, NodeMap
from gpumap.model.words import listed

_NOT_SERVED = "its gpumap does not report"
_HOLDERS = "the holders of its GPUs (add --collect allocation, or stop dropping its series)"
_LACKS_PODS = (
    "the holders of its GPUs are not known: the kubelet lists no pod of the API server yet (or Prometheus drops "
    "gpumap_device_holders)"
)
"""The reason if other series of the group allocation exist (gpumap_node_info)."""
_USERS = "the users of its GPUs (its driver lists no processes; else add --collect use, or stop dropping its series)"
_GPUS = "its GPUs (add --collect device without --no-native, or stop dropping its series)"


class Answers(NamedTuple):
    """A server's values of these targets, by family. `by_target`: each row has the labels of its target."""

    targets: Mapping[Key, Target]
    names: Mapping[Key, Name]
    asked: Sequence[Family]
    values: Mapping[str, FamilyValues]
    by_target: bool


class NodeResult(NamedTuple):
    """A node and its map. `cluster` are the values that the map was made of, and possibly those of other nodes."""

    node: Node
    node_map: NodeMap
    cluster: Cluster


def node_results(answers: Answers) -> list[NodeResult]:
    """Return the nodes, in the order of their shown names."""
    cluster = _cluster(answers)
    nodes = nodes_of(answers.targets, answers.names, targets_by_device(cluster), gpus_by_index(cluster))
    if not answers.by_target:
        return [NodeResult(node, node_map_of(node, answers.targets, cluster), cluster) for node in nodes]
    rows = rows_by_target(answers.values, answers.asked)
    results = []
    for node in nodes:
        own = group_by_family(values_of_node(node, rows, answers.asked))
        results.append(NodeResult(node, node_map_of(node, answers.targets, own), own))
    return results


def are_mixed(answers: Answers) -> bool:
    """Whether several targets report one device, and their rows cannot be distinguished."""
    first: dict[str, Key] = {}
    for family in (DEVICE_INFO, HOLDER_COUNT):
        width = len(family.by)
        for row in answers.values.get(family.name, NO_VALUES).values:
            if first.setdefault(row[0], row[width:]) != row[width:]:
                return not answers.by_target
    return False


def duplicate_devices(results: Sequence[NodeResult]) -> dict[str, list[str]]:
    """Return devices that more than one node has, which is impossible, and the nodes."""
    names: dict[str, list[str]] = {}
    for one in results:
        for device in one.node_map.devices:
            names.setdefault(device.uuid, []).append(one.node.shown)
    return {uuid: several for uuid, several in names.items() if len(several) > 1}


def _cluster(answers: Answers) -> Cluster:
    if not answers.by_target:
        return group_by_family(answers.values)
    return group_by_family({family.name: answers.values[family.name] for family in answers.asked if family.of_target})


# --- gaps: what a gpumap that answers does not report, because groups or families are not served ----------------------


def gaps(result: NodeResult, parts: Collection[str], namespace: str) -> Iterator[str]:
    """Return a sentence for each kind of series that these parts need and that the node's gpumap does not serve,
    although its source answers."""
    node_map = result.node_map
    up = {source.source for source in node_map.sources if source.up}
    devices = node_map.devices
    if not node_map.sources:
        yield "its gpumap does not report its sources (Prometheus drops gpumap_source_up)"
        return
    if "nvml" in up and _lacks_gpus(result):
        yield f"{_NOT_SERVED} {_GPUS}"
    if families.HOLDERS in {family.part for family in families.families_for(parts)} and "kubelet" in up and devices:
        if not any(device.holders_known for device in devices):
            yield _LACKS_PODS if result.node.has_info else f"{_NOT_SERVED} {_HOLDERS}"
        elif not namespace and (fewer := [one.uuid for one in devices if _has_more_holders(one, result)]):
            yield f"some holders of {listed(fewer)} are missing (Prometheus drops gpumap_allocation_info)"
        elif _lacks_slots(result):
            yield "how the holders hold its GPUs is not known (Prometheus drops gpumap_allocation_slots)"
    if families.USE in parts and "nvml" in up:
        yield from _gaps_of_use(node_map, namespace)


def gaps_of_nodes(results: Iterable[NodeResult]) -> Iterator[str]:
    """Return a sentence on devices that no node reports although containers hold or use them: they are not shown."""
    clusters = {id(one.cluster): one.cluster for one in results}  # usually one, of all nodes
    lost = sorted({uuid for cluster in clusters.values() for uuid in devices_without_target(cluster)})
    if lost:
        yield f"the node of {listed(lost)} is not known, so its holders and users are not shown"


def _lacks_gpus(result: NodeResult) -> bool:
    """Whether NVML answers and no series is about a GPU; or none is about the devices that others name."""
    node_map = result.node_map
    if node_map.gpus or node_map.nameless_gpus:
        return False
    return bool(node_map.devices) or not newest_facts(result.cluster, result.node).driver


def _has_more_holders(device: DeviceEntry, result: NodeResult) -> bool:
    whole = result.cluster.holders.get(device.gpu_uuid, {}) if device.gpu_uuid not in (None, device.uuid) else {}
    return result.cluster.held.get(device.uuid, 0) > len({*result.cluster.holders.get(device.uuid, {}), *whole})


def _lacks_slots(result: NodeResult) -> bool:
    """Whether there are holders and no slots at all, and nothing shows that a scheduler granted these devices."""
    cluster = result.cluster
    shared = cluster.of(families.RESERVED) or any(owner == "scheduled" for _, owner in cluster.of(families.OWNER_BYTES))
    return bool(cluster.of(families.HOLDING)) and not cluster.of(families.SLOTS) and not shared


def _gaps_of_use(node_map: NodeMap, namespace: str) -> Iterator[str]:
    down = {gpu.uuid for gpu in node_map.gpus if not gpu.up}
    partitioned = {gpu.uuid for gpu in node_map.gpus if gpu.partitioned}
    measurable = [one for one in node_map.devices if one.gpu_uuid not in down and one.uuid not in partitioned]
    if measurable and not any(one.owners for one in measurable):
        yield f"{_NOT_SERVED} {_USERS}"
    elif not namespace and any(_lacks_users(one) for one in measurable):
        yield "some users of its GPUs are missing (Prometheus drops gpumap_container_gpu_processes)"


def _lacks_users(device: DeviceEntry) -> bool:
    """Whether containers have processes there, and no container is named."""
    running = sum(row.processes or 0 for row in device.owners if row.owner in ("assigned", "unassigned", "scheduled"))
    return running > 0 and not device.users
