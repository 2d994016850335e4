"""Which GPUs no container can be assigned, although something shows that containers should get them.

Evidence for the finding `not_offered`, and the zeros of `gpumap_device_slots_allocatable`. The kubelet's current answer
must be known, gpumap must know the device of each offered id, and no DRA claim may have been seen: DRA offers GPUs in
another way. A plugin that stops and a move to DRA look the same until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import structs

from gpumap.agent.join.inventory import KnownGpu, KnownLeaf
from gpumap.agent.join.joined import Joined
from gpumap.agent.join.memory import Memory
from gpumap.agent.join.rules import Rules
from gpumap.model.grouping import grouped
from gpumap.model.node import Gpu
from gpumap.model.observations import Moment
from gpumap.model.plugins import DRA_DRIVER
from gpumap.model.readings import Uuid

MissingOffers = Mapping[Uuid, Mapping[Uuid, frozenset[str]]]
"""For each GPU that no container can be assigned: the resources that each of its leaves should have, if known."""


def has_seen_claim(joined: Joined) -> bool:
    """Return whether a DRA claim of GPUs exists or existed in this agent's life.

    Kubelets before 1.34 list no claims, or list them without drivers: then any claim may be one of GPUs.
    """
    containers = (container for pod in joined.listing.pods for container in pod.containers)
    drivers = {claim.driver for container in containers for claim in container.claims}
    unlisted = bool(joined.pod_table.claims) and not joined.allocation.lists_claims
    prepared = joined.identity is not None and bool(joined.identity.value.dra.prepared)
    return (
        joined.memory.claimed
        or unlisted
        or prepared
        or any(driver in ("", DRA_DRIVER) or joined.rules.is_gpu_resource(driver) for driver in drivers)
    )


def missing_offers(joined: Joined, after: Memory) -> MissingOffers | None:
    """Return the GPUs that no container can be assigned; `None` if that cannot be known."""
    if joined.listing.allocatable is None or after.claimed or joined.allocation.offer.unplaced:
        return None
    known_by_uuid = {known.uuid: known for known in joined.inventory.known}
    evidence = _Evidence(joined, after)
    readable = [known_by_uuid[gpu.uuid] for gpu in joined.inventory.gpus if gpu.reading is not None]
    return {gpu.uuid: evidence.resources(gpu) for gpu in readable if evidence.is_missing(gpu)}


def watch_offers(
    memory: Memory, gpus: Iterable[Gpu], missing: MissingOffers | None, now: Moment, rules: Rules
) -> tuple[dict[Uuid, Moment], tuple[Gpu, ...]]:
    """Return since when no container can be assigned each GPU, and the GPUs with the time. A gap ends it."""
    is_gap = memory.finished is not None and rules.is_gap(memory.finished, now)
    since = {uuid: now if is_gap else memory.not_offered_since.get(uuid, now) for uuid in missing or ()}
    return since, tuple(
        gpu
        if missing is None or gpu.reading is None
        else structs.replace(gpu, not_offered_seconds=now.since(since.get(gpu.uuid, now)))
        for gpu in gpus
    )


class _Evidence:
    """What shows that the kubelet should offer a GPU. The own id of a partitioned GPU is no evidence."""

    def __init__(self, joined: Joined, after: Memory) -> None:
        allocation = joined.allocation
        self._inventory = joined.inventory
        self._offered = grouped((uuid, resource) for uuid, of in allocation.offer.slots.items() for resource in of)
        grants = allocation.grants
        self._reserved = {uuid for (_, uuid), grant in grants.items() if grant.reservation}
        pairs = [*after.offered, *allocation.offer.registered]
        pairs += [(uuid, resource) for (_, uuid), grant in grants.items() for resource in grant.slots]
        self._shown = grouped(pairs)

    def is_missing(self, gpu: KnownGpu) -> bool:
        """Return whether the GPU should be offered, and is neither offered nor reserved."""
        if self._is_offered(gpu) or self._reserved & {gpu.uuid, *(leaf.uuid for leaf in gpu.leaves)}:
            return False
        others = self._alike(gpu)
        is_exception = bool(gpu.leaves and others) and all(map(self._is_offered, others))
        return is_exception or any(leaf.uuid in self._shown for leaf in gpu.leaves)

    def resources(self, gpu: KnownGpu) -> dict[Uuid, frozenset[str]]:
        """Return what shows for each leaf: for itself, else for its GPU, else for such leaves of other GPUs."""
        of_gpu = self._resources_of(self._shown, gpu.leaves)
        return {
            leaf.uuid: self._resources_of(self._shown, [leaf])
            or of_gpu
            or self._resources_of(
                self._offered,
                (one for other in self._alike(gpu) for one in other.leaves if one.profile == leaf.profile),
            )
            for leaf in gpu.leaves
        }

    def _is_offered(self, gpu: KnownGpu) -> bool:
        return any(uuid in self._offered for uuid in (gpu.uuid, *(leaf.uuid for leaf in gpu.leaves)))

    def _alike(self, gpu: KnownGpu) -> list[KnownGpu]:
        """Return the other GPUs of its model."""
        return [known for known in self._inventory.known if gpu.model and known.model == gpu.model and known is not gpu]

    @staticmethod
    def _resources_of(resources: Mapping[Uuid, list[str]], leaves: Iterable[KnownLeaf]) -> frozenset[str]:
        return frozenset(resource for leaf in leaves for resource in resources.get(leaf.uuid, ()))
