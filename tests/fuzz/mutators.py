"""Changes bytes as their format allows: JSON by values, protobuf by fields, text by words, files one by one.

Every function takes bytes and a `Random`, and returns other bytes. The same seed gives the same bytes. Mutated bytes
rarely reach deep: a flipped bit of JSON is rarely JSON.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from random import Random

Mutate = Callable[[bytes, Random], bytes]

BYTES_MAX = 1 << 17
"""No input becomes longer."""
REPEATS = (*(2,) * 12, *(10,) * 6, 100, 100, 1000)
"""Few are large: a thousandfold input takes as long as a thousand others."""
DEEP = (*(5,) * 8, *(100,) * 6, 1001, 1001, 20_000)
"""Levels of nesting: below and above the limits of Python and of protobuf."""

WORDS: tuple[bytes, ...] = (
    b"",
    b"\0",
    b"\n",
    b"\r\n",
    b'"',
    b"\\",
    b"'",
    b"{",
    b"}",
    b"/",
    b"..",
    b"../../etc/passwd",
    b":",
    b",",
    b"=",
    b"_",
    b"-",
    b"-1",
    b"0",
    b"1e999",
    b"0x10",
    b"9" * 19,
    b"9" * 40,
    b"9" * 5000,
    b"18446744073709551616",
    b"NaN",
    b"inf",
    b"null",
    b"true",
    b"%",
    b"%s%n",
    b"\x1b[31m",
    b"\xff",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    "\u202e".encode(),
    "\u2028".encode(),
    "\x85".encode(),
    "\u0663".encode(),
    "\u00b2".encode(),
    "\U0001f600".encode(),
    b"A" * 300,
    b"A" * 5000,
    b"GPU-00000000-0000-4000-8000-000000000000",
    b"MIG-GPU-00000000-0000-4000-8000-000000000000/1/0",
    b"pod00000000-0000-4000-8000-000000000000",
    b"kubepods",
)
"""Words that parsers trip over."""


def mutate_raw(data: bytes, random: Random) -> bytes:
    """Change bytes without regard to their meaning."""
    at, end = sorted((random.randint(0, len(data)), random.randint(0, len(data))))
    match random.randrange(6):
        case 0:
            return data[:at] + data[end:]
        case 1:
            return data[:at] + random.choice(WORDS) + data[at:]
        case 2:
            return data[:end] + data[at:end] * random.choice(REPEATS) + data[end:]
        case 3 if data:
            at = min(at, len(data) - 1)
            return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
        case 4:
            return data[:at]
        case _:
            return data[:at] + random.randbytes(random.randint(1, 8)) + data[end:]


_TOKEN = re.compile(rb"[A-Za-z]+|[0-9]+|[^A-Za-z0-9]")


def mutate_text(data: bytes, random: Random) -> bytes:
    """Change, drop, repeat or exchange a line or a word."""
    parts = data.splitlines(keepends=True) if random.random() < 0.4 else _TOKEN.findall(data)
    if not parts or random.random() < 0.1:
        return mutate_raw(data, random)
    at = random.randrange(len(parts))
    match random.randrange(6):
        case 0:
            del parts[at]
        case 1:
            parts[at] = random.choice(WORDS)
        case 2:
            parts[at] *= random.choice(REPEATS)
        case 3:
            other = random.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
        case 4:
            parts.insert(at, random.choice(WORDS))
        case _:
            parts[at] = mutate_raw(parts[at], random)
    return b"".join(parts)


# --- JSON -------------------------------------------------------------------------------------------------------------


class _Pairs(list[tuple[str, object]]):
    """An object of JSON: keys may be there twice."""


class _Verbatim(str):
    """Text that is written without quotes, whether or not it is JSON."""


_SCALARS: tuple[object, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    0.5,
    -0.0,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    1 << 64,
    10**30,
    *map(
        _Verbatim,
        ("1e308", "1e309", "-1e999", "1e-400", "NaN", "Infinity", "9" * 400, "9" * 5000, "01", "0." + "1" * 400, "{]"),
    ),
    *map(_Verbatim, (r'"\ud800"', r'"\udfff\ud800"', r'"\u0000"', '"\0"', '"\udcff"', r'"\x"', '"')),
    *(word.decode(errors="replace") for word in WORDS),
    [],
    _Pairs(),
)


def mutate_json(data: bytes, random: Random) -> bytes:
    """Change a value of JSON, at any depth, also of JSON and protobuf that is within a text."""
    if random.random() < 0.1:
        return mutate_text(data, random)
    try:
        document: object = json.loads(data, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError):
        return mutate_text(data, random)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        document = _changed(document, random)
    return _written(document)


def mutate_json_lines(data: bytes, random: Random) -> bytes:
    """Change one of several lines of JSON, or their order."""
    lines = data.split(b"\n")
    if random.random() < 0.2:
        return mutate_text(data, random)
    at = random.randrange(len(lines))
    lines[at] = mutate_json(lines[at], random)
    return b"\n".join(lines)


def _changed(value: object, random: Random) -> object:
    """Return the value with one change, at a random place. The way down is random, so deep places have their turn."""
    if isinstance(value, _Pairs) and value:
        return _changed_object(value, random)
    if isinstance(value, list) and value:
        return _changed_array(value, random)
    return _other(value, random)


def _changed_object(value: _Pairs, random: Random) -> object:
    at = random.randrange(len(value))
    key, inner = value[at]
    match random.randrange(12):
        case 0:
            return _Pairs((*value[:at], *value[at + 1 :]))
        case 1:
            return _Pairs((*value, (key, _changed(inner, random))))
        case 2:
            other = random.choice((key.lower(), key.upper(), "", f"{key}\0", key * 2, random.choice(value)[0]))
            return _Pairs((*value[:at], (other, inner), *value[at + 1 :]))
        case 3:
            return _other(value, random)
        case 4:
            number = random.choice(REPEATS)
            return _Pairs((*value, *((f"{key}{one}", inner) for one in range(number))))
        case _:
            return _Pairs((*value[:at], (key, _changed(inner, random)), *value[at + 1 :]))


def _changed_array(value: list[object], random: Random) -> object:
    at = random.randrange(len(value))
    match random.randrange(10):
        case 0:
            return [*value[:at], *value[at + 1 :]]
        case 1:
            return [*value, *value[at : at + 1] * random.choice(REPEATS)]
        case 2:
            return _other(value, random)
        case 3:
            return random.sample(value, len(value))
        case _:
            return [*value[:at], _changed(value[at], random), *value[at + 1 :]]


def _other(value: object, random: Random) -> object:
    """Return another value in the place of this one."""
    match random.randrange(8):
        case 0:
            return value if _size(value) > BYTES_MAX else [value]
        case 1:
            levels = random.choice(DEEP)
            left, right = random.choice((("[", "]"), ('{"a":', "}")))
            return _Verbatim(left * levels + "1" + right * levels)
        case 2 | 3 | 4 if isinstance(value, str) and not isinstance(value, _Verbatim):
            return _other_text(value, random)
        case 2 | 3 if isinstance(value, int | float):
            return value * random.choice((-1, 2, 10, 1 << 32)) + random.choice((-1, 0, 1))
        case _:
            return random.choice(_SCALARS)


def _other_text(value: str, random: Random) -> str:
    """Change a text. If it is JSON or base64, change what it means."""
    if value[:1] in ("{", "[") and random.random() < 0.9:
        return mutate_json(value.encode(errors="surrogatepass"), random).decode(errors="replace")
    if len(value) > 8 and random.random() < 0.7:
        try:
            return base64.b64encode(mutate_protobuf(base64.b64decode(value, validate=True), random)).decode()
        except (ValueError, binascii.Error):
            pass
    return mutate_text(value.encode(errors="surrogatepass"), random).decode(errors="replace")


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | list) else 0


def _written(value: object) -> bytes:
    parts: list[str] = []
    _write(value, parts)
    return "".join(parts).encode(errors="surrogateescape")


def _write(value: object, parts: list[str]) -> None:
    if isinstance(value, _Verbatim):
        parts.append(value)
    elif isinstance(value, _Pairs):
        parts.append("{")
        for number, (key, inner) in enumerate(value):
            parts.append(f"{',' if number else ''}{json.dumps(key)}:")
            _write(inner, parts)
        parts.append("}")
    elif isinstance(value, list):
        parts.append("[")
        for number, inner in enumerate(value):
            parts.append("," if number else "")
            _write(inner, parts)
        parts.append("]")
    else:
        parts.append(json.dumps(value, ensure_ascii=False).encode(errors="replace").decode())


# --- protobuf ---------------------------------------------------------------------------------------------------------

_Field = tuple[int, int, int | bytes]
"""Number, wire type, and value."""


def mutate_protobuf(data: bytes, random: Random) -> bytes:
    """Change a field of a message, at any depth. A field of bytes that reads as a message counts as one."""
    if random.random() < 0.1:
        return mutate_raw(data, random)
    fields = _fields(data)
    if not fields:
        return mutate_text(data, random) if data else random.choice(WORDS)
    at = random.randrange(len(fields))
    number, kind, value = fields[at]
    match random.randrange(12):
        case 0:
            del fields[at]
        case 1:
            fields += fields[at : at + 1] * random.choice(REPEATS)
        case 2:
            fields[at] = random.randint(1, 20), kind, value
        case 3:
            fields[at] = number, random.choice((0, 1, 2, 3, 4, 5)), value
        case 4:
            random.shuffle(fields)
        case 5:
            return _joined(fields) + bytes([number << 3 & 0x7F | 2]) + b"\xff\xff\xff\xff\x0f"
        case 6:
            nested = b""
            for _ in range(random.choice((3, 101, 500))):
                nested = _key(number, 2) + _varint(len(nested)) + nested
            fields.append((number, 2, nested))
        case _ if isinstance(value, bytes):
            fields[at] = number, kind, _other_bytes(value, random)
        case _:
            fields[at] = number, kind, random.choice((0, 1, 1 << 31, 1 << 32, (1 << 63) - 1, (1 << 64) - 1))
    return _joined(fields)


def _other_bytes(value: bytes, random: Random) -> bytes:
    if _fields(value) and random.random() < 0.85:
        return mutate_protobuf(value, random)
    return mutate_text(value, random) if random.random() < 0.7 else random.choice(WORDS)


def _fields(data: bytes) -> list[_Field]:
    """Return the fields of a message; none if the bytes are not one."""
    found: list[_Field] = []
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        value: int | bytes
        if kind == 0:
            value, at = _read_varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = data[at : at + size], at + size
        elif kind == 2:
            size, at = _read_varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            return []
        if not 0 < number < 1 << 29 or not 0 < at <= len(data):
            return []
        found.append((number, kind, value))
    return found


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number, and where it ends; beyond the data if it has no end."""
    value = shift = 0
    while at < len(data) and shift < 70:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if not data[at - 1] & 0x80:
            return value, at
    return 0, len(data) + 1


def _joined(fields: list[_Field]) -> bytes:
    parts = []
    for number, kind, value in fields:
        raw = value if isinstance(value, bytes) else _varint(value)
        parts.append(_key(number, kind) + (_varint(len(raw)) + raw if kind == 2 else raw))
    return b"".join(parts)


def _key(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# --- several files ----------------------------------------------------------------------------------------------------


def pack(files: Mapping[str, bytes]) -> bytes:
    """Write files as one input: JSON, each byte as a character."""
    return json.dumps({path: content.decode("latin-1") for path, content in files.items()}, indent=0).encode()


def unpack(data: bytes) -> dict[str, bytes]:
    """Read files from an input; none if it is not one."""
    try:
        found = json.loads(data)
        return {path: content.encode("latin-1") for path, content in found.items()}
    except (ValueError, AttributeError, RecursionError):
        return {}


def of_files(kind_of: Callable[[str], Mutate | None]) -> Mutate:
    """Return what changes one of several files by its format, drops it, copies it, or renames it.

    `kind_of` gives the mutator of a path; None keeps the file.
    """

    def mutate_files(data: bytes, random: Random) -> bytes:
        files = unpack(data)
        paths = sorted(path for path in files if kind_of(path) is not None)
        for _ in range(random.choice((1, 1, 2, 4))):
            if not paths:
                break
            path = random.choice(paths)
            mutate = kind_of(path) or mutate_raw
            match random.randrange(16):
                case 0:
                    files.pop(path, None)
                case 1:
                    files[random.choice(paths)] = files.get(path, b"")
                case 2:
                    renamed = mutate_text(path.rpartition("/")[2].encode(), random).decode(errors="replace")
                    files[path.rpartition("/")[0] + "/" + renamed.replace("/", "_")] = files.get(path, b"")
                case _:
                    files[path] = mutate(files.get(path, b""), random)
        return pack(files)

    return mutate_files
