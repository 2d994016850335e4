"""The node's checkpoints in a capture, reduced to what gpumap reads of them: the kubelet's, DRA's, and the files of
containers that share GPUs. Pure.

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

from gpumap.agent.sources.checkpoint import ids_in, parse_plugin_answer, read
from gpumap.agent.sources.dra import parse_prepared, parse_state
from gpumap.agent.sources.fractioning import Record, parse_record
from gpumap.lab.capture.answers import is_gpus
from gpumap.lab.capture.pseudonyms import Pseudonyms
from gpumap.lab.demo.texts import alloc_response
from gpumap.model.grouping import grouped
from gpumap.model.observations import ClaimPods, ContainerLink, PluginAnswer, PreparedDevice, ScheduledShare
from gpumap.model.plugins import DRA_DRIVER, MIB
from gpumap.model.readings import Uuid
from gpumap.model.terms import ContainerName, PodUid

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
    """Reduce a checkpoint; `uid`, `container` and `id_` return new names. Raises ValueError if it is none."""
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
    return _as_json({"Data": {"PodDeviceEntries": rows or None, "RegisteredDevices": offered}, "Checksum": 0})


def _renamed(value: object, id_: Rename) -> dict[str, list[str]] | list[str]:
    """Return ids by NUMA node, or a list for kubelets until 1.19. A key that is not a number keeps its ids."""
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
        answer = parse_plugin_answer(message)
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
        {"ClaimName": claim.claim, "Namespace": claim.namespace, "PodUIDs": {uid: {} for uid in claim.pod_uids}}
        for claim in claims
    ]
    return _as_json({"version": "v1", "entries": entries, "checksum": 0})


def dra_checkpoint_text(devices: Iterable[PreparedDevice]) -> bytes:
    """Return what NVIDIA's DRA driver writes down of the claims that it has prepared: `checkpoint.json`, version 2
    (kubernetes-sigs/dra-driver-nvidia-gpu, cmd/gpu-kubelet-plugin), with what gpumap reads of it. Each device is as if
    it were the only one of its claim. The checksums are 0."""
    claims = {str(number): _prepared_claim(device) for number, device in enumerate(devices)}
    return _as_json({"checksum": 0, "v2": {"checksum": 0, "preparedClaims": claims}})


def renamed_dra_state(text: bytes, names: Pseudonyms) -> bytes:
    """Return the kubelet's state with new names, in their order. Raises ValueError if it cannot be read."""
    claims, _ = parse_state(text)
    return dra_state_text(
        sorted(
            ClaimPods(
                names.namespace(claim.namespace),
                names.claim(claim.claim),
                tuple(sorted(PodUid(names.uid(uid)) for uid in claim.pod_uids)),
            )
            for claim in claims
        )
    )


def renamed_dra_checkpoint(text: bytes, names: Pseudonyms) -> bytes:
    """Return the driver's checkpoint with new names, in their order. Raises ValueError if it cannot be read."""
    devices, _ = parse_prepared(text)
    renamed = {
        PreparedDevice(
            names.namespace(device.claim_namespace),
            names.claim(device.claim),
            names.device(device.device),
            names.device(device.share_id),
            Uuid(names.device(device.uuid)),
            device.admin_access,
            device.memory_bytes,
        )
        for device in devices
    }
    return dra_checkpoint_text(sorted(renamed, key=lambda device: json.dumps(_prepared_claim(device))))


def _prepared_claim(device: PreparedDevice) -> dict[str, object]:
    # What the scheduler allocated: `DeviceRequestAllocationResult` of resource.k8s.io.
    result: dict[str, object] = {"driver": DRA_DRIVER, "device": device.device}
    named = {"DeviceName": device.device}
    if device.share_id:
        result["shareID"] = named["ShareID"] = device.share_id
    if device.admin_access:
        result["adminAccess"] = True
    if device.memory_bytes is not None:
        result["consumedCapacity"] = {"memory": str(device.memory_bytes)}
    prepared: dict[str, object] = {"gpu": {"info": {"uuid": device.uuid}, "device": named}}
    if device.uuid.startswith("MIG-"):
        prepared = {"mig": {"concrete": {"migUUID": device.uuid}, "device": named}}
    return {
        "checkpointState": "PrepareCompleted",
        "name": device.claim,
        "namespace": device.claim_namespace,
        "status": {"allocation": {"devices": {"results": [result]}}},
        "preparedDevices": [{"devices": [prepared]}],
    }


def _as_json(document: object) -> bytes:
    return json.dumps(document, indent=1, ensure_ascii=False).encode() + b"\n"


# --- containers that share GPUs ---------------------------------------------------------------------------------------

SHARING_FOLDER = "gpu_fractioning"
SHARING_PATH = re.compile(rf"{SHARING_FOLDER}/([0-9a-f]{{64}})\.json")


def sharing_files(links: Iterable[ContainerLink], shares: Iterable[ScheduledShare]) -> dict[str, bytes]:
    """Return a file for each container, in version 1 of their format."""
    of_container = grouped((share.container_id, share) for share in shares)
    return {
        f"{SHARING_FOLDER}/{link.container_id}.json": _sharing_file(
            Record(link, tuple(of_container.get(link.container_id, ())))
        )
        for link in links
    }


def container_id(path: str) -> str | None:
    """Return the container of a file; `None` if it is another kind of file."""
    match = SHARING_PATH.fullmatch(path)
    return match[1] if match else None


def renamed_path(path: str, names: Pseudonyms) -> str:
    id_ = container_id(path)
    return path if id_ is None else f"{SHARING_FOLDER}/{names.container_id(id_)}.json"


def renamed_sharing(id_: str, text: bytes, names: Pseudonyms) -> bytes:
    """Return a file with new names. Raises ValueError if it cannot be read."""
    old, shares = parse_record(id_, text)
    name = ContainerName(names.namespace(old.name.namespace), names.pod(old.name.pod), "")
    link = ContainerLink(names.container_id(id_), PodUid(names.uid(old.pod_uid)), name)
    return _sharing_file(
        Record(
            link,
            tuple(
                ScheduledShare(
                    link.pod_uid,
                    uuid=None if share.uuid is None else Uuid(names.device(share.uuid)),
                    minor=share.minor,
                    memory_bytes=share.memory_bytes,
                )
                for share in shares
            ),
        )
    )


def _sharing_file(record: Record) -> bytes:
    gpus = [
        {"index": number, "uuid": share.uuid or ""} | ({} if share.minor is None else {"minorNumber": share.minor})
        for number, share in enumerate(record.shares)
    ]
    amounts = {share.memory_bytes // MIB for share in record.shares if share.memory_bytes is not None}
    name = record.link.name
    file = {
        "schemaVersion": 1,
        "pod": name.pod,
        "namespace": name.namespace,
        "podUID": record.link.pod_uid,
        "gpuDevices": gpus,
        "requestedMemoryMiB": max(amounts, default=0),
    }
    return _as_json(file)
