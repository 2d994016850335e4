"""What the native families mean: groups, conventions, the number of series, and absence.

Their names, types and labels are in docs/reference/metrics.md, in the captures' golden pages, and stay.
"""

from collections.abc import Iterable
from dataclasses import replace

from msgspec import structs

from gpumap.agent.flags import DEFAULT_GROUPS
from gpumap.agent.metrics import GROUPS, native, self_families
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
OF_GPUS = ("gpumap_gpu_", "gpumap_nvml_", "gpumap_xid_", "gpumap_accounting_")
"""The prefixes of families with the uuid of a physical GPU."""


def test_only_codec_is_off_by_default() -> None:
    assert set(DEFAULT_GROUPS) == set(GROUPS) - {"codec"}


def test_the_chosen_groups_alone_are_served() -> None:
    """--collect picks groups, --process-metrics adds the family by process, and the order of choice does not matter."""
    assert {*native(["use"], process_metrics=False)} == {*GROUPS["use"]}
    assert [one.name for one in native([], process_metrics=True)] == ["gpumap_process_gpu_memory_used_bytes"]
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


def test_every_family_has_a_sample_on_the_busy_node() -> None:
    """A new family needs a value in `busy_node`: the tests of all pages read it there."""
    families = (*native(GROUPS, process_metrics=True), *self_families("1", "2"))
    snapshot = busy_node(gpus=4)
    assert [family.name for family in families if not list(family.read(snapshot))] == []


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
    """The node's name comes with the scrape; as a label it is only on gpumap_node_info."""
    named = [one.name for one in native(GROUPS, process_metrics=True) if "node" in one.labels]
    assert named == ["gpumap_node_info"]


def names(snapshot: Snapshot) -> set[str]:
    families = native(GROUPS, process_metrics=True)
    return {one.name for one in families if list(one.read(snapshot))} - {"gpumap_node_info"}


def test_an_unknown_node_has_no_sample() -> None:
    """A node without any value has no sample except its name: unknown is absent."""
    assert names(empty_node()) == set()


def test_what_is_not_known_of_a_container_is_absent() -> None:
    """A holder with only a known slot and process has these, and no 0 for the rest."""
    row = ContainerOnDevice("n", "p", "c", Uuid("GPU-x"), grant=SLOT, use=UNKNOWN_USE)
    assert names(replace(empty_node(), containers=(row,))) == {
        "gpumap_allocation_info",
        "gpumap_allocation_slots",
        "gpumap_container_gpu_processes",
    }


def test_a_user_without_a_grant_has_no_allocation() -> None:
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
    """What GPM measured is on the GPU that is not partitioned, or on its MIG devices, never on both."""
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
    """The recovery action is there for a GPU that needs a reset too, and absent if the driver does not report it."""
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
        "gpumap_finding_unjudged",
    }
    assert sample("gpumap_container_allocated_gpu_seconds_total", snapshot) == {(*name, "GPU-x"): 1.5}
    assert "estimate" in next(one.help for one in GROUPS["accounting"] if "container_energy" in one.name)
