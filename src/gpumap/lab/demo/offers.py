"""What the node's device plugins offer to the kubelet, and what they answer when it gives an id away. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from gpumap.lab.demo.assign import by_resource
from gpumap.lab.demo.scenario_model import ContainerSpec, GpuSpec, Scenario, leaf_ids
from gpumap.model.observations import DeviceId, PluginAnswer, ResourceDevices

SILENT_FAULTS = ("hung",)
"""Faults that a device plugin does not notice; with others it calls the GPU unhealthy."""


def offered(scenario: Scenario, moment: float) -> tuple[ResourceDevices, ...]:
    """The ids that the plugins call healthy at a time of the play."""
    return _offered(scenario, tuple(gpu.index for gpu in scenario.gpus if _is_unhealthy(gpu, moment)))


def numa_nodes(scenario: Scenario) -> dict[DeviceId, tuple[int, ...]]:
    """Whole GPUs and their slots have a NUMA node; MIG devices have none, as in the captures."""
    return {id_: (gpu.numa,) for gpu in scenario.gpus if not gpu.mig for _, ids in _gpu_ids(gpu) for id_ in ids}


def answer_to(scenario: Scenario, container: ContainerSpec, devices: ResourceDevices) -> PluginAnswer:
    """What the scenario says. The NVIDIA plugin sets a variable, too, if it was not told to name devices otherwise."""
    said = dict(container.answers).get(devices.resource, PluginAnswer())
    otherwise = said.annotations or said.mount_paths or said.cdi_devices
    if otherwise or _own_ids(scenario).get(devices.resource, frozenset()).isdisjoint(devices.ids):
        return said
    uuids = dict.fromkeys(id_.partition("::")[0] for id_ in devices.ids)
    return replace(said, envs=tuple(({"NVIDIA_VISIBLE_DEVICES": ",".join(uuids)} | dict(said.envs)).items()))


def _is_unhealthy(gpu: GpuSpec, moment: float) -> bool:
    return any(fault.kind not in SILENT_FAULTS and fault.start <= moment < fault.end for fault in gpu.faults)


@lru_cache(maxsize=64)
def _offered(scenario: Scenario, unhealthy: Collection[int]) -> tuple[ResourceDevices, ...]:
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
    return by_resource(pairs)


def _foreign(scenario: Scenario) -> Iterator[ResourceDevices]:
    """What other makers' plugins offer: a scenario need not say so of what is held."""
    yield from scenario.offers
    own = _own_ids(scenario)
    for pod in scenario.pods:
        for container in pod.containers:
            for devices in container.devices:
                ids = tuple(id_ for id_ in devices.ids if id_ not in own.get(devices.resource, ()))
                yield ResourceDevices(devices.resource, ids)


def _names(gpu: GpuSpec) -> re.Pattern[str]:
    """The ids of a card that say so: by its uuid, by those of its MIG devices, or by its device node (GKE's)."""
    uuids: list[str] = [gpu.uuid, *(device.uuid for device in gpu.mig)]
    return re.compile("|".join([*map(re.escape, uuids), rf"^nvidia{gpu.minor}(?:/|$)"]))


@lru_cache(maxsize=4)
def _own_ids(scenario: Scenario) -> Mapping[str, frozenset[DeviceId]]:
    """What the plugin gives away that offers the scenario's GPUs, rather than a foreign one."""
    pairs = [(resource, id_) for gpu in scenario.gpus for resource, ids in _gpu_ids(gpu) for id_ in ids]
    return {devices.resource: frozenset(devices.ids) for devices in by_resource(pairs)}


def _gpu_ids(gpu: GpuSpec) -> Iterator[tuple[str, tuple[DeviceId, ...]]]:
    if not gpu.mig:
        yield leaf_ids(gpu, None)
    for number in range(len(gpu.mig)):
        yield leaf_ids(gpu, number)
