"""The dialect dcgm: dcgm-exporter's names, labels and units; a device's value where one has it, else each one's own."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpumap.dialects.dcgm import FAMILIES, NEEDS
from gpumap.dialects.dcgm_entities import cards, entities
from gpumap.exposition import Exposition
from gpumap.metrics import GROUPS
from gpumap.model import ContainerName, DeviceMemory, GpuReading, MigInstance, NvmlReading, Uuid
from gpumap.snapshot import (
    ContainerOnDevice,
    ContainerUse,
    Gpu,
    GpuXids,
    Leaf,
    Node,
    Owner,
    OwnerUse,
    ProcessUse,
    Snapshot,
)
from tests.dialect_pages import documented_lints, lints
from tests.nodes import TestNode
from tests.snapshots import ACTIVITY, busy_node, empty_node, gpu, pascal
from tests.test_laws import nodes

GOLDEN = Path(__file__).parent / "dialects" / "dcgm.prom"
GIB, MIB = 1 << 30, 1 << 20
CARD = Uuid("GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52")
SHARED = Uuid("GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e53")
PARTITIONED = Uuid("GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e54")
TRAINER = ContainerName("ml", "job-0", "trainer")
P1, P2 = ContainerName("ml", "p1", "a"), ContainerName("ml", "p2", "a")
PODS = ("container", "namespace", "pod")

Rows = dict[tuple[str, ...], float]


def card(index: int = 0, uuid: Uuid = CARD, *, partitioned: bool = False, fault: str | None = None) -> Gpu:
    made = replace(
        gpu(index, partitioned=partitioned, fault=fault),
        uuid=uuid,
        pci_bus_id=f"00000000:{0x5A + index:02X}:00.0",
        model="NVIDIA H200",
    )
    if made.reading is None:
        return made
    reading = made.reading._replace(
        uuid=uuid,
        memory=DeviceMemory(141 * GIB, 4 * GIB, 136 * GIB, GIB),
        utilization_ratio=None if partitioned else 0.57,
        power_limits_watts=(("requested", 650.0), ("default", 700.0)),
        ecc_totals=(
            ("corrected", "volatile", 1),
            ("uncorrected", "volatile", 0),
            ("corrected", "aggregate", 5),
            ("uncorrected", "aggregate", 2),
        ),
        retired_pages_pending=None,
        pcie_replays=3,
    )
    return replace(made, reading=reading)


def old_card() -> Gpu:
    """A card that retires pages, and waits for a reset to retire one more."""
    made = replace(pascal(1), uuid=SHARED)
    assert made.reading is not None
    return replace(made, reading=made.reading._replace(retired_pages_pending=True))


def use(
    memory: int | None = 0, sm: float | None = 0.0, processes: int = 1, *, unassigned: bool = False
) -> ContainerUse:
    return ContainerUse(memory, memory, processes, sm, sm, None, None, unassigned=unassigned, last_active=None)


def holder(name: ContainerName, uuid: Uuid = CARD, of: ContainerUse | None = None) -> ContainerOnDevice:
    return ContainerOnDevice(name, uuid, (("nvidia.com/gpu", 1),), use=of)


def user(
    name: ContainerName, uuid: Uuid = CARD, memory: int | None = GIB, sm: float | None = 0.25
) -> ContainerOnDevice:
    return ContainerOnDevice(name, uuid, use=use(memory, sm, unassigned=True))


def leaf(on: Gpu, *owners: OwnerUse, instance: MigInstance | None = None, memory: DeviceMemory | None = None) -> Leaf:
    found = memory or (on.reading.memory if on.reading else None)
    return Leaf(instance.uuid if instance else on.uuid, on, instance, found, owners=owners)


def processes_of(owner: Owner, number: int = 1) -> OwnerUse:
    return OwnerUse(owner, number * GIB, number)


def instance(number: int, compute: int = 0, profile: str = "1g.10gb") -> MigInstance:
    return MigInstance(Uuid(f"MIG-{number}-{compute}"), number, compute, profile, 1, None, None, activity=ACTIVITY)


def node(
    *containers: ContainerOnDevice, gpus: tuple[Gpu, ...] = (card(),), leaves: tuple[Leaf, ...] | None = None
) -> Snapshot:
    return replace(
        empty_node("node1"),
        driver=NvmlReading("570.172.08", "12.8", "12.570.172.08", ()),
        gpus=gpus,
        leaves=tuple(leaf(one) for one in gpus if not one.partitioned) if leaves is None else leaves,
        containers=tuple(sorted(containers, key=lambda row: (row.name, row.uuid))),
        xids=tuple(GpuXids(one.uuid, (), 0.0) for one in gpus),
    )


def sample_node() -> Snapshot:
    """An exclusive card, one that two containers share, and one that is partitioned, with an instance that is free."""
    cards = card(), card(1, SHARED), card(2, PARTITIONED, partitioned=True)
    held, free = instance(3), instance(5, profile="2g.20gb")
    memory = DeviceMemory(10 * GIB, 2 * GIB, 8 * GIB, 64 * MIB)
    return node(
        holder(TRAINER, of=use(3 * GIB, 0.5)),
        holder(P1, SHARED, use(GIB, 0.25)),
        holder(P2, SHARED, use(2 * GIB + 1, 0.07)),
        holder(TRAINER, held.uuid, use(GIB, None)),
        gpus=cards,
        leaves=(
            leaf(cards[0], processes_of(Owner.ASSIGNED)),
            leaf(cards[1], processes_of(Owner.ASSIGNED, 2)),
            leaf(cards[2], instance=held, memory=memory),
            leaf(cards[2], instance=free, memory=memory),
        ),
    )


def page(snapshot: Snapshot, *, openmetrics: bool = False) -> str:
    return Exposition(FAMILIES, openmetrics=openmetrics).render(snapshot).decode()


def rows(snapshot: Snapshot, field: str, *labels: str) -> Rows:
    """The values of a field by these labels; a label that is not there is ""."""
    found: Rows = {}
    for family in parse_text(page(snapshot)):
        for sample in family.samples:
            if sample.name.removesuffix("_total") == f"DCGM_FI_{field}":  # the parser adds it to a counter
                key = tuple(sample.labels.get(label, "") for label in labels)
                assert key not in found
                found[key] = sample.value
    return found


def test_the_page_is_written_as_the_original_writes_it() -> None:
    """Names, HELP, TYPE, labels and their order, units and numbers, over an exclusive, a shared and a MIG card."""
    assert page(sample_node()) == GOLDEN.read_text()


def test_an_exclusive_gpu_is_the_originals_sample() -> None:
    """The line that dcgm-exporter writes of it, byte for byte: pod labels last, and none of MIG."""
    expected = (
        'DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52",pci_bus_id="00000000:5A:00.0",'
        'device="nvidia0",modelName="NVIDIA H200",hostname="node1",DCGM_FI_DRIVER_VERSION="570.172.08",'
        'container="trainer",namespace="ml",pod="job-0"} 4096\n'
    )
    assert expected in page(sample_node())


def test_a_mig_instance_is_the_originals_sample() -> None:
    """UUID is the card's; profile and number of the GPU instance stand after the model."""
    expected = 'modelName="NVIDIA H200",GPU_I_PROFILE="1g.10gb",GPU_I_ID="3",hostname="node1"'
    lines = [line for line in page(sample_node()).splitlines() if expected in line]
    assert [line.split("{")[0] for line in lines] == [
        "DCGM_FI_DEV_FB_FREE",
        "DCGM_FI_DEV_FB_USED",
        "DCGM_FI_DEV_FB_RESERVED",
        "DCGM_FI_DEV_FB_TOTAL",
        "DCGM_FI_PROF_SM_ACTIVE",
        "DCGM_FI_PROF_SM_OCCUPANCY",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        "DCGM_FI_PROF_DRAM_ACTIVE",
    ]
    assert all(f'UUID="{PARTITIONED}"' in line and line.split("} ")[0].endswith('pod="job-0"') for line in lines)


def test_an_exclusive_gpu_has_its_pod_on_every_field() -> None:
    """One container holds it and nobody else is known to be on it: each field of it names the container."""
    snapshot = node(holder(TRAINER, of=use(GIB, 0.5)))
    lines = [line for line in page(snapshot).splitlines() if not line.startswith("#")]
    assert len(lines) > 30
    assert all('container="trainer"' in line and 'namespace="ml",pod="job-0"' in line for line in lines)


def test_containers_of_a_shared_gpu_have_their_own_values() -> None:
    """FB_USED and GPU_UTIL are each one's own, without a row of the device; the device's other values are nobody's."""
    snapshot = node(holder(P1, of=use(GIB, 0.25)), holder(P2, of=use(2 * GIB, 0.5)))
    assert rows(snapshot, "DEV_FB_USED", *PODS) == {("a", "ml", "p1"): 1024, ("a", "ml", "p2"): 2048}
    assert rows(snapshot, "DEV_GPU_UTIL", *PODS) == {("a", "ml", "p1"): 25, ("a", "ml", "p2"): 50}
    for field in ("DEV_FB_FREE", "DEV_POWER_USAGE", "DEV_MEM_COPY_UTIL", "DEV_XID_ERRORS", "PROF_SM_ACTIVE"):
        assert list(rows(snapshot, field, *PODS)) == [("", "", "")]


def test_idle_holders_have_zeros() -> None:
    """A holder without a process has 0 and not nothing: autoscaling relies on it."""
    snapshot = node(holder(P1, of=use(0, 0.0, 0)), holder(P2, of=use(GIB, 1.0)))
    assert rows(snapshot, "DEV_GPU_UTIL", "pod") == {("p1",): 0, ("p2",): 100}
    assert rows(snapshot, "DEV_FB_USED", "pod") == {("p1",): 0, ("p2",): 1024}


def test_what_is_not_known_of_a_container_is_absent() -> None:
    """Memory that the driver does not tell, SM time of an MPS client: no row, never 0 and never the card's."""
    snapshot = node(holder(P1, of=use(None, None)), holder(P2))
    assert rows(snapshot, "DEV_FB_USED", "pod") == {}
    assert rows(snapshot, "DEV_GPU_UTIL", "pod") == {}
    assert rows(snapshot, "DEV_FB_FREE", "pod") == {("",): 136 * 1024}


def test_a_row_without_a_pod_says_so() -> None:
    """Empty labels keep Prometheus from putting the agent's own pod there, as it does where it honors labels."""
    (line,) = [line for line in page(node()).splitlines() if line.startswith("DCGM_FI_DEV_GPU_TEMP{")]
    assert line.endswith(',DCGM_FI_DRIVER_VERSION="570.172.08",container="",namespace="",pod=""} 61')
    assert "GPU_I_" not in line


def test_a_gpu_that_nobody_holds_or_uses_has_rows_of_its_own() -> None:
    """The device's values, without pod labels; what runs on the host beside Kubernetes is in them."""
    snapshot = node(leaves=(leaf(card(), processes_of(Owner.HOST)),))
    assert rows(snapshot, "DEV_FB_USED", "gpu", *PODS) == {("0", "", "", ""): 4096}
    assert rows(snapshot, "DEV_GPU_UTIL", "gpu", *PODS) == {("0", "", "", ""): 57}


@pytest.mark.parametrize("owner", [Owner.HOST, Owner.GONE, Owner.UNASSIGNED, Owner.MPS_SERVER])
def test_processes_of_others_end_the_exclusive_hold(owner: Owner) -> None:
    """Where a process is known to be another's, the card's values are not the holder's: it has its own."""
    mine = holder(TRAINER, of=use(GIB, 0.5))
    snapshot = node(mine, leaves=(leaf(card(), processes_of(Owner.ASSIGNED), processes_of(owner)),))
    assert rows(snapshot, "DEV_FB_USED", "pod") == {("job-0",): 1024}
    assert rows(snapshot, "DEV_GPU_UTIL", "pod") == {("job-0",): 50}
    assert rows(snapshot, "DEV_POWER_USAGE", "pod") == {("",): 507.409}


@pytest.mark.parametrize("owner", [Owner.HOST, Owner.GONE, Owner.UNASSIGNED, Owner.ASSIGNED, Owner.UNKNOWN])
def test_an_owner_without_processes_disturbs_nobody(owner: Owner) -> None:
    """Owners stand with 0 processes: those are nobody's."""
    snapshot = node(holder(TRAINER), leaves=(leaf(card(), OwnerUse(owner, 0, 0)),))
    assert rows(snapshot, "DEV_FB_USED", "pod") == {("job-0",): 4096}


def test_without_pid_visibility_the_holder_stands() -> None:
    """Nobody can say whose the processes are: an exclusive card keeps its pod, of a shared one nothing is told."""
    alone = node(holder(TRAINER), leaves=(leaf(card(), processes_of(Owner.UNKNOWN, 3)),))
    assert rows(alone, "DEV_FB_USED", "pod") == {("job-0",): 4096}
    several = node(holder(P1), holder(P2), leaves=(leaf(card(), processes_of(Owner.UNKNOWN, 3)),))
    assert rows(several, "DEV_FB_USED", "pod") == {}
    assert rows(several, "DEV_POWER_USAGE", "pod") == {("",): 507.409}


def test_a_squatter_and_the_holder_have_a_row_each() -> None:
    """Who uses without holding is charged for itself; the holder is no longer taken for the whole card."""
    squatter = ContainerName("web", "squatter", "c")
    snapshot = node(holder(TRAINER, of=use(3 * GIB, 0.5)), user(squatter))
    assert rows(snapshot, "DEV_FB_USED", "pod") == {("job-0",): 3072, ("squatter",): 1024}
    assert rows(snapshot, "DEV_GPU_TEMP", "pod") == {("",): 61}
    assert rows(node(user(squatter)), "DEV_FB_USED", "pod") == {("squatter",): 1024}


def test_a_process_of_another_pod_disturbs_at_first_sight() -> None:
    """Whether it is a squatter's is said when two snapshots agree; that it is not the holder's is known at once."""
    seen = ProcessUse(7, CARD, "C", "python", Owner.UNKNOWN, P1, None, GIB, 0.5)
    snapshot = node(holder(TRAINER, of=use(GIB, 0.5)), leaves=(leaf(card(), processes_of(Owner.UNKNOWN)),))
    assert rows(snapshot, "DEV_FB_USED", "pod") == {("job-0",): 4096}
    assert rows(replace(snapshot, processes=(seen,)), "DEV_FB_USED", "pod") == {("job-0",): 1024}
    own = seen._replace(name=TRAINER)
    assert rows(replace(snapshot, processes=(own,)), "DEV_FB_USED", "pod") == {("job-0",): 4096}


def test_a_process_of_its_own_pod_is_no_stranger() -> None:
    """Which container of the pod it is in is not known: it may be the holder's own."""
    nameless = ContainerOnDevice(ContainerName("ml", "job-0", ""), CARD, use=use(GIB, 0.1))
    assert rows(node(holder(TRAINER), nameless), "DEV_FB_USED", *PODS) == {("trainer", "ml", "job-0"): 4096}
    shared = node(holder(TRAINER), holder(P1, of=use(GIB)), nameless)
    assert rows(shared, "DEV_FB_USED", *PODS) == {("", "ml", "job-0"): 1024, ("a", "ml", "p1"): 1024}


def test_two_containers_of_one_pod_share() -> None:
    """Containers hold devices, not pods."""
    other = ContainerName("ml", "job-0", "sidecar")
    snapshot = node(holder(TRAINER, of=use(GIB)), holder(other, of=use(0)))
    assert rows(snapshot, "DEV_FB_USED", "container") == {("trainer",): 1024, ("sidecar",): 0}


def test_without_a_list_users_are_told_and_nobody_holds() -> None:
    """While the kubelet does not answer nobody is said to have a card to himself."""
    snapshot = node(ContainerOnDevice(TRAINER, CARD, use=use(GIB, 0.5)))
    assert rows(snapshot, "DEV_FB_USED", "pod") == {("job-0",): 1024}
    assert rows(snapshot, "DEV_GPU_TEMP", "pod") == {("",): 61}


def test_while_nvml_is_down_nothing_is_told() -> None:
    """The kubelet alone measures nothing."""
    snapshot = replace(node(holder(TRAINER)), gpus=(), leaves=(Leaf(CARD, None),), driver=None, xids=())
    assert page(snapshot) == ""


def test_a_lost_gpu_tells_its_last_xid_alone() -> None:
    """Its measurements are gone; why it fell off the bus is what is asked for, and whom it hit."""
    lost = card(fault="lost")
    snapshot = replace(node(holder(TRAINER), gpus=(lost,)), xids=(GpuXids(CARD, ((31, 2), (79, 1)), 0.0, 79),))
    lines = [line for line in page(snapshot).splitlines() if not line.startswith("#")]
    assert len(lines) == 1
    assert lines[0].endswith(',container="trainer",err_code="79",namespace="ml",pod="job-0"} 79')


def test_other_gpus_stand_beside_a_lost_one() -> None:
    """A fault costs its own GPU alone."""
    snapshot = node(gpus=(card(fault="lost"), card(1, SHARED)))
    assert rows(snapshot, "DEV_GPU_TEMP", "gpu") == {("1",): 61}


@pytest.mark.parametrize(
    ("xids", "told"),
    [
        ((), {}),
        ((GpuXids(CARD, (), 0.0),), {("0",): 0}),
        ((GpuXids(CARD, ((31, 2), (79, 1)), 0.0, 31),), {("31",): 31}),
        ((GpuXids(CARD, ((31, 2), (79, 1)), 0.0, None),), {}),
    ],
    ids=["nobody listens", "none was heard", "the last one", "which was last is not known"],
)
def test_xid_errors_are_the_last_one(xids: tuple[GpuXids, ...], told: Rows) -> None:
    """0 says that gpumap listened and heard none; what cannot be known is absent."""
    assert rows(replace(node(), xids=xids), "DEV_XID_ERRORS", "err_code") == told


def test_a_partitioned_card_tells_what_it_has_once() -> None:
    """Temperature, power, clocks stand once without GPU_I_*; memory by instance, so that no sum counts it twice."""
    snapshot = sample_node()
    on_it = {"DEV_GPU_TEMP", "DEV_POWER_USAGE", "DEV_SM_CLOCK", "DEV_TOTAL_ENERGY_CONSUMPTION", "DEV_XID_ERRORS"}
    for field in on_it:
        mine = {key for key in rows(snapshot, field, "UUID", "GPU_I_ID", "pod") if key[0] == PARTITIONED}
        assert mine == {(PARTITIONED, "", "")}
    used = rows(snapshot, "DEV_FB_USED", "UUID", "GPU_I_ID", "pod")
    assert {key[1:]: value for key, value in used.items() if key[0] == PARTITIONED} == {
        ("3", "job-0"): 2048,
        ("5", ""): 2048,
    }
    assert {uuid for (uuid,) in rows(node(gpus=(card(partitioned=True),), leaves=()), "DEV_GPU_UTIL", "UUID")} == set()


def test_compute_instances_of_one_gpu_instance_are_one() -> None:
    """dcgm-exporter's labels cannot tell them apart: their memory stands once, under the GPU instance's profile."""
    on = card(partitioned=True)
    parts = instance(2, 0, "1c.3g.40gb"), instance(2, 1, "2c.3g.40gb")
    memory = DeviceMemory(40 * GIB, 8 * GIB, 32 * GIB, 0)
    leaves = tuple(leaf(on, instance=one._replace(activity=None), memory=memory) for one in parts)
    labels = "GPU_I_ID", "GPU_I_PROFILE", "pod"
    one_holds_both = node(holder(P1, parts[0].uuid), holder(P1, parts[1].uuid), gpus=(on,), leaves=leaves)
    assert rows(one_holds_both, "DEV_FB_USED", *labels) == {("2", "3g.40gb", "p1"): 8192}
    each_holds_one = node(
        holder(P1, parts[0].uuid, use(GIB)), holder(P2, parts[1].uuid, use(3 * GIB)), gpus=(on,), leaves=leaves
    )
    assert rows(each_holds_one, "DEV_FB_USED", *labels) == {("2", "3g.40gb", "p1"): 1024, ("2", "3g.40gb", "p2"): 3072}
    assert rows(each_holds_one, "DEV_FB_TOTAL", *labels) == {("2", "3g.40gb", ""): 40960}
    partly_known = node(
        holder(P1, parts[0].uuid, use(GIB)),
        holder(P1, parts[1].uuid),
        holder(P2, parts[1].uuid, use(0)),
        gpus=(on,),
        leaves=leaves,
    )
    assert rows(partly_known, "DEV_FB_USED", *labels) == {("2", "3g.40gb", "p2"): 0}


def test_who_holds_a_partitioned_gpu_as_a_whole_has_its_instances() -> None:
    """Its name stands on the card and on each instance, as long as nobody else is on them."""
    on = card(partitioned=True)
    made = instance(1), instance(2)
    leaves = tuple(leaf(on, instance=one, memory=DeviceMemory(GIB, GIB, 0, 0)) for one in made)
    alone = node(holder(TRAINER), gpus=(on,), leaves=leaves)
    assert rows(alone, "DEV_GPU_TEMP", "GPU_I_ID", "pod") == {("", "job-0"): 61}
    assert rows(alone, "DEV_FB_USED", "GPU_I_ID", "pod") == {("1", "job-0"): 1024, ("2", "job-0"): 1024}
    beside = node(holder(TRAINER), holder(P1, made[0].uuid, use(MIB)), gpus=(on,), leaves=leaves)
    assert rows(beside, "DEV_GPU_TEMP", "GPU_I_ID", "pod") == {("", ""): 61}
    assert rows(beside, "DEV_FB_USED", "GPU_I_ID", "pod") == {("1", "p1"): 1, ("2", "job-0"): 1024}


def test_units_are_the_originals() -> None:
    """MHz, mJ, %, ns and whole MiB; a percentage is not 56.99999999999999, and a measured ratio is not cut off."""
    snapshot = node(holder(P1, of=use(GIB + MIB - 1, 0.123456)), holder(P2, of=use(MIB - 1, 0.29)))
    assert rows(snapshot, "DEV_SM_CLOCK", "gpu") == {("0",): 1980}
    assert rows(snapshot, "DEV_TOTAL_ENERGY_CONSUMPTION", "gpu") == {("0",): 1_000_143_994}
    assert rows(snapshot, "DEV_POWER_VIOLATION", "gpu") == {("0",): 12_500_000_000}
    assert rows(snapshot, "DEV_FB_USED", "pod") == {("p1",): 1024, ("p2",): 0}
    assert "12.3456\n" in page(snapshot)
    assert " 29\n" in page(snapshot)


def test_device_is_the_device_node() -> None:
    """nvidiaN is /dev/nvidiaN, which is not NVML's order on every node; gpu is NVML's index."""
    odd = replace(card(), index=3, minor=1)
    assert list(rows(node(gpus=(odd,)), "DEV_GPU_TEMP", "gpu", "device")) == [("3", "nvidia1")]
    assert "device=" not in page(node(gpus=(replace(card(), minor=None),)))


def test_label_values_are_escaped() -> None:
    """The original writes them as they are, which breaks its page."""
    name = ContainerName("ml", 'a"b\\c\nd', "x")
    assert list(rows(node(holder(name)), "DEV_GPU_TEMP", "pod")) == [(name.pod,)]


def test_rows_do_not_depend_on_the_order_of_anything() -> None:
    """The same node is the same page."""
    snapshot = sample_node()
    turned = replace(
        snapshot, containers=snapshot.containers[::-1], leaves=snapshot.leaves[::-1], gpus=snapshot.gpus[::-1]
    )
    assert page(turned) == page(snapshot)


def test_every_family_has_a_sample() -> None:
    """Over a new card and an old one; that which has none would be a name without a meaning."""
    text = page(node(holder(TRAINER), gpus=(card(), old_card())))
    assert [family.name for family in FAMILIES if f"# TYPE {family.name} " not in text] == []


def test_what_it_needs_are_groups() -> None:
    """And without any of them some family has nothing to say."""
    assert set(NEEDS) <= set(GROUPS)


@pytest.mark.parametrize("openmetrics", [False, True], ids=["text", "openmetrics"])
def test_both_formats_are_read_back(openmetrics: bool) -> None:
    """OpenMetrics has no counter whose name does not end in _total: there such a one is of unknown type."""
    parse = parse_openmetrics if openmetrics else parse_text
    read = list(parse(page(busy_node(), openmetrics=openmetrics)))
    lines = [line for line in page(busy_node()).splitlines() if not line.startswith("#")]
    assert sum(len(family.samples) for family in read) == len(lines)
    types = {family.name: family.type for family in read}
    assert types["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"] == ("unknown" if openmetrics else "counter")
    assert types["DCGM_FI_DEV_GPU_TEMP"] == "gauge"


def test_promtool_says_what_the_docs_list() -> None:
    """The original's names, units and labels are its own; nothing else is wrong with them."""
    assert lints(page(node(gpus=(card(), old_card())))) == documented_lints("dcgm", FAMILIES)


@settings(max_examples=150, deadline=None)
@given(nodes())
def test_a_device_or_its_containers_and_never_both(truth: TestNode) -> None:
    """FB_USED of a GPU or GPU instance is one row of the device, or one a container that adds up to no more than it."""
    snapshot = truth.collect()
    by_entity: dict[tuple[str, ...], Rows] = defaultdict(dict)
    for key, value in rows(snapshot, "DEV_FB_USED", "UUID", "GPU_I_ID", *PODS).items():
        by_entity[key[:2]][key[2:]] = value
    total = rows(snapshot, "DEV_FB_TOTAL", "UUID", "GPU_I_ID")
    free = rows(snapshot, "DEV_FB_FREE", "UUID", "GPU_I_ID")
    for entity, told in by_entity.items():
        if ("", "", "") in told:
            assert len(told) == 1
        if len(told) > 1:
            assert sum(told.values()) <= total[entity] - free[entity]


@settings(max_examples=150, deadline=None)
@given(nodes())
def test_who_has_a_device_to_himself_is_alone_on_it(truth: TestNode) -> None:
    """Nobody stands on a device's values while a process of another is seen there."""
    snapshot = truth.collect()
    for entity in (*cards(snapshot), *entities(snapshot)):
        sole = entity.sole
        on_it = {leaf.uuid for leaf in entity.leaves}
        if sole is None:
            continue
        for process in snapshot.processes:
            if process.uuid in on_it:
                assert process.owner in (Owner.ASSIGNED, Owner.UNKNOWN)
                assert process.name in (None, sole, sole._replace(container=""))
        others = {row.name for row in snapshot.containers if row.holds and row.uuid in {*on_it, entity.gpu.uuid}}
        assert others == {sole}


def test_a_reading_without_anything_has_no_row() -> None:
    """A card that tells nothing of all this is unknown in all of it."""
    bare = replace(card(), reading=GpuReading(0, uuid=CARD))
    assert page(replace(node(gpus=(bare,)), xids=(), node=Node("n", ""))) == ""
