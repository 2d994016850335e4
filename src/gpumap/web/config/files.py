"""Reads a web configuration and the files that it names, as they are at one moment.

Everything is read, and not only looked at: a Secret's volume swaps a link above the files, and times may be any.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gpumap.web.config.parse import parse
from gpumap.web.config.values import WebConfig, WebConfigError

_BYTES_MAX = 1 << 20


class Look(NamedTuple):
    """What was found: the configuration, or what is wrong, and the bytes of what its `tls` names, by key."""

    config: WebConfig | WebConfigError
    pems: dict[str, bytes]
    fingerprint: bytes
    """Equal for the same bytes, and for the same mistakes."""


def reader(path: Path) -> Callable[[], Look]:
    """Something that looks; text that it has parsed before is not parsed again."""
    last: tuple[bytes, WebConfig | WebConfigError] | None = None

    def look() -> Look:
        nonlocal last
        try:
            data = _read(path)
        except WebConfigError as error:
            return _look(error, {}, b"")
        if last is None or last[0] != data:
            last = data, _parse(data)
        config, pems = last[1], {}
        if isinstance(config, WebConfig) and config.tls is not None:
            for pem in config.tls.files:
                try:
                    pems[pem.key] = _read(path.parent / pem.file)
                except WebConfigError as error:
                    return _look(WebConfigError(f"{pem.key} {pem.file}: {error}"), pems, data)
        return _look(config, pems, data)

    return look


def _parse(data: bytes) -> WebConfig | WebConfigError:
    try:
        return parse(data.decode())
    except UnicodeDecodeError:
        return WebConfigError("is not text in UTF-8")
    except WebConfigError as error:
        return error


def _look(config: WebConfig | WebConfigError, pems: dict[str, bytes], data: bytes) -> Look:
    said = str(config) if isinstance(config, WebConfigError) else ""
    digest = hashlib.sha256()
    for part in (data, said.encode(), *pems.values()):
        digest.update(hashlib.sha256(part).digest())
    return Look(config, pems, digest.digest())


def _read(path: Path) -> bytes:
    """A regular file. Raises WebConfigError. Nothing else is waited for, such as a pipe nobody writes into."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(number, "rb") as file:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise WebConfigError("is not a file")
            data = file.read(_BYTES_MAX + 1)
    except IsADirectoryError as error:
        raise WebConfigError("is a directory") from error
    except OSError as error:
        raise WebConfigError(error.strerror or type(error).__name__) from error
    if len(data) > _BYTES_MAX:
        raise WebConfigError("is larger than 1 MiB")
    return data
