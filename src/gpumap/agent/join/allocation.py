"""Which container holds which device: each id of the kubelet's List is placed on a device or counted as unmatched.

A slot is one device id. Only the kubelet and the device plugins decide an allocation; processes do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpumap.agent.join.grants import Holding, grants
from gpumap.agent.join.inventory import Inventory
from gpumap.agent.join.placement import NO_INDICES, Placed, PlacedOffer, place, place_claim, place_offer
from gpumap.agent.join.pods import PodTable, matching_rows
from gpumap.agent.join.served_list import ServedList
from gpumap.agent.join.settings import JoinSettings
from gpumap.agent.join.shares import PlacedShare, place_shares
from gpumap.agent.judgement.judge import AssignedTwice
from gpumap.model.device_ids import ByIndex, DeviceRef
from gpumap.model.grouping import grouped
from gpumap.model.node import Grant, UnmatchedSlots
from gpumap.model.observations import (
    CheckpointEntry,
    ClaimDevice,
    DeviceId,
    ListedContainer,
    ListedPod,
    Moment,
    PluginAnswer,
    PodIdentity,
    PreparedDevice,
    ProcTable,
    ResourceDevices,
)
from gpumap.model.plugins import Unit, family, named_devices, recognise
from gpumap.model.readings import Uuid
from gpumap.model.remedies import UNMATCHED
from gpumap.model.terms import ContainerName, PodName, PodUid


@dataclass(frozen=True, slots=True)
class CheckpointAllocation:
    """The devices that only the checkpoint gives to a container. `complete`: each of its ids is on a device."""

    devices: frozenset[Uuid]
    complete: bool


class PluginGpuRefs(NamedTuple):
    """The GPUs that a plugin's answer names for one resource of a container."""

    container: ContainerName
    pod_uid: PodUid | None
    resource: str
    refs: tuple[DeviceRef, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """The kubelet's assignments of this node's devices. `basis` are the inputs: equal inputs give an equal result."""

    basis: tuple[object, ...]
    grants: Mapping[tuple[ContainerName, Uuid], Grant]
    unmatched: tuple[UnmatchedSlots, ...]
    incomplete: frozenset[ContainerName]
    """Containers of which gpumap does not know all devices: they have unmatched slots, or a claim without devices."""
    holders: Mapping[Uuid, tuple[ContainerName, ...]]
    """Containers with a slot or a scheduled share of each device, sorted."""
    reservations: frozenset[PodName]
    """Pods that hold their devices for a scheduler."""
    sharers: frozenset[tuple[PodName, Uuid]]
    """(pod, device) pairs of scheduled shares. The kubelet assigned no slot."""
    may_be_shared: bool
    """A scheduler's file could not be read: any pod may hold any device."""
    shared_ids: tuple[SharedId, ...]
    """Ids that several pods hold, although only one may."""
    init_containers: Mapping[tuple[PodUid, str], CheckpointAllocation]
    """Init containers, which the List does not contain, by pod and container."""
    left_out: Mapping[tuple[PodUid, str], CheckpointAllocation]
    """Containers in the List without the devices of their rows, by pod and container. The pod may have ended
    (kubelets before 1.34), or the kubelet leaves devices out (1.20 to 1.22)."""
    held_by_rows: frozenset[Uuid]
    """Leaves that only the checkpoint gives to a container of a live pod."""
    lacks_devices: bool
    """The kubelet may list a container without its devices, and no checkpoint has them."""
    lists_claims: bool
    """The kubelet listed a claim's device, now or earlier: then it lists every claim."""
    may_be_claimed: frozenset[Uuid]
    """Leaves that a claim may hold which the kubelet does not list, or lists without its devices."""
    offer: PlacedOffer
    gpu_indices: Mapping[PluginGpuRefs, Mapping[int, Uuid]]
    """For each plugin answer: the GPU of each NVML index when gpumap first saw the answer. NVML renumbers its GPUs when
    one is unbound."""


def allocate(
    pods: tuple[ListedPod, ...],
    pod_table: PodTable,
    files: PodIdentity,
    served_list: ServedList,
    inventory: Inventory,
    settings: JoinSettings,
    previous: Allocation | None,
) -> Allocation:
    """Place every id of the List on a device. Returns `previous` itself while its inputs are the same.

    `pods` are those of a current List. `pod_table` has the plugins' answers, and `files` has the notes of NVIDIA's DRA
    driver and the shares of schedulers, which may be newer than the table.
    """
    is_gpu_resource, allocatable, sharing = settings.is_gpu_resource, served_list.allocatable, files.sharing
    may_have_claims, may_leave_out_devices = served_list.may_have_claims, served_list.may_leave_out_devices
    of_kubelet = allocatable, may_have_claims, may_leave_out_devices
    basis = (pod_table, *of_kubelet, pods, files.dra.prepared, sharing, inventory.shape)
    if previous is not None and previous.basis == basis:
        return previous
    registered = pod_table.files.checkpoint.registered if pod_table.files.checkpoint else ()
    placed_offer = place_offer(allocatable or (), registered, inventory, is_gpu_resource)
    indices_before = previous.gpu_indices if previous is not None else {}
    placer = _Placer(pod_table, files.dra.prepared or (), inventory, is_gpu_resource, indices_before)
    for pod in pods:
        for container in pod.containers:
            placer.place(ContainerName(pod.namespace, pod.name, container.name), container)
    holdings, unmatched = placer.holdings(), placer.unmatched
    init_containers = {
        key: _allocate_rows(rows, inventory, is_gpu_resource) for key, rows in pod_table.unlisted.items()
    }
    left_out = {
        key: _allocate_rows(rows, inventory, is_gpu_resource) for key, rows in _left_out(pods, pod_table).items()
    }
    holders = _holders((holding.container, holding.uuid) for holding in holdings)
    # Only a namespace makes a pod's devices a scheduler's reservation.
    reservations = frozenset(pod.pod_name for pod in pods if settings.is_reserving(pod.namespace))
    scheduled = place_shares(sharing.shares, reservations, holders, pod_table, inventory) if pods else ()
    granted = grants(holdings, placed_offer.allocatable, placed_offer.registered, inventory, reservations, scheduled)
    listed_claims = previous is not None and previous.lists_claims
    lists_claims = listed_claims or any(claim.driver for _, claim in _claims(pods))
    return Allocation(
        basis=basis,
        grants=granted,
        unmatched=tuple(
            UnmatchedSlots(*name, resource, reason, len(slots), UNMATCHED.get(reason))
            for (name, resource, reason), slots in sorted(unmatched.items())
        ),
        incomplete=frozenset(
            (*(key[0] for key in unmatched), *(name for name, claim in _claims(pods) if not claim.driver))
        ),
        holders=_holders(granted),
        reservations=reservations,
        sharers=frozenset((share.container.pod_name, share.uuid) for share in scheduled),
        may_be_shared=not sharing.complete,
        shared_ids=find_shared_ids(holdings, inventory),
        init_containers=init_containers,
        left_out=left_out,
        # Only kubelets before 1.23 leave devices of live pods out. Later ones do so for pods that have ended.
        held_by_rows=_leaves((*init_containers.values(), *(() if may_have_claims else left_out.values())), inventory),
        lacks_devices=may_leave_out_devices and pod_table.files.checkpoint is None,
        lists_claims=lists_claims,
        may_be_claimed=frozenset()
        if lists_claims or pod_table.files.dra.claims == () or not may_have_claims
        else _offered_by_no_plugin(placed_offer, holdings, scheduled, inventory),
        offer=placed_offer,
        gpu_indices=placer.gpu_indices if pods else indices_before,
    )


Unmatched = dict[tuple[ContainerName, str, str], set[tuple[DeviceId, str]]]
"""(id, share) pairs by container, resource and reason."""


class _Placer:
    """Places the ids of one List on devices, each (container, resource, id) once.

    Kubelets before 1.34 may list an ended pod together with its successor.
    """

    def __init__(
        self,
        pod_table: PodTable,
        prepared: Iterable[PreparedDevice],
        inventory: Inventory,
        is_gpu_resource: Callable[[str], bool],
        indices_before: Mapping[PluginGpuRefs, Mapping[int, Uuid]],
    ) -> None:
        self.unmatched: Unmatched = {}
        self.gpu_indices: dict[PluginGpuRefs, Mapping[int, Uuid]] = {}
        self._indices_before = indices_before
        self._holdings: dict[tuple[object, ...], tuple[Holding, dict[DeviceId, None]]] = {}
        self._pod_table = pod_table
        self._inventory = inventory
        self._is_gpu_resource = is_gpu_resource
        self._prepared = grouped((device.device, device) for device in prepared)

    def holdings(self) -> list[Holding]:
        return [holding._replace(ids=tuple(ids)) for holding, ids in self._holdings.values()]

    def place(self, name: ContainerName, container: ListedContainer) -> None:
        """Place all devices of one listed container."""
        uid = self._pod_table.uid_of.get(name.pod_name)
        for devices in container.devices:
            answers = _find_answers(self._pod_table, name, devices, container)
            answer = next(iter(answers), None)
            refs = first_device_refs(answers)
            indices = self._indices(PluginGpuRefs(name, uid, devices.resource, refs))
            placed = place(devices.resource, devices.ids, refs, self._inventory, indices)
            for slot in placed:
                for uuid in self._devices(name, devices.resource, slot):
                    if slot.plugin is not None:
                        key = name, devices.resource, uuid, slot.plugin
                        self._add(slot, Holding(*key, (), len(placed), answer, slot.located.position))
        for device in container.claims:
            placed_claim, prepared = place_claim(device, self._prepared.get(device.device, ()), self._inventory)
            for uuid in self._devices(name, device.driver, placed_claim, device.share_id):
                if placed_claim.plugin is not None:
                    key = name, device.driver, uuid, placed_claim.plugin
                    self._add(placed_claim, Holding(*key, (), 1, claim=device, prepared=prepared))

    def _indices(self, answer: PluginGpuRefs) -> Mapping[int, Uuid]:
        """Return the GPU of each NVML index in an answer, at the time gpumap first saw the answer."""
        by_index = [ref for ref in answer.refs if isinstance(ref, ByIndex)]
        current = {ref.nvml_index: uuid for ref in by_index for uuid in self._inventory.resolve(ref)}
        by_number = {**current, **self._indices_before.get(answer, NO_INDICES)}
        if by_number:
            self.gpu_indices[answer] = by_number
        return by_number

    def _add(self, placed: Placed, holding: Holding) -> None:
        """Add an id to the first holding of its container, resource, device and claim."""
        _, ids = self._holdings.setdefault((*holding[:4], holding.claim), (holding, {}))
        ids[placed.device_id] = None

    def _devices(self, name: ContainerName, resource: str, placed: Placed, share_id: str = "") -> tuple[Uuid, ...]:
        """Return the devices of a slot, and count it as unmatched if there are none.

        A slot counts only if its resource is a GPU resource, or its id has the uuid of a device of this node.
        """
        if not (self._is_gpu_resource(resource) or _has_own_uuid(resource, placed.device_id, self._inventory)):
            return ()
        if not placed.located.devices:
            key = (name, resource, placed.located.reason)
            self.unmatched.setdefault(key, set()).add((placed.device_id, share_id))
        return placed.located.devices


def _holders(holdings: Iterable[tuple[ContainerName, Uuid]]) -> dict[Uuid, tuple[ContainerName, ...]]:
    holders = grouped((uuid, name) for name, uuid in holdings)
    return {uuid: tuple(sorted(set(names))) for uuid, names in holders.items()}


def _claims(pods: Iterable[ListedPod]) -> Iterator[tuple[ContainerName, ClaimDevice]]:
    for pod in pods:
        for container in pod.containers:
            name = ContainerName(pod.namespace, pod.name, container.name)
            yield from ((name, claim) for claim in container.claims)


def _offered_by_no_plugin(
    offer: PlacedOffer, holdings: Iterable[Holding], scheduled: Iterable[PlacedShare], inventory: Inventory
) -> frozenset[Uuid]:
    """Return the leaves that no device plugin offers or has assigned, nor a scheduler. A DRA driver may have them.

    Kubelets before 1.34 list no claims, and 1.27 to 1.30 list them without devices.
    """
    if offer.names_no_device:
        return frozenset()
    offered = {uuid for uuid, _ in offer.allocatable}
    offered.update(holding.uuid for holding in holdings if holding.claim is None)
    offered.update(share.uuid for share in scheduled)
    return frozenset(inventory.leaves) - {leaf for uuid in offered for leaf in inventory.leaves_of(uuid)}


def _left_out(pods: Iterable[ListedPod], pod_table: PodTable) -> dict[tuple[PodUid, str], list[CheckpointEntry]]:
    """Return the rows of listed containers with a resource that the List does not give to them."""
    listed = {
        (uid, container.name): {devices.resource for devices in container.devices if devices.ids}
        for pod in pods
        if (uid := pod_table.uid_of.get(pod.pod_name)) is not None
        for container in pod.containers
    }
    rows = pod_table.files.checkpoint.entries if pod_table.files.checkpoint else ()
    with_key = (((row.pod_uid, row.container), row) for row in rows)
    return grouped((key, row) for key, row in with_key if key in listed and row.resource not in listed[key])


def add_left_out(pods: tuple[ListedPod, ...], pod_table: PodTable, procs: ProcTable) -> tuple[ListedPod, ...]:
    """Return the List with the rows that it leaves out, of pods that have a process on a GPU (`procs`).

    Kubelets 1.20 to 1.22 leave out devices without NUMA topology (kubernetes/kubernetes#103289). The rows of an ended
    pod stay, so a row is taken only with a running process. If the List has a device of a resource, it has all of them.
    """
    running = {pod.pod_uid for entry in procs.entries for pod in entry.cgroup.pods}
    left_out = _left_out(pods, pod_table)
    completed = []
    for pod in pods:
        uid = pod_table.uid_of.get(pod.pod_name)
        if uid in running:
            containers = []
            for container in pod.containers:
                rows = left_out.get((uid, container.name), ())
                devices = (ResourceDevices(row.resource, tuple(sorted(row.ids))) for row in rows)
                containers.append(replace(container, devices=tuple(sorted((*container.devices, *devices)))))
            pod = replace(pod, containers=tuple(containers))
        completed.append(pod)
    return tuple(completed)


def _leaves(allocations: Iterable[CheckpointAllocation], inventory: Inventory) -> frozenset[Uuid]:
    """Return the leaves that rows may assign: all leaves if one of their ids matches no device."""
    allocations = tuple(allocations)
    if not all(allocation.complete for allocation in allocations):
        return frozenset(inventory.leaves)
    return frozenset(
        leaf for allocation in allocations for uuid in allocation.devices for leaf in inventory.leaves_of(uuid)
    )


def _allocate_rows(
    rows: Iterable[CheckpointEntry], inventory: Inventory, is_gpu_resource: Callable[[str], bool]
) -> CheckpointAllocation:
    rows = tuple(rows)
    devices: set[Uuid] = set()
    complete = True
    for row in rows:
        # First the answer about its own ids, then those about all of its plugin's rows.
        own_family = family(row.resource)
        of_plugin = (sibling for sibling in rows if own_family and family(sibling.resource) == own_family)
        answers = (plugin_row.answer for plugin_row in (row, *of_plugin) if plugin_row.answer is not None)
        for slot in place(row.resource, row.ids, first_device_refs(answers), inventory):
            if is_gpu_resource(row.resource) or _has_own_uuid(row.resource, slot.device_id, inventory):
                devices.update(slot.located.devices)
                complete = complete and bool(slot.located.devices)
    return CheckpointAllocation(frozenset(devices), complete)


def _has_own_uuid(resource: str, device_id: DeviceId, inventory: Inventory) -> bool:
    """Whether an id is the uuid of a device of this node. The resource may have any name."""
    recognised = recognise(resource, device_id)
    return recognised is not None and inventory.has_uuid_of(recognised.device)


# --- plugins' answers -------------------------------------------------------------------------------------------------


def _find_answers(
    pod_table: PodTable, name: ContainerName, devices: ResourceDevices, container: ListedContainer
) -> list[PluginAnswer]:
    """Return the plugin's answers about these ids: first for their resource, then for its other resources."""
    own_family = family(devices.resource)
    siblings = (
        sibling
        for sibling in container.devices
        if own_family and sibling is not devices and family(sibling.resource) == own_family
    )
    answers = (_answer(pod_table, name, listed) for listed in (devices, *siblings))
    return [answer for answer in answers if answer is not None]


def _answer(pod_table: PodTable, name: ContainerName, devices: ResourceDevices) -> PluginAnswer | None:
    """Return the answer in the pod's rows with these ids. If the pod's UID is unknown, all such rows must agree."""
    if not devices.ids:
        return None
    uid = pod_table.uid_of.get(name.pod_name)
    answers = {
        row.answer
        for row in matching_rows(pod_table.rows, name.container, devices)
        # A row of an ended pod stays until the next write, and its ids may have another owner by then.
        if row.pod_uid == uid
        or (
            uid is None
            and (pod_table.fixed_names.get(row.pod_uid) or pod_table.name(row.pod_uid)) in (None, name.pod_name)
        )
    }
    return answers.pop() if len(answers) == 1 else None


def first_device_refs(answers: Iterable[PluginAnswer]) -> tuple[DeviceRef, ...]:
    """Return the devices of the first answer that names devices."""
    return next((refs for answer in answers if (refs := named_devices(answer))), ())


# --- ids that two pods hold -------------------------------------------------------------------------------------------


class SharedId(NamedTuple):
    """An id that containers of several pods hold."""

    resource: str
    device_id: DeviceId
    uuid: Uuid
    containers: tuple[ContainerName, ...]


def find_shared_ids(holdings: Iterable[Holding], inventory: Inventory) -> tuple[SharedId, ...]:
    """Return the ids of whole GPUs, MIG devices and replicas that several pods hold. Claims may be shared."""
    exclusive = (
        holding
        for holding in holdings
        if holding.plugin.unit in (Unit.DEVICE, Unit.REPLICA)
        if holding.claim is None and holding.uuid not in inventory.parents
    )
    containers = grouped(
        ((holding.resource, id_, holding.uuid), holding.container) for holding in exclusive for id_ in holding.ids
    )
    return tuple(
        SharedId(*key, tuple(sorted(names)))
        for key, names in sorted(containers.items())
        if len({name.pod_name for name in names}) > 1
    )


def watch_shared_ids(
    previous: Iterable[AssignedTwice], shared_ids: Iterable[SharedId], exists: Callable[[PodName], bool], moment: Moment
) -> tuple[AssignedTwice, ...]:
    """Return the shared ids of which at least two pods certainly exist."""
    since = {entry[:4]: entry.since for entry in previous}
    assigned_twice: list[AssignedTwice] = []
    for resource, device_id, uuid, containers in shared_ids:
        pods = {container.pod_name for container in containers if exists(container.pod_name)}
        for container in containers if len(pods) > 1 else ():
            key, other_pods = (container, resource, device_id, uuid), pods - {container.pod_name}
            if other_pods < pods:
                assigned_twice.append(AssignedTwice(*key, since.get(key, moment), tuple(sorted(other_pods))))
    return tuple(assigned_twice)
