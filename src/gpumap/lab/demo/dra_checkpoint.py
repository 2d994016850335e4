"""What NVIDIA's DRA driver writes down of the claims that it has prepared: `plugins/gpu.nvidia.com/checkpoint.json`.

Its shape is version 2 of that driver's (kubernetes-sigs/dra-driver-nvidia-gpu, cmd/gpu-kubelet-plugin), of which it has
what gpumap reads. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from gpumap.lab.demo.names import derived_uuid
from gpumap.model.observations import PreparedDevice
from gpumap.model.plugins import DRA_DRIVER

Claim = tuple[str, str]
"""Namespace and name."""


def notes_text(devices: Iterable[PreparedDevice]) -> str:
    """The file's content. The checksums are not the driver's, which only Go can compute."""
    by_claim: dict[Claim, list[PreparedDevice]] = {}
    for one in sorted(set(devices), key=lambda one: (one.claim_namespace, one.claim, one.device, one.share_id)):
        by_claim.setdefault((one.claim_namespace, one.claim), []).append(one)
    prepared = {derived_uuid("claim", *claim): prepared_claim(claim, found) for claim, found in by_claim.items()}
    return json.dumps({"checksum": 0, "v2": {"checksum": 0, "preparedClaims": prepared}})


def prepared_claim(claim: Claim, devices: Sequence[PreparedDevice]) -> dict[str, object]:
    """One claim that is prepared to the end, with its devices."""
    return {
        "checkpointState": "PrepareCompleted",
        "name": claim[1],
        "namespace": claim[0],
        "status": {"allocation": {"devices": {"results": [_result(one) for one in devices]}}},
        "preparedDevices": [{"devices": [_device(one) for one in devices]}],
    }


def _result(one: PreparedDevice) -> dict[str, object]:
    """What the scheduler allocated (`DeviceRequestAllocationResult` of resource.k8s.io)."""
    result: dict[str, object] = {"driver": DRA_DRIVER, "device": one.device}
    if one.share_id:
        result["shareID"] = one.share_id
    if one.admin_access:
        result["adminAccess"] = True
    if one.memory_bytes is not None:
        result["consumedCapacity"] = {"memory": str(one.memory_bytes)}
    return result


def _device(one: PreparedDevice) -> dict[str, object]:
    told = {"DeviceName": one.device, **({"ShareID": one.share_id} if one.share_id else {})}
    if one.uuid.startswith("MIG-"):
        return {"mig": {"concrete": {"migUUID": one.uuid}, "device": told}}
    return {"gpu": {"info": {"uuid": one.uuid}, "device": told}}
