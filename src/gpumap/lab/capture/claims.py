"""DRA's local files in a capture: what gpumap read in them and nothing else, in a form that it reads again. Pure.

Of the kubelet's state stay claims and the UIDs of their pods. Of the driver's checkpoint stay devices' names and uuids,
their claims, admin access and the memory that a share consumes: no configuration, no other capacity, no CDI name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Protocol

from gpumap.agent.sources.dra import parse_prepared, parse_state
from gpumap.lab.demo.texts import prepared_claim
from gpumap.model.observations import ClaimPods, PodUid, PreparedDevice
from gpumap.model.readings import Uuid


class Names(Protocol):
    """Other names for what these files name; `pseudonyms.Pseudonyms` gives them."""

    def namespace(self, name: str) -> str: ...
    def claim(self, name: str) -> str: ...
    def uid(self, uid: str) -> str: ...
    def device(self, id_: str) -> str: ...


def state_text(claims: Iterable[ClaimPods]) -> bytes:
    """The kubelet's state, in the form of kubelets until 1.31, which people can read. The checksum is 0."""
    entries = [
        {"ClaimName": one.claim, "Namespace": one.namespace, "PodUIDs": {uid: {} for uid in one.pod_uids}}
        for one in claims
    ]
    return _text({"version": "v1", "entries": entries, "checksum": 0})


def checkpoint_text(devices: Iterable[PreparedDevice]) -> bytes:
    """The driver's checkpoint, each device as if it were a claim's only one. The checksums are 0."""
    claims = {str(number): _claim(one) for number, one in enumerate(devices)}
    return _text({"checksum": 0, "v2": {"checksum": 0, "preparedClaims": claims}})


def renamed_state(text: bytes, names: Names) -> bytes:
    """The kubelet's state under other names, in their order. Raises ValueError where it cannot be read."""
    claims, _ = parse_state(text)
    return state_text(
        sorted(
            ClaimPods(
                names.namespace(one.namespace),
                names.claim(one.claim),
                tuple(sorted(PodUid(names.uid(uid)) for uid in one.pod_uids)),
            )
            for one in claims
        )
    )


def renamed_checkpoint(text: bytes, names: Names) -> bytes:
    """The driver's checkpoint under other names, in their order. Raises ValueError where it cannot be read."""
    devices, _ = parse_prepared(text)
    renamed = {
        PreparedDevice(
            names.namespace(one.claim_namespace),
            names.claim(one.claim),
            names.device(one.device),
            names.device(one.share_id),
            Uuid(names.device(one.uuid)),
            one.admin_access,
            one.memory_bytes,
        )
        for one in devices
    }
    return checkpoint_text(sorted(renamed, key=lambda one: json.dumps(_claim(one))))


def _claim(one: PreparedDevice) -> dict[str, object]:
    return prepared_claim((one.claim_namespace, one.claim), [one])


def _text(document: object) -> bytes:
    return json.dumps(document, indent=1, ensure_ascii=False).encode() + b"\n"
