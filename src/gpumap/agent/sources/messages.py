r"""Protobuf messages and names that are not valid in Kubernetes, made safe for a label, a log and a complaint. Pure.

Strings may not be UTF-8: Go sends what a plugin registered, and protobuf refuses it. Such a string affects only itself.
Its bytes that are not UTF-8 are escaped (`\xff`), so two strings differ.
"""

from __future__ import annotations

import functools
import hashlib
from typing import TypeVar

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

M = TypeVar("M", bound=Message)
MESSAGE_BYTES_MAX = 24 << 20
"""The largest accepted answer: a larger one could use all of the memory that the chart allows. 17.8 MB were seen
(kubernetes/kubernetes#141335)."""
CHARACTERS_MAX = 4096
"""A longer text is cut. Kubernetes allows 253 characters for a pod, and no plugin has such ids."""
_BEGIN_CHARACTERS = 253
_SHOWN_CHARACTERS = 80


def decode(kind: type[M], data: bytes) -> tuple[M, str]:
    """Parse a message. Return it with the first string that was not UTF-8, escaped, else an empty text.

    Raises DecodeError for any other error.
    """
    try:
        return kind.FromString(data), ""
    except DecodeError:
        raw = _bytes_message(kind.DESCRIPTOR).FromString(data)
        spelled = _spell_out(raw)
        return kind.FromString(raw.SerializeToString()), spelled


@functools.cache
def _bytes_message(descriptor: Descriptor) -> type[Message]:
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
            for inner in values:
                first = _spell_out(inner) or first
        elif field.type == FieldDescriptor.TYPE_BYTES:
            spelled = [_escape(text) for text in values]
            if spelled != values:
                first = next(text for text, raw in zip(spelled, values, strict=True) if text != raw).decode()
                if is_list:
                    value[:] = spelled
                else:
                    setattr(message, field.name, spelled[0])
    return first


def _escape(text: bytes) -> bytes:
    try:
        text.decode()
    except UnicodeDecodeError:
        return spell_out(text).encode()
    return text


def fit(text: str) -> str:
    """Return a text unchanged, or the beginning of a longer one with its length and a digest, so two stay different.

    Otherwise every page would contain it once for each series.
    """
    if len(text) <= CHARACTERS_MAX:
        return text
    return _cut(text[:_BEGIN_CHARACTERS], f"{len(text)} characters", text.encode(errors="surrogatepass"))


def spell_out(data: bytes) -> str:
    r"""Return bytes as a text that fits. Bytes that are not UTF-8 are escaped (`\xff`), so two stay different."""
    if len(data) <= CHARACTERS_MAX:
        return data.decode(errors="backslashreplace")
    return _cut(data[:_BEGIN_CHARACTERS].decode(errors="backslashreplace"), f"{len(data)} bytes", data)


def show(name: str) -> str:
    """Return a name for one line of a log: strange characters are escaped, and it is cut."""
    begin = name[: _SHOWN_CHARACTERS + 1]
    letters = (letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in begin)
    spelled = "".join(letters)
    return spelled if len(spelled) <= _SHOWN_CHARACTERS else f"{spelled[:_SHOWN_CHARACTERS]}…"


def _cut(begin: str, size: str, data: bytes) -> str:
    return f"{begin}… ({size}, {hashlib.blake2b(data, digest_size=8).hexdigest()})"
