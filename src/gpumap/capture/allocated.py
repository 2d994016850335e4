"""A device plugin's ContainerAllocateResponse, cut down to what is said of GPUs.

Plugins put what they like into a container: its environment may hold a password. What is not on the lists here is
dropped. Pure: the message's fields are walked by hand, because a decoder would keep the fields that it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from gpumap.protobuf_fields import field

ENVS = re.compile(
    r"NVIDIA_VISIBLE_DEVICES|NVIDIA_DRIVER_CAPABILITIES|CUDA_VISIBLE_DEVICES"
    r"|CUDA_MPS_(?:PIPE_DIRECTORY|ACTIVE_THREAD_PERCENTAGE|PINNED_DEVICE_MEM_LIMIT)"
    r"|CUDA_DEVICE_(?:MEMORY_LIMIT|SM_LIMIT)(?:_[0-9]{1,3})?|CUDA_OVERSUBSCRIBE"
    r"|VOLCANO_GPU_(?:ALLOCATED|FACTOR|TOTAL)"
    r"|ALIYUN_COM_GPU_MEM_(?:IDX|POD|CONTAINER|DEV|ASSIGNED|ASSUME_TIME|ASSIGN_TIME)"
)
"""Environment of NVIDIA's plugin, MPS, HAMi, volcano and gpushare."""
ANNOTATIONS = re.compile(
    r"tencent\.com/vcuda-(?:device|core|memory)|volcano\.sh/(?:gpu-index|vgpu-ids-new|vgpu-node)"
    r"|cdi\.k8s\.io/nvidia-device-plugin[A-Za-z0-9._-]*"
)
_VALUE = re.compile(r"[A-Za-z0-9_.,:;=/+ -]{0,4096}")
_DEVICE = re.compile(r"/dev/(?:nvidia|dri/)[A-Za-z0-9/_-]{0,80}")
_CDI = re.compile(r"(?:[a-z0-9-]+\.)*nvidia\.com/[A-Za-z0-9._-]{1,63}=[A-Za-z0-9._:-]{1,253}")

_ENVS, _DEVICES, _ANNOTATIONS, _CDI_DEVICES = 1, 3, 4, 5
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

Rename = Callable[[str], str]


def cut(message: bytes, rename: Rename = str) -> bytes:
    """The message with nothing but GPUs in it; empty where it cannot be read. `rename` is put to values and paths."""
    try:
        kept = [(number, left) for number, said in _fields(message) if (left := _kept(number, said, rename))]
    except ValueError:
        return b""
    return b"".join(field(number, said) for number, said in kept)


def _kept(number: int, said: bytes, rename: Rename) -> bytes:
    if number in (_ENVS, _ANNOTATIONS):
        key, value = _texts(said, 1, 2)
        listed = (ENVS if number == _ENVS else ANNOTATIONS).fullmatch(key)
        if listed and _VALUE.fullmatch(value):
            key = key if number == _ENVS else rename(key)  # that of CDI's annotation holds an id
            return field(1, key.encode()) + field(2, rename(value).encode())
    if number == _DEVICES:
        container, host, permissions = _texts(said, 1, 2, 3)
        if _DEVICE.fullmatch(container) and _DEVICE.fullmatch(host) and re.fullmatch(r"[rwm]{0,3}", permissions):
            texts = rename(container), rename(host), permissions
            return b"".join(field(n, text.encode()) for n, text in enumerate(texts, 1))
    if number == _CDI_DEVICES:
        (name,) = _texts(said, 1)
        if _CDI.fullmatch(name):
            return field(1, rename(name).encode())
    return b""


def _texts(message: bytes, *numbers: int) -> list[str]:
    """String fields by number; the last of several counts, as protobuf has it."""
    found = dict(_fields(message))
    return [found.get(number, b"").decode() for number in numbers]


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The length-delimited fields of a message. Raises ValueError where it is none."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            _, at = _varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        elif kind == _BYTES:
            length, at = _varint(message, at)
            yield number, message[at : at + length]
            at += length
        else:
            raise ValueError(f"wire type {kind}")
        if at > len(message):
            raise ValueError("cut off")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 64:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("a number without an end")
