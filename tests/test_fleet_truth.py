"""What a look finds in a server's series is what the agents report, and what no series has is named."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumap.agent.judgement.judge import ENDING_SECONDS
from gpumap.agent.metrics import GROUPS
from gpumap.agent.published import published
from gpumap.cli.fleet import queries
from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.tables import Shape
from gpumap.cli.tables.top import top_values
from gpumap.cli.tables.waste import waste_table, waste_values
from gpumap.model.findings import faulty_gpus
from gpumap.model.names import Owner
from gpumap.model.node import ContainerOnDevice, Device, Finding, Gpu, Node, encode
from gpumap.model.readings import DeviceMemory
from gpumap.model.snapshot import Snapshot
from tests.examples import examples
from tests.generated import nodes as made_nodes
from tests.nodes import GIB, Pod, Process, TestNode, gpu_uuid
from tests.nodes import Gpu as MadeGpu
from tests.snapshots import busy_node
from tests.test_fleet import Labels, cluster_of, container_in_series, named, node_of, series, target
from tests.test_map_schema import VALIDATOR

BARE: Labels = {"job": "g", "instance": "b:1"}
KINDS: tuple[Labels, ...] = (target("a:1", node="n"), target("a:1"), BARE, {**BARE, "namespace": "gpumap"})
"""Targets as an operator, a static configuration and something between them label them."""


# --- what is compared -------------------------------------------------------------------------------------------------


def facts_in_series(found: Node) -> dict[str, Any]:
    """What series have of a node."""
    names = ("nameless_gpus", "driver", "capabilities", "remedies", "name", "internal_ip", "timestamp")
    return {
        "devices": {one.uuid: _device(one) for one in found.devices if _has_series(one)},
        "gpus": {one.uuid: _gpu(one) for one in found.gpus},
        "pods": sorted(one.pod for one in found.pods),
        "unmatched": Counter(map(repr, found.unmatched)),
        "findings": Counter(map(_finding, found.findings or ())),
        "judged": found.judged,
        "sources": [(one.source, one.up, one.last_success) for one in found.sources],
        **{name: getattr(found, name) for name in names},
    }


def _finding(one: Finding) -> str:
    """What series have of a finding: not its evidence."""
    return repr(msgspec.structs.replace(one, why="", pids=(), granted_bytes=None, used_bytes=None))


def _has_series(device: Device) -> bool:
    return device.gpu_uuid is not None or device.holders is not None or bool(device.owners or device.allocatable)


def _device(device: Device) -> dict[str, Any]:
    names = ("uuid", "gpu_uuid", "index", "partitioned", "allocatable", "host")
    found = {name: getattr(device, name) for name in names}
    # The series are the same if no holder is known, and if it is not known who holds the device.
    found["holders"] = device.holders or (None if device.holders is None or device.may_have_more else 0)
    mig = device.mig
    found["mig"] = mig and (mig.uuid, mig.gpu_instance_id, mig.compute_instance_id, mig.profile)
    # Of a user without a grant, series have no owner; the sums by owner say how many processes are of which.
    settled = [one for one in device.containers if one.holds or one.owner is Owner.UNASSIGNED]
    rest = [one for one in device.containers if one not in settled]
    found["containers"] = [
        *map(container_in_series, settled),
        *(_without_owner(container_in_series(one)) for one in rest),
    ]
    found["processes"] = Counter(owner for one in rest for owner in [one.owner] * (one.use.processes if one.use else 0))
    found["memory"] = _memory(device.memory)
    owners = {one.owner: (one.memory_bytes or 0, one.processes or 0) for one in device.owners}
    found["owners"] = {owner: of_owner for owner, of_owner in owners.items() if any(of_owner)}
    return found | {"use_known": bool(device.owners)}


def _without_owner(one: ContainerOnDevice) -> ContainerOnDevice:
    return msgspec.structs.replace(one, owner=Owner.UNKNOWN)


def _memory(memory: DeviceMemory | None) -> tuple[int, int] | None:
    return (memory.total_bytes, memory.used_bytes) if memory else None


def _gpu(gpu: Gpu) -> dict[str, Any]:
    names = ("index", "minor", "pci_bus_id", "model", "partitioned", "fault")
    reading = gpu.reading and (gpu.reading.utilization_ratio, _memory(gpu.reading.memory))
    return {name: getattr(gpu, name) for name in names} | {"reading": reading, "remedy": gpu.remedies.get("fault")}


def shown_of(found: Node) -> dict[str, Any]:
    """What tables show of a node.

    No series has the names of leftovers' pods in `top`, nor the memory of the other processes of an owner, if that of
    one of its containers is unknown.
    """
    seen = NodeMaps((found,))
    containers = (one for device in found.devices for one in device.containers)
    mixed = {(one.uuid, _shown(one.owner)) for one in containers if one.use and one.use.memory_bytes is None}
    top: Counter[tuple[str, str, str]] = Counter()
    for row in msgspec.to_builtins(top_values(seen, Shape()))["rows"]:
        owner = _shown(row["owner"])
        if (row["uuid"], owner) not in mixed:
            top[row["uuid"], owner, "bytes"] += row["memory_bytes"] or 0
        top[row["uuid"], owner, "processes"] += row["processes"] or 0
        top[row["uuid"], str(row["work"]), "processes"] += row["processes"] or 0
    return {
        "top": {key: value for key, value in top.items() if value},
        "waste": msgspec.to_builtins(waste_values(seen, Shape()))["sums"],
    }


def _shown(owner: str) -> str:
    """Return the owner as far as series have it: they have sums by owner, but not each container's owner."""
    return "of a pod" if owner in (Owner.ASSIGNED, Owner.SCHEDULED, Owner.UNKNOWN) else owner


def agree(snapshot: Snapshot, of_target: Labels, *, honour: bool) -> None:
    """The series of one node make its own document again, and all tables show the same of both."""
    seen, _ = cluster_of((snapshot, of_target), honour=honour)
    (found,) = seen.maps
    own = published(snapshot)
    VALIDATOR.validate(msgspec.json.decode(encode(found)))
    assert facts_in_series(found) == facts_in_series(own)
    assert shown_of(found) == shown_of(own)
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
    agree(node.collect(ENDING_SECONDS), of_target, honour=honour)


def test_a_gpu_without_a_device() -> None:
    """A partitioned GPU without MIG devices, and one that never reported its uuid, have their places and their say."""
    node = TestNode([MadeGpu(0), MadeGpu(1, mig=[]), MadeGpu(2, fault="lost")], [], [])
    node.collect()
    snapshot = node.collect()
    agree(snapshot, target("a:1"), honour=True)
    seen, _ = cluster_of((snapshot, target("a:1")))
    assert [gpu.index for gpu in seen.maps[0].gpus] == [0, 1]
    assert [gpu.index for gpu in seen.maps[0].nameless_gpus] == [2]


def test_a_kubelet_that_is_away_for_long() -> None:
    """The holders are then unknown, and no device is shown without a holder."""
    node = TestNode([MadeGpu(0)], [Pod("ml", "train", {"main": {"nvidia.com/gpu": [gpu_uuid(0)]}})], [])
    node.collect()
    node.down.add("kubelet")
    node.collect(90)
    snapshot = node.collect()
    agree(snapshot, target("a:1"), honour=True)
    seen, _ = cluster_of((snapshot, target("a:1")))
    assert seen.maps[0].devices[0].holders is None


def test_an_init_container_beside_an_unknown_process() -> None:
    """It was given the device: what it uses is not taken from the device's unknown use."""
    held: dict[str, list[str]] = {"nvidia.com/gpu": [gpu_uuid(0)]}
    pod = Pod("ml", "train", {"main": held}, init={"fetch": held})
    none = Process(11, gpu_uuid(0), None, memory=2 * GIB, readable=False)
    node = TestNode([MadeGpu(0)], [pod], [Process(10, gpu_uuid(0), pod, container="fetch"), none])
    node.collect()
    agree(node.collect(), target("a:1"), honour=True)


# --- what is not served -----------------------------------------------------------------------------------------------


def names(*groups: str) -> frozenset[str]:
    """The families of groups of --collect."""
    return frozenset(family.name for group in groups for family in GROUPS[group])


_SERVED = "n: its gpumap does not report"


@pytest.mark.parametrize(
    ("dropped", "expected"),
    [
        (names("allocation"), [f"{_SERVED} the holders of its GPUs"]),
        (names("use"), [f"{_SERVED} the users of its GPUs"]),
        (names("device"), [f"{_SERVED} its GPUs (add"]),
        (names("allocation", "use"), [f"{_SERVED} the holders", f"{_SERVED} the users"]),
        (names("findings"), [f"{_SERVED} what is wrong on it (add --collect findings"]),
        (
            names("allocation", "device"),
            [f"{_SERVED} its GPUs (add", f"{_SERVED} the holders of its GPUs"],
        ),
        (names(*GROUPS), [f"{_SERVED} what is wrong on it", f"{_SERVED} its GPUs (add"]),
        (frozenset({"gpumap_device_info"}), [f"{_SERVED} its GPUs (add"]),
        (frozenset({"gpumap_allocation_info", "gpumap_allocation_slots"}), ["n: some holders of GPU-"]),
        (frozenset({"gpumap_allocation_slots"}), ["n: how the holders hold its GPUs is not known"]),
        (frozenset({"gpumap_container_gpu_processes"}), ["n: some users of its GPUs"]),
        (frozenset({"gpumap_source_up"}), ["n: its gpumap does not report its sources"]),
        (names("accounting", "health", "links", "gpm", "codec"), []),
    ],
)
def test_series_that_are_not_served_are_named(dropped: frozenset[str], expected: list[str]) -> None:
    """Groups that are off, and families that a server drops: no zero stands for them, and the look is not whole."""
    seen, _ = cluster_of((node_of("n", 0), target("a:1", node="n")), dropped=dropped)
    assert len(seen.missing) == len(expected), seen.missing
    assert all(one.startswith(start) for one, start in zip(seen.missing, expected, strict=True)), seen.missing
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


@pytest.mark.parametrize("dropped", [names("findings"), frozenset({"gpumap_finding_judged"})])
def test_findings_that_are_not_served_are_no_zeros(dropped: frozenset[str]) -> None:
    """Such a node is never shown as free of waste, neither on its own nor beside another one."""
    parts = frozenset({queries.FINDINGS})
    scrapes = (node_of("m", 0), target("a:1", node="m")), (node_of("n", 1), target("b:1", node="n"))
    seen, _ = cluster_of(*scrapes, parts=parts, dropped=dropped)
    assert [one.partition(" (")[0] for one in seen.missing] == [
        f"{one}: its gpumap does not report what is wrong on it" for one in "mn"
    ]
    assert not any(msgspec.to_builtins(waste_values(seen._replace(maps=()), Shape()))["sums"].values())
    found = msgspec.to_builtins(waste_values(seen, Shape()))
    assert {value for key, value in found["sums"].items() if key != "squatter_bytes"} == {None}
    assert "No waste found" not in waste_table(seen, Shape())
    assert "unmatched: not known on 2 of 2 nodes (m, n)." in waste_table(seen, Shape())


def test_findings_alone_take_no_other_series() -> None:
    """All that `waste` shows of a node needs its findings, the devices that have one, and which sources are down."""
    snapshot = node_of("n", 0)
    seen, _ = cluster_of((snapshot, target("a:1")), parts=frozenset({queries.FINDINGS}))
    whole, _ = cluster_of((snapshot, target("a:1")))
    assert waste_table(seen, Shape()) == waste_table(whole, Shape())
    assert seen.missing == ()


def test_two_targets_of_a_node_find_a_thing_once() -> None:
    """A node that two jobs scrape has the findings of one: of the newest that serves findings."""
    older, newer = node_of("n", 0), node_of("n", 0)
    newer = replace(newer, at=newer.at._replace(wall=newer.at.wall + 5))
    scrapes = (older, target("a:1", job="x")), (newer, target("b:1", job="y"))
    for judges in ([older], [newer], [older, newer]):
        silent = (replace(one, node=msgspec.structs.replace(one.node, findings=None, judged={})) for one, _ in scrapes)
        served = [(one if one in judges else other, of) for (one, of), other in zip(scrapes, silent, strict=True)]
        seen, _ = cluster_of(*served, parts=frozenset({queries.FINDINGS}))
        (found,) = seen.maps
        assert [one.finding for one in found.findings or ()] == ["squatter"]


def test_a_fault_is_not_one_of_gpumaps_own_pod() -> None:
    """Without honorLabels an empty name becomes that of the target."""
    node = TestNode([MadeGpu(0, fault="lost"), MadeGpu(1)], [], [])
    node.collect()
    seen, _ = cluster_of((node.collect(), target("a:1")), honour=False, parts=frozenset({queries.FINDINGS}))
    assert {(one.finding, one.pod, one.namespace) for one in seen.maps[0].findings or ()} == {("fault", "", "")}


def test_a_gpu_with_several_faults_counts_once() -> None:
    """Its line names its other reasons, as on its node."""
    seen, _ = cluster_of((busy_node(3), target("a:1")))
    lines, expected = (
        [(fault.uuid, fault.why, fault.gpus) for fault in faulty_gpus(node.findings) if fault.uuid]
        for node in (seen.maps[0], published(busy_node(3)))
    )
    assert lines == expected
    assert "; also " in lines[0][1]
