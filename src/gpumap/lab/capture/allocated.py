"""A device plugin's ContainerAllocateResponse, cut down to what gpumap reads of it, and under other names.

Pure. What gpumap reads is on the lists of `plugin_answers`; the rest, passwords in environments among it, is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from gpumap.agent._proto.deviceplugin.v1beta1_pb2 import CDIDevice, ContainerAllocateResponse, DeviceSpec, Mount
from gpumap.agent.sources import plugin_answers

Rename = Callable[[str], str]


def cut(message: bytes, rename: Rename = str) -> bytes:
    """The message with nothing but GPUs in it; empty where it cannot be read. `rename` is put to values and paths."""
    try:
        answer = plugin_answers.parse(message)
    except ValueError:
        return b""
    kept = ContainerAllocateResponse(
        envs={key: rename(value) for key, value in answer.envs},
        mounts=[Mount(container_path=rename(path)) for path in answer.mount_paths],
        # The path in the container, which nobody reads, and the node's.
        devices=[DeviceSpec(container_path=rename(path), host_path=rename(path)) for path in answer.device_paths],
        annotations={rename(key): rename(value) for key, value in answer.annotations},  # the key of CDI's holds an id
        cdi_devices=[CDIDevice(name=rename(name)) for name in answer.cdi_devices],
    )
    return kept.SerializeToString(deterministic=True)
