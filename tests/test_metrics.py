"""The native families are those of the contract: names, types, labels, the number of series, and what absence means."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from gpumap.families import Family
from gpumap.metrics import DEFAULT_GROUPS, GROUPS, LATER_GROUPS, native, self_families
from gpumap.model import ContainerName, Uuid
from gpumap.snapshot import ContainerOnDevice, Leaf, ProcessUse, Snapshot
from tests.snapshots import UNKNOWN_USE, busy_node, empty_node, gpu

CONTAINER = "namespace pod container uuid"
DEVICE_INFO = "uuid gpu_uuid index minor pci_bus_id model mig_profile gpu_instance_id compute_instance_id"
UNMATCHED = "namespace pod container resource reason"

# Written from the contract, not from the code: a name that is released stays. (type, labels in the page's order)
CONTRACT: dict[str, dict[str, tuple[str, str]]] = {
    "allocation": {
        "gpumap_allocation_info": ("gauge", CONTAINER),
        "gpumap_allocation_slots": ("gauge", f"{CONTAINER} resource"),
        "gpumap_device_slots_allocatable": ("gauge", "uuid resource"),
        "gpumap_device_holders": ("gauge", "uuid"),
        "gpumap_unmatched_slots": ("gauge", UNMATCHED),
        "gpumap_container_allocated_gpus": ("gauge", CONTAINER),
        "gpumap_container_allocated_gpu_memory_bytes": ("gauge", CONTAINER),
        "gpumap_pod_info": ("gauge", "namespace pod pod_uid"),
        "gpumap_node_info": ("gauge", "node internal_ip"),
    },
    "use": {
        "gpumap_container_gpu_memory_used_bytes": ("gauge", CONTAINER),
        "gpumap_container_gpu_memory_peak_bytes": ("gauge", CONTAINER),
        "gpumap_container_gpu_processes": ("gauge", CONTAINER),
        "gpumap_container_sm_utilization_ratio": ("gauge", CONTAINER),
        "gpumap_container_memory_controller_busy_ratio": ("gauge", CONTAINER),
        "gpumap_container_unassigned_use": ("gauge", CONTAINER),
        "gpumap_container_last_active_timestamp_seconds": ("gauge", CONTAINER),
        "gpumap_device_memory_used_by_owner_bytes": ("gauge", "uuid owner"),
        "gpumap_device_processes": ("gauge", "uuid owner"),
    },
    "device": {
        "gpumap_device_info": ("gauge", DEVICE_INFO),
        "gpumap_device_memory_total_bytes": ("gauge", "uuid"),
        "gpumap_device_memory_used_bytes": ("gauge", "uuid"),
        "gpumap_device_memory_reserved_bytes": ("gauge", "uuid"),
        "gpumap_device_memory_free_bytes": ("gauge", "uuid"),
        "gpumap_gpu_up": ("gauge", "uuid"),
        "gpumap_gpu_fault_info": ("gauge", "uuid reason"),
        "gpumap_gpu_last_success_timestamp_seconds": ("gauge", "uuid"),
        "gpumap_gpu_utilization_ratio": ("gauge", "uuid"),
        "gpumap_gpu_memory_controller_busy_ratio": ("gauge", "uuid"),
        "gpumap_gpu_memory_total_bytes": ("gauge", "uuid"),
        "gpumap_gpu_memory_used_bytes": ("gauge", "uuid"),
        "gpumap_gpu_temperature_celsius": ("gauge", "uuid sensor"),
        "gpumap_gpu_power_watts": ("gauge", "uuid"),
        "gpumap_gpu_power_limit_watts": ("gauge", "uuid"),
        "gpumap_gpu_energy_joules_total": ("counter", "uuid"),
        "gpumap_driver_info": ("gauge", "driver_version cuda_version nvml_version"),
    },
    "codec": {
        "gpumap_container_encoder_utilization_ratio": ("gauge", CONTAINER),
        "gpumap_container_decoder_utilization_ratio": ("gauge", CONTAINER),
        "gpumap_gpu_encoder_utilization_ratio": ("gauge", "uuid"),
        "gpumap_gpu_decoder_utilization_ratio": ("gauge", "uuid"),
    },
}
SELF = {
    "gpumap_build_info": ("gauge", "version python_version"),
    "gpumap_source_up": ("gauge", "source"),
    "gpumap_source_last_success_timestamp_seconds": ("gauge", "source"),
    "gpumap_source_errors_total": ("counter", "source reason"),
    "gpumap_source_duration_seconds": ("summary", "source"),
    "gpumap_snapshot_timestamp_seconds": ("gauge", ""),
    "gpumap_collections_total": ("counter", "trigger"),
    "gpumap_capability": ("gauge", "capability"),
    "gpumap_nvml_stuck_seconds": ("gauge", "uuid"),
}
PROCESS_METRICS = {"gpumap_process_gpu_memory_used_bytes": ("gauge", f"{CONTAINER} pid type")}
ALL_GROUPS = {"allocation", "use", "accounting", "device", "gpm", "health", "codec", "links"}

# The contract's budget, less what the groups to come need of it: per (container, leaf) the four counters of
# accounting; per leaf the four ratios of gpm and the accounting gap.
MOST_PER_CONTAINER_AND_LEAF = 14 - 4
MOST_PER_LEAF = 24 - 5
MOST_PER_GPU = 55
MOST_PER_AGENT = 60
PROCESS_COLLECTOR_SERIES = 6
"""process_* of prometheus_client, on every page."""


def shape(families: Iterable[Family]) -> dict[str, tuple[str, str]]:
    return {one.name: (one.kind, " ".join(one.labels)) for one in families}


@pytest.mark.parametrize("group", CONTRACT)
def test_a_group_is_as_the_contract_says(group: str) -> None:
    """Each group has the contract's families, no other, with its types and labels."""
    assert shape(GROUPS[group]) == CONTRACT[group]


def test_the_self_metrics_are_as_the_contract_says() -> None:
    """The families on gpumap itself have the contract's names, types and labels."""
    assert shape(self_families("1", "2")) == SELF


def test_the_groups_are_those_of_the_contract() -> None:
    """What is built and what is to come are the contract's groups; codec alone is off by default."""
    assert set(GROUPS) == set(CONTRACT)
    assert {*GROUPS, *LATER_GROUPS} == ALL_GROUPS
    assert not set(GROUPS) & set(LATER_GROUPS)
    assert set(DEFAULT_GROUPS) == set(GROUPS) - {"codec"}


def test_the_chosen_groups_alone_are_served() -> None:
    """--collect picks groups, --process-metrics adds the family by process, and the order of choice does not matter."""
    assert shape(native(["use"], process_metrics=False)) == CONTRACT["use"]
    assert shape(native([], process_metrics=True)) == PROCESS_METRICS
    assert native(["device", "use"], process_metrics=False) == native(["use", "device"], process_metrics=False)


def test_names_keep_to_the_conventions() -> None:
    """Prefix, unit and type agree: counters and only they end in _total, *_info is 1, a ratio is within 0 and 1."""
    snapshot = busy_node()
    for one in (*native(GROUPS, process_metrics=True), *self_families("1", "2")):
        assert one.name.startswith("gpumap_")
        assert one.name.endswith("_total") == (one.kind == "counter")
        assert one.help.endswith(".")
        values = [series.value for series in one.read(snapshot)]
        if one.name.endswith("_info"):
            assert set(values) == {1}, one.name
        if one.name.endswith("_ratio"):
            assert all(0 <= value <= 1 for value in values), one.name


def test_no_family_stands_on_both_leaves_and_gpus() -> None:
    """gpumap_gpu_* and gpumap_nvml_* name physical GPUs, gpumap_device_* and gpumap_container_* leaves, never both."""
    snapshot = busy_node()
    gpus = {one.uuid for one in snapshot.gpus}
    leaves = {one.uuid for one in snapshot.leaves}
    for one in (*native(GROUPS, process_metrics=True), *self_families("1", "2")):
        if "uuid" not in one.labels:
            continue
        named = {series.labels[one.labels.index("uuid")] for series in one.read(snapshot)}
        assert named <= (gpus if one.name.startswith(("gpumap_gpu_", "gpumap_nvml_")) else leaves), one.name


def test_no_family_but_node_info_names_the_node() -> None:
    """The node's name comes with the scrape; as a label it stands on gpumap_node_info alone."""
    named = [one.name for one in native(GROUPS, process_metrics=True) if "node" in one.labels]
    assert named == ["gpumap_node_info"]


def test_the_number_of_series_is_within_the_budget() -> None:
    """On a large and busy node the default set keeps to what a container, a leaf, a GPU and an agent may have."""
    snapshot = busy_node()
    per: dict[str, Counter[tuple[str, ...]]] = {
        kind: Counter() for kind in ("container", "leaf", "gpu", "agent", "pod")
    }
    for one in (*native(DEFAULT_GROUPS, process_metrics=False), *self_families("1", "2")):
        for series in one.read(snapshot):
            if one.labels[:4] == tuple(CONTAINER.split()):
                per["container"][series.labels[:4]] += 1
            elif one.name.startswith(("gpumap_gpu_", "gpumap_nvml_")):
                per["gpu"][series.labels[:1]] += 1
            elif one.labels[:1] == ("uuid",):
                per["leaf"][series.labels[:1]] += 1
            elif one.labels[:2] == ("namespace", "pod"):
                per["pod"][(one.name, *series.labels)] += 1
            else:
                per["agent"][()] += 1
    assert len(per["container"]) == len(snapshot.containers)
    assert len(per["leaf"]) == len(snapshot.leaves)
    assert len(per["gpu"]) == len(snapshot.gpus)
    assert max(per["container"].values()) <= MOST_PER_CONTAINER_AND_LEAF
    assert max(per["leaf"].values()) <= MOST_PER_LEAF
    assert max(per["gpu"].values()) <= MOST_PER_GPU
    assert per["agent"][()] + PROCESS_COLLECTOR_SERIES <= MOST_PER_AGENT
    assert set(per["pod"].values()) == {1}


def names(snapshot: Snapshot) -> set[str]:
    families = native(GROUPS, process_metrics=True)
    return {one.name for one in families if list(one.read(snapshot))} - {"gpumap_node_info"}


def test_nothing_known_is_nothing_said() -> None:
    """A node that has told nothing has no sample at all besides its name: unknown is absent."""
    assert names(empty_node()) == set()


def test_what_is_not_known_of_a_container_is_absent() -> None:
    """A holder of whom only the slot and a process are known has these, and no 0 for the rest."""
    row = ContainerOnDevice(ContainerName("n", "p", "c"), Uuid("GPU-x"), (("nvidia.com/gpu", 1),), use=UNKNOWN_USE)
    assert names(replace(empty_node(), containers=(row,))) == {
        "gpumap_allocation_info",
        "gpumap_allocation_slots",
        "gpumap_container_gpu_processes",
    }


def test_what_is_not_held_is_not_said_to_be_allocated() -> None:
    """A container that only uses a device has no series of allocation on it."""
    row = ContainerOnDevice(ContainerName("n", "p", "c"), Uuid("GPU-x"), use=replace(UNKNOWN_USE, unassigned=True))
    assert names(replace(empty_node(), containers=(row,))) == {
        "gpumap_container_gpu_processes",
        "gpumap_container_unassigned_use",
    }


def test_a_lost_gpu_keeps_its_identity_and_loses_its_measurements() -> None:
    """A GPU with a fault has up 0, the reason and when it last answered; nothing measured."""
    lost = gpu(0, fault="lost")
    snapshot = replace(empty_node(), gpus=(lost,), leaves=(Leaf(lost.uuid, lost, holders=1),))
    assert names(snapshot) == {
        "gpumap_gpu_up",
        "gpumap_gpu_fault_info",
        "gpumap_gpu_last_success_timestamp_seconds",
        "gpumap_device_info",
        "gpumap_device_holders",
    }
    up = next(one for one in GROUPS["device"] if one.name == "gpumap_gpu_up")
    assert [series.value for series in up.read(snapshot)] == [0]


def test_a_device_that_only_the_kubelet_names_has_its_allocation() -> None:
    """While NVML is down a device has holders and slots, but neither gpumap_device_info nor a measurement."""
    snapshot = replace(
        empty_node(), leaves=(Leaf(Uuid("GPU-x"), None, holders=0, allocatable=(("nvidia.com/gpu", 1),)),)
    )
    assert names(snapshot) == {"gpumap_device_holders", "gpumap_device_slots_allocatable"}


def test_a_whole_gpus_memory_is_told_once() -> None:
    """gpumap_gpu_memory_* stands for partitioned GPUs only; a whole one's memory is its leaf's."""
    snapshot = busy_node(gpus=4)
    partitioned = [one.uuid for one in snapshot.gpus if one.partitioned]
    for name in ("gpumap_gpu_memory_total_bytes", "gpumap_gpu_memory_used_bytes"):
        family = next(one for one in GROUPS["device"] if one.name == name)
        assert [series.labels[0] for series in family.read(snapshot)] == partitioned


def test_a_process_in_no_pod_has_empty_names() -> None:
    """By process, what no pod can be named for has empty labels; a process whose memory is not told is absent."""
    snapshot = busy_node()
    (family,) = native([], process_metrics=True)
    uuid = snapshot.leaves[0].uuid
    assert [series.labels for series in family.read(snapshot)] == [
        ("team", "pod-0-0", "main", uuid, "100", "C"),
        ("", "", "", uuid, "101", "C"),
    ]
    untold: list[ProcessUse] = [one._replace(memory_bytes=None) for one in snapshot.processes]
    assert list(family.read(replace(snapshot, processes=tuple(untold)))) == []
