"""Nodes for tests of the dialects of dcgm-exporter: cards, GPU instances, and who holds and uses them."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from gpumap.model.names import ContainerName, Owner, PodUid
from gpumap.model.node import ContainerOnDevice, Device, Driver, Gpu, GpuXids, Grant, OwnerUse, Process, Use
from gpumap.model.readings import DeviceMemory, MigInstance, Uuid
from gpumap.model.snapshot import Snapshot
from tests.dialect_pages import GIB, MIB, WHOLE
from tests.snapshots import ACTIVITY, empty_node, gpu, with_containers, with_node

CARD = Uuid("GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52")
SHARED = Uuid("GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e53")
PARTITIONED = Uuid("GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e54")
TRAINER = ContainerName("ml", "job-0", "trainer")
P1, P2 = ContainerName("ml", "p1", "a"), ContainerName("ml", "p2", "a")


def card(index: int = 0, uuid: Uuid = CARD, *, partitioned: bool = False, fault: str | None = None) -> Gpu:
    made = structs.replace(
        gpu(index, partitioned=partitioned, fault=fault),
        uuid=uuid,
        pci_bus_id=f"00000000:{0x5A + index:02X}:00.0",
        model="NVIDIA H200",
    )
    if made.reading is None:
        return made
    reading = structs.replace(
        made.reading,
        uuid=uuid,
        memory=DeviceMemory(141 * GIB, 4 * GIB, 136 * GIB, GIB),
        utilization_ratio=None if partitioned else 0.57,
        power_limits_watts={"requested": 650.0, "default": 700.0},
        ecc_totals={"corrected": {"volatile": 1, "aggregate": 5}, "uncorrected": {"volatile": 0, "aggregate": 2}},
        retired_pages_pending=None,
        pcie_replays=3,
    )
    return structs.replace(made, reading=reading)


def use(memory: int | None = 0, sm: float | None = 0.0, processes: int = 1) -> Use:
    return Use(memory, memory, processes, sm, sm, None, None)


def holder(
    name: ContainerName,
    uuid: Uuid = CARD,
    of: Use | None = None,
    *,
    gpus: float | None = 1.0,
    memory: int | None = None,
) -> ContainerOnDevice:
    return ContainerOnDevice(*name, uuid, grant=Grant(WHOLE, gpus, memory), use=of)


def user(
    name: ContainerName, memory: int | None = GIB, sm: float | None = 0.25, owner: Owner = Owner.UNASSIGNED
) -> ContainerOnDevice:
    return ContainerOnDevice(*name, CARD, owner, use=use(memory, sm))


def leaf(on: Gpu, *owners: OwnerUse, instance: MigInstance | None = None, memory: DeviceMemory | None = None) -> Device:
    measured = instance or on.reading
    return Device(
        instance.uuid if instance else on.uuid,
        on.uuid,
        on.index,
        mig=instance,
        memory=memory or (on.reading.memory if on.reading else None),
        activity=measured.activity if measured else None,
        owners=owners or (OwnerUse(Owner.UNKNOWN, 0, 0),),
    )


def processes_of(owner: Owner, number: int = 1) -> OwnerUse:
    return OwnerUse(owner, number * GIB, number)


def instance(number: int, compute: int = 0, profile: str = "1g.10gb") -> MigInstance:
    return MigInstance(Uuid(f"MIG-{number}-{compute}"), number, compute, profile, 1, None, None, activity=ACTIVITY)


def process(name: ContainerName | None, owner: Owner = Owner.ASSIGNED, uid: str = "") -> Process:
    namespace, pod, container = name or (None, None, None)
    return Process(7, CARD, "C", "python", owner, namespace, pod, container, PodUid(uid), GIB, 0.5)


def node(
    *containers: ContainerOnDevice,
    gpus: tuple[Gpu, ...] = (card(),),
    leaves: tuple[Device, ...] | None = None,
    processes: tuple[Process, ...] = (),
    visible: bool = True,
) -> Snapshot:
    held = [row.uuid for row in containers if row.holds]
    alone = tuple(leaf(one) for one in gpus if not one.partitioned) if leaves is None else leaves
    as_a_whole = [Device(one.uuid, one.uuid, one.index, partitioned=True) for one in gpus if one.partitioned]
    counted = (structs.replace(one, holders=held.count(one.uuid)) for one in (*alone, *as_a_whole))
    return with_node(
        replace(empty_node("node1"), processes=processes),
        capabilities={"pid_visibility": visible},
        driver=Driver("570.172.08", "12.8", "12.570.172.08"),
        gpus=gpus,
        devices=with_containers((one for one in counted if one.holders or one.is_leaf), containers),
        xids=tuple(GpuXids(one.uuid, {}, 0.0) for one in gpus),
    )


def without_nvml(snapshot: Snapshot) -> Snapshot:
    """The node while NVML is down: only the kubelet names its devices."""
    devices = (Device(one.uuid, holders=one.holders, containers=one.containers) for one in snapshot.node.devices)
    return with_node(snapshot, driver=None, gpus=(), devices=tuple(devices), xids=())


def sample_node() -> Snapshot:
    """An exclusive card, one that two containers share, and one that is partitioned, with an instance that is free."""
    cards = card(), card(1, SHARED), card(2, PARTITIONED, partitioned=True)
    held, free = instance(3), instance(5, profile="2g.20gb")
    memory = DeviceMemory(10 * GIB, 2 * GIB, 8 * GIB, 64 * MIB)
    return node(
        holder(TRAINER, of=use(3 * GIB, 0.5)),
        holder(P1, SHARED, use(GIB, 0.25), gpus=0.5),
        holder(P2, SHARED, use(2 * GIB + 1, 0.07), gpus=0.5),
        holder(TRAINER, held.uuid, use(GIB, None), gpus=1 / 7, memory=memory.total_bytes),
        gpus=cards,
        leaves=(
            leaf(cards[0], processes_of(Owner.ASSIGNED)),
            leaf(cards[1], processes_of(Owner.ASSIGNED, 2)),
            leaf(cards[2], instance=held, memory=memory),
            leaf(cards[2], instance=free, memory=memory),
        ),
    )
