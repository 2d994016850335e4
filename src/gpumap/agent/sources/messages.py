r"""Protobuf messages whose strings may not be UTF-8: Go sends what a plugin registered, and protobuf refuses it. Pure.

Such a string affects only itself. Its bytes that are not UTF-8 are escaped (`\xff`), so two strings differ.
"""

from __future__ import annotations

import functools
from typing import TypeVar

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from gpumap.agent.sources.names import spell_out

M = TypeVar("M", bound=Message)
MESSAGE_BYTES_MAX = 24 << 20
"""The largest accepted answer: a larger one could use all of the memory that the chart allows. 17.8 MB were seen
(kubernetes/kubernetes#141335)."""


def decode(kind: type[M], data: bytes) -> tuple[M, str]:
    """Parse a message. Return it with the first string that was not UTF-8, escaped, else an empty text.

    Raises DecodeError for any other error.
    """
    try:
        return kind.FromString(data), ""
    except DecodeError:
        raw = _with_bytes(kind.DESCRIPTOR).FromString(data)
        spelled = _spell_out(raw)
        return kind.FromString(raw.SerializeToString()), spelled


@functools.cache
def _with_bytes(descriptor: Descriptor) -> type[Message]:
    """Return the same message with `bytes` for each `string`: both are the same on the wire."""
    from google.protobuf import descriptor_pb2  # rarely needed

    file = descriptor_pb2.FileDescriptorProto()
    descriptor.file.CopyToProto(file)
    waiting = list(file.message_type)
    while waiting:
        message = waiting.pop()
        waiting.extend(message.nested_type)
        for field in message.field:
            if field.type == FieldDescriptor.TYPE_STRING:
                field.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(descriptor.full_name))


def _spell_out(message: Message) -> str:
    """Make every string of a message UTF-8. Return the first one that was not."""
    first = ""
    for field, value in message.ListFields():
        is_list = field.is_repeated
        values = list(value) if is_list else [value]
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for one in values:
                first = _spell_out(one) or first
        elif field.type == FieldDescriptor.TYPE_BYTES:
            spelled = [_whole(one) for one in values]
            if spelled != values:
                first = next(one for one, before in zip(spelled, values, strict=True) if one != before).decode()
                if is_list:
                    value[:] = spelled
                else:
                    setattr(message, field.name, spelled[0])
    return first


def _whole(text: bytes) -> bytes:
    try:
        text.decode()
    except UnicodeDecodeError:
        return spell_out(text).encode()
    return text
