"""Which GPUs no container can be assigned, although something shows that containers should get them.

Evidence for the finding `not_offered`, and the zeros of `gpumap_device_slots_allocatable`. The kubelet's current answer
must be known, gpumap must know the device of each offered id, and no DRA claim may have been seen: DRA offers GPUs in
another way. A plugin that stops and a move to DRA look the same until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from gpumap.agent.join.collection import Joined
from gpumap.agent.join.inventory import Inventory, KnownGpu, KnownLeaf
from gpumap.agent.join.memory import Memory, UnlistedGpuMemory
from gpumap.agent.join.settings import remember_since
from gpumap.model.device_ids import pci_address
from gpumap.model.formatting import age, counted
from gpumap.model.grouping import grouped
from gpumap.model.node import Gpu, MissingGpus
from gpumap.model.observations import Failed, Moment, Observations, Observed, PciFunction, ProcTable
from gpumap.model.plugins import DRA_DRIVER
from gpumap.model.readings import Uuid

UnofferedGpus = Mapping[Uuid, Mapping[Uuid, frozenset[str]]]
"""For each GPU that no container can be assigned: the resources that each of its leaves should have, if known."""


def has_seen_claim(joined: Joined) -> bool:
    """Return whether a DRA claim of GPUs exists or existed in this agent's life.

    Kubelets before 1.34 list no claims, or list them without drivers: then any claim may be one of GPUs.
    """
    containers = (container for pod in joined.served_list.pods for container in pod.containers)
    drivers = {claim.driver for container in containers for claim in container.claims}
    unlisted = bool(joined.pod_table.files.dra.claims) and not joined.allocation.lists_claims
    prepared = joined.identity is not None and bool(joined.identity.value.dra.prepared)
    return (
        joined.memory.claimed
        or unlisted
        or prepared
        or any(driver in ("", DRA_DRIVER) or joined.settings.is_gpu_resource(driver) for driver in drivers)
    )


def find_unoffered_gpus(joined: Joined, after: Memory) -> UnofferedGpus | None:
    """Return the GPUs that no container can be assigned; `None` if that cannot be known."""
    if joined.served_list.allocatable is None or after.claimed or joined.allocation.offer.unplaced:
        return None
    known_by_uuid = {known.uuid: known for known in joined.inventory.known}
    evidence = _Evidence(joined, after)
    readable = [known_by_uuid[gpu.uuid] for gpu in joined.inventory.gpus if gpu.reading is not None]
    return {gpu.uuid: evidence.resources(gpu) for gpu in readable if evidence.is_missing(gpu)}


def watch_offers(
    joined: Joined, gpus: Iterable[Gpu], missing: UnofferedGpus | None
) -> tuple[dict[Uuid, Moment], tuple[Gpu, ...]]:
    """Return since when no container can be assigned each GPU, and the GPUs with the time."""
    moment = joined.observations.finished
    since = remember_since(joined.memory.not_offered_since, missing or (), moment, is_gap=joined.is_gap)
    return since, tuple(
        gpu
        if missing is None or gpu.reading is None
        else structs.replace(gpu, not_offered_seconds=moment.since(since.get(gpu.uuid, moment)))
        for gpu in gpus
    )


class _Evidence:
    """What shows that the kubelet should offer a GPU. The own id of a partitioned GPU is no evidence."""

    def __init__(self, joined: Joined, after: Memory) -> None:
        allocation = joined.allocation
        self._inventory = joined.inventory
        self._offered = grouped(
            (uuid, resource) for uuid, slots in allocation.offer.slots.items() for resource in slots
        )
        grants = allocation.grants
        self._reserved = {uuid for (_, uuid), grant in grants.items() if grant.reservation}
        pairs = [*after.offered, *allocation.offer.registered]
        pairs += [(uuid, resource) for (_, uuid), grant in grants.items() for resource in grant.slots]
        self._shown = grouped(pairs)

    def is_missing(self, gpu: KnownGpu) -> bool:
        """Return whether the GPU should be offered, and is neither offered nor reserved."""
        if self._is_offered(gpu) or self._reserved & {gpu.uuid, *(leaf.uuid for leaf in gpu.leaves)}:
            return False
        alike = self._alike(gpu)
        is_exception = bool(gpu.leaves and alike) and all(map(self._is_offered, alike))
        return is_exception or any(leaf.uuid in self._shown for leaf in gpu.leaves)

    def resources(self, gpu: KnownGpu) -> dict[Uuid, frozenset[str]]:
        """Return what shows for each leaf: for itself, else for its GPU, else for such leaves of other GPUs."""
        of_gpu = self._resources_of(self._shown, gpu.leaves)
        return {
            leaf.uuid: self._resources_of(self._shown, [leaf])
            or of_gpu
            or self._resources_of(
                self._offered,
                (twin for alike in self._alike(gpu) for twin in alike.leaves if twin.profile == leaf.profile),
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


# --- GPUs on PCI that NVML does not list ------------------------------------------------------------------------------


CONTROLLER_3D, DRIVER = "0x0302", "nvidia"


def find_unlisted_gpus(joined: Joined) -> tuple[UnlistedGpuMemory, MissingGpus | None, str]:
    """Return what to remember, and the missing GPUs; or `None` and why they cannot be judged."""
    previous, observations = joined.memory.missing_gpus, joined.observations
    inventory, settings = joined.inventory, joined.settings
    why = settings.why_not_on_pci or _why_unjudged(observations, joined.procs)
    if why or not isinstance(observations.pci, Observed):
        return UnlistedGpuMemory(previous.listed_ids), None, why
    finished = observations.finished
    listed_ids, count, addresses = _unlisted_functions(previous.listed_ids, observations.pci.value, inventory)
    since = remember_since(previous.since, addresses, finished, is_gap=joined.is_gap)
    levels = (*(() if joined.is_gap else previous.levels[:count]), *[finished] * count)[:count]
    memory = UnlistedGpuMemory(listed_ids, since, levels)
    lasting = tuple(address for address, moment in since.items() if finished.since(moment) >= settings.grace_seconds)
    sure = min(len(lasting), sum(finished.since(moment) >= settings.grace_seconds for moment in levels))
    if sure:
        return memory, MissingGpus(sure, lasting, finished.wall - finished.since(levels[0])), ""
    if count:
        problem = f"{counted(count, 'GPU')} on PCI {'is' if count == 1 else 'are'} not in NVML"
        return memory, None, f"{problem}, for less than {age(settings.grace_seconds)}"
    return memory, MissingGpus(), ""


def _unlisted_functions(
    known_ids: frozenset[str], functions: Sequence[PciFunction], inventory: Inventory
) -> tuple[frozenset[str], int, Sequence[str]]:
    """Return the PCI device ids of GPUs that NVML listed now or earlier, how many GPUs are missing, and the addresses
    of the functions that may be these."""
    bus_ids = [*(gpu.pci_bus_id for gpu in inventory.gpus), *(gpu.pci_bus_id for gpu in inventory.nameless)]
    listed = {pci_address(bus_id) for bus_id in bus_ids} & {function.address for function in functions}
    listed_ids = known_ids | {function.device_id for function in functions if function.address in listed}
    addresses = [
        function.address
        for function in functions
        if function.address not in listed
        # NVML should list it: the driver has it, or it is a GPU of a kind that NVML listed.
        if function.driver in ("", DRIVER) and not function.driver_override
        if (function.class_code == CONTROLLER_3D and function.driver == DRIVER) or function.device_id in listed_ids
    ]
    # NVML may list a GPU with an address that is not on PCI, or without one: it may be any of them.
    count = max(len(addresses) - (len(bus_ids) - len(listed)), 0)
    return listed_ids, count, addresses if count else ()


def _why_unjudged(observations: Observations, procs: ProcTable) -> str:
    if isinstance(observations.nvml, Failed):
        return "NVML does not answer"
    if not (procs.pid_visibility and procs.is_machine):
        return "gpumap is not in the machine's own PID namespace: NVML may list only some of the GPUs"
    if isinstance(observations.pci, Failed):
        return observations.pci.complaints[-1].detail
    return "" if observations.pci else "PCI was not read"
