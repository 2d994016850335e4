"""The kubelet's PodResources messages as model values: one pod's bytes, or the devices that plugins offer. Pure.

It drops nothing only because it is strange, but notes it. It cuts what is far too long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gpumap.agent._proto.podresources import envelope_pb2, v1_pb2
from gpumap.agent.sources.messages import decode
from gpumap.agent.sources.names import fit, show
from gpumap.model.formatting import counted
from gpumap.model.observations import ClaimDevice, Complaint, DeviceId, ListedContainer, ListedPod, ResourceDevices

NAME_CHARACTERS_MAX = 253
"""Kubernetes' limit for names of pods, claims, pools and, for want of another, of device ids."""
RESOURCE_CHARACTERS_MAX = 317
"""A resource's name is a domain (253), a slash and a name (63)."""
_REPEATS_MAX = 256
"""More than a node has pods. Kubelets repeat a claim's device a few times: if pods that share the claim start together
(1.36.2), or after a restart (kubernetes/kubernetes#140471). They repeat it without an end if they retry a preparation
that another driver fails (#141335), until the answer is too large."""


class DecodedPod(NamedTuple):
    """A pod, and what is strange in its bytes."""

    pod: ListedPod
    repeated: int
    """Mean number of repetitions of a device in one of its claims."""
    odd_name: str
    """The first name that is not valid in Kubernetes, made readable; else empty."""


def parts(answer: bytes) -> tuple[bytes, ...]:
    """Open a List or an Allocatable answer one layer deep. Both are a list of messages in field 1."""
    return tuple(envelope_pb2.ListPodResourcesResponse.FromString(answer).pod_resources)


def decode_pod(chunk: bytes) -> DecodedPod:
    """Read one pod. v1alpha1's messages are v1's with fields left out: one decoder reads both. Raises DecodeError."""
    message, spelled = decode(v1_pb2.PodResources, chunk)
    repeated = 0
    containers = []
    for container in message.containers:
        claims, times = _claims(container.dynamic_resources)
        repeated = max(repeated, times)
        containers.append(ListedContainer(container.name, _devices(container.devices), claims))
    # A container that is listed twice is one: otherwise the pod would seem to have other devices than before.
    pod = ListedPod(message.namespace, message.name, tuple(sorted(set(containers))))
    not_text = (f"a name that is not UTF-8: {show(spelled)}",) if spelled else ()
    odd = next(iter((*not_text, *_odd_names(pod))), "")
    return DecodedPod(_fitted(pod) if odd else pod, repeated, odd)


def decode_offer(answer: bytes) -> tuple[ResourceDevices, ...]:
    """Read GetAllocatableResources' answer. Raises DecodeError."""
    message, _ = decode(v1_pb2.AllocatableResourcesResponse, answer)
    return tuple(sorted(map(_fitted_devices, _devices(message.devices))))


def complaints_of(pods: Sequence[DecodedPod]) -> tuple[Complaint, ...]:
    """Return the complaints about a List: one for each kind, however many pods have it."""
    repeating = [one for one in pods if one.repeated > _REPEATS_MAX]
    odd = [one.odd_name for one in pods if one.odd_name]
    found = []
    if repeating:
        worst = max(repeating, key=lambda one: one.repeated)
        name = show(f"{worst.pod.namespace}/{worst.pod.name}")
        found.append(Complaint("duplicate_claims", f"a claim of pod {name} lists each device {worst.repeated} times"))
    if odd:
        more = f", and in {counted(len(odd) - 1, 'more pod')}" if odd[1:] else ""
        found.append(Complaint("odd_name", f"{odd[0]}{more}"))
    return tuple(found)


def _devices(entries: Iterable[v1_pb2.ContainerDevices]) -> tuple[ResourceDevices, ...]:
    """Group ids by resource. The kubelet sends an entry for each device and NUMA node: repetitions are normal."""
    ids: dict[str, set[DeviceId]] = {}
    for entry in entries:
        ids.setdefault(entry.resource_name, set()).update(map(DeviceId, entry.device_ids))
    return tuple(ResourceDevices(resource, tuple(sorted(found))) for resource, found in sorted(ids.items()))


def _claims(entries: Iterable[v1_pb2.DynamicResource]) -> tuple[tuple[ClaimDevice, ...], int]:
    """Return the devices of all claims, each once, and the largest mean number of repetitions of a device in a claim.

    A container with two requests of a claim is listed with the whole claim twice. That is not a repetition.
    """
    found: set[ClaimDevice] = set()
    most = 0
    for entry in entries:
        devices = entry.claim_resources
        names = {(one.driver_name, one.pool_name, one.device_name, one.share_id) for one in devices}
        if names and names != {("", "", "", "")}:  # kubelets before 1.31 name no device
            most = max(most, len(devices) // len(names))
        found.update(ClaimDevice(*name, entry.claim_namespace, entry.claim_name) for name in names)
    return tuple(sorted(found)), most


def _fitted(pod: ListedPod) -> ListedPod:
    containers = (
        ListedContainer(
            fit(one.name),
            tuple(sorted(map(_fitted_devices, one.devices))),
            tuple(sorted(ClaimDevice(*map(fit, _fields(claim))) for claim in one.claims)),
        )
        for one in pod.containers
    )
    return ListedPod(fit(pod.namespace), fit(pod.name), tuple(sorted(containers)))


def _fitted_devices(devices: ResourceDevices) -> ResourceDevices:
    return ResourceDevices(fit(devices.resource), tuple(sorted(DeviceId(fit(id_)) for id_ in devices.ids)))


def _odd_names(pod: ListedPod) -> Iterator[str]:
    for kind, name in _names(pod):
        longest = RESOURCE_CHARACTERS_MAX if kind == "resource" else NAME_CHARACTERS_MAX
        if len(name) > longest:
            yield f"a {kind} of {len(name)} characters: {show(name)}"
        elif not name.isprintable():
            yield f"a {kind} with characters that are not printable: {show(name)}"


def _names(pod: ListedPod) -> Iterator[tuple[str, str]]:
    yield "namespace", pod.namespace
    yield "pod", pod.name
    for container in pod.containers:
        yield "container", container.name
        for devices in container.devices:
            yield "resource", devices.resource
            yield from (("device id", id_) for id_ in devices.ids)
        for claim in container.claims:
            yield from (("part of a claim", str(part)) for part in _fields(claim))


def _fields(claim: ClaimDevice) -> tuple[str, ...]:
    return claim.driver, claim.pool, claim.device, claim.share_id, claim.claim_namespace, claim.claim
