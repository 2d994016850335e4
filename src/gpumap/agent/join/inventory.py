"""Which devices the node has: NVML's answer, and the identity of GPUs that just now do not answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gpumap.model.device_ids import ByIndex, ByMinor, ByPlacement, ByUuid, DeviceRef, mig_place
from gpumap.model.observations import NvmlReading
from gpumap.model.readings import GpuReading, MigInstance, Uuid
from gpumap.model.snapshot import Gpu, NamelessGpu


class KnownLeaf(NamedTuple):
    uuid: Uuid
    gpu_instance_id: int | None
    compute_instance_id: int | None
    profile: str
    share: float | None
    """Of its GPU: 1, or a MIG instance's compute slices by the GPU's."""
    total_bytes: int | None
    profile_id: int | None = None
    placement_start: int | None = None


@dataclass(frozen=True, slots=True)
class KnownGpu:
    """What stays true of a GPU while it is lost: its names and its leaves."""

    uuid: Uuid
    index: int
    minor: int | None
    pci_bus_id: str
    model: str
    partitioned: bool
    total_bytes: int | None
    leaves: tuple[KnownLeaf, ...]
    last_success: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class Inventory:
    """The node's devices by uuid. `up` is whether NVML answered; `nameless` are GPUs that have not told their uuid yet.

    `gpus` are those of NVML's answer. The rest is identity, which stays while NVML is down.
    """

    up: bool
    count: int
    """How many GPUs NVML counted, now or the last time."""
    nameless: tuple[NamelessGpu, ...]
    known: tuple[KnownGpu, ...]
    gpus: tuple[Gpu, ...]
    gpu_of_leaf: Mapping[Uuid, KnownGpu]
    leaves: Mapping[Uuid, KnownLeaf]
    parents: Mapping[Uuid, KnownGpu]

    @property
    def shape(self) -> tuple[object, ...]:
        """All of it but the moments at which devices last answered."""
        return self.up, self.nameless, self.known

    def has_uuid_of(self, ref: DeviceRef | None) -> bool:
        """Whether a reference is by uuid, and of a device that is here."""
        return isinstance(ref, ByUuid) and self.find(ref.uuid) is not None

    def find(self, uuid: Uuid) -> Uuid | None:
        """Give the uuid under which a device stands here, a leaf's or a partitioned GPU's; `None` if it is not here."""
        if uuid in self.leaves or uuid in self.parents:
            return uuid
        place = mig_place(uuid)
        parent = self.parents.get(place.gpu) if place else None
        if place is None or parent is None:
            return None
        wanted = (place.gpu_instance_id, place.compute_instance_id)
        return next(
            (leaf.uuid for leaf in parent.leaves if (leaf.gpu_instance_id, leaf.compute_instance_id) == wanted), None
        )

    def resolve(self, ref: DeviceRef) -> tuple[Uuid, ...]:
        """Give the devices that a reference names; empty if none of them is here."""
        match ref:
            case ByUuid(uuid):
                found = self.find(uuid)
                return (found,) if found is not None else ()
            case ByMinor(minor, gpu_instance_id):
                gpus = [gpu for gpu in self.known if gpu.minor == minor]
                if gpu_instance_id is None:
                    return tuple(gpu.uuid for gpu in gpus)
                leaves = [leaf for gpu in gpus for leaf in gpu.leaves if leaf.gpu_instance_id == gpu_instance_id]
                # GKE's plugin, whose name for it this is, makes one compute instance in each (pkg/gpu/nvidia/mig).
                return tuple(leaf.uuid for leaf in leaves if leaf.compute_instance_id == 0)
            case ByIndex(nvml_index):
                return tuple(gpu.uuid for gpu in self.known if gpu.index == nvml_index)
            case ByPlacement():
                wanted = (ref.profile_id, ref.start)
                placed = [one.uuid for one in self._placed(ref) if (one.profile_id, one.placement_start) == wanted]
                return tuple(placed) if len(placed) == 1 else ()
            case _:
                return tuple(gpu.uuid for gpu in self.known)

    def keeps_back(self, ref: DeviceRef) -> bool:
        """Whether a MIG device is asked for that may be one of several: by the place, which the driver keeps back from
        us, or which compute instances share."""
        if not isinstance(ref, ByPlacement):
            return False
        starts = [leaf.placement_start for leaf in self._placed(ref)]
        return None in starts or starts.count(ref.start) > 1

    def _placed(self, ref: ByPlacement) -> tuple[KnownLeaf, ...]:
        return tuple(leaf for gpu in self.parents.values() if gpu.minor == ref.minor for leaf in gpu.leaves)

    def leaves_of(self, uuid: Uuid) -> tuple[Uuid, ...]:
        """Give the leaves that a device stands for: itself, or all of a partitioned GPU."""
        parent = self.parents.get(uuid)
        return tuple(leaf.uuid for leaf in parent.leaves) if parent else (uuid,)


def take(reading: NvmlReading | None, wall: float, remembered: tuple[KnownGpu, ...], count: int) -> Inventory:
    """Take stock. `reading` is `None` while NVML is down: then no GPU answers, and none is forgotten."""
    answered = {gpu.uuid for gpu in reading.gpus if gpu.fault is None} if reading else set()
    # With another count of GPUs an index may be another GPU.
    same_order = reading is not None and len(reading.gpus) == count
    by_index = {known.index: known for known in remembered if same_order and known.uuid not in answered}
    by_uuid = {known.uuid: known for known in remembered}
    known_gpus: dict[Uuid, KnownGpu] = {}
    gpus: list[Gpu] = []
    nameless: list[NamelessGpu] = []
    # Who answers says who it is; the others' names are from before, when another GPU may have had that index.
    for said in sorted(reading.gpus if reading else (), key=lambda said: said.fault is not None):
        if said.fault is None and said.uuid is not None:
            known: KnownGpu | None = _learn(said, said.uuid, wall)
        else:
            said = said if said.fault else said._replace(fault="unknown")  # no name is a fault too
            known = _recall(said, by_uuid, by_index)
        if known is None:
            nameless.append(NamelessGpu(said.index, said.fault or "unknown"))
        elif known.uuid not in known_gpus:
            known_gpus[known.uuid] = known
            gpus.append(_gpu(known, said))
        elif said.fault:
            nameless.append(NamelessGpu(said.index, said.fault))
    identities = tuple(sorted(known_gpus.values(), key=lambda gpu: gpu.index)) if reading else remembered
    return Inventory(
        up=reading is not None,
        count=len(reading.gpus) if reading else count,
        nameless=tuple(sorted(nameless, key=lambda gpu: gpu.index)),
        known=identities,
        gpus=tuple(sorted(gpus, key=lambda gpu: gpu.index)),
        gpu_of_leaf={leaf.uuid: gpu for gpu in identities for leaf in gpu.leaves},
        leaves={leaf.uuid: leaf for gpu in identities for leaf in gpu.leaves},
        parents={gpu.uuid: gpu for gpu in identities if gpu.partitioned},
    )


def _learn(said: GpuReading, uuid: Uuid, wall: float) -> KnownGpu:
    total = said.memory.total_bytes if said.memory else None
    if said.partitioned:
        leaves = tuple(_leaf(instance, said.max_mig_devices) for instance in said.instances)
    else:
        leaves = (KnownLeaf(uuid, None, None, "", 1.0, total),)
    return KnownGpu(
        uuid, said.index, said.minor, said.pci_bus_id, said.model, said.partitioned, total, leaves, last_success=wall
    )


def _leaf(instance: MigInstance, slices_of_gpu: int | None) -> KnownLeaf:
    share = instance.compute_slices / slices_of_gpu if instance.compute_slices and slices_of_gpu else None
    return KnownLeaf(
        instance.uuid,
        instance.gpu_instance_id,
        instance.compute_instance_id,
        instance.profile,
        share,
        instance.memory.total_bytes if instance.memory else None,
        instance.profile_id,
        instance.placement_start,
    )


def _recall(said: GpuReading, by_uuid: Mapping[Uuid, KnownGpu], by_index: Mapping[int, KnownGpu]) -> KnownGpu | None:
    """Name a GPU that gives no measurement: by the uuid that it still tells, else by its place in NVML's order."""
    if said.uuid is None:
        return by_index.get(said.index)
    known = by_uuid.get(said.uuid)
    if known is not None:
        return replace(known, index=said.index)
    return _learn(said, said.uuid, wall=0.0)


def _gpu(known: KnownGpu, said: GpuReading) -> Gpu:
    return Gpu(
        uuid=known.uuid,
        index=said.index,
        minor=known.minor,
        pci_bus_id=known.pci_bus_id,
        model=known.model,
        partitioned=known.partitioned,
        fault=said.fault,
        stuck_seconds=said.stuck_seconds,
        last_success=known.last_success or None,
        reading=said if said.fault is None else None,
        recovery_action=said.recovery_action,
    )
