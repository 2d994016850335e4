"""Parse the kubelet's device ids: which device an id names.

This is the only place that turns a `DeviceId` into a reference to a device of NVML. It never guesses. `plugins` decides
which ids can be trusted: some name another GPU than the container gets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from gpumap.model.observations import DeviceId
from gpumap.model.readings import Uuid

UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_NUMBER = r"\d{1,9}"
LONGEST = 253
"""The limit of names in Kubernetes. The ids of all plugins are much shorter; longer ids match no pattern."""
IDS_KEPT = 2048
"""How many ids keep their meaning: more than most nodes have."""
# Drivers since R470 give a MIG device its own UUID. Older drivers name it by its GPU, GPU instance and compute instance
# (nvml.h, nvmlDeviceGetUUID).
_MIG_BY_PLACE = re.compile(rf"MIG-(?P<gpu>GPU-{UUID})/(?P<gi>{_NUMBER})/(?P<ci>{_NUMBER})", re.ASCII)
_UUID_OF_NVML = re.compile(rf"(?:GPU|MIG)-{UUID}|{_MIG_BY_PLACE.pattern}", re.ASCII)
_DEVICE_NODE = re.compile(rf"/dev/nvidia({_NUMBER})", re.ASCII)
_INDEX = re.compile(_NUMBER, re.ASCII)
_EVERY_GPU = "all"


class ByUuid(NamedTuple):
    """A GPU or a MIG device by its uuid in NVML. A MIG device may have the older form."""

    uuid: Uuid


class ByMinor(NamedTuple):
    """The GPU of `/dev/nvidia<minor>`, or one of its GPU instances. NVML's index is another number."""

    minor: int
    gpu_instance_id: int | None = None


class ByIndex(NamedTuple):
    """The GPU at an index of NVML's order."""

    nvml_index: int


class ByPlacement(NamedTuple):
    """A MIG device by its GPU's minor, and the profile and start of its GPU instance."""

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
    """The meaning of an id. `device` is `None` if the shape is known, and names no device of NVML."""

    shape: str
    device: DeviceRef | None


def _shape(name: str, pattern: str) -> tuple[str, re.Pattern[str]]:
    return name, re.compile(pattern, re.ASCII)


# The shapes of every known plugin; no string has two. `plugins` lists which plugin makes which.
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
# Device names of NVIDIA's DRA driver (kubernetes-sigs/dra-driver-nvidia-gpu, cmd/gpu-kubelet-plugin). A MIG device has
# profile id, start and size until v25.8, then profile name, profile id and start.
_DRA_NAMES = (
    _shape(
        "dra", rf"gpu-(?P<minor>{_NUMBER})(?:-mig-(?P<profile>{_NUMBER})-(?P<start>{_NUMBER})-(?P<size>{_NUMBER}))?"
    ),
    _shape(
        "dra",
        rf"gpu-(?P<minor>{_NUMBER})-mig-[^-a-z]*[a-z][^-]*(?:-[^-]+)*?-(?P<profile>{_NUMBER})-(?P<start>{_NUMBER})",
    ),
    _shape("dra-passed-through", rf"gpu-vfio-{_NUMBER}"),
)


def parse(device_id: DeviceId) -> Meaning | None:
    """Return the meaning of a device plugin's id; `None` if no known plugin makes such ids."""
    return _parse(device_id) if len(device_id) <= LONGEST else None  # long ids would fill the memory


@lru_cache(IDS_KEPT)
def _parse(device_id: DeviceId) -> Meaning | None:
    return _first(_SHAPES, device_id)


def parse_dra(device_name: str) -> Meaning | None:
    """Return the meaning of a device name of NVIDIA's DRA driver."""
    return _first(_DRA_NAMES, device_name) if len(device_name) <= LONGEST else None


def parse_visible(word: str) -> DeviceRef | None:
    """Parse a word in which a plugin names a device for NVIDIA's container runtime: a uuid, an index or `all`."""
    if _UUID_OF_NVML.fullmatch(word):
        return ByUuid(Uuid(word))
    if _INDEX.fullmatch(word):
        return ByIndex(int(word))
    return EveryGpu() if word == _EVERY_GPU else None


def parse_node(path: str) -> ByMinor | None:
    """Parse a GPU's device node; `None` for any other, such as /dev/nvidiactl."""
    match = _DEVICE_NODE.fullmatch(path)
    return ByMinor(int(match[1])) if match else None


def mig_place(uuid: Uuid) -> MigPlace | None:
    """Parse the older form of a MIG uuid, `MIG-GPU-<uuid>/<gi>/<ci>`."""
    match = _MIG_BY_PLACE.fullmatch(uuid)
    return MigPlace(Uuid(match["gpu"]), int(match["gi"]), int(match["ci"])) if match else None


def is_gpu(uuid: Uuid) -> bool:
    """Return whether a uuid is a GPU's, not a MIG device's."""
    return uuid.startswith("GPU-")


def _first(shapes: Iterable[tuple[str, re.Pattern[str]]], text: str) -> Meaning | None:
    for name, pattern in shapes:
        if match := pattern.fullmatch(text):
            return Meaning(name, _device(name, match.groupdict()))
    return None


def _device(shape: str, fields: dict[str, str | None]) -> DeviceRef | None:
    match fields:
        case {"uuid": str(uuid)}:
            return ByUuid(Uuid(uuid))
        case {"index": str(index)}:
            return ByIndex(int(index))
        case {"minor": str(minor), "profile": str(profile), "start": str(start)}:
            return ByPlacement(int(minor), int(profile), int(start))
        case {"minor": str(minor), "gi": str(instance)}:
            return ByMinor(int(minor), int(instance))
        case {"minor": str(minor)}:
            return ByMinor(int(minor))
    return EveryGpu() if shape.startswith("every") else None


# --- addresses of PCI functions ---------------------------------------------------------------------------------------


_ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE | re.ASCII)


def pci_address(text: str) -> str:
    """Return an address as the kernel names it: `0000:3b:00.0` for NVML's `00000000:3B:00.0`; empty if it is none."""
    match = _ADDRESS.fullmatch(text)
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}.{match[4]}".lower() if match else ""
