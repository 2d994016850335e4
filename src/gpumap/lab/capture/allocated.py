"""A device plugin's ContainerAllocateResponse, cut down to what gpumap reads of it, and under other names.

Pure. What gpumap reads is on the lists of `plugin_answers`; the rest, passwords in environments among it, is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from gpumap.model.plugin_answers import ANNOTATIONS_FIELD, DEVICES_FIELD, ENVS_FIELD, Said, read
from gpumap.model.protobuf_fields import field

Rename = Callable[[str], str]


def cut(message: bytes, rename: Rename = str) -> bytes:
    """The message with nothing but GPUs in it; empty where it cannot be read. `rename` is put to values and paths."""
    try:
        return b"".join(field(said.field, _content(said, rename)) for said in read(message))
    except ValueError:
        return b""


def _content(said: Said, rename: Rename) -> bytes:
    value = rename(said.value).encode()
    if said.field == ENVS_FIELD:
        return field(1, said.key.encode()) + field(2, value)
    if said.field == ANNOTATIONS_FIELD:
        return field(1, rename(said.key).encode()) + field(2, value)  # the key of CDI's holds an id
    if said.field == DEVICES_FIELD:
        return field(1, value) + field(2, value)  # the path in the container, which nobody reads, and the node's
    return field(1, value)
