"""Reads a web configuration and the files that it names, as they are at one moment.

Everything is read, and not only looked at: a Secret's volume swaps a link above the files, and times may be any.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gpumap.agent.web.config.parse import parse
from gpumap.agent.web.config.values import WebConfig, WebConfigError
from gpumap.model.text import cut_off, printable

_TEXT_BYTES = 1 << 16
"""So much YAML takes a second of CPU time."""
_PEM_BYTES = 1 << 20
_SHOWN_CHARACTERS = 200


class Found(NamedTuple):
    """A configuration, and the bytes of what its `tls` names, by key."""

    config: WebConfig
    pems: dict[str, bytes]


class Look(NamedTuple):
    asked: Found | None
    """None where it cannot be taken, which `wrong` tells."""
    kept: Found | None
    """The configuration in force with its files of now, where that is not `asked`: certificates are renewed also
    beside a mistake."""
    wrong: str


def reader(path: Path) -> Callable[[WebConfig | None], Look]:
    """Something that looks, and is told what is in force; text that it has parsed before is not parsed again."""
    last: tuple[bytes, WebConfig | WebConfigError] | None = None

    def read_config() -> WebConfig:
        nonlocal last
        data = _read(path, _TEXT_BYTES)
        if last is None or last[0] != data:
            last = data, _parse(data)
        if isinstance(last[1], WebConfigError):
            raise last[1]
        return last[1]

    def look(in_force: WebConfig | None) -> Look:
        asked, kept, wrong = None, None, ""
        try:
            config = read_config()
            if in_force is not None and in_force.asks and config.says_nothing:
                raise WebConfigError("it is empty, as one that is cut off is; `basic_auth_users: {}` opens the pages")
            asked = Found(config, _read_pems(config, path.parent))
        except WebConfigError as error:
            wrong = str(error)
        if in_force is not None and (asked is None or asked.config != in_force):
            try:
                kept = Found(in_force, _read_pems(in_force, path.parent))
            except WebConfigError:
                pass  # what was read of them before goes on
        return Look(asked, kept, wrong)

    return look


def _read_pems(config: WebConfig, folder: Path) -> dict[str, bytes]:
    pems = {}
    for pem in config.tls.files if config.tls is not None else ():
        try:
            pems[pem.key] = _read(folder / pem.file, _PEM_BYTES)
        except WebConfigError as error:
            raise WebConfigError(f"{pem.key} {cut_off(printable(pem.file), _SHOWN_CHARACTERS)}: {error}") from error
    return pems


def _parse(data: bytes) -> WebConfig | WebConfigError:
    try:
        return parse(data.decode())
    except UnicodeDecodeError:
        return WebConfigError("is not text in UTF-8")
    except WebConfigError as error:
        return error


def _read(path: Path, most: int) -> bytes:
    """A regular file. Raises WebConfigError. Nothing else is waited for, such as a pipe nobody writes into."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(number, "rb") as file:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise WebConfigError("is not a file")
            data = file.read(most + 1)
    except IsADirectoryError as error:
        raise WebConfigError("is a directory") from error
    except OSError as error:
        raise WebConfigError(error.strerror or type(error).__name__) from error
    if len(data) > most:
        raise WebConfigError(f"is larger than {most >> 10} KiB")
    return data
