"""The dialect arms: what Aliyun's GPU monitoring calls DCGM_CUSTOM_*, of processes, containers, cards and the node."""

from dataclasses import replace

import pytest
from hypothesis import given
from msgspec import structs

from gpumap.agent.dialects.arms import FAMILIES
from gpumap.model.node import ContainerOnDevice, UnmatchedSlots
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import ContainerName
from tests.dialect_pages import (
    ALONE,
    GPUSHARE,
    HARD,
    MAIN,
    PARENT,
    SHARED_1,
    SHARED_2,
    TITAN,
    Rows,
    blind,
    card,
    devices,
    holder,
    node,
    partitioned,
    process,
    rows,
    used,
    without_nvml,
)
from tests.dialect_samples import V100
from tests.generated import nodes
from tests.nodes import TestNode
from tests.snapshots import with_node

PROCESS = ("MEM_USED", "SM_UTIL", "MEM_COPY_UTIL", "ENCODE_UTIL", "DECODE_UTIL")


def family_rows(snapshot: Snapshot, name: str, *labels: str) -> Rows:
    return rows(FAMILIES, snapshot, f"DCGM_CUSTOM_{name}", *labels)


def only(snapshot: Snapshot, name: str) -> float | None:
    """The value of the family's one series."""
    values = list(family_rows(snapshot, name).values())
    assert len(values) <= 1
    return values[0] if values else None


def held(*containers: ContainerOnDevice) -> Snapshot:
    return node("n", [card(0, V100, "Tesla V100-SXM2-16GB")], containers)


def test_a_processs_times_are_its_own_in_percent() -> None:
    """All four engines of each process, without a group of --collect; what is not reported is absent."""
    times = structs.replace(
        process(7, V100, 1, HARD),
        sm_ratio=0.29,
        memory_controller_busy_ratio=0.07,
        encoder_ratio=0.5,
        decoder_ratio=0.25,
    )
    snapshot = node("n", [card(0, V100, "V100")], [], [times, process(8, V100, None, HARD, sm=None)])
    assert {name: family_rows(snapshot, f"PROCESS_{name}", "ProcessId") for name in PROCESS} == {
        "MEM_USED": {("7",): 1},
        "SM_UTIL": {("7",): 29},
        "MEM_COPY_UTIL": {("7",): 7},
        "ENCODE_UTIL": {("7",): 50},
        "DECODE_UTIL": {("7",): 25},
    }


@pytest.mark.parametrize(
    ("containers", "mode", "word"),
    [
        ([], 0, None),
        ([holder(HARD, V100)], 1, "exclusive"),
        ([holder(HARD, V100, slots=GPUSHARE, gpus=4 / 15, memory_mib=4096)], 2, "share"),
        ([holder(HARD, V100, gpus=0.25, memory_mib=None)], 2, "share"),
        ([holder(HARD, V100, gpus=None, memory_mib=4096)], 2, "share"),
        ([holder(HARD, V100, gpus=None, memory_mib=None)], None, ""),
        ([holder(HARD, V100, gpus=0.0, memory_mib=None)], 0, "none"),
        ([holder(one, V100, gpus=None, memory_mib=None) for one in (HARD, MAIN)], 2, "share"),
        ([holder(HARD, V100), holder(MAIN, V100, gpus=0.0, memory_mib=None)], 1, "exclusive"),
        ([holder(HARD, V100, gpus=0.5, memory_mib=None), holder(MAIN, V100, gpus=0.5)], 2, "share"),
    ],
)
def test_how_a_card_is_given_away(containers: list[ContainerOnDevice], mode: int | None, word: str | None) -> None:
    """None, exclusive or shared, by what is left of it to others; absent if that is unknown."""
    snapshot = held(*containers)
    assert only(snapshot, "ALLOCATE_MODE") == mode
    snapshot = replace(snapshot, processes=(process(7, V100, 1, HARD),))
    assert list(family_rows(snapshot, "PROCESS_MEM_USED", "AllocateMode")) == [(word or "",)]


def test_no_mode_and_no_share_without_a_list() -> None:
    """An old List does not show what is assigned, nor do slots show it on cards that they may be on."""
    snapshot = held()
    devices_held = tuple(structs.replace(one, holders=None) for one in snapshot.node.devices)
    unknown = with_node(snapshot, devices=devices_held)
    assert only(unknown, "ALLOCATE_MODE") is only(unknown, "DEV_FB_ALLOCATED") is None
    assert only(unknown, "DEV_FB_TOTAL") == 16160
    slots = UnmatchedSlots(*HARD, "aliyun.com/gpu-mem", "untrusted_id", 4)
    somewhere = with_node(snapshot, unmatched=(slots,))
    assert only(somewhere, "ALLOCATE_MODE") is only(somewhere, "DEV_FB_ALLOCATED") is None
    other = card(1, TITAN[0], "TITAN V")
    offered = structs.replace(*devices(other), holders=0, allocatable={"aliyun.com/gpu-mem": 11})
    elsewhere = with_node(somewhere, gpus=(*somewhere.node.gpus, other), devices=(*somewhere.node.devices, offered))
    assert family_rows(elsewhere, "DEV_FB_ALLOCATED", "UUID") == {(V100,): 0}
    for reason in ("not_in_nvml", "device_down"):
        outside = with_node(snapshot, unmatched=(structs.replace(slots, reason=reason),))
        assert only(outside, "DEV_FB_ALLOCATED") == 0
        assert only(outside, "ALLOCATE_MODE") is None


def test_what_is_not_known_is_absent() -> None:
    """Without PID visibility there is no process; without NVML no card, and only the device's id of a grant."""
    assert all(family_rows(blind(), f"PROCESS_{name}") == {} for name in PROCESS)
    assert only(blind(), "CONTAINER_MEM_ALLOCATED") == 12066
    assert family_rows(without_nvml(), "DEV_FB_TOTAL") == family_rows(without_nvml(), "DEV_FB_ALLOCATED") == {}
    assert family_rows(without_nvml(), "CONTAINER_CP_ALLOCATED", "UUID", "device", "gpu", "modelName") == {
        (TITAN[0], "", "", ""): 0
    }


def test_mig_devices_are_their_cards() -> None:
    """UUID is the card's: a process on two devices is one row, and memory that compute instances share counts once."""
    rows_held = [
        holder(HARD, one.uuid, used(1, None), gpus=1 / 7, memory_mib=9728) for one in (SHARED_1, SHARED_2, ALONE)
    ]
    processes = [process(7, one.uuid, 10, HARD, sm=None) for one in (SHARED_1, SHARED_2, ALONE)]
    snapshot = partitioned(rows_held, processes)
    assert family_rows(snapshot, "PROCESS_MEM_USED", "ProcessId", "UUID") == {("7", PARENT): 30}
    assert family_rows(snapshot, "CONTAINER_MEM_ALLOCATED", "UUID", "AllocateMode") == {(PARENT, "exclusive"): 2 * 9728}
    assert only(snapshot, "CONTAINER_CP_ALLOCATED") == pytest.approx(3 / 7)
    assert family_rows(snapshot, "DEV_FB_ALLOCATED", "UUID") == {(PARENT,): pytest.approx(2 * 9728 / 81920)}
    assert family_rows(snapshot, "PROCESS_SM_UTIL") == {}


def test_a_shared_mig_device_is_shared() -> None:
    """By what its plugin offers of it, where it grants no memory; without the offer it is unknown."""
    sliced = holder(HARD, ALONE.uuid, gpus=1 / 28, memory_mib=None)
    snapshot = partitioned([sliced])
    assert only(snapshot, "ALLOCATE_MODE") is None
    offered = tuple(structs.replace(one, allocatable={"nvidia.com/gpu": 4}) for one in snapshot.node.devices)
    assert only(with_node(snapshot, devices=offered), "ALLOCATE_MODE") == 2
    assert only(with_node(snapshot, devices=offered), "CONTAINER_CP_ALLOCATED") is None


@given(nodes())
def test_what_is_granted_adds_up_to_what_is_given_away(truth: TestNode) -> None:
    """By container and by card it is the same memory; that of compute instances with two holders counts once."""
    snapshot = truth.collect()
    totals = family_rows(snapshot, "DEV_FB_TOTAL", "UUID")
    granted: dict[str, float] = {}
    for (uuid, *_), value in family_rows(
        snapshot, "CONTAINER_MEM_ALLOCATED", "UUID", "NamespaceName", "PodName", "ContainerName"
    ).items():
        granted[uuid] = granted.get(uuid, 0) + value
    holders: dict[tuple[str, int], set[ContainerName]] = {}
    for one in snapshot.node.devices:
        if one.gpu_uuid is not None and one.mig is not None:
            names = {row.name for row in one.containers if row.holds}
            holders.setdefault((one.gpu_uuid, one.mig.gpu_instance_id), set()).update(names)
    shared = {uuid for (uuid, _), names in holders.items() if len(names) > 1}
    for (uuid,), ratio in family_rows(snapshot, "DEV_FB_ALLOCATED", "UUID").items():
        given_away, rounded = ratio * totals[(uuid,)], len(snapshot.containers) + 1
        assert given_away <= granted.get(uuid, 0) + rounded
        if uuid not in shared:
            assert given_away == pytest.approx(granted.get(uuid, 0), abs=rounded)


@given(nodes())
def test_processes_and_cards_are_there_once(truth: TestNode) -> None:
    """On generated nodes: no series twice, utilisation in percent, no card given away twice where nothing is shared."""
    snapshot = truth.collect()
    memory = family_rows(snapshot, "PROCESS_MEM_USED", "ProcessId", "UUID")
    assert len(memory) == len(
        family_rows(snapshot, "PROCESS_MEM_USED", "ProcessId", "UUID", "PodName", "NamespaceName")
    )
    assert all(0 <= value <= 100 for value in family_rows(snapshot, "PROCESS_SM_UTIL", "ProcessId", "UUID").values())
    assert all(value >= 0 for value in family_rows(snapshot, "DEV_FB_ALLOCATED", "UUID").values())
    assert only(snapshot, "ALLOCATE_MODE") in (None, 0, 1, 2)
