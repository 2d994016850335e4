"""Protobuf's length-delimited fields by hand, for messages that are not worth a generated module. Pure."""

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The length-delimited fields of a message, by number. Raises ValueError where it is none."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            _, at = _read_varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        elif kind == _BYTES:
            length, at = _read_varint(message, at)
            yield number, message[at : at + length]
            at += length
        else:
            raise ValueError(f"wire type {kind}")
        if at > len(message):
            raise ValueError("cut off")


def texts(message: bytes, *numbers: int) -> list[str]:
    """String fields by number, empty where there is none; the last of several counts. Raises ValueError."""
    found = dict(fields(message))
    return [found.get(number, b"").decode() for number in numbers]


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 64:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("a number without an end")
