"""What a device-id string of the kubelet means.

Pure: strings in, values out. The only place that turns a `DeviceId` into a `Uuid`. It never guesses: an id whose shape
is known, but which does not name the GPU that the container gets, is `untrusted_id`; any other is `unparsed`.
"""

import re
from typing import NamedTuple

from gpumap.model import DeviceId, Uuid

DEFAULT_RESOURCE_PATTERN = (
    r"nvidia\.com/(?!.*(mps-control|imex)).+|aliyun\.com/gpu-mem|tencent\.com/vcuda-(core|memory)"
    r"|volcano\.sh/(gpu-memory|gpu-number|vgpu-number|vgpu-memory|vgpu-cores)|k8s\.amazonaws\.com/vgpu|gpu\.nvidia\.com"
)
"""The resources of every GPU plugin that facts are known of; matched whole."""

_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"

# NVIDIA k8s-device-plugin, internal/rm/devices.go: NewAnnotatedID is "%s::%d".
_REPLICA = re.compile(r"(?P<base>.+)::(?P<n>\d+)", re.ASCII)
_GPU = re.compile(rf"GPU-{_UUID}")
# Drivers since R470 give a MIG device a UUID of its own; before, it is named by its GPU, GPU instance and compute
# instance (nvml.h, nvmlDeviceGetUUID).
_MIG = re.compile(rf"MIG-{_UUID}")
_MIG_BY_PLACE = re.compile(rf"MIG-(?P<gpu>GPU-{_UUID})/(?P<gi>\d+)/(?P<ci>\d+)", re.ASCII)
# Shapes of plugins whose scheduler, not the kubelet, picks the GPU: gpushare, tkestack vcuda, volcano-sh/devices.
_UNTRUSTED = re.compile(rf"GPU-{_UUID}-_-\d+|tencent\.com/vcuda-(?:core|memory)-(?:\d+-)?\d+|\d+-\d+", re.ASCII)
# volcano-vgpu: the ids carry a UUID, but the kubelet picks among them freely.
_UNTRUSTED_RESOURCE = re.compile(r"volcano\.sh/vgpu-(?:number|memory|cores)")
# KubeVirt and vfio plugins: a PCI address or a mediated device, which NVML of this node does not drive.
_PASSED_THROUGH = re.compile(rf"[0-9a-fA-F]{{4}}:[0-9a-fA-F]{{2}}:[0-9a-fA-F]{{2}}\.[0-7]|{_UUID}")


class NamedDevice(NamedTuple):
    """An id that names a GPU or a MIG device. `shared`: it is one of several replicas of it."""

    uuid: Uuid
    shared: bool


class MigPlace(NamedTuple):
    """A MIG device named by its GPU and its instance ids."""

    gpu: Uuid
    gpu_instance_id: int
    compute_instance_id: int


class Unnamed(NamedTuple):
    """An id that names no device of NVML's, and the reason that its slots are counted under."""

    reason: str


UNPARSED = Unnamed("unparsed")
UNTRUSTED = Unnamed("untrusted_id")
NOT_IN_NVML = Unnamed("not_in_nvml")


def parse(resource: str, device_id: DeviceId) -> NamedDevice | Unnamed:
    """Tell which device an id of a resource names."""
    if _UNTRUSTED_RESOURCE.fullmatch(resource):
        return UNTRUSTED
    replica = _REPLICA.fullmatch(device_id)
    base = replica["base"] if replica else device_id
    if _GPU.fullmatch(base) or _MIG.fullmatch(base) or _MIG_BY_PLACE.fullmatch(base):
        return NamedDevice(Uuid(base), shared=replica is not None)
    if _UNTRUSTED.fullmatch(base):
        return UNTRUSTED
    return NOT_IN_NVML if _PASSED_THROUGH.fullmatch(base) else UNPARSED


def mig_place(uuid: Uuid) -> MigPlace | None:
    """Read the older form of a MIG name, `MIG-GPU-<uuid>/<gi>/<ci>`."""
    match = _MIG_BY_PLACE.fullmatch(uuid)
    return MigPlace(Uuid(match["gpu"]), int(match["gi"]), int(match["ci"])) if match else None


def is_gpu(uuid: Uuid) -> bool:
    """Tell a GPU's name from a MIG device's."""
    return _GPU.fullmatch(uuid) is not None
