"""The native families are those of the contract: names, types, labels, the number of series, and what absence means."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from msgspec import structs

from gpumap.agent.flags import DEFAULT_GROUPS
from gpumap.agent.metrics import GROUPS, native, self_families
from gpumap.model.families import Family
from gpumap.model.node import (
    ContainerAccount,
    ContainerOnDevice,
    Device,
    GpuAccount,
    GpuXids,
    Grant,
    NamelessGpu,
    ReportedDeviceHealth,
)
from gpumap.model.readings import CLOCK_EVENT_TIMES, Activity, Uuid
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import Owner
from tests.snapshots import MODEL, UNKNOWN_USE, busy_node, empty_node, gpu, with_node

SLOT = Grant({"nvidia.com/gpu": 1})
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
        "gpumap_device_reserved_info": ("gauge", "uuid namespace pod"),
        "gpumap_unmatched_slots": ("gauge", UNMATCHED),
        "gpumap_container_allocated_gpus": ("gauge", CONTAINER),
        "gpumap_container_allocated_gpu_memory_bytes": ("gauge", CONTAINER),
        "gpumap_allocation_unhealthy_info": ("gauge", "namespace pod container resource device_id"),
        "gpumap_pod_info": ("gauge", "namespace pod uid"),
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
    "host": {
        "gpumap_host_gpu_memory_used_bytes": ("gauge", "workload_kind workload uuid"),
        "gpumap_host_sm_utilization_ratio": ("gauge", "workload_kind workload uuid"),
        "gpumap_host_gpu_processes": ("gauge", "workload_kind workload uuid"),
    },
    "findings": {
        "gpumap_finding_since_timestamp_seconds": ("gauge", "finding reason namespace pod container uuid"),
        "gpumap_finding_gpus": ("gauge", "finding reason namespace pod container uuid"),
        "gpumap_finding_memory_bytes": ("gauge", "finding reason namespace pod container uuid"),
        "gpumap_finding_judged": ("gauge", "finding"),
    },
    "device": {
        "gpumap_device_info": ("gauge", DEVICE_INFO),
        "gpumap_device_memory_total_bytes": ("gauge", "uuid"),
        "gpumap_device_memory_used_bytes": ("gauge", "uuid"),
        "gpumap_device_memory_reserved_bytes": ("gauge", "uuid"),
        "gpumap_device_memory_free_bytes": ("gauge", "uuid"),
        "gpumap_gpu_up": ("gauge", "gpu_uuid"),
        "gpumap_gpu_fault_info": ("gauge", "gpu_uuid reason"),
        "gpumap_gpu_without_device_info": ("gauge", "gpu_uuid index minor pci_bus_id model reason"),
        "gpumap_gpu_last_success_timestamp_seconds": ("gauge", "gpu_uuid"),
        "gpumap_gpu_utilization_ratio": ("gauge", "gpu_uuid"),
        "gpumap_gpu_memory_controller_busy_ratio": ("gauge", "gpu_uuid"),
        "gpumap_gpu_memory_total_bytes": ("gauge", "gpu_uuid"),
        "gpumap_gpu_memory_used_bytes": ("gauge", "gpu_uuid"),
        "gpumap_gpu_temperature_celsius": ("gauge", "gpu_uuid sensor"),
        "gpumap_gpu_power_watts": ("gauge", "gpu_uuid"),
        "gpumap_gpu_power_limit_watts": ("gauge", "gpu_uuid"),
        "gpumap_gpu_energy_joules_total": ("counter", "gpu_uuid"),
        "gpumap_driver_info": ("gauge", "driver_version cuda_version nvml_version"),
    },
    "accounting": {
        "gpumap_container_allocated_gpu_seconds_total": ("counter", CONTAINER),
        "gpumap_container_sm_seconds_total": ("counter", CONTAINER),
        "gpumap_container_sm_activity_seconds_total": ("counter", CONTAINER),
        "gpumap_container_gpu_memory_byte_seconds_total": ("counter", CONTAINER),
        "gpumap_container_energy_joules_total": ("counter", CONTAINER),
        "gpumap_gpu_energy_unattributed_joules_total": ("counter", "gpu_uuid"),
        "gpumap_accounting_gap_seconds_total": ("counter", "gpu_uuid"),
    },
    "gpm": {
        "gpumap_device_sm_activity_ratio": ("gauge", "uuid"),
        "gpumap_device_sm_occupancy_ratio": ("gauge", "uuid"),
        "gpumap_device_tensor_activity_ratio": ("gauge", "uuid"),
        "gpumap_device_dram_activity_ratio": ("gauge", "uuid"),
        "gpumap_device_graphics_activity_ratio": ("gauge", "uuid"),
        "gpumap_device_fp64_activity_ratio": ("gauge", "uuid"),
        "gpumap_device_fp32_activity_ratio": ("gauge", "uuid"),
        "gpumap_device_fp16_activity_ratio": ("gauge", "uuid"),
        "gpumap_container_sm_activity_ratio": ("gauge", CONTAINER),
    },
    "health": {
        "gpumap_gpu_clock_hertz": ("gauge", "gpu_uuid domain"),
        "gpumap_gpu_clock_event": ("gauge", "gpu_uuid reason"),
        "gpumap_gpu_clock_event_seconds_total": ("counter", "gpu_uuid reason"),
        "gpumap_gpu_performance_state": ("gauge", "gpu_uuid"),
        "gpumap_gpu_fan_speed_ratio": ("gauge", "gpu_uuid fan"),
        "gpumap_gpu_ecc_errors_total": ("counter", "gpu_uuid type location"),
        "gpumap_gpu_remapped_rows": ("gauge", "gpu_uuid type"),
        "gpumap_gpu_row_remap_pending": ("gauge", "gpu_uuid"),
        "gpumap_gpu_row_remap_failure": ("gauge", "gpu_uuid"),
        "gpumap_gpu_retired_pages": ("gauge", "gpu_uuid type"),
        "gpumap_gpu_recovery_action_info": ("gauge", "gpu_uuid action"),
        "gpumap_gpu_xid_errors_total": ("counter", "gpu_uuid"),
        "gpumap_gpu_xid_errors_by_code_total": ("counter", "gpu_uuid xid"),
        "gpumap_container_xid_errors_total": ("counter", f"{CONTAINER} xid"),
        "gpumap_xid_blind_seconds_total": ("counter", "gpu_uuid"),
    },
    "links": {
        "gpumap_gpu_pcie_transmit_bytes_total": ("counter", "gpu_uuid"),
        "gpumap_gpu_pcie_receive_bytes_total": ("counter", "gpu_uuid"),
        "gpumap_gpu_nvlink_transmit_bytes_total": ("counter", "gpu_uuid"),
        "gpumap_gpu_nvlink_receive_bytes_total": ("counter", "gpu_uuid"),
        "gpumap_gpu_nvlink_errors_total": ("counter", "gpu_uuid type"),
        "gpumap_gpu_fabric_info": ("gauge", "gpu_uuid state status"),
    },
    "codec": {
        "gpumap_container_encoder_utilization_ratio": ("gauge", CONTAINER),
        "gpumap_container_decoder_utilization_ratio": ("gauge", CONTAINER),
        "gpumap_gpu_encoder_utilization_ratio": ("gauge", "gpu_uuid"),
        "gpumap_gpu_decoder_utilization_ratio": ("gauge", "gpu_uuid"),
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
    "gpumap_nvml_stuck_seconds": ("gauge", "gpu_uuid"),
}
PROCESS_METRICS = {"gpumap_process_gpu_memory_used_bytes": ("gauge", f"{CONTAINER} pid type")}
OF_GPUS = ("gpumap_gpu_", "gpumap_nvml_", "gpumap_xid_", "gpumap_accounting_")
"""What the names of families begin with whose `uuid` is a physical GPU's."""


def shape(families: Iterable[Family]) -> dict[str, tuple[str, str]]:
    return {one.name: (one.kind, " ".join(one.labels)) for one in families}


@pytest.mark.parametrize("group", CONTRACT)
def test_a_group_is_as_in_the_contract(group: str) -> None:
    """Each group has the contract's families, no other, with its types and labels."""
    assert shape(GROUPS[group]) == CONTRACT[group]


def test_the_self_metrics_are_as_in_the_contract() -> None:
    """The families on gpumap itself have the contract's names, types and labels."""
    assert shape(self_families("1", "2")) == SELF


def test_the_groups_are_those_of_the_contract() -> None:
    """They are the contract's groups; codec alone is off by default."""
    assert set(GROUPS) == set(CONTRACT)
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


def test_no_family_is_on_both_leaves_and_gpus() -> None:
    """gpumap_gpu_* and some others name physical GPUs, gpumap_device_* and gpumap_container_* leaves, never both."""
    snapshot = busy_node()
    gpus = {one.uuid for one in snapshot.node.gpus}
    leaves = {one.uuid for one in snapshot.node.devices}
    for one in (*native(GROUPS, process_metrics=True), *self_families("1", "2")):
        if "uuid" not in one.labels:
            continue
        named = {series.labels[one.labels.index("uuid")] for series in one.read(snapshot)} - {""}
        assert named <= (gpus if one.name.startswith(OF_GPUS) else leaves), one.name


def test_no_family_but_node_info_names_the_node() -> None:
    """The node's name comes with the scrape; as a label it stands on gpumap_node_info alone."""
    named = [one.name for one in native(GROUPS, process_metrics=True) if "node" in one.labels]
    assert named == ["gpumap_node_info"]


def names(snapshot: Snapshot) -> set[str]:
    families = native(GROUPS, process_metrics=True)
    return {one.name for one in families if list(one.read(snapshot))} - {"gpumap_node_info"}


def test_an_unknown_node_has_no_sample() -> None:
    """A node that has told nothing has no sample at all besides its name: unknown is absent."""
    assert names(empty_node()) == set()


def test_what_is_not_known_of_a_container_is_absent() -> None:
    """A holder of whom only the slot and a process are known has these, and no 0 for the rest."""
    row = ContainerOnDevice("n", "p", "c", Uuid("GPU-x"), grant=SLOT, use=UNKNOWN_USE)
    assert names(replace(empty_node(), containers=(row,))) == {
        "gpumap_allocation_info",
        "gpumap_allocation_slots",
        "gpumap_container_gpu_processes",
    }


def test_a_user_without_a_grant_has_no_allocation() -> None:
    """A container that only uses a device has no series of allocation on it."""
    row = ContainerOnDevice("n", "p", "c", Uuid("GPU-x"), Owner.UNASSIGNED, use=UNKNOWN_USE)
    snapshot = replace(empty_node(), containers=(row,))
    assert names(snapshot) == {"gpumap_container_gpu_processes", "gpumap_container_unassigned_use"}
    assert sample("gpumap_container_unassigned_use", snapshot) == {("n", "p", "c", "GPU-x"): 1}


def test_a_number_of_holders_is_complete_or_absent() -> None:
    """It is absent without a current List, and if a slot without a known device may be on the leaf."""
    leaves = (
        Device(Uuid("GPU-free"), holders=0),
        Device(Uuid("GPU-held"), holders=2),
        Device(Uuid("GPU-unlisted")),
        Device(Uuid("GPU-perhaps-more"), holders=1, may_have_more=True),
    )
    found = sample("gpumap_device_holders", with_node(empty_node(), devices=leaves))
    assert found == {("GPU-free",): 0, ("GPU-held",): 2}


def test_gpus_without_a_device_are_named() -> None:
    """Each GPU is in gpumap_device_info or in gpumap_gpu_without_device_info, which has its fault."""
    whole, empty, lost = gpu(0), gpu(1, partitioned=True), gpu(2, partitioned=True, fault="lost")
    snapshot = with_node(
        empty_node(),
        gpus=(whole, empty, lost),
        nameless_gpus=(NamelessGpu(3, "hung"),),
        devices=(Device(whole.uuid, whole.uuid), Device(Uuid("GPU-x"))),
    )
    assert sample("gpumap_gpu_without_device_info", snapshot) == {
        (empty.uuid, "1", "1", "00000000:01:00.0", MODEL, ""): 1,
        (lost.uuid, "2", "2", "00000000:02:00.0", MODEL, "lost"): 1,
        ("", "3", "", "", "", "hung"): 1,
    }


def sample(name: str, snapshot: Snapshot) -> dict[tuple[str, ...], float]:
    """A family's values by their labels."""
    (family,) = (one for one in native(GROUPS, process_metrics=False) if one.name == name)
    return {series.labels: series.value for series in family.read(snapshot)}


def test_devices_that_their_plugin_calls_unhealthy() -> None:
    """Each once, also for two pods of one name. An unknown claim is not: its driver may report no health at all."""
    gpu, claim = "nvidia.com/gpu", "claim:gpus/one"
    reported = [(gpu, "0", "Unhealthy"), (gpu, "0", "Unknown"), (gpu, "1", "Unknown"), (gpu, "2", "Healthy")]
    reported += [(claim, "3", "Unhealthy"), (claim, "4", "Unknown"), (gpu, "5", "")]
    rows = tuple(ReportedDeviceHealth("n", "p", "c", *one) for one in reported)
    assert sample("gpumap_allocation_unhealthy_info", with_node(empty_node(), device_health=rows)) == {
        ("n", "p", "c", resource, device): 1 for resource, device in ((claim, "3"), (gpu, "0"), (gpu, "1"))
    }


def test_times_of_clock_events_count_nothing_twice() -> None:
    """The driver also counts totals over several reasons, and thermal violations as a whole and in two parts."""
    card = gpu(0)
    assert card.reading is not None
    family = "gpumap_gpu_clock_event_seconds_total"

    def reasons(times: Iterable[str]) -> set[str]:
        assert card.reading is not None
        answer = structs.replace(
            card, reading=structs.replace(card.reading, clock_event_seconds=dict.fromkeys(times, 1.0))
        )
        return {labels[-1] for labels in sample(family, with_node(empty_node(), gpus=(answer,)))}

    everything = set(CLOCK_EVENT_TIMES)
    totals = {"total_app_clocks", "total_base_clocks"}
    assert reasons(everything) == everything - totals - {"thermal"}
    old = {one for one in everything if not one.endswith("_slowdown")}
    assert reasons(old) == old - totals, "an older driver counts no parts"
    for part in ("sw_thermal_slowdown", "hw_thermal_slowdown"):
        assert reasons(("thermal", part)) == {part}


def test_activity_is_on_leaves() -> None:
    """What GPM measured stands on the GPU that is not partitioned, or on its MIG devices, never on both, as told."""
    snapshot = busy_node(gpus=4)
    found = sample("gpumap_device_sm_activity_ratio", snapshot)
    old, lost = snapshot.node.gpus[2], snapshot.node.gpus[3]
    measured = [leaf for leaf in snapshot.node.devices if leaf.gpu_uuid not in (old.uuid, lost.uuid)]
    assert list(found) == [(leaf.uuid,) for leaf in measured]
    beyond = structs.replace(snapshot.node.devices[0], activity=Activity(1.01, None, 0.0, None))
    alone = with_node(snapshot, devices=(beyond,))
    assert sample("gpumap_device_sm_activity_ratio", alone) == {(beyond.uuid,): 1.01}, "it is the driver's to tell"
    assert sample("gpumap_device_tensor_activity_ratio", alone) == {(beyond.uuid,): 0.0}
    assert sample("gpumap_device_sm_occupancy_ratio", alone) == {}


def test_xid_errors_are_counted_from_nought() -> None:
    """A GPU that is listened to has 0 from the start, the sum of its codes after that, also while it is lost."""
    lost = gpu(0, fault="lost")
    snapshot = with_node(empty_node(), gpus=(lost,), xids=(GpuXids(lost.uuid, {}, 0.0),))
    assert sample("gpumap_gpu_xid_errors_total", snapshot) == {(lost.uuid,): 0}
    assert sample("gpumap_gpu_xid_errors_by_code_total", snapshot) == {}
    assert sample("gpumap_xid_blind_seconds_total", snapshot) == {(lost.uuid,): 0.0}
    snapshot = with_node(snapshot, xids=(GpuXids(lost.uuid, {31: 2, 79: 1}, 7.5),))
    assert sample("gpumap_gpu_xid_errors_total", snapshot) == {(lost.uuid,): 3}
    assert sample("gpumap_gpu_xid_errors_by_code_total", snapshot) == {(lost.uuid, "31"): 2, (lost.uuid, "79"): 1}


def test_the_recovery_action_exists_also_for_a_lost_gpu() -> None:
    """The recovery action stands for a GPU that needs a reset too, and nowhere where the driver does not tell it."""
    lost, silent = gpu(0, fault="reset_required"), structs.replace(gpu(1), recovery_action=None)
    snapshot = with_node(empty_node(), gpus=(lost, silent, gpu(2)))
    assert sample("gpumap_gpu_recovery_action_info", snapshot) == {
        (lost.uuid, "gpu_reset"): 1,
        (gpu(2).uuid, "none"): 1,
    }


def test_accounts_exist_without_their_container() -> None:
    """What was charged is served by its own rows: the container may be gone, and what is not known is absent."""
    name = ("n", "p", "c")
    charged = ContainerAccount(*name, Uuid("GPU-x"), 1.5, None, None, None)
    accounts = (GpuAccount(Uuid("GPU-x"), None, 2.5),)
    snapshot = with_node(empty_node(), accounts=(charged,), gpu_accounts=accounts)
    assert names(snapshot) == {
        "gpumap_container_allocated_gpu_seconds_total",
        "gpumap_accounting_gap_seconds_total",
        "gpumap_finding_judged",
    }
    assert sample("gpumap_container_allocated_gpu_seconds_total", snapshot) == {(*name, "GPU-x"): 1.5}
    assert "estimate" in next(one.help for one in GROUPS["accounting"] if "container_energy" in one.name)
