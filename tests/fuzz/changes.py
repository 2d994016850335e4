"""Hypothesis strategies that change an example as its format allows: text by words, JSON by values, protobuf by fields.

Changed bytes alone rarely reach deep: JSON with a flipped bit is rarely JSON.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from google.protobuf import empty_pb2, unknown_fields
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

Change = Callable[[bytes], st.SearchStrategy[bytes]]
"""Returns the changed forms of an example."""

BYTES_MAX = 1 << 17
"""No input becomes longer."""
EDITS = st.sampled_from((1, 1, 1, 2, 5))
REPEATS = st.sampled_from((2, 2, 2, 2, 10, 10, 100, 1000))
"""Few are large: a thousandfold input takes as long as a thousand others. `repeats` limits them by the size."""
WORDS = (
    *rb"""" \ ' { } [ / .. ../../etc/passwd : , = _ - -1 0 1e999 0x10 NaN inf null true % %s%n kubepods""".split(),
    *(b"", b"\0", b"\n", b"\r\n", b"\x1b[31m", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf"),
    *(character.encode() for character in "\x85\u202e\u2028\u0663\u00b2\U0001f600"),
    *(b"9" * 19, b"9" * 40, b"9" * 5000, b"18446744073709551616", b"A" * 300, b"A" * 5000),
    *(prefix + b"00000000-0000-4000-8000-000000000000" for prefix in (b"GPU-", b"MIG-GPU-", b"pod")),
)
"""Words that parsers trip over."""


def repeats(size: int) -> st.SearchStrategy[int]:
    """Return how often a part of this many bytes is repeated."""
    return REPEATS.map(lambda number: min(number, BYTES_MAX // (size + 1)))


_TOKEN = re.compile(rb"[A-Za-z]+|[0-9]+|[^A-Za-z0-9]")


@st.composite
def edited(draw: st.DrawFn, data: bytes) -> bytes:
    """Replace, repeat or drop words, lines or the end."""
    for _ in range(draw(EDITS)):
        parts = data.splitlines(keepends=True) if draw(st.booleans()) else _TOKEN.findall(data)
        start = draw(st.integers(0, len(parts)))
        end = draw(st.sampled_from((start, start + 1, start + 1, start + 1, start + 3, len(parts))))
        chosen = b"".join(parts[start:end])
        repeated = repeats(len(chosen)).map(chosen.__mul__)
        replacement = draw(st.sampled_from((*WORDS, *parts[:50])) | st.binary(max_size=8) | repeated)
        data = b"".join((*parts[:start], replacement, *parts[end:]))[:BYTES_MAX]
    return data


# --- JSON -------------------------------------------------------------------------------------------------------------

_SCALARS: tuple[object, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    [],
    {},
    10**30,
)
_BOUNDARIES = tuple((1 << bits) - less for bits in (31, 32, 63, 64) for less in (0, 1))
_VERBATIM = {
    f"@{number}": literal
    for number, literal in enumerate(
        (
            *(b"1e309 -1e999 1e-400 01 0." + b"1" * 400).split(),
            *(b"9" * 400, b"9" * 5000, b"{]", b'"', b'"\0"', b'"\xff"', rb'"\x"'),
            *(left * levels + b"1" + right * levels for levels in (100, 1001, 20_000) for left, right in
              ((b"[", b"]"), (b'{"a":', b"}"))),
        )
    )
}  # fmt: skip
"""JSON, and what is almost JSON, that `json.dumps` does not write. It replaces its name."""


@st.composite
def changed_json(draw: st.DrawFn, data: bytes) -> bytes:
    """Change values of JSON at any depth, also of JSON and protobuf that is within a text."""
    try:
        document: list[object] = [json.loads(data)]
    except (ValueError, RecursionError):
        return draw(edited(data))
    for _ in range(draw(EDITS)):
        container, key = draw(st.sampled_from([*_places(document)] or [(document, 0)]))
        value = container[key]
        match draw(st.integers(0, 9)):
            case 0 if container is not document:
                del container[key]
            case 1 if isinstance(container, dict):
                container[draw(st.sampled_from(WORDS)).decode(errors="replace")] = value
            case 1:
                container.extend([value] * draw(repeats(len(json.dumps(value)))))
            case _:
                container[key] = draw(_changed_value(value))
    text = json.dumps(document)[1:-1].encode()
    for name, literal in _VERBATIM.items():
        text = text.replace(f'"{name}"'.encode(), literal)
    return text


def changed_json_lines(data: bytes) -> st.SearchStrategy[bytes]:
    """Change one of several lines of JSON."""
    lines = data.splitlines(keepends=True)

    def change_line(index: int) -> st.SearchStrategy[bytes]:
        return changed_json(lines[index]).map(lambda line: b"".join((*lines[:index], line, b"\n", *lines[index + 1 :])))

    return edited(data) | st.integers(0, len(lines) - 1).flatmap(change_line)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = range(len(value)) if isinstance(value, list) else [*value] if isinstance(value, dict) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _changed_value(value: object) -> st.SearchStrategy[object]:
    others = st.sampled_from((*_SCALARS, *_BOUNDARIES, *_VERBATIM, [value]))
    if isinstance(value, str):
        return others | _changed_text(value) | _changed_text(value)
    return others | st.just(value * -2 - 1) if isinstance(value, int | float) else others


def _changed_text(value: str) -> st.SearchStrategy[str]:
    data = value.encode(errors="surrogatepass")
    if data[:1] in (b"{", b"["):
        return changed_json(data).map(_decoded)
    try:
        message = base64.b64decode(data, validate=True)
    except ValueError:
        message = b""
    return (changed_protobuf(message).map(base64.b64encode) if len(message) > 6 else edited(data)).map(_decoded)


def _decoded(data: bytes) -> str:
    return data.decode(errors="replace")


# --- protobuf ---------------------------------------------------------------------------------------------------------


@st.composite
def changed_protobuf(draw: st.DrawFn, data: bytes) -> bytes:
    """Change a field of a message, at any depth. A field of bytes that reads as a message counts as one."""
    fields = _fields(data)
    if not fields:
        return draw(edited(data))
    index = draw(st.integers(0, len(fields) - 1))
    number, wire_type, value = fields[index]
    match draw(st.integers(0, 11)):
        case 0:
            del fields[index]
        case 1:
            fields += fields[index : index + 1] * draw(repeats(len(_message(fields[index : index + 1]))))
        case 2:
            fields[index] = draw(st.integers(1, 20)), wire_type, value
        case 3:
            fields[index] = number, draw(st.integers(0, 5)), value
        case 4:
            return _message(fields) + _varint(number << 3 | 2) + b"\xff\xff\xff\xff\x0f"
        case 5:
            nested = b""
            for _ in range(draw(st.sampled_from((3, 101, 500)))):
                nested = _message([(number, 2, nested)])
            fields[index] = number, 2, nested
        case _ if isinstance(value, bytes):
            fields[index] = number, wire_type, draw(st.sampled_from(WORDS) | changed_protobuf(value))
        case _:
            fields[index] = number, wire_type, draw(st.sampled_from((0, 1, *_BOUNDARIES)))
    return _message(fields)


def _fields(data: bytes) -> list[tuple[int, int, int | bytes]]:
    """Return number, wire type and value of each field; none if the bytes are no message."""
    try:
        message = empty_pb2.Empty.FromString(data)
    except DecodeError:
        return []
    fields: Any = unknown_fields.UnknownFieldSet(message)
    return [(field.field_number, field.wire_type, field.data) for field in fields if field.wire_type != 3]


def _message(fields: list[tuple[int, int, int | bytes]]) -> bytes:
    parts = []
    for number, wire_type, value in fields:
        content = value if isinstance(value, bytes) else _varint(value)
        parts += [_varint(number << 3 | wire_type), _varint(len(content)) if wire_type == 2 else b"", content]
    return b"".join(parts)


def _varint(value: int) -> bytes:
    return b"" if value < 0 else bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


# --- several files ----------------------------------------------------------------------------------------------------


def pack(files: Mapping[str, bytes]) -> bytes:
    """Write files as one input: JSON, each byte as a character."""
    return json.dumps({path: content.decode("latin-1") for path, content in files.items()}, indent=0).encode()


def unpack(data: bytes) -> dict[str, bytes]:
    """Read files from an input; none if it is not one."""
    try:
        return {path: content.encode("latin-1") for path, content in json.loads(data).items()}
    except (ValueError, AttributeError, RecursionError):
        return {}


def changed_files(choose_change: Callable[[str], Change | None]) -> Change:
    """Return what changes some of several files by their formats, or drops, copies or renames one.

    `choose_change` returns the change of a path. None means that the file stays as it is.
    """

    @st.composite
    def change(draw: st.DrawFn, data: bytes) -> bytes:
        files = unpack(data)
        for _ in range(draw(EDITS)):
            changes = {path: change for path in sorted(files) if (change := choose_change(path))}
            if not changes:
                break
            path = draw(st.sampled_from([*changes]))
            folder, slash, name = path.rpartition("/")
            match draw(st.integers(0, 15)):
                case 0:
                    del files[path]
                case 1:
                    files[draw(st.sampled_from([*changes]))] = files[path]
                case 2:
                    renamed = _decoded(draw(edited(name.encode()))).replace("/", "_")
                    files[folder + slash + renamed] = files[path]
                case _:
                    files[path] = draw(changes[path](files[path]))
        return pack(files)

    return change
