"""The kubelet's devices: the ids that device plugins offer, their assignment to pods, and the plugins' answers.

`assign` gives the pods of a scenario their ids as a kubelet does: never one id to two pods at a time. `check_memory`
proves that the memory of the processes fits. Pure; both raise `ScenarioError` if something does not fit.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from msgspec import structs

from gpumap.lab.demo.scenario_model import (
    GIB,
    Container,
    Gpu,
    Leaf,
    Pod,
    Process,
    Scenario,
    overhead_bytes,
    peak_bytes,
)
from gpumap.lab.demo.scenario_pods import PodReader, Request
from gpumap.lab.demo.yaml_reading import ScenarioError
from gpumap.model.grouping import grouped
from gpumap.model.observations import DeviceId, PluginAnswer, ResourceDevices

SILENT_FAULTS = ("hung",)
"""Faults that a device plugin does not notice. It reports a GPU with any other fault as unhealthy."""

# --- what plugins offer and answer ------------------------------------------------------------------------------------


def offered(scenario: Scenario, moment: float) -> tuple[ResourceDevices, ...]:
    """Return the ids that the plugins report as healthy at a time of the play."""
    faults = ((gpu.index, fault) for gpu in scenario.gpus for fault in gpu.faults if fault.start <= moment < fault.end)
    unhealthy = {index for index, fault in faults if fault.kind not in SILENT_FAULTS}
    pairs = [
        (resource, id_)
        for gpu in scenario.gpus
        if gpu.index not in unhealthy
        for resource, ids in _gpu_ids(gpu)
        for id_ in ids
    ]
    away = [_names(scenario.gpus[index]) for index in unhealthy]
    pairs += [
        (devices.resource, id_)
        for devices in _foreign(scenario)
        for id_ in devices.ids
        if not any(names.search(id_) for names in away)
    ]
    return group_ids(pairs)


def numa_nodes(scenario: Scenario) -> dict[DeviceId, tuple[int, ...]]:
    """Whole GPUs and their slots have a NUMA node; MIG devices have none, as in the captures."""
    return {id_: (gpu.numa,) for gpu in scenario.gpus if not gpu.mig for _, ids in _gpu_ids(gpu) for id_ in ids}


def answer_to(scenario: Scenario, container: Container, devices: ResourceDevices) -> PluginAnswer:
    """The scenario's answer. The NVIDIA plugin also sets a variable, unless the answer names devices in another way."""
    answer: PluginAnswer = container.answer.get(devices.resource, PluginAnswer())
    otherwise = answer.annotations or answer.mount_paths or answer.cdi_devices
    if otherwise or _own_ids(scenario).get(devices.resource, frozenset()).isdisjoint(devices.ids):
        return answer
    uuids = dict.fromkeys(id_.partition("::")[0] for id_ in devices.ids)
    return replace(answer, envs=tuple(({"NVIDIA_VISIBLE_DEVICES": ",".join(uuids)} | dict(answer.envs)).items()))


def _foreign(scenario: Scenario) -> Iterator[ResourceDevices]:
    """Return the offers of foreign plugins: a scenario need not list what pods hold."""
    for resource, texts in scenario.kubelet.offers.items():
        yield ResourceDevices(resource, tuple(map(DeviceId, texts)))
    own_ids = _own_ids(scenario)
    for pod in scenario.pods:
        for container in pod.containers:
            for devices in container.devices:
                ids = tuple(id_ for id_ in devices.ids if id_ not in own_ids.get(devices.resource, ()))
                yield ResourceDevices(devices.resource, ids)


def _names(gpu: Gpu) -> re.Pattern[str]:
    """Return the ids that name a GPU: by its uuid, by those of its MIG devices, or by its device node (GKE's)."""
    uuids: list[str] = [gpu.uuid, *(device.uuid for device in gpu.devices)]
    return re.compile("|".join([*map(re.escape, uuids), rf"^nvidia{gpu.minor}(?:/|$)"]))


@lru_cache(maxsize=4)
def _own_ids(scenario: Scenario) -> Mapping[str, frozenset[DeviceId]]:
    """What the plugin of the scenario's GPUs assigns, as opposed to a foreign plugin."""
    pairs = [(resource, id_) for gpu in scenario.gpus for resource, ids in _gpu_ids(gpu) for id_ in ids]
    return {devices.resource: frozenset(devices.ids) for devices in group_ids(pairs)}


def _gpu_ids(gpu: Gpu) -> Iterator[tuple[str, tuple[DeviceId, ...]]]:
    if not gpu.mig:
        yield gpu.ids(None)
    for number in range(len(gpu.devices)):
        yield gpu.ids(number)


# --- what pods get ----------------------------------------------------------------------------------------------------


_Holdings = defaultdict[tuple[str, DeviceId], list[tuple[Pod, Container]]]
"""By resource and id, the containers that hold it, each at its time."""


def assign(reader: PodReader, gpus: Sequence[Gpu], pods: Sequence[Pod]) -> tuple[Pod, ...]:
    """Return the pods with the ids of what they request. Containers reuse the ids of their pod's init container."""
    holdings: _Holdings = defaultdict(list)
    for number, pod in enumerate(pods):
        for index, container in enumerate(pod.containers):
            _hold_spelled_out(pod, f"pods[{number}].containers[{index}].ids", container, holdings)
    assigned = []
    for number, pod in enumerate(pods):
        ids: dict[str, dict[str, tuple[str, ...]]] = {}
        for index, container in sorted(enumerate(pod.containers), key=lambda pair: not pair[1].init):
            own_ids = [(entry.resource, id_) for entry in container.devices for id_ in entry.ids]
            for request in reader.requests(container, f"pods[{number}].containers[{index}]"):
                resource, granted = _grant(gpus, pod, container, request, holdings)
                for id_ in granted:
                    holdings[resource, id_].append((pod, container))
                own_ids += [(resource, id_) for id_ in granted]
            ids[container.name] = {devices.resource: devices.ids for devices in group_ids(own_ids)}
        containers = tuple(structs.replace(container, ids=ids[container.name]) for container in pod.containers)
        assigned.append(structs.replace(pod, containers=containers))
    return tuple(assigned)


def group_ids(pairs: Iterable[tuple[str, DeviceId]]) -> tuple[ResourceDevices, ...]:
    """Sort resources and their ids, each once."""
    return tuple(ResourceDevices(resource, tuple(sorted({*ids}))) for resource, ids in sorted(grouped(pairs).items()))


def _hold_spelled_out(pod: Pod, place: str, container: Container, holdings: _Holdings) -> None:
    for entry in container.devices:
        for id_ in entry.ids:
            owner = _taken(pod, container, holdings[entry.resource, id_])
            if owner is not None:
                holder = f"{owner.namespace}/{owner.name}"
                raise ScenarioError(f"{place}.{entry.resource}: {id_} is held by {holder} at that time")
            holdings[entry.resource, id_].append((pod, container))


def _taken(pod: Pod, container: Container, holdings: Iterable[tuple[Pod, Container]]) -> Pod | None:
    """Return the owner of an id at a time when a container wants it."""
    for holder, holding in holdings:
        if pod.overlaps(holder) and not (holder is pod and (holding.init or container.init)):
            return holder
    return None


def _grant(
    gpus: Sequence[Gpu], pod: Pod, container: Container, request: Request, all_holdings: _Holdings
) -> tuple[str, tuple[DeviceId, ...]]:
    place, leaf, slots = request
    resource, ids = gpus[leaf.gpu].ids(leaf.instance)
    holdings = {id_: all_holdings[resource, id_] for id_ in ids}
    holder_of = {id_: holder for id_ in ids if (holder := _taken(pod, container, holdings[id_]))}
    reusable = {id_ for id_ in ids if any(holder is pod and holding.init for holder, holding in holdings[id_])}
    free = sorted((id_ for id_ in ids if id_ not in holder_of), key=lambda id_: id_ not in reusable)
    if len(free) < slots:
        device_name = f"gpu {leaf.gpu}"
        if not ids:
            raise ScenarioError(f"{place}: {device_name} is offered by no plugin (resource: none)")
        if leaf.instance is not None:
            device_name += f", MIG device {leaf.instance}"
        if len(ids) > 1:
            raise ScenarioError(f"{place}: {device_name} has {len(ids)} slots, {len(free)} of them free at that time")
        holder = holder_of[ids[0]]
        raise ScenarioError(f"{place}: {device_name} is held by {holder.namespace}/{holder.name} at that time")
    return resource, tuple(free[:slots])


def check_memory(scenario: Scenario) -> None:
    """Check that the processes of a device never use more memory than it has, at their maximum."""
    users = list(_users(scenario))
    pools: dict[tuple[int, int | None], int] = {}
    for gpu in scenario.gpus:
        pools[gpu.index, None] = gpu.memory_bytes - gpu.reserved_bytes - gpu.leaked_bytes
        pools |= {(gpu.index, instance.gpu_instance_id): instance.memory_bytes for instance in gpu.gpu_instances}
    for place, process in users:
        moment = process.start or 0.0
        for pool in {_pool(scenario, leaf) for leaf in process.leaves}:
            there = [
                peak_bytes(user.memory)
                for _, user in users
                for leaf in user.leaves
                if _pool(scenario, leaf) == pool and user.runs_at(moment)
            ]
            if sum(there) + overhead_bytes(len(there)) > pools[pool]:
                raise ScenarioError(
                    f"{place}: with it, processes use {sum(there) / GIB:.1f} GiB of gpu {pool[0]} at {moment:g}s, "
                    f"which has {pools[pool] / GIB:.1f} GiB for them"
                )


def _users(scenario: Scenario) -> Iterator[tuple[str, Process]]:
    for number, pod in enumerate(scenario.pods):
        for index, container in enumerate(pod.containers):
            for place, process in enumerate(container.processes):
                yield f"pods[{number}].containers[{index}].processes[{place}]", process
    for number, host in enumerate(scenario.host_processes):
        yield f"host_processes[{number}]", host


def _pool(scenario: Scenario, leaf: Leaf) -> tuple[int, int | None]:
    """Return the memory that a leaf uses: the GPU's, or that of a GPU instance."""
    if leaf.instance is None:
        return leaf.gpu, None
    return leaf.gpu, scenario.gpus[leaf.gpu].devices[leaf.instance].gpu_instance_id
