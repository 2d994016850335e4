"""JSON files that the kubelet and drivers write for themselves. gpumap trusts nothing in them.

Their writers replace them whole: a temporary file, then a rename.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Generic, TypeGuard, TypeVar

import msgspec

FILE_BYTES_MAX = 64 << 20
"""A larger file is not read. 110 pods with 1000 ids each make 6 MB. What makes the kubelet's List large
(kubernetes/kubernetes#141335) is in its state of DRA too."""

Text = Annotated[str, msgspec.Meta(pattern=r"\A[^\ud800-\udfff]*\Z")]
"""A string that can be written again: JSON can name half a character, which no page can hold."""
Name = Annotated[str, msgspec.Meta(pattern=r"\A[^\ud800-\udfff]+\Z")]

T = TypeVar("T")


class StaleMountError(OSError):
    """The file has no name any more. It was mounted by itself, and its writer has renamed another into its place."""


class ReplacedFile(Generic[T]):
    """A file that is replaced as a whole. It is read again only after it changed."""

    def __init__(self, path: Path, parse: Callable[[bytes], T]) -> None:
        self.path = path
        self._parse = parse
        self._seen: tuple[int, int, int] | None = None
        self._value: T | None = None

    def read(self) -> T:
        """Return the content, the very same object while it is unchanged. Raises OSError, ValueError."""
        found = self.path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "not a regular file")
        if not found.st_nlink:
            raise StaleMountError
        key = (found.st_ino, found.st_mtime_ns, found.st_size)
        if self._value is None or key != self._seen:
            with self.path.open("rb") as file:
                text = file.read(FILE_BYTES_MAX + 1)
            if len(text) > FILE_BYTES_MAX:
                raise OSError(0, f"larger than {FILE_BYTES_MAX >> 20} MiB")
            value = self._parse(text)
            self._seen = key
            if value != self._value:
                self._value = value
                return value
        return self._value


def parse_object(text: bytes | str, *, any_case: bool = False) -> dict[str, object]:
    """Parse a JSON object. `any_case` makes its keys lower case: Go reads them in any. Raises ValueError.

    The standard library's parser, because msgspec's refuses the whole text for one half of a character.
    """
    try:
        value: object = json.loads(text, object_pairs_hook=_lower if any_case else None)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("no object in it")
    return value


def each(values: Iterable[object], kind: type[T]) -> Iterator[T | None]:
    """Convert each value. `None` for one that is not whole: it costs only itself."""
    for value in values:
        try:
            yield msgspec.convert(value, kind)
        except msgspec.ValidationError:
            yield None


def is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _lower(pairs: list[tuple[str, object]]) -> dict[str, object]:
    return {key.lower(): value for key, value in pairs}
