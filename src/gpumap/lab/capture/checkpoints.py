"""The node's checkpoints in a capture, reduced to what gpumap reads of them: the kubelet's, and DRA's. Pure.

Each row of a GPU resource in the kubelet's device checkpoint keeps pod UID, container, resource and ids, and the GPU
entries of the plugin's ContainerAllocateResponse. The rest of that answer is dropped, because environments can contain
passwords. The kubelet's DRA state keeps claims and the UIDs of their pods. The DRA driver's checkpoint keeps names and
uuids of devices, their claims, admin access and the memory of a share. Checksums become 0: they cover the whole file,
and gpumap does not check them.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable

from gpumap.agent.sources import plugin_answers
from gpumap.agent.sources.checkpoint import ids_in, read
from gpumap.agent.sources.dra import parse_prepared, parse_state
from gpumap.lab.capture.answers import is_gpus
from gpumap.lab.capture.pseudonyms import Pseudonyms
from gpumap.lab.demo.texts import alloc_response, prepared_claim
from gpumap.model.names import PodUid
from gpumap.model.observations import ClaimPods, PluginAnswer, PreparedDevice
from gpumap.model.readings import Uuid

Rename = Callable[[str], str]

# --- the device checkpoint --------------------------------------------------------------------------------------------

_NUMA_NODE = re.compile(r"-1|[0-9]{1,4}")
_NO_NUMA_NODE = "-1"
"""The kubelet's key of ids without a NUMA node (nodeWithoutTopology in its pkg/kubelet/cm/devicemanager/manager.go)."""


def cut_checkpoint(
    text: bytes,
    is_gpu_resource: Callable[[str], bool],
    *,
    uid: Rename = str,
    container: Rename = str,
    id_: Rename = str,
) -> bytes:
    """Reduce a checkpoint; `uid`, `container` and `id_` return new names. Raises ValueError if it is not a
    checkpoint."""
    entries, registered = read(text)
    rows = [
        {
            "PodUID": uid(row.pod_uid),
            "ContainerName": container(row.container),
            "ResourceName": row.resource,
            "DeviceIDs": _renamed(row.ids, id_),
            "AllocResp": _alloc_resp(row.answer, id_),
        }
        for row in entries
        if row is not None and is_gpus(row.resource, ids_in(row.ids), is_gpu_resource)
    ]
    rows.sort(key=lambda row: json.dumps(row, sort_keys=True))
    offered = {
        resource: sorted(map(id_, ids_in(value)))
        for resource, value in sorted(registered.items())
        if is_gpus(resource, ids_in(value), is_gpu_resource)
    }
    kept = {"Data": {"PodDeviceEntries": rows or None, "RegisteredDevices": offered}, "Checksum": 0}
    return json.dumps(kept, indent=1, ensure_ascii=False).encode() + b"\n"


def _renamed(value: object, id_: Rename) -> dict[str, list[str]] | list[str]:
    """Return ids by NUMA node, or a list for kubelets until 1.19. The ids of a key that is not a node's number
    stay."""
    if not isinstance(value, dict):
        return sorted(map(id_, ids_in(value)))
    nodes: dict[str, list[str]] = {}
    for key, group in value.items():
        node = key if _NUMA_NODE.fullmatch(key) else _NO_NUMA_NODE
        nodes.setdefault(node, []).extend(map(id_, ids_in({key: group})))
    return {node: sorted(ids) for node, ids in sorted(nodes.items())}


def _alloc_resp(text: object, rename: Rename) -> str:
    try:
        message = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
        return base64.b64encode(cut_answer(message, rename)).decode()
    except ValueError:
        return ""


# --- a plugin's answer ------------------------------------------------------------------------------------------------


def cut_answer(message: bytes, rename: Rename = str) -> bytes:
    """Return the message with only its GPU part; empty if it cannot be read. `rename` changes values and paths."""
    try:
        answer = plugin_answers.parse(message)
    except ValueError:
        return b""
    renamed = PluginAnswer(
        envs=tuple((key, rename(value)) for key, value in answer.envs),
        annotations=tuple((rename(key), rename(value)) for key, value in answer.annotations),  # a key of CDI has an id
        device_paths=tuple(map(rename, answer.device_paths)),
        mount_paths=tuple(map(rename, answer.mount_paths)),
        cdi_devices=tuple(map(rename, answer.cdi_devices)),
    )
    return alloc_response(renamed)


# --- DRA --------------------------------------------------------------------------------------------------------------


def dra_state_text(claims: Iterable[ClaimPods]) -> bytes:
    """The kubelet's state, in the form of kubelets until 1.31, which people can read. The checksum is 0."""
    entries = [
        {"ClaimName": one.claim, "Namespace": one.namespace, "PodUIDs": {uid: {} for uid in one.pod_uids}}
        for one in claims
    ]
    return _as_json({"version": "v1", "entries": entries, "checksum": 0})


def dra_checkpoint_text(devices: Iterable[PreparedDevice]) -> bytes:
    """The driver's checkpoint, each device as if it were the only one of its claim. The checksums are 0."""
    claims = {str(number): _claim(one) for number, one in enumerate(devices)}
    return _as_json({"checksum": 0, "v2": {"checksum": 0, "preparedClaims": claims}})


def renamed_dra_state(text: bytes, names: Pseudonyms) -> bytes:
    """Return the kubelet's state with new names, in their order. Raises ValueError if it cannot be read."""
    claims, _ = parse_state(text)
    return dra_state_text(
        sorted(
            ClaimPods(
                names.namespace(one.namespace),
                names.claim(one.claim),
                tuple(sorted(PodUid(names.uid(uid)) for uid in one.pod_uids)),
            )
            for one in claims
        )
    )


def renamed_dra_checkpoint(text: bytes, names: Pseudonyms) -> bytes:
    """Return the driver's checkpoint with new names, in their order. Raises ValueError if it cannot be read."""
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
    return dra_checkpoint_text(sorted(renamed, key=lambda one: json.dumps(_claim(one))))


def _claim(one: PreparedDevice) -> dict[str, object]:
    return prepared_claim((one.claim_namespace, one.claim), [one])


def _as_json(document: object) -> bytes:
    return json.dumps(document, indent=1, ensure_ascii=False).encode() + b"\n"
