"""Made-up snapshots for the tests of the pages: `busy_node` has a sample of every native family."""

from collections.abc import Iterable
from dataclasses import replace

from msgspec import structs

from gpumap.agent.join import node_parts
from gpumap.agent.judgement.free import add_free
from gpumap.agent.judgement.judge import judge
from gpumap.model import remedies
from gpumap.model.devices import add_processes
from gpumap.model.node import (
    ContainerAccount,
    ContainerOnDevice,
    ContainerXids,
    Device,
    Driver,
    Gpu,
    GpuAccount,
    GpuXids,
    Grant,
    HostUse,
    NamelessGpu,
    Node,
    OwnerUse,
    Pod,
    Process,
    ReportedDeviceHealth,
    SourceHealth,
    Unexplained,
    UnmatchedSlots,
    Use,
    Watch,
    Workload,
)
from gpumap.model.observations import Moment
from gpumap.model.readings import (
    CLOCK_EVENT_TIMES,
    CLOCK_EVENTS,
    NVLINK_ERRORS,
    PCIE_TOTALS,
    SAMPLES_OLD,
    Activity,
    DeviceMemory,
    Fabric,
    GpuProcess,
    GpuReading,
    MigInstance,
    ProcessSample,
    Uuid,
)
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import Owner, PodUid, Source

GIB = 1 << 30
PROCESS = GpuProcess(100, GIB, "C")
MODEL = "NVIDIA H100 80GB HBM3"
DRIVER = Driver("570.124.06", "12.8", "12.570.124.06")
OWNERS = (Owner.ASSIGNED, Owner.UNASSIGNED, Owner.GONE, Owner.HOST, Owner.UNKNOWN)
CAPABILITIES = ("device_checkpoint", "gpm", "pid_visibility", "pod_logs", "process_utilization", "push", "xid_events")
ACTIVITY = Activity(0.5, 0.25, 0.125, 0.0625, 0.75, 0.0, 0.375, 0.03125, 0.875)
UNKNOWN_USE = Use(None, None, 1, None, None, None, None)
WATCH = Watch(
    last_active=1e9, seen_seconds=3600.0, known_seconds=3600.0, worked_seconds_ago=1.0, no_process_seconds=0.0
)


def empty_node(name: str = "node-1") -> Snapshot:
    """A node where all sources have failed since the start."""
    node = Node(
        timestamp=1_800_000_000.25,
        name=name,
        sources=tuple(SourceHealth(source.value, attempts=1, seconds=0.5, errors={"hung": 1}) for source in Source),
        capabilities=dict.fromkeys(CAPABILITIES, False),
    )
    return Snapshot(at=Moment(10.0, 1_800_000_000.25), node=node, collections=(("interval", 1),))


def with_node(snapshot: Snapshot, **changed: object) -> Snapshot:
    """The snapshot with other parts of its node; its containers are those of the node's devices. Remedies follow."""
    node = structs.replace(snapshot.node, **changed)
    missing = remedies.capability_remedies(node.capabilities, gpu_answers=any(gpu.reading for gpu in node.gpus))
    node = structs.replace(node, gpus=node_parts.gpus(node.gpus, node.xids), remedies=missing)
    if "judged" not in changed:
        node = judged(node, snapshot.processes)
    rows = [one for device in node.devices for one in device.containers]
    return replace(snapshot, node=node, containers=tuple(sorted(rows, key=lambda one: (one.name, one.uuid))))


def judged(node: Node, processes: Iterable[Process] = ()) -> Node:
    """The node with its findings."""
    findings, judged, unjudged = judge(add_processes(node, processes))
    return add_free(structs.replace(node, findings=findings, judged=judged, unjudged=unjudged))


def with_containers(devices: Iterable[Device], rows: Iterable[ContainerOnDevice]) -> tuple[Device, ...]:
    """Devices with these containers on them."""
    by_name = sorted(rows, key=lambda one: one.name)
    return tuple(
        structs.replace(one, containers=tuple(row for row in by_name if row.uuid == one.uuid)) for one in devices
    )


def gpu(index: int, *, partitioned: bool = False, fault: str | None = None) -> Gpu:
    """A Hopper GPU that reports all that such a GPU can, or only the remedy of its fault."""
    uuid = Uuid(f"GPU-{index:08d}-0000-0000-0000-000000000000")
    reading = GpuReading(
        index=index,
        uuid=uuid,
        minor=index,
        pci_bus_id=f"00000000:{index:02X}:00.0",
        model=MODEL,
        virtualization="none",
        numa_node=0,
        memory=DeviceMemory(80 * GIB, 40 * GIB, 39 * GIB, GIB),
        partitioned=partitioned,
        utilization_ratio=0.5,
        memory_controller_busy_ratio=0.25,
        encoder_ratio=0.125,
        decoder_ratio=0.0,
        temperatures_celsius={"gpu": 61.0, "memory": 69.0},
        power_watts=507.409,
        power_limit_watts=700.0,
        energy_joules=1_000_143.994,
        clocks_hertz={"graphics": 1.98e9, "memory": 2.619e9, "sm": 1.98e9, "video": 1.545e9},
        # Those that a Hopper GPU knows; the other two of nvml.h are of other cards.
        clock_events={reason: reason == "sw_power_cap" for reason in CLOCK_EVENTS[:9]},
        clock_event_seconds=dict.fromkeys(CLOCK_EVENT_TIMES, 12.5),
        performance_state=0,
        fan_speed_ratios={"0": 0.3},
        ecc_errors={"corrected": {"dram": 1, "sram": 1}, "uncorrected": {"dram": 0, "sram": 0}},
        remapped_rows={"correctable": 1, "uncorrectable": 0},
        row_remap_pending=False,
        row_remap_failure=False,
        recovery_action="none",
        ecc_totals={kind: {"volatile": 1, "aggregate": 1} for kind in ("corrected", "uncorrected")},
        retired_pages_pending=False,
        compute_mode="default",
        power_limits_watts={"requested": 700.0, "default": 700.0, "min": 200.0, "max": 700.0},
        max_clocks_hertz={"graphics": 1.98e9, "memory": 2.619e9, "sm": 1.98e9, "video": 1.545e9},
        vbios_version="96.00.74.00.01",
        compute_capability="9.0",
        pcie_source=PCIE_TOTALS,
        pcie_replays=0,
        pcie_transmit_bytes=1_000_000_000,
        pcie_receive_bytes=2_000_000_000,
        nvlink_transmit_bytes=3_000_000_000,
        nvlink_receive_bytes=4_000_000_000,
        nvlink_errors=dict.fromkeys(NVLINK_ERRORS, 2),
        fabric=Fabric("completed", "success"),
        activity=None if partitioned else ACTIVITY,
        samples=None if partitioned else (ProcessSample(PROCESS.pid, 0.25, 0.125, 0.5, 0.0),),
        processes=None if partitioned else (PROCESS,),
    )
    return Gpu(
        uuid,
        index,
        index,
        f"00000000:{index:02X}:00.0",
        MODEL,
        partitioned,
        fault,
        0.0,
        1e9,
        None if fault else reading,
        samples_from=SAMPLES_OLD if reading.samples and not fault else None,
        recovery_action="gpu_reset" if fault else "none",
        not_offered_seconds=None if fault else 0.0,
        ecc_uncorrected_at=1.7e9,
        remedies={"fault": remedies.FAULTS[fault]} if fault else {},
    )


def pascal(index: int) -> Gpu:
    """A GPU of before Ampere: it retires pages, and has neither GPM nor rows to remap."""
    card = gpu(index)
    assert card.reading is not None
    of_its_age = structs.replace(
        card.reading,
        retired_pages={"double_bit_ecc": 1, "single_bit_ecc": 2},
        remapped_rows={},
        row_remap_pending=None,
        row_remap_failure=None,
        activity=None,
    )
    return structs.replace(card, reading=of_its_age)


XIDS = ({31: 2, 79: 1}, 0.5, 79, {31: 1.7e9, 79: 1.7e9}, {code: remedies.XIDS[code] for code in (31, 79)})
UNTRUSTED = ("aliyun.com/gpu-mem", "untrusted_id", 4, remedies.UNMATCHED["untrusted_id"])
WORK = Workload("docker", "4f1c9e0b7a2d")


def leaf(on: Gpu, uuid: str, mig: MigInstance | None = None, *, holders: int = 1) -> Device:
    """A leaf with used memory of every owner."""
    owners = [OwnerUse(owner, GIB, 1) for owner in OWNERS]
    measured = mig or on.reading
    return Device(
        uuid=Uuid(uuid),
        gpu_uuid=on.uuid,
        index=on.index,
        mig=mig,
        memory=DeviceMemory(80 * GIB, 40 * GIB, 39 * GIB, GIB),
        activity=measured.activity if measured else None,
        allocatable={"nvidia.com/gpu": 0, "nvidia.com/gpu.shared": 10},
        holders=holders,
        owners=(*owners, OwnerUse(Owner.UNACCOUNTED, 35 * GIB, None)),
        host=(HostUse(WORK, GIB, 1, 0.25),),
        readable_ratio=1.0,
        unexplained=Unexplained(),
    )


def instances(on: Gpu) -> tuple[MigInstance, ...]:
    return tuple(
        MigInstance(
            Uuid(f"MIG-{on.index:08d}-0000-0000-0000-{number:012d}"),
            number,
            0,
            "1g.10gb",
            1,
            DeviceMemory(10 * GIB, 5 * GIB, 4 * GIB, GIB),
            (PROCESS,),
            19,
            number,
            1,
            activity=ACTIVITY,
        )
        for number in range(7)
    )


def row(pod: str, uuid: str, *, holds: bool = True) -> ContainerOnDevice:
    """A holder that is measured in every way, or one that uses what it does not hold."""
    use = Use(
        *(GIB, 2 * GIB, 1, 0.25, 0.125, 0.5, 0.0),
        pod_uid=PodUid("uid"),
        sm_activity_ratio=0.25,
    )
    if uuid.startswith("MIG-"):
        use = structs.replace(use, sm_ratio=None, memory_controller_busy_ratio=None)
    if not holds:
        return ContainerOnDevice("team", pod, "main", Uuid(uuid), Owner.UNASSIGNED, use=use, watch=WATCH)
    grant = Grant({"nvidia.com/gpu.shared": 1}, 0.1, 8 * GIB)
    return ContainerOnDevice("team", pod, "main", Uuid(uuid), grant=grant, use=use, watch=WATCH)


def reservation(on: Device) -> ContainerOnDevice:
    """The pod that keeps a leaf for a scheduler."""
    name = ("kai-resource-reservation", "gpu-reservation-0123456789abcdef", "resource-reservation")
    use = Use(0, 0, 0, 0.0, 0.0, 0.0, 0.0)
    return ContainerOnDevice(*name, on.uuid, grant=Grant({"nvidia.com/gpu": 1}, reservation=True), use=use, watch=WATCH)


def process(pid: int, pod: str | None, uuid: str) -> Process:
    what, ratios = (pid, Uuid(uuid), "C", "python"), (0.25, 0.125, 0.5, 0.0)
    if pod is None:
        return Process(*what, Owner.HOST, None, None, None, None, GIB, *ratios, WORK, 1e9)
    return Process(*what, Owner.ASSIGNED, "team", pod, "main", PodUid("uid"), GIB, *ratios, owner_since=1e9)


def account(of: ContainerOnDevice) -> ContainerAccount:
    return ContainerAccount(*of.name, of.uuid, 3600.5, 900.25, 3.5e13, 250_000.75, 300.5)


def busy_node(gpus: int = 16, sharing: int = 10) -> Snapshot:
    """A node with everything: every second GPU partitioned, the last one lost, `sharing` holders on each leaf.

    With four GPUs or more one of them is old, and the first is reserved, so that every native family has a sample.
    """
    cards = [
        *(gpu(index, partitioned=index % 2 == 1) for index in range(gpus - 1)),
        gpu(gpus - 1, fault="lost"),
    ]
    if gpus >= 4:
        cards[2] = pascal(2)
    leaves: list[Device] = []
    for card in cards:
        if card.partitioned:
            leaves += [leaf(card, instance.uuid, instance, holders=sharing) for instance in instances(card)]
        elif card.fault:
            leaves.append(Device(card.uuid, card.uuid, card.index, holders=sharing, allocatable={"nvidia.com/gpu": 0}))
        else:
            leaves.append(leaf(card, card.uuid, holders=sharing))
    containers = [
        row(f"pod-{number}-{place}", one.uuid, holds=number < sharing)
        for place, one in enumerate(leaves)
        for number in range(sharing + 1)
    ]
    if gpus >= 4:
        containers.append(reservation(leaves[0]))
        leaves[0] = structs.replace(leaves[0], owners=(*leaves[0].owners, OwnerUse(Owner.SCHEDULED, 0, 1)))
    containers.sort(key=lambda one: (one.name, one.uuid))
    node = Node(
        timestamp=1_800_000_000.25,
        name="node-1",
        internal_ip="10.0.0.7",
        driver=DRIVER,
        gpus=tuple(cards),
        nameless_gpus=(NamelessGpu(gpus, "lost", "00000000:FF:00.0", "node_reboot"),),
        devices=with_containers(leaves, containers),
        unmatched=(UnmatchedSlots("team", "other", "main", *UNTRUSTED),),
        pods=tuple(Pod(one.namespace, one.pod, "uid") for one in containers),
        device_health=(ReportedDeviceHealth("team", "pod-0-0", "main", "nvidia.com/gpu", "GPU-0", "Unhealthy"),),
        accounts=tuple(account(one) for one in containers),
        gpu_accounts=tuple(GpuAccount(one.uuid, 1000.25, 0.0) for one in cards),
        xids=tuple(GpuXids(one.uuid, *(XIDS if one.fault else ({}, 0.5))) for one in cards),
        container_xids=(ContainerXids("team", "pod-0-0", "main", leaves[0].uuid, 31, 2),),
        sources=tuple(
            SourceHealth(
                *(source.value, True, "", "", None, 1_799_999_999.5, 7, 3, {"hung": 2, "decode": 1}, 0.125, 0.01)
            )
            for source in Source
        ),
        capabilities=dict.fromkeys(CAPABILITIES, True),
        pid_visibility_reason="gpumap runs on the bare host",
    )
    processes = (process(100, "pod-0-0", leaves[0].uuid), process(101, None, leaves[0].uuid))
    return Snapshot(
        at=Moment(10.0, 1_800_000_000.25),
        node=judged(node, processes),
        containers=tuple(containers),
        processes=processes,
        answered=dict.fromkeys(Source, 9.5),
        collections=(("interval", 7), ("push", 3)),
    )
