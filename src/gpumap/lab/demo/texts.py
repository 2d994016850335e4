"""The texts of a node's files as a kubelet, a container runtime and Linux write them, and the ids in them.

Shapes are those of real captures: kubelet 1.36.2 (checkpoint, logs, cgroup v1) and facts of peers (cgroup v2). Ids
depend only on names: two processes with the same scenario derive the same ones. Pure.
"""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
import zlib
from collections.abc import Mapping, Sequence

from gpumap.agent._proto.deviceplugin.v1beta1_pb2 import CDIDevice, ContainerAllocateResponse, DeviceSpec, Mount
from gpumap.model.grouping import grouped
from gpumap.model.observations import (
    CheckpointEntry,
    ContainerLink,
    DeviceId,
    LogTree,
    PluginAnswer,
    ResourceDevices,
)

V1_CONTROLLERS = ("name=systemd", "pids", "blkio", "freezer", "devices", "memory", "cpuset", "cpuacct", "cpu")


def pod_cgroup(style: str, qos: str, uid: str, container_id: str) -> str:
    """The path of a container's cgroup. Guaranteed pods have no QoS level in it."""
    if style == "v2-systemd":
        level = "" if qos == "guaranteed" else f"-{qos}"
        parent = f"/kubepods{level}.slice" if level else ""
        pod = f"kubepods{level}-pod{uid.replace('-', '_')}.slice"
        return f"/kubepods.slice{parent}/{pod}/cri-containerd-{container_id}.scope"
    level = "" if qos == "guaranteed" else f"/{qos}"
    return f"/kubepods{level}/pod{uid}/{container_id}"


def cgroup_text(style: str, path: str) -> str:
    """/proc/PID/cgroup."""
    if style != "v1-cgroupfs":
        return f"0::{path}\n"
    count = len(V1_CONTROLLERS)
    lines = [f"{count - number}:{controller}:{path}\n" for number, controller in enumerate(V1_CONTROLLERS)]
    return "".join([*lines, f"0::{path}\n"])


def stat_text(pid: int, comm: str, start_ticks: int) -> str:
    """/proc/PID/stat: field 22 is the start time in ticks since boot."""
    head = f"{pid} ({comm}) S 1 {pid} {pid} 0 -1 4194560 791 0 0 0 0 0 0 0 20 0 1 0"
    tail = "2322432 316 18446744073709551615 4198400 5785993 140722959573312 0 0 0 0 0 0 1 0 0 17 0 0 0 0 0 0"
    return f"{head} {start_ticks} {tail} 6141704 6178576 371118080 140722959580709 140722959580722 0 0 0\n"


def tree_name(tree: LogTree) -> str:
    """A directory's name below /var/log/pods."""
    return f"{tree.namespace}_{tree.pod}_{tree.pod_uid}"


def link_name(link: ContainerLink) -> str:
    """A link's name below /var/log/containers (k/k pkg/kubelet/kuberuntime/legacy.go: cut before the suffix)."""
    full = f"{link.name.pod}_{link.name.namespace}_{link.name.container}-{link.container_id}"
    return f"{full[:251]}.log"


def link_target(link: ContainerLink) -> str:
    """What a link of /var/log/containers points at, wherever the log root is mounted."""
    return f"/var/log/pods/{link.name.namespace}_{link.name.pod}_{link.pod_uid}/{link.name.container}/0.log"


def checkpoint_text(
    rows: Sequence[CheckpointEntry], registered: Sequence[ResourceDevices], numa: Mapping[DeviceId, tuple[int, ...]]
) -> str:
    """kubelet_internal_checkpoint, version 2. The checksum is not the kubelet's, which only Go can compute."""
    data = {
        "PodDeviceEntries": [_entry_object(row, numa) for row in rows] or None,
        "RegisteredDevices": {resource.resource: list(resource.ids) for resource in registered},
    }
    checksum = zlib.crc32(json.dumps(data).encode())
    return json.dumps({"Data": data, "Checksum": checksum}, separators=(",", ":"))


def _entry_object(row: CheckpointEntry, numa: Mapping[DeviceId, tuple[int, ...]]) -> dict[str, object]:
    return {
        "PodUID": row.pod_uid,
        "ContainerName": row.container,
        "ResourceName": row.resource,
        "DeviceIDs": grouped((str(node), id_) for id_ in sorted(row.ids) for node in numa.get(id_) or (-1,)),
        "AllocResp": base64.b64encode(alloc_response(row.answer or PluginAnswer())).decode(),
    }


def alloc_response(answer: PluginAnswer) -> bytes:
    """A device plugin's ContainerAllocateResponse (k8s.io/kubelet, pkg/apis/deviceplugin/v1beta1/api.proto)."""
    message = ContainerAllocateResponse(
        envs=dict(answer.envs),
        mounts=[Mount(container_path=path, host_path="/dev/null") for path in answer.mount_paths],
        devices=[DeviceSpec(container_path=path, host_path=path, permissions="rwm") for path in answer.device_paths],
        annotations=dict(answer.annotations),
        cdi_devices=[CDIDevice(name=name) for name in answer.cdi_devices],
    )
    return message.SerializeToString(deterministic=True)


# --- derived ids ------------------------------------------------------------------------------------------------------

MAX_PID = 4_000_000
"""Below the largest pid_max that Linux allows (4194304)."""
_FIRST_PID = 3001
_PIDS_OF_ACTOR = 37


def digest(*parts: object) -> str:
    """64 hex digits, as a container id has."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def derived_uuid(*parts: object) -> str:
    """A UUID in the form of a random one (version 4)."""
    return str(uuid.UUID(hex=digest(*parts)[:32], version=4))


def number(limit: int, *parts: object) -> int:
    """A number from 0 to below `limit`."""
    return int(digest(*parts)[:12], 16) % limit


def pid_of(node: str, actor: int, actors: int, play: int) -> int:
    """A PID: each of the node's `actors` has a range of its own, and another one in each round of plays.

    `play` counts the plays; an actor that is always there keeps the PID of play 0.
    """
    span = _PIDS_OF_ACTOR * actors
    rounds = max(2, (MAX_PID - _FIRST_PID) // span)
    inside = number(_PIDS_OF_ACTOR, node, actor, play)
    return _FIRST_PID + play % rounds * span + actor * _PIDS_OF_ACTOR + inside
