"""JSON files that the kubelet and drivers write for themselves. gpumap does not trust their content.

Their writers replace them whole: a temporary file, then a rename.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Generic, TypeVar

import msgspec

FILE_BYTES_MAX = 24 << 20
"""A larger file is not read: it could use all of the memory that the chart allows. 110 pods with 1000 ids each make
6 MB. The cause of large Lists (kubernetes/kubernetes#141335: 17.8 MB) also affects the state of DRA."""
COMMAS_MAX = 1 << 19
"""A file with more is not parsed: each value costs memory, even one of two bytes. 100,000 rows have as many."""

Name = Annotated[str, msgspec.Meta(min_length=1)]

T = TypeVar("T")


class StaleMountError(OSError):
    """The file no longer has a name. It was mounted by itself, and its writer has replaced it by another."""

    strerror = "was replaced, and this is the old file: mount its directory instead of the file"


class ReplacedFile(Generic[T]):
    """A file that is replaced whole. It is read again only after it changed."""

    def __init__(self, path: Path, parse: Callable[[bytes], T]) -> None:
        self.path = path
        self._parse = parse
        self._key: tuple[int, int, int] | None = None
        self._value: T | None = None

    def read(self) -> T:
        """Return the content, the very same object while it is unchanged. Raises OSError and ValueError."""
        status = self.path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "not a regular file")
        if not status.st_nlink:
            raise StaleMountError
        key = (status.st_ino, status.st_mtime_ns, status.st_size)
        if self._value is None or key != self._key:
            value = self._parse(_read_bytes(self.path))
            self._key = key
            if value != self._value:
                self._value = value
                return value
        return self._value


def decode(text: bytes | str | msgspec.Raw, kind: type[T]) -> T:
    r"""Decode JSON. Half of a character (`\ud800`) becomes U+FFFD, as Go reads and writes it. Raises ValueError.

    `msgspec.Raw` in `kind` marks a part to decode later, so a damaged part affects only itself.
    """
    try:
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            data = text.encode() if isinstance(text, str) else bytes(text)
            data = _SURROGATES.sub(lambda match: match[0] if len(match[0]) != _HALF_BYTES else rb"\ufffd", data)
            return msgspec.json.decode(data, type=kind)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def decode_lower_case(text: msgspec.Raw) -> object:
    """Decode JSON with the keys of objects in lower case: Go accepts any case. Raises ValueError."""
    try:
        return json.loads(bytes(text), object_pairs_hook=lower_case)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def lower_case(pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    return {key.lower(): value for key, value in pairs}


def each(values: Iterable[msgspec.Raw], kind: type[T]) -> Iterator[T | None]:
    """Decode each value; `None` for a damaged one, which affects only itself."""
    for value in values:
        try:
            yield msgspec.json.decode(value, type=kind)
        except (ValueError, RecursionError):
            yield None


def _read_bytes(path: Path) -> bytes:
    """Read the file. Raises OSError, also for a file that would use too much memory."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > FILE_BYTES_MAX:
            raise OSError(0, f"larger than {FILE_BYTES_MAX >> 20} MiB ({size} bytes)")
        text = file.read(size)
    if text.count(b",") > COMMAS_MAX:
        raise OSError(0, f"more than {COMMAS_MAX} values in {size} bytes")
    return text


_SURROGATES = re.compile(
    rb"\\(?:\\|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
"""A backslash, a whole character of two halves, or half a character."""
_HALF_BYTES = len(rb"\ufffd")
