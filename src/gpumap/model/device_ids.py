"""What a device-id string of the kubelet means: which device it names, and whether that can be believed.

Pure: strings in, values out. The only place that turns a `DeviceId` into a device of NVML's. It never guesses: an id
whose shape is known, but which does not name the GPU that the container gets, is not trusted.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from gpumap.model.observations import DeviceId
from gpumap.model.readings import Uuid

DEFAULT_RESOURCE_PATTERN = (
    r"nvidia\.com/(?!.*(mps-control|imex)).+|aliyun\.com/gpu-mem|tencent\.com/vcuda-(core|memory)"
    r"|volcano\.sh/(gpu-memory|gpu-number|vgpu-number|vgpu-memory|vgpu-cores)|k8s\.amazonaws\.com/vgpu|gpu\.nvidia\.com"
)
"""The resources of every GPU plugin that facts are known of; matched whole."""

UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_NUMBER = r"\d{1,9}"
LONGEST = 253
"""Of names in Kubernetes. No plugin's ids are near it, and no pattern here has to cope with more."""
# Drivers since R470 give a MIG device a UUID of its own; before, it is named by its GPU, GPU instance and compute
# instance (nvml.h, nvmlDeviceGetUUID).
_MIG_BY_PLACE = re.compile(rf"MIG-(?P<gpu>GPU-{UUID})/(?P<gi>{_NUMBER})/(?P<ci>{_NUMBER})", re.ASCII)
_UUID_OF_NVML = re.compile(rf"(?:GPU|MIG)-{UUID}|{_MIG_BY_PLACE.pattern}", re.ASCII)
_DEVICE_NODE = re.compile(rf"/dev/nvidia({_NUMBER})", re.ASCII)
_INDEX = re.compile(_NUMBER, re.ASCII)
_EVERY_GPU = "all"


class ByUuid(NamedTuple):
    """A GPU or a MIG device by NVML's name, or a MIG device by the older form of it."""

    uuid: Uuid


class ByMinor(NamedTuple):
    """The GPU of `/dev/nvidia<minor>`, or one of its GPU instances. The minor is no index: NVML orders by PCI bus."""

    minor: int
    gpu_instance_id: int | None = None


class ByIndex(NamedTuple):
    """The GPU at an index of NVML's order."""

    nvml_index: int


class ByPlacement(NamedTuple):
    """A MIG device by its GPU's minor, its GPU instance's profile and where on the GPU that begins."""

    minor: int
    profile_id: int
    start: int


class EveryGpu(NamedTuple):
    """All GPUs of the node."""


DeviceRef = ByUuid | ByMinor | ByIndex | ByPlacement | EveryGpu


class MigPlace(NamedTuple):
    """A MIG device named by its GPU and its instance ids."""

    gpu: Uuid
    gpu_instance_id: int
    compute_instance_id: int


class Meaning(NamedTuple):
    """What an id says. `device` is `None` where it names none of NVML's, though its shape is known."""

    shape: str
    device: DeviceRef | None


class _Shape(NamedTuple):
    name: str
    pattern: re.Pattern[str]


def _shape(name: str, pattern: str) -> _Shape:
    return _Shape(name, re.compile(pattern, re.ASCII))


# The shapes of every plugin that facts are known of; no string has two. Where each is made: `plugins`.
_SHAPES = (
    _shape("uuid", rf"(?P<uuid>(?:GPU|MIG)-{UUID}|MIG-GPU-{UUID}/{_NUMBER}/{_NUMBER})"),
    _shape("replica", rf"(?P<uuid>(?:GPU|MIG)-{UUID}|MIG-GPU-{UUID}/{_NUMBER}/{_NUMBER})::\d+"),
    _shape("gpushare", rf"(?P<uuid>GPU-{UUID})-_-\d+"),
    _shape("split", rf"(?P<uuid>(?:GPU|MIG)-{UUID})-\d+"),
    _shape("memory-split", rf"(?P<uuid>(?:GPU|MIG)-{UUID})-memory-\d+"),
    _shape("core-split", rf"(?P<uuid>(?:GPU|MIG)-{UUID})-core-\d+"),
    _shape("node", rf"nvidia(?P<minor>{_NUMBER})(?:/gi(?P<gi>{_NUMBER}))?"),
    _shape("node-share", rf"nvidia(?P<minor>{_NUMBER})(?:/gi(?P<gi>{_NUMBER}))?/vgpu\d+"),
    _shape("vcuda-core", r"tencent\.com/vcuda-core-\d+"),
    _shape("vcuda-memory", r"tencent\.com/vcuda-memory-(?:\d+-)?\d+"),
    _shape("index-unit", rf"(?P<index>{_NUMBER})-\d+"),
    _shape("passed-through", rf"[0-9a-fA-F]{{4}}:[0-9a-fA-F]{{2}}:[0-9a-fA-F]{{2}}\.[0-7]|{UUID}|\d+"),
    _shape("every", _EVERY_GPU),
    _shape("every-share", rf"{_EVERY_GPU}::\d+"),
    _shape("tegra", "tegra"),
)
# The names that NVIDIA's DRA driver gives to devices (kubernetes-sigs/dra-driver-nvidia-gpu, cmd/gpu-kubelet-plugin):
# of a MIG device, profile id, start and size until v25.8, then profile name, profile id and start.
_DRA_NAMES = (
    _shape(
        "dra", rf"gpu-(?P<minor>{_NUMBER})(?:-mig-(?P<profile>{_NUMBER})-(?P<start>{_NUMBER})-(?P<size>{_NUMBER}))?"
    ),
    _shape(
        "dra", rf"gpu-(?P<minor>{_NUMBER})-mig-[^-]*[a-z][^-]*(?:-[^-]+)*?-(?P<profile>{_NUMBER})-(?P<start>{_NUMBER})"
    ),
    _shape("dra-passed-through", rf"gpu-vfio-{_NUMBER}"),
)


def parse(device_id: DeviceId) -> Meaning | None:
    """Tell what an id of a device plugin's says; `None` where no plugin is known to make such ids."""
    return _first(_SHAPES, device_id)


def parse_dra(device_name: str) -> Meaning | None:
    """Tell what a name of NVIDIA's DRA driver says."""
    return _first(_DRA_NAMES, device_name)


def parse_visible(word: str) -> DeviceRef | None:
    """Read a word by which a plugin names a device to NVIDIA's container runtime: a uuid, an index or `all`."""
    if _UUID_OF_NVML.fullmatch(word):
        return ByUuid(Uuid(word))
    if _INDEX.fullmatch(word):
        return ByIndex(int(word))
    return EveryGpu() if word == _EVERY_GPU else None


def parse_node(path: str) -> ByMinor | None:
    """Read a GPU's device node; `None` for any other, such as /dev/nvidiactl."""
    match = _DEVICE_NODE.fullmatch(path)
    return ByMinor(int(match[1])) if match else None


def mig_place(uuid: Uuid) -> MigPlace | None:
    """Read the older form of a MIG name, `MIG-GPU-<uuid>/<gi>/<ci>`."""
    match = _MIG_BY_PLACE.fullmatch(uuid)
    return MigPlace(Uuid(match["gpu"]), int(match["gi"]), int(match["ci"])) if match else None


def is_gpu(uuid: Uuid) -> bool:
    """Tell a GPU's name from a MIG device's."""
    return uuid.startswith("GPU-")


def _first(shapes: tuple[_Shape, ...], text: str) -> Meaning | None:
    if len(text) > LONGEST:
        return None
    for shape in shapes:
        match = shape.pattern.fullmatch(text)
        if match:
            return Meaning(shape.name, _device(shape.name, match.groupdict()))
    return None


def _device(shape: str, found: dict[str, str | None]) -> DeviceRef | None:
    uuid, minor, index = found.get("uuid"), found.get("minor"), found.get("index")
    if uuid is not None:
        return ByUuid(Uuid(uuid))
    if index is not None:
        return ByIndex(int(index))
    if minor is not None:
        profile, start, instance = found.get("profile"), found.get("start"), found.get("gi")
        if profile is not None and start is not None:
            return ByPlacement(int(minor), int(profile), int(start))
        return ByMinor(int(minor), int(instance) if instance is not None else None)
    return EveryGpu() if shape.startswith("every") else None
