"""GPUs that a scheduler shares among pods beside the kubelet (KAI-Scheduler, Run:ai).

The kubelet assigns such a GPU to a reservation, a pod that keeps it for the scheduler, or to none, and nothing to the
pods that share it. Their shares come from the scheduler's own notes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gpumap.agent.join.inventory import Inventory
from gpumap.agent.join.pods import PodTable
from gpumap.model.device_ids import ByMinor, ByUuid
from gpumap.model.grouping import grouped
from gpumap.model.observations import ScheduledShare
from gpumap.model.readings import Uuid
from gpumap.model.terms import ContainerName, PodName


class PlacedShare(NamedTuple):
    """A share on its device. `gpus` is a ratio of the device; an amount that was not granted is `None`."""

    container: ContainerName
    """Empty if only the pod is known."""
    uuid: Uuid
    gpus: float | None
    memory_bytes: int | None


def place_shares(
    shares: Iterable[ScheduledShare],
    reservations: frozenset[PodName],
    holders: Mapping[Uuid, Iterable[ContainerName]],
    pod_table: PodTable,
    inventory: Inventory,
) -> tuple[PlacedShare, ...]:
    """Return the shares of listed pods on known devices. `shares` come from a scheduler's files, `holders` from the
    kubelet.

    Anybody who may create a pod chooses its name, labels and annotations. They give no device that no reservation in a
    namespace of reservations holds. Two notes about the same share are one share: the first one that has an amount
    counts, and a file is the first.
    """
    reserved = {uuid for uuid, names in holders.items() if any(name.pod_name in reservations for name in names)}
    groups = _devices_by_group(reservations, holders, pod_table)
    containers = grouped((container.pod_name, container) for container in pod_table.containers)
    placed: dict[tuple[ContainerName, Uuid], PlacedShare] = {}
    in_pods = (
        share for pod in pod_table.files.pods or () for share in pod.shares if share.group or share.uuid in reserved
    )
    for share in (*shares, *in_pods):
        pod = pod_table.name_of.get(share.pod_uid)
        devices = groups.get(share.group, ()) if share.group else _devices(share, inventory)
        if pod is None or pod in reservations or len(devices) != 1:
            continue
        (uuid,) = devices
        name = share.container or pod_table.container(share.pod_uid, share.container_id, read_now=False)
        # If no source names the container, it is the only one of the pod.
        listed = [
            container for container in containers.get(pod, ()) if container.container == (name or container.container)
        ]
        container = listed[0] if len(listed) == 1 else ContainerName(*pod, "")
        placed_share = PlacedShare(container, uuid, share.gpus, share.memory_bytes)
        earlier_share = placed.get(placed_share[:2])
        placed[placed_share[:2]] = placed_share if earlier_share is None else _merged(earlier_share, placed_share)
    return tuple(placed.values())


def _devices_by_group(
    reservations: frozenset[PodName], holders: Mapping[Uuid, Iterable[ContainerName]], pod_table: PodTable
) -> dict[str, set[Uuid]]:
    """Return the devices that the reservations of each group hold: one, unless a scheduler made two reservations."""
    groups_of = {pod.pod_uid: pod.gpu_groups for pod in pod_table.files.pods or () if pod.gpu_groups}
    devices_held = (
        (pod, uuid) for uuid, names in holders.items() for pod in {name.pod_name for name in names} & reservations
    )
    with_uid = ((uid, uuid) for pod, uuid in devices_held if (uid := pod_table.uid_of.get(pod)) is not None)
    devices = grouped((group, uuid) for uid, uuid in with_uid for group in groups_of.get(uid, ()))
    return {group: set(uuids) for group, uuids in devices.items()}


def _devices(share: ScheduledShare, inventory: Inventory) -> tuple[Uuid, ...]:
    if share.uuid is not None:
        return inventory.resolve(ByUuid(share.uuid))
    return inventory.resolve(ByMinor(share.minor)) if share.minor is not None else ()


def _merged(share: PlacedShare, other_share: PlacedShare) -> PlacedShare:
    return share._replace(
        gpus=other_share.gpus if share.gpus is None else share.gpus,
        memory_bytes=other_share.memory_bytes if share.memory_bytes is None else share.memory_bytes,
    )
