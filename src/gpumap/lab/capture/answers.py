"""The kubelet's answers in a capture: its own bytes, or protobuf's JSON; and the same answers with new names.

Only this module of a capture knows the kubelet's messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message

from gpumap.agent._proto.podresources import v1_pb2
from gpumap.agent._proto.pods import v1alpha1_pb2
from gpumap.lab.capture.pseudonyms import Pseudonyms
from gpumap.model.device_ids import ByUuid, parse
from gpumap.model.observations import DeviceId

_MESSAGES = {
    "kubelet/list": v1_pb2.ListPodResourcesResponse,
    "kubelet/allocatable": v1_pb2.AllocatableResourcesResponse,
}


M = TypeVar("M", v1_pb2.ListPodResourcesResponse, v1_pb2.AllocatableResourcesResponse)

P = TypeVar("P", bound=Message)


def answer(files: Mapping[str, bytes], stem: str) -> bytes | None:
    """Return an answer as bytes, which may be no message; `None` if there is none. Raises ValueError for other JSON."""
    if f"{stem}.pb" in files:
        return files[f"{stem}.pb"]
    if f"{stem}.json" not in files:
        return None
    try:
        message: Message = json_format.Parse(files[f"{stem}.json"], _MESSAGES[stem]())
        return message.SerializeToString()
    except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{stem}.json: {error}") from error


def pods(text: bytes) -> tuple[bytes, ...]:
    """Return the pods of the Pods API, as bytes, from a JSON list of them. Raises ValueError."""
    try:
        entries = json.loads(text)
        if not isinstance(entries, list) or not all(isinstance(pod, dict) for pod in entries):
            raise ValueError("is not a list of pods")
        return tuple(json_format.ParseDict(pod, v1alpha1_pb2.Pod()).SerializeToString() for pod in entries)
    except (json_format.ParseError, ValueError, RecursionError) as error:
        raise ValueError(f"pods_api.json: {error}") from error


def renamed_list(raw: bytes, names: Pseudonyms, is_gpu_resource: Callable[[str], bool]) -> bytes:
    """Return a List in the order of the new names, with only GPUs and claims. Raises ValueError if it is none."""
    pods = [
        v1_pb2.PodResources(
            name=names.pod(pod.name),
            namespace=names.namespace(pod.namespace),
            containers=_sort_messages(
                v1_pb2.ContainerResources(
                    name=names.container(container.name),
                    devices=_devices(container.devices, names, is_gpu_resource),
                    dynamic_resources=_claims(container.dynamic_resources, names, is_gpu_resource),
                )
                for container in pod.containers
            ),
        )
        for pod in _decoded(v1_pb2.ListPodResourcesResponse(), raw).pod_resources
    ]
    return v1_pb2.ListPodResourcesResponse(pod_resources=_sort_messages(pods)).SerializeToString(deterministic=True)


def renamed_allocatable(raw: bytes, names: Pseudonyms, is_gpu_resource: Callable[[str], bool]) -> bytes:
    """Return what the plugins offer, with new ids. Raises ValueError if it cannot be decoded."""
    devices = _devices(_decoded(v1_pb2.AllocatableResourcesResponse(), raw).devices, names, is_gpu_resource)
    return v1_pb2.AllocatableResourcesResponse(devices=devices).SerializeToString(deterministic=True)


def is_gpus(resource: str, ids: Iterable[str], is_gpu_resource: Callable[[str], bool]) -> bool:
    """Return whether it is a GPU resource: by its name, or because one of its ids names a GPU."""
    meanings = (parse(DeviceId(id_)) for id_ in ids)
    return is_gpu_resource(resource) or any(
        meaning is not None and isinstance(meaning.device, ByUuid) for meaning in meanings
    )


def _decoded(message: M, raw: bytes) -> M:
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise ValueError(f"is not the kubelet's answer: {error}") from error
    return message


def _devices(
    entries: Iterable[v1_pb2.ContainerDevices], names: Pseudonyms, is_gpu_resource: Callable[[str], bool]
) -> list[v1_pb2.ContainerDevices]:
    devices = [
        v1_pb2.ContainerDevices(
            resource_name=entry.resource_name,
            device_ids=sorted(map(names.device, entry.device_ids)),
            topology=v1_pb2.TopologyInfo(nodes=[v1_pb2.NUMANode(ID=node.ID) for node in entry.topology.nodes])
            if entry.HasField("topology")
            else None,
        )
        for entry in entries
        if is_gpus(entry.resource_name, entry.device_ids, is_gpu_resource)
    ]
    return _sort_messages(devices)


def _claims(
    entries: Iterable[v1_pb2.DynamicResource], names: Pseudonyms, is_gpu_resource: Callable[[str], bool]
) -> list[v1_pb2.DynamicResource]:
    """Remove the names that a container runtime uses for devices: they contain the UIDs of claims.

    A claim without a GPU keeps only its name, which separates pods, and no name of a device or driver.
    """
    claims = []
    for entry in entries:
        devices = [
            v1_pb2.ClaimResource(
                driver_name=device.driver_name,
                pool_name=names.node(device.pool_name),
                device_name=names.device(device.device_name),
                share_id=names.device(device.share_id) if device.HasField("share_id") else None,
            )
            for device in entry.claim_resources
            if is_gpus(device.driver_name, [device.device_name], is_gpu_resource)
        ]
        # A claim may be one of a GPU if the kubelet does not name its devices.
        is_named = any(device.driver_name for device in entry.claim_resources)
        other_device = v1_pb2.ClaimResource(driver_name="driver.example" if is_named else "")
        claims.append(
            v1_pb2.DynamicResource(
                claim_name=names.claim(entry.claim_name),
                claim_namespace=names.namespace(entry.claim_namespace),
                claim_resources=devices or [other_device],
            )
        )
    return _sort_messages(claims)


def _sort_messages(messages: Iterable[P]) -> list[P]:
    return sorted(messages, key=lambda message: message.SerializeToString(deterministic=True))
