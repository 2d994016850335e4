"""Which devices the node has: NVML's answer, and the remembered identity of GPUs that do not answer now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from msgspec import structs

from gpumap.model.device_ids import ByIndex, ByMinor, ByPlacement, ByUuid, DeviceRef, mig_place
from gpumap.model.node import Gpu, NamelessGpu
from gpumap.model.observations import NvmlReading
from gpumap.model.readings import GpuReading, MigInstance, Uuid


class KnownLeaf(NamedTuple):
    uuid: Uuid
    gpu_instance_id: int | None
    compute_instance_id: int | None
    profile: str
    share: float | None
    """Share of its GPU: 1, or the compute slices of a MIG instance divided by those of the GPU."""
    total_bytes: int | None
    profile_id: int | None = None
    placement_start: int | None = None


@dataclass(frozen=True, slots=True)
class KnownGpu:
    """The identity of a GPU: its names and its leaves. It stays while the GPU is lost."""

    uuid: Uuid
    index: int
    minor: int | None
    pci_bus_id: str
    model: str
    partitioned: bool
    total_bytes: int | None
    leaves: tuple[KnownLeaf, ...]
    last_success: float = field(compare=False)
    ecc_uncorrected: Mapping[str, int] = field(default_factory=dict, compare=False)
    """The driver's last counts of uncorrected ECC errors, by location."""
    ecc_uncorrected_at: float | None = field(default=None, compare=False)
    """When one of them last grew, in Unix seconds."""


@dataclass(frozen=True)
class Inventory:
    """The node's devices by uuid. `Inventory()` is the state at gpumap's start.

    `up` is whether NVML answered, and `gpus` are the GPUs of its answer. The other fields are identity, which stays
    while NVML is down.
    """

    up: bool = False
    count: int = 0
    """How many GPUs NVML counted, now or the last time."""
    nameless: tuple[NamelessGpu, ...] = ()
    """GPUs that have not reported their uuid yet."""
    known: tuple[KnownGpu, ...] = ()
    gpus: tuple[Gpu, ...] = ()

    @cached_property
    def gpu_of_leaf(self) -> Mapping[Uuid, KnownGpu]:
        return {leaf.uuid: gpu for gpu in self.known for leaf in gpu.leaves}

    @cached_property
    def leaves(self) -> Mapping[Uuid, KnownLeaf]:
        return {leaf.uuid: leaf for gpu in self.known for leaf in gpu.leaves}

    @cached_property
    def parents(self) -> Mapping[Uuid, KnownGpu]:
        return {gpu.uuid: gpu for gpu in self.known if gpu.partitioned}

    @cached_property
    def measured(self) -> Mapping[Uuid, GpuReading | MigInstance]:
        """What NVML reports of each leaf of a GPU that answers."""
        leaves: dict[Uuid, GpuReading | MigInstance] = {}
        for gpu in self.gpus:
            if gpu.reading is not None and gpu.partitioned:
                leaves |= {instance.uuid: instance for instance in gpu.reading.instances}
            elif gpu.reading is not None:
                leaves[gpu.uuid] = gpu.reading
        return leaves

    @property
    def shape(self) -> tuple[object, ...]:
        """Everything except the times at which devices last answered."""
        return self.up, self.nameless, self.known

    def has_uuid_of(self, ref: DeviceRef | None) -> bool:
        """Whether a reference is a uuid, and its device is present."""
        return isinstance(ref, ByUuid) and self.find(ref.uuid) is not None

    def find(self, uuid: Uuid) -> Uuid | None:
        """Return the uuid of a leaf or partitioned GPU as NVML writes it; `None` if the device is not present."""
        if uuid in self.leaves or uuid in self.parents:
            return uuid
        place = mig_place(uuid)
        parent = self.parents.get(place.gpu) if place else None
        if place is None or parent is None:
            return None
        instance_ids = (place.gpu_instance_id, place.compute_instance_id)
        return next(
            (leaf.uuid for leaf in parent.leaves if (leaf.gpu_instance_id, leaf.compute_instance_id) == instance_ids),
            None,
        )

    def resolve(self, ref: DeviceRef) -> tuple[Uuid, ...]:
        """Return the devices that a reference names; empty if none of them is present."""
        match ref:
            case ByUuid(uuid):
                device = self.find(uuid)
                return (device,) if device is not None else ()
            case ByMinor():
                return self._find_minor(ref)
            case ByIndex(nvml_index):
                return tuple(gpu.uuid for gpu in self.known if gpu.index == nvml_index)
            case ByPlacement():
                return self._find_placement(ref)
            case _:
                return tuple(gpu.uuid for gpu in self.known)

    def _find_minor(self, ref: ByMinor) -> tuple[Uuid, ...]:
        gpus = [gpu for gpu in self.known if gpu.minor == ref.minor]
        if ref.gpu_instance_id is None:
            return tuple(gpu.uuid for gpu in gpus)
        leaves = [leaf for gpu in gpus for leaf in gpu.leaves if leaf.gpu_instance_id == ref.gpu_instance_id]
        # GKE's plugin uses this name, and makes one compute instance in each GPU instance (pkg/gpu/nvidia/mig).
        return tuple(leaf.uuid for leaf in leaves if leaf.compute_instance_id == 0)

    def _find_placement(self, ref: ByPlacement) -> tuple[Uuid, ...]:
        placement = (ref.profile_id, ref.start)
        leaves = [
            leaf.uuid for leaf in self._leaves_of_minor(ref) if (leaf.profile_id, leaf.placement_start) == placement
        ]
        return tuple(leaves) if len(leaves) == 1 else ()

    def is_ambiguous(self, ref: DeviceRef) -> bool:
        """Whether a reference may mean several MIG devices: the driver does not report their placement, or compute
        instances share it."""
        if not isinstance(ref, ByPlacement):
            return False
        starts = [leaf.placement_start for leaf in self._leaves_of_minor(ref)]
        return None in starts or starts.count(ref.start) > 1

    def may_answer_later(self, ref: DeviceRef) -> bool:
        """Whether a reference may mean a GPU that has not reported its uuid, or the minor that the reference has."""
        if self.nameless or not isinstance(ref, ByMinor | ByPlacement):
            return bool(self.nameless)
        minors = {gpu.minor for gpu in self.known}
        return None in minors and ref.minor not in minors

    def _leaves_of_minor(self, ref: ByPlacement) -> tuple[KnownLeaf, ...]:
        return tuple(leaf for gpu in self.parents.values() if gpu.minor == ref.minor for leaf in gpu.leaves)

    def leaves_of(self, uuid: Uuid) -> tuple[Uuid, ...]:
        """Return the leaves of a device: the leaf itself, or all leaves of a partitioned GPU."""
        parent = self.parents.get(uuid)
        return tuple(leaf.uuid for leaf in parent.leaves) if parent else (uuid,)


_NO_NAME = "unknown"
"""The fault of a GPU that reports no uuid."""


def take_inventory(answer: NvmlReading | None, wall: float, remembered: tuple[KnownGpu, ...], count: int) -> Inventory:
    """Return the node's devices. `answer` is `None` while NVML is down: then no GPU answers, and none is forgotten."""
    if answer is None:
        return Inventory(count=count, known=remembered)
    by_uuid: dict[Uuid, tuple[KnownGpu, GpuReading]] = {}
    nameless: list[NamelessGpu] = []
    for known, reading in _identified(answer, wall, remembered, count):
        if known is not None and known.uuid not in by_uuid:
            by_uuid[known.uuid] = known, reading
        else:  # two GPUs with one uuid are one device and one without
            fault = reading.fault or _NO_NAME
            nameless.append(NamelessGpu(reading.index, fault, reading.pci_bus_id, reading.recovery_action))
    return Inventory(
        up=True,
        count=len(answer.gpus),
        nameless=tuple(sorted(nameless, key=lambda gpu: gpu.index)),
        known=tuple(sorted((known for known, _ in by_uuid.values()), key=lambda gpu: gpu.index)),
        gpus=tuple(sorted((_gpu(*pair) for pair in by_uuid.values()), key=lambda gpu: gpu.index)),
    )


def _identified(
    answer: NvmlReading, wall: float, remembered: tuple[KnownGpu, ...], count: int
) -> Iterator[tuple[KnownGpu | None, GpuReading]]:
    """Identify the GPU of each reading; `None` if nothing identifies it.

    GPUs without a fault come first, because they report their own uuid. The uuid of the others may be a remembered one,
    and another GPU may have had that index then.
    """
    # If the number of GPUs changed, an index may mean another GPU.
    is_same_order = len(answer.gpus) == count
    by_index = {known.index: known for known in remembered if is_same_order}
    by_uuid = {known.uuid: known for known in remembered}
    for reading in sorted(answer.gpus, key=lambda reading: reading.fault is not None):
        if reading.fault is None and reading.uuid is not None:
            uuid = reading.uuid
            known = by_uuid.get(uuid)
            if known and known.partitioned and reading.mig_unknown:
                # It does not report its mode now: values of the whole GPU are not valid for a partitioned one.
                reading = structs.replace(reading, partitioned=True, processes=None, samples=None)
            yield _known_gpu(reading, uuid, wall, known), reading
        else:
            faulty = reading if reading.fault else structs.replace(reading, fault=_NO_NAME)
            yield _remembered_gpu(faulty, by_uuid, by_index), faulty


def _known_gpu(reading: GpuReading, uuid: Uuid, wall: float, previous: KnownGpu | None = None) -> KnownGpu:
    total = reading.memory.total_bytes if reading.memory else None
    if reading.partitioned:
        leaves = tuple(_leaf(instance, reading.max_mig_devices) for instance in reading.instances)
        if reading.mig_unknown and previous is not None and previous.partitioned:
            read = {leaf.uuid for leaf in leaves}
            leaves += tuple(leaf for leaf in previous.leaves if leaf.uuid not in read)
    else:
        leaves = (KnownLeaf(uuid, None, None, "", 1.0, total),)
    errors, errors_at = _ecc_uncorrected(reading, wall, previous)
    return KnownGpu(
        uuid,
        reading.index,
        reading.minor if reading.minor is not None or previous is None else previous.minor,
        reading.pci_bus_id or (previous.pci_bus_id if previous else ""),
        reading.model or (previous.model if previous else ""),
        reading.partitioned,
        total,
        leaves,
        last_success=wall,
        ecc_uncorrected=errors,
        ecc_uncorrected_at=errors_at,
    )


def _ecc_uncorrected(
    reading: GpuReading, wall: float, previous: KnownGpu | None
) -> tuple[Mapping[str, int], float | None]:
    """Return the counts of uncorrected ECC errors, and when one last grew. A count may be absent for a while."""
    counts = reading.ecc_errors.get("uncorrected", {})
    if previous is None:
        return counts, None
    grew = any(errors > previous.ecc_uncorrected.get(location, errors) for location, errors in counts.items())
    return {**previous.ecc_uncorrected, **counts}, wall if grew else previous.ecc_uncorrected_at


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


def _remembered_gpu(
    reading: GpuReading, by_uuid: Mapping[Uuid, KnownGpu], by_index: Mapping[int, KnownGpu]
) -> KnownGpu | None:
    """Identify a GPU without measurements: by the uuid if it reports one, else by its index in NVML's order."""
    if reading.uuid is None:
        return by_index.get(reading.index)
    known = by_uuid.get(reading.uuid)
    if known is not None:
        return replace(known, index=reading.index)
    return _known_gpu(reading, reading.uuid, wall=0.0)


def _gpu(known: KnownGpu, reading: GpuReading) -> Gpu:
    return Gpu(
        uuid=known.uuid,
        index=reading.index,
        minor=known.minor,
        pci_bus_id=known.pci_bus_id,
        model=known.model,
        partitioned=known.partitioned,
        fault=reading.fault,
        stuck_seconds=reading.stuck_seconds,
        last_success=known.last_success or None,
        reading=reading if reading.fault is None else None,
        samples_from=reading.samples_from if reading.samples is not None else None,
        recovery_action=reading.recovery_action,
        ecc_uncorrected_at=known.ecc_uncorrected_at,
    )
