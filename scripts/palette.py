"""A screenshot as a PNG of at most 256 colours: a third of the size, for pictures that are kept in the repository."""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Iterator

SIGNATURE = b"\x89PNG\r\n\x1a\n"
MOST = 256
Colour = bytes


def with_palette(png: bytes) -> bytes:
    """The commonest colours stay what they are; each other becomes the nearest of them."""
    chunks = list(read_chunks(png))
    width, height, depth, kind = struct.unpack(">IIBB", chunks[0][1][:10])
    if (depth, kind) not in ((8, 2), (8, 6)):
        raise ValueError(f"not a picture of 8-bit colours: depth={depth} kind={kind}")
    size = 3 if kind == 2 else 4
    data = zlib.decompress(b"".join(body for name, body in chunks if name == b"IDAT"))
    rows = [
        [row[at : at + 3] for at in range(0, width * size, size)] for row in unfilter(data, width * size, height, size)
    ]
    counts = Counter(colour for row in rows for colour in row)
    palette = [colour for colour, _ in counts.most_common(MOST)]
    numbers = {colour: number for number, colour in enumerate(palette)}
    for colour in counts:
        if colour not in numbers:
            numbers[colour] = min(range(len(palette)), key=lambda number: distance(palette[number], colour))
    lines = b"".join(b"\0" + bytes(numbers[colour] for colour in row) for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = [(b"IHDR", header), (b"PLTE", b"".join(palette)), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")]
    return SIGNATURE + b"".join(chunk(name, body) for name, body in parts)


def distance(one: Colour, other: Colour) -> int:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


def read_chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = len(SIGNATURE)
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        yield png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        at += length + 12


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def unfilter(data: bytes, wide: int, height: int, size: int) -> Iterator[bytes]:
    """The rows of a picture, each made of the bytes to its left and above (PNG specification, 9.2)."""
    above = bytes(wide)
    for number in range(height):
        start = number * (wide + 1)
        kind, row = data[start], bytearray(data[start + 1 : start + 1 + wide])
        for i in range(wide):
            left = row[i - size] if i >= size else 0
            corner = above[i - size] if i >= size else 0
            row[i] = (row[i] + predicted(kind, left, above[i], corner)) & 255
        above = bytes(row)
        yield above


def predicted(kind: int, left: int, up: int, corner: int) -> int:
    match kind:
        case 0:
            return 0
        case 1:
            return left
        case 2:
            return up
        case 3:
            return (left + up) // 2
    guess = left + up - corner
    return min((left, up, corner), key=lambda one: abs(guess - one))
