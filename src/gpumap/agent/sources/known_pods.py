"""Remembers a kubelet's answers, so that it does not decode known pods again. One thread at a time.

Kubelets answer in random order. So the pods of two answers with one content are the same, but the answers are not.
"""

from __future__ import annotations

import hashlib

from gpumap.agent.sources.podresources import DecodedPod, complaints_of, decode_offer, decode_pod, parts
from gpumap.model.observations import Complaint, ListedPod, ResourceDevices

_ORDERS_KEPT = 4
"""Number of orders of its parts in which a pod is known by its bytes, on average: enough for containers with one
device."""
_KEPT_BYTES_MAX = 4096
"""Larger bytes are known by their digest: a pod of 17.8 MB has been seen, in many orders."""

Pods = tuple[ListedPod, ...]
Offer = tuple[ResourceDevices, ...]


class KnownPods:
    """Decodes a kubelet's answers. What it returns is the very same object while its content is unchanged."""

    def __init__(self) -> None:
        self._answer_key = b""
        self._decoded: dict[bytes, DecodedPod] = {}
        self._listed: dict[int, ListedPod] = {}
        self._pods: Pods = ()
        self._oddities: tuple[Complaint, ...] = ()
        self._entries: frozenset[bytes] = frozenset()
        self._offer: Offer = ()

    def read_list(self, answer: bytes) -> tuple[Pods, tuple[Complaint, ...]]:
        """Return a List's pods and its complaints: a complaint lasts as long as its cause is in the List.

        Raises DecodeError.
        """
        key = _key(answer)
        if key != self._answer_key:
            self._take(answer)
            self._answer_key = key
        return self._pods, self._oddities

    def read_offer(self, answer: bytes) -> Offer:
        """Return what plugins offer. Raises DecodeError."""
        entries = frozenset(map(_key, parts(answer)))
        if entries != self._entries:
            offer = decode_offer(answer)
            self._entries = entries
            if offer != self._offer:
                self._offer = offer
        return self._offer

    def _take(self, answer: bytes) -> None:
        chunks = parts(answer)
        if len(self._decoded) > _ORDERS_KEPT * len(chunks):
            self._decoded = {}
        decoded = [self._pod(chunk) for chunk in chunks]
        self._oddities = complaints_of(decoded)
        listed = {id(one.pod): one.pod for one in decoded}
        if listed.keys() != self._listed.keys():
            self._listed = listed
            pods = tuple(sorted(set(listed.values())))
            if pods != self._pods:
                self._pods = pods

    def _pod(self, chunk: bytes) -> DecodedPod:
        """Return one pod: the very same object for equal content, although the order of its parts in the bytes is
        random."""
        key = _key(chunk)
        known = self._decoded.get(key)
        if known is None:
            decoded = decode_pod(chunk)
            same = (pod for pod in self._listed.values() if pod == decoded.pod)
            known = self._decoded[key] = decoded._replace(pod=next(same, decoded.pod))
        return known


def _key(data: bytes) -> bytes:
    return data if len(data) <= _KEPT_BYTES_MAX else hashlib.blake2b(data).digest()
