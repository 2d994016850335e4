"""The kubelet's PodResources messages as model values: one pod's bytes, or the devices that plugins offer. Pure.

It drops nothing only because it is strange, but notes it. It cuts what is far too long. It does not decode known pods
again. Kubelets answer in random order: the pods of two answers with one content are the same, but the answers are not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from gpumap.agent._proto.podresources import envelope_pb2, v1_pb2
from gpumap.agent.sources.messages import decode, fit, show
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
_ORDERS_MAX = 4
"""Number of orders of its parts in which a pod is known by its bytes, on average: enough for containers with one
device."""
_KEY_BYTES_MAX = 4096
"""Larger bytes are known by their digest: a pod of 17.8 MB has been seen, in many orders."""

ListedPods = tuple[ListedPod, ...]
AllocatableDevices = tuple[ResourceDevices, ...]


_CLAIM_NAMES = attrgetter("driver", "pool", "device", "share_id", "claim_namespace", "claim")


class DecodedPod(NamedTuple):
    """A pod, and what is strange in its bytes."""

    pod: ListedPod
    repeated: int
    """Mean number of repetitions of a device in one of its claims."""
    odd_name: str
    """The first name that is not valid in Kubernetes, made readable; else empty."""


class KnownPods:
    """Decodes a kubelet's answers, in one thread at a time. Unchanged content is the very same object."""

    def __init__(self) -> None:
        self._answer_key = b""
        self._decoded: dict[bytes, DecodedPod] = {}
        self._listed: dict[int, ListedPod] = {}
        self._pods: ListedPods = ()
        self._oddities: tuple[Complaint, ...] = ()
        self._entries: frozenset[bytes] = frozenset()
        self._allocatable: AllocatableDevices = ()

    def read_list(self, answer: bytes) -> tuple[ListedPods, tuple[Complaint, ...]]:
        """Return a List's pods and the complaints about it, which last as long as their cause. Raises DecodeError."""
        key = _key(answer)
        if key != self._answer_key:
            self._take(answer)
            self._answer_key = key
        return self._pods, self._oddities

    def read_allocatable(self, answer: bytes) -> AllocatableDevices:
        """Return what plugins offer. Raises DecodeError."""
        entries = frozenset(map(_key, parts(answer)))
        if entries != self._entries:
            allocatable = decode_allocatable(answer)
            self._entries = entries
            if allocatable != self._allocatable:
                self._allocatable = allocatable
        return self._allocatable

    def _take(self, answer: bytes) -> None:
        chunks = parts(answer)
        if len(self._decoded) > _ORDERS_MAX * len(chunks):
            self._decoded = {}
        decoded = [self._pod(chunk) for chunk in chunks]
        self._oddities = complaints_of(decoded)
        listed = {id(pod.pod): pod.pod for pod in decoded}
        if listed.keys() != self._listed.keys():
            self._listed = listed
            pods = tuple(sorted(set(listed.values())))
            if pods != self._pods:
                self._pods = pods

    def _pod(self, chunk: bytes) -> DecodedPod:
        """Return one pod, the very same object for equal content: the order of its parts in the bytes is random."""
        key = _key(chunk)
        known = self._decoded.get(key)
        if known is None:
            decoded = decode_pod(chunk)
            equal_pods = (pod for pod in self._listed.values() if pod == decoded.pod)
            known = self._decoded[key] = decoded._replace(pod=next(equal_pods, decoded.pod))
        return known


def _key(data: bytes) -> bytes:
    return data if len(data) <= _KEY_BYTES_MAX else hashlib.blake2b(data).digest()


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
    odd_name = next(iter((*not_text, *_odd_names(pod))), "")
    return DecodedPod(_fit_pod(pod) if odd_name else pod, repeated, odd_name)


def decode_allocatable(answer: bytes) -> tuple[ResourceDevices, ...]:
    """Read GetAllocatableResources' answer. Raises DecodeError."""
    message, _ = decode(v1_pb2.AllocatableResourcesResponse, answer)
    return tuple(sorted(map(_fit_devices, _devices(message.devices))))


def complaints_of(pods: Sequence[DecodedPod]) -> tuple[Complaint, ...]:
    """Return the complaints about a List: one for each kind, however many pods have it."""
    repeating = [pod for pod in pods if pod.repeated > _REPEATS_MAX]
    odd_names = [pod.odd_name for pod in pods if pod.odd_name]
    complaints = []
    if repeating:
        worst = max(repeating, key=lambda pod: pod.repeated)
        name = show(f"{worst.pod.namespace}/{worst.pod.name}")
        detail = f"a claim of pod {name} lists each device {worst.repeated} times"
        complaints.append(Complaint("duplicate_claims", detail))
    if odd_names:
        more_pods = f", and in {counted(len(odd_names) - 1, 'more pod')}" if odd_names[1:] else ""
        complaints.append(Complaint("odd_name", f"{odd_names[0]}{more_pods}"))
    return tuple(complaints)


def _devices(entries: Iterable[v1_pb2.ContainerDevices]) -> tuple[ResourceDevices, ...]:
    """Group ids by resource. The kubelet sends an entry for each device and NUMA node: repetitions are normal."""
    ids: dict[str, set[DeviceId]] = {}
    for entry in entries:
        ids.setdefault(entry.resource_name, set()).update(map(DeviceId, entry.device_ids))
    return tuple(ResourceDevices(resource, tuple(sorted(own_ids))) for resource, own_ids in sorted(ids.items()))


def _claims(entries: Iterable[v1_pb2.DynamicResource]) -> tuple[tuple[ClaimDevice, ...], int]:
    """Return the devices of all claims, each once, and the largest mean number of repetitions of a device in a claim.

    A container with two requests of a claim is listed with the whole claim twice. That is not a repetition.
    """
    claim_devices: set[ClaimDevice] = set()
    repeated = 0
    for entry in entries:
        devices = entry.claim_resources
        names = {(device.driver_name, device.pool_name, device.device_name, device.share_id) for device in devices}
        if names and names != {("", "", "", "")}:  # kubelets before 1.31 name no device
            repeated = max(repeated, len(devices) // len(names))
        claim_devices.update(ClaimDevice(*name, entry.claim_namespace, entry.claim_name) for name in names)
    return tuple(sorted(claim_devices)), repeated


def _fit_pod(pod: ListedPod) -> ListedPod:
    containers = (
        ListedContainer(
            fit(container.name),
            tuple(sorted(map(_fit_devices, container.devices))),
            tuple(sorted(ClaimDevice(*map(fit, _CLAIM_NAMES(claim))) for claim in container.claims)),
        )
        for container in pod.containers
    )
    return ListedPod(fit(pod.namespace), fit(pod.name), tuple(sorted(containers)))


def _fit_devices(devices: ResourceDevices) -> ResourceDevices:
    return ResourceDevices(fit(devices.resource), tuple(sorted(DeviceId(fit(id_)) for id_ in devices.ids)))


def _odd_names(pod: ListedPod) -> Iterator[str]:
    for kind, name in _names(pod):
        if len(name) > (RESOURCE_CHARACTERS_MAX if kind == "resource" else NAME_CHARACTERS_MAX):
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
            yield from (("part of a claim", str(name)) for name in _CLAIM_NAMES(claim))
