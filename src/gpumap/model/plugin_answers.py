"""What a device plugin's ContainerAllocateResponse says of GPUs and shares, and nothing else that is in it.

Plugins put what they like into a container: its environment may hold a password. What is not on the lists here is not
read. Pure; the message's fields are walked by hand, because a decoder would keep the fields that it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from gpumap.model import protobuf_fields
from gpumap.model.observations import PluginAnswer

ENVS = re.compile(
    r"NVIDIA_VISIBLE_DEVICES|CUDA_MPS_(?:PIPE_DIRECTORY|PINNED_DEVICE_MEM_LIMIT)"
    r"|CUDA_DEVICE_MEMORY_LIMIT_[0-9]{1,3}|CUDA_DEVICE_SM_LIMIT"
    r"|VOLCANO_GPU_(?:ALLOCATED|FACTOR)|ALIYUN_COM_GPU_MEM_(?:IDX|DEV)"
)
"""Environment of NVIDIA's plugin, MPS, HAMi, volcano and gpushare."""
ANNOTATIONS = re.compile(r"tencent\.com/vcuda-device|(?:nvidia\.)?cdi\.k8s\.io/nvidia-device-plugin[A-Za-z0-9._-]*")
VALUE = re.compile(r"[A-Za-z0-9_.,:;=/+ -]{0,4096}")
DEVICE_PATH = re.compile(r"/dev/(?:nvidia|dri/)[A-Za-z0-9/_-]{0,80}")
MOUNT_PATH = re.compile(r"/var/run/nvidia-container-devices/[A-Za-z0-9:/-]{1,120}")
"""NVIDIA's plugin names devices by mounts with --device-list-strategy=volume-mounts."""
CDI_DEVICE = re.compile(r"(?:[a-z0-9-]+\.)*nvidia\.com/[A-Za-z0-9._-]{1,63}=[A-Za-z0-9._:-]{1,253}")

ENVS_FIELD, MOUNTS_FIELD, DEVICES_FIELD, ANNOTATIONS_FIELD, CDI_DEVICES_FIELD = 1, 2, 3, 4, 5
"""Of ContainerAllocateResponse (k8s.io/kubelet, pkg/apis/deviceplugin/v1beta1/api.proto)."""


class Said(NamedTuple):
    """One thing that an answer says and that gpumap reads. `key` is a variable's or an annotation's name, or empty."""

    field: int
    key: str
    value: str


def parse(message: bytes) -> PluginAnswer:
    """Read an answer. Raises ValueError where it is none."""
    said = list(read(message))
    return PluginAnswer(
        envs=tuple(sorted((one.key, one.value) for one in said if one.field == ENVS_FIELD)),
        annotations=tuple(sorted((one.key, one.value) for one in said if one.field == ANNOTATIONS_FIELD)),
        device_paths=tuple(one.value for one in said if one.field == DEVICES_FIELD),
        mount_paths=tuple(one.value for one in said if one.field == MOUNTS_FIELD),
        cdi_devices=tuple(one.value for one in said if one.field == CDI_DEVICES_FIELD),
    )


def read(message: bytes) -> Iterator[Said]:
    """What of an answer is on the lists, in its order. Raises ValueError where it is none."""
    for number, content in protobuf_fields.fields(message):
        if number in (ENVS_FIELD, ANNOTATIONS_FIELD):
            key, value = protobuf_fields.texts(content, 1, 2)
            listed = ENVS if number == ENVS_FIELD else ANNOTATIONS
            if listed.fullmatch(key) and VALUE.fullmatch(value):
                yield Said(number, key, value)
        elif number == MOUNTS_FIELD:
            (path,) = protobuf_fields.texts(content, 1)
            if MOUNT_PATH.fullmatch(path):
                yield Said(number, "", path)
        elif number == DEVICES_FIELD:
            (path,) = protobuf_fields.texts(content, 2)
            if DEVICE_PATH.fullmatch(path):
                yield Said(number, "", path)
        elif number == CDI_DEVICES_FIELD:
            (name,) = protobuf_fields.texts(content, 1)
            if CDI_DEVICE.fullmatch(name):
                yield Said(number, "", name)
