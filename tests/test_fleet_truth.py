"""What a look finds in a server's series is what the agents themselves say, and what no series tells is said."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumap.agent.metrics import GROUPS
from gpumap.agent.published import published
from gpumap.cli.fleet import queries
from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.tables import Shape, map_table, top_values, waste_table, waste_values
from gpumap.model.findings import ENDING_SECONDS, Thresholds
from gpumap.model.node import Device, Gpu, Node
from gpumap.model.readings import DeviceMemory
from gpumap.model.snapshot import Snapshot
from tests.examples import examples
from tests.generated import nodes as made_nodes
from tests.nodes import GIB, Pod, Process, TestNode, gpu_uuid
from tests.nodes import Gpu as MadeGpu
from tests.test_fleet import Labels, cluster_of, named, node_of, series, target, told_of_container

BARE: Labels = {"job": "g", "instance": "b:1"}
KINDS: tuple[Labels, ...] = (target("a:1", node="n"), target("a:1"), BARE, {**BARE, "namespace": "gpumap"})
"""Targets as an operator, a static configuration and something between them label them."""
ANY_AGE = Thresholds(idle_after_seconds=0.0, grace_seconds=0.0)
"""Series do not tell how old a container is."""


# --- what is compared -------------------------------------------------------------------------------------------------


def told_of(found: Node) -> dict[str, Any]:
    """What series have of a node."""
    names = ("nameless_gpus", "driver", "capabilities", "remedies", "name", "internal_ip", "timestamp")
    return {
        "devices": {one.uuid: _device(one) for one in found.devices if _has_series(one)},
        "gpus": {one.uuid: _gpu(one) for one in found.gpus},
        "pods": sorted(one.pod for one in found.pods),
        "unmatched": Counter(map(repr, found.unmatched)),
        "sources": [(one.source, one.up, one.last_success) for one in found.sources],
        **{name: getattr(found, name) for name in names},
    }


def _has_series(device: Device) -> bool:
    return device.gpu_uuid is not None or device.holders is not None or bool(device.owners or device.allocatable)


def _device(device: Device) -> dict[str, Any]:
    names = ("uuid", "gpu_uuid", "index", "partitioned", "allocatable", "holders", "host")
    found = {name: getattr(device, name) for name in names}
    mig = device.mig
    found["mig"] = mig and (mig.uuid, mig.gpu_instance_id, mig.compute_instance_id, mig.profile)
    found["containers"] = [told_of_container(one) for one in device.containers]
    found["memory"] = _memory(device.memory)
    owners = {one.owner: (one.memory_bytes or 0, one.processes or 0) for one in device.owners}
    found["owners"] = {owner: of_owner for owner, of_owner in owners.items() if any(of_owner)}
    return found | {"use_known": bool(device.owners)}


def _memory(memory: DeviceMemory | None) -> tuple[int, int] | None:
    return (memory.total_bytes, memory.used_bytes) if memory else None


def _gpu(gpu: Gpu) -> dict[str, Any]:
    names = ("index", "minor", "pci_bus_id", "model", "partitioned", "fault")
    reading = gpu.reading and (gpu.reading.utilization_ratio, _memory(gpu.reading.memory))
    return {name: getattr(gpu, name) for name in names} | {"reading": reading, "remedy": gpu.remedies.get("fault")}


def shown_of(found: Node) -> dict[str, Any]:
    """What tables show of a node, without the names of leftovers' pods, which no series tells.

    Nor does a series tell the memory of the other processes of an owner, if that of one of its containers is unknown.
    """
    seen = NodeMaps((found,))
    containers = (one for device in found.devices for one in device.containers)
    mixed = {(one.uuid, one.owner) for one in containers if one.use and one.use.memory_bytes is None}
    top: Counter[tuple[str, str, str]] = Counter()
    for row in msgspec.to_builtins(top_values(seen, Shape()))["rows"]:
        if (row["uuid"], row["owner"]) not in mixed:
            top[row["uuid"], row["owner"], "bytes"] += row["memory_bytes"] or 0
        top[row["uuid"], row["owner"], "processes"] += row["processes"] or 0
        top[row["uuid"], str(row["work"]), "processes"] += row["processes"] or 0
    waste = msgspec.to_builtins(waste_values(seen, Shape(thresholds=ANY_AGE)))
    findings: Counter[str] = Counter()
    for row in waste["findings"]:
        of_pod = () if row["finding"] == "leftover" else ("pod", "granted_bytes", "gpus", "waste_bytes")
        told = str([row[name] for name in ("finding", "uuid", *of_pod)])
        findings[told] += row["used_bytes"] or 0
    return {
        "top": {key: value for key, value in top.items() if value},
        "findings": dict(findings),
        "sums": waste["sums"],
    }


def without_sm_of_processes(found: Node) -> Node:
    """No series has the SM time of a process that is no user, such as the server of MPS, nor the age of an owner."""

    def without(device: Device) -> Device:
        silent = tuple(msgspec.structs.replace(one, sm_ratio=None, owner_since=None) for one in device.processes)
        return msgspec.structs.replace(device, processes=silent)

    return msgspec.structs.replace(found, devices=tuple(map(without, found.devices)))


def agree(snapshot: Snapshot, of_target: Labels, *, honour: bool) -> None:
    """The series of one node make its own document again, and all tables show the same of both."""
    seen, _ = cluster_of((snapshot, of_target), honour=honour)
    (found,) = seen.maps
    own = published(snapshot)
    assert told_of(found) == told_of(own)
    assert shown_of(found) == shown_of(without_sm_of_processes(own))
    holders = [one for device in own.devices for one in device.containers if one.holds]
    if holders and not any(holder.slots for holder in holders):  # no series shows that idle sharers have no slots
        assert all("Prometheus drops gpumap_allocation_slots" in one for one in seen.missing)
    elif any(device.holders is not None for device in own.devices):
        assert seen.missing == ()
    else:  # a List without a pod of the API server gives no holders
        assert not holders
        reasons = ("the holders of its GPUs are not known: the kubelet lists", "its driver lists no processes")
        assert all(any(reason in one for reason in reasons) for one in seen.missing)


# --- one node ---------------------------------------------------------------------------------------------------------


@given(made_nodes(), st.sampled_from(KINDS), st.booleans(), st.sets(st.sampled_from(["kubelet", "nvml", "procfs"])))
@settings(max_examples=examples(60))
def test_any_node(node: TestNode, of_target: Labels, honour: bool, down: set[str]) -> None:
    """Whatever a node is like, and whichever of its sources are down."""
    node.collect()
    node.down |= down
    # No series has the age of an owner: a process of a pod that is gone for less than 10 s is a leftover only there.
    agree(node.collect(ENDING_SECONDS), of_target, honour=honour)


def test_a_gpu_without_a_device() -> None:
    """A partitioned GPU without MIG devices, and one that never told its uuid, have their places and their say."""
    node = TestNode([MadeGpu(0), MadeGpu(1, mig=[]), MadeGpu(2, fault="lost")], [], [])
    node.collect()
    snapshot = node.collect()
    agree(snapshot, target("a:1"), honour=True)
    seen, _ = cluster_of((snapshot, target("a:1")))
    assert [gpu.index for gpu in seen.maps[0].gpus] == [0, 1]
    assert [gpu.index for gpu in seen.maps[0].nameless_gpus] == [2]


def test_a_kubelet_that_is_away_for_long() -> None:
    """Who holds what is then not known, and nobody is said to hold nothing."""
    node = TestNode([MadeGpu(0)], [Pod("ml", "train", {"main": {"nvidia.com/gpu": [gpu_uuid(0)]}})], [])
    node.collect()
    node.down.add("kubelet")
    node.collect(90)
    snapshot = node.collect()
    agree(snapshot, target("a:1"), honour=True)
    seen, _ = cluster_of((snapshot, target("a:1")))
    assert seen.maps[0].devices[0].holders is None


def test_an_init_container_beside_what_nobody_can_name() -> None:
    """It was given the device: what it uses is not taken from the device's unknown use."""
    held: dict[str, list[str]] = {"nvidia.com/gpu": [gpu_uuid(0)]}
    pod = Pod("ml", "train", {"main": held}, init={"fetch": held})
    nobody = Process(11, gpu_uuid(0), None, memory=2 * GIB, readable=False)
    node = TestNode([MadeGpu(0)], [pod], [Process(10, gpu_uuid(0), pod, container="fetch"), nobody])
    node.collect()
    agree(node.collect(), target("a:1"), honour=True)


# --- what is not served -----------------------------------------------------------------------------------------------


def names(*groups: str) -> frozenset[str]:
    """The families of groups of --collect."""
    return frozenset(family.name for group in groups for family in GROUPS[group])


_SERVED = "n: its gpumap does not report"


@pytest.mark.parametrize(
    ("dropped", "says"),
    [
        (names("allocation"), [f"{_SERVED} the holders of its GPUs"]),
        (names("use"), [f"{_SERVED} the users of its GPUs"]),
        (names("device"), [f"{_SERVED} its GPUs (add"]),
        (names("allocation", "use"), [f"{_SERVED} the holders", f"{_SERVED} the users"]),
        (
            names("allocation", "device"),
            [f"{_SERVED} its GPUs (add", f"{_SERVED} the holders of its GPUs"],
        ),
        (names(*GROUPS), [f"{_SERVED} its GPUs (add"]),
        (frozenset({"gpumap_device_info"}), [f"{_SERVED} its GPUs (add"]),
        (frozenset({"gpumap_allocation_info", "gpumap_allocation_slots"}), ["n: some holders of GPU-"]),
        (frozenset({"gpumap_allocation_slots"}), ["n: how the holders hold its GPUs is not known"]),
        (frozenset({"gpumap_container_gpu_processes"}), ["n: some users of its GPUs"]),
        (frozenset({"gpumap_source_up"}), ["n: its gpumap does not report its sources"]),
        (names("accounting", "health", "links", "gpm", "codec"), []),
    ],
)
def test_what_is_not_served_is_said(dropped: frozenset[str], says: list[str]) -> None:
    """Groups that are off, and families that a server drops: no zero stands for them, and the look is not whole."""
    seen, _ = cluster_of((node_of("n", 0), target("a:1", node="n")), dropped=dropped)
    assert len(seen.missing) == len(says), seen.missing
    assert all(one.startswith(start) for one, start in zip(seen.missing, says, strict=True)), seen.missing
    (found,) = seen.maps
    for device in found.devices:
        assert (device.holders is not None) is ("gpumap_device_holders" not in dropped)
        assert bool(device.owners) is ("gpumap_device_processes" not in dropped)


@pytest.mark.parametrize("address", ["10.0.0.7", ""])
def test_a_list_that_lacks_pods_is_named_as_the_reason(address: str) -> None:
    """After a restart the kubelet lists only static pods: no flag of gpumap and no dropped series is the cause."""
    pod = Pod("ml", "train", {"main": {"nvidia.com/gpu": [gpu_uuid(0)]}}, listed=False)
    node = TestNode([MadeGpu(0)], [pod], [])
    node.collect()
    snapshot = named(node.collect(), "n", address)
    assert "gpumap_device_holders" not in {name for name, _, _ in series([(snapshot, target("a:1"))], honour=True)}
    for parts in (queries.ALL, frozenset({queries.HOLDERS})):
        seen, _ = cluster_of((snapshot, target("a:1")), parts=parts)
        assert seen.missing == (
            "n: the holders of its GPUs are not known: the kubelet lists no pod of the API server yet (or Prometheus "
            "drops gpumap_device_holders)",
        )


def test_a_device_that_only_its_holder_names() -> None:
    """It belongs to the node that serves the holder. What is not known of it is said."""
    node = TestNode([MadeGpu(0)], [Pod("ml", "train", {"main": {"nvidia.com/gpu": [gpu_uuid(0)]}})], [])
    node.collect()
    seen, _ = cluster_of((node.collect(), target("a:1")), dropped=names("device") | {"gpumap_device_holders"})
    (device,) = seen.maps[0].devices
    assert [(device.uuid, device.gpu_uuid)] == [(gpu_uuid(0), None)]
    assert [one.pod for one in device.containers] == ["train"]
    assert "its gpumap does not report its GPUs" in " ".join(seen.missing)


def test_no_table_shows_a_zero_for_what_is_not_served() -> None:
    """Nobody is said to hold, to use or to waste nothing, where that is not told."""
    scrape = (node_of("n", 0), target("a:1", node="n"))
    for group in ("allocation", "use"):
        seen, _ = cluster_of(scrape, dropped=names(group))
        assert None in msgspec.to_builtins(waste_values(seen, Shape()))["sums"].values(), group
    seen, _ = cluster_of(scrape, dropped=names("allocation"))
    assert "No waste found" not in waste_table(seen, Shape())
    assert map_table(seen, Shape())
