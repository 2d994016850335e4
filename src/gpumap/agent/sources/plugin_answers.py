"""The GPU part of a device plugin's ContainerAllocateResponse.

A plugin may put anything into a container: the environment may contain a password. This module keeps only the entries
of the lists below. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from gpumap.agent._proto.deviceplugin.v1beta1_pb2 import ContainerAllocateResponse
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


def parse(message: bytes) -> PluginAnswer:
    """Read the GPU part of an answer. Raises ValueError if the bytes are not an answer."""
    try:
        answer = ContainerAllocateResponse.FromString(message)
    except DecodeError as error:
        raise ValueError(str(error)) from error
    mounts = (mount.container_path for mount in answer.mounts)
    devices = (device.host_path for device in answer.devices)
    names = (device.name for device in answer.cdi_devices)
    return PluginAnswer(
        envs=_listed(answer.envs.items(), ENVS),
        annotations=_listed(answer.annotations.items(), ANNOTATIONS),
        device_paths=tuple(path for path in devices if DEVICE_PATH.fullmatch(path)),
        mount_paths=tuple(path for path in mounts if MOUNT_PATH.fullmatch(path)),
        cdi_devices=tuple(name for name in names if CDI_DEVICE.fullmatch(name)),
    )


def _listed(entries: Iterable[tuple[str, str]], keys: re.Pattern[str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, value) for key, value in entries if keys.fullmatch(key) and VALUE.fullmatch(value)))
