"""Reads a web configuration and its files repeatedly, and activates changes.

A change is active after two equal reads in a row, not while it is written. An invalid change is logged once, and the
previous configuration stays active; its certificates are renewed all the same.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gpumap.agent.executors import SerialExecutor
from gpumap.agent.files import open_at_once
from gpumap.agent.web.config.guard import Guard, requirements_of
from gpumap.agent.web.config.schema import IF_GIVEN, NONE, REMOVED_BY, REQUIRED, WebConfig, WebConfigError, parse
from gpumap.agent.web.port import CloseOthers
from gpumap.model.errors import UsageError

LOOK_SECONDS = 2.0
_DEADLINE_SECONDS = 5.0
_WORDS = {REQUIRED: "required", IF_GIVEN: "if_given", NONE: "no"}
_TEXT_BYTES = 1 << 16
"""YAML of this size takes a second of CPU time."""
_PEM_BYTES = 1 << 20

log = logging.getLogger("gpumap.agent.web.config")


class Loaded(NamedTuple):
    """A configuration, and the bytes of the files that its `tls` names, by key."""

    config: WebConfig
    pems: dict[str, bytes]


class FileState(NamedTuple):
    """The result of one read of the files."""

    wanted: Loaded | None
    """The configuration in the file; None if it is invalid, with the reason in `error`."""
    renewed: Loaded | None
    """The active configuration with its current files, if that is not `wanted`: certificates are renewed also
    during an error."""
    error: str


class Reader:
    """Reads the files at one moment. It parses the same text only once.

    It reads the content each time, not only time stamps: a Secret's volume swaps a link above the files, and times may
    have any value.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data: bytes | None = None
        self._parsed: WebConfig | WebConfigError = WebConfig()

    def read(self, in_force: WebConfig | None) -> FileState:
        wanted, renewed, wrong = None, None, ""
        try:
            config = self._config()
            if in_force is not None and (key := config.leaves_out(in_force)) is not None:
                raise WebConfigError(f"{key}: is missing, perhaps cut off; to remove it, {REMOVED_BY[key]}")
            wanted = Loaded(config, self._pems(config))
        except WebConfigError as error:
            wrong = str(error)
        if in_force is not None and (wanted is None or wanted.config != in_force):
            try:
                renewed = Loaded(in_force, self._pems(in_force))
            except WebConfigError:
                pass  # their earlier content continues
        return FileState(wanted, renewed, wrong)

    def _config(self) -> WebConfig:
        data = _read(self._path, _TEXT_BYTES)
        if data != self._data:
            try:
                self._parsed = parse(data.decode())
            except UnicodeDecodeError:
                self._parsed = WebConfigError("is not text in UTF-8")
            except WebConfigError as error:
                self._parsed = error
            self._data = data
        if isinstance(self._parsed, WebConfigError):
            raise self._parsed
        return self._parsed

    def _pems(self, config: WebConfig) -> dict[str, bytes]:
        pems = {}
        if (tls := config.tls) is not None:
            for key, file in tls.files.items():
                try:
                    pems[key] = _read(self._path.parent / file, _PEM_BYTES)
                except WebConfigError as error:
                    raise WebConfigError(f"{tls.place(key)}: {error}") from error
        return pems


def _read(path: Path, most: int) -> bytes:
    """Read a regular file. Raises WebConfigError. Never waits: a pipe without a writer would block."""
    try:
        with open_at_once(path) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise WebConfigError("is not a file")
            data = file.read(most + 1)
    except IsADirectoryError as error:
        raise WebConfigError("is a directory") from error
    except OSError as error:
        raise WebConfigError(error.strerror or type(error).__name__) from error
    if len(data) > most:
        raise WebConfigError(f"is larger than {most >> 10} KiB")
    return data


class Watch:
    """Follow a configuration's file for a guard. Raises UsageError if the file is not usable at the start."""

    def __init__(self, path: Path, *, look_seconds: float = LOOK_SECONDS) -> None:
        self._path = path
        self._look_seconds = look_seconds
        self._reader = Reader(path)
        self._thread = SerialExecutor("gpumap-web-config")
        self._handled = self._reader.read(None)
        try:
            if self._handled.wanted is None:
                raise WebConfigError(self._handled.error)
            self.guard = Guard(requirements_of(*self._handled.wanted))
        except WebConfigError as error:
            raise UsageError(f"--web-config {path}: {error}") from error
        self._in_force = self._handled.wanted

    def words(self) -> str:
        """Return the requirements, for the log."""
        config = self._in_force.config
        certificates = _WORDS[config.tls.client_auth if config.tls else NONE]
        return f"tls={'yes' if config.tls else 'no'} client_certificates={certificates} users={len(config.users)}"

    async def follow(self, close_others: CloseOthers) -> None:
        """Apply changes for ever. After each, close the idle connections from before."""
        self._warn()
        before = self._handled
        while True:
            await asyncio.sleep(self._look_seconds)
            try:
                read = partial(self._reader.read, self._in_force.config)
                state = await self._thread.run(read, _DEADLINE_SECONDS)
            except TimeoutError:
                continue  # a file system hangs: the active configuration stays
            except Exception as error:  # no file may end the service, whatever error it causes in a library
                state = FileState(None, None, f"cannot be read: {type(error).__name__}")
            settled, before = state == before, state
            if settled and state != self._handled:
                self._handled = state
                await self._take(state, close_others)

    def close(self) -> None:
        self.guard.close()
        self._thread.close()

    async def _take(self, state: FileState, close_others: CloseOthers) -> None:
        """Activate the wanted configuration, or else the previous one with its renewed certificates."""
        wrong = state.error
        for loaded in (state.wanted, state.renewed):
            if loaded is None:
                continue
            if loaded == self._in_force:
                break
            try:
                requirements = await self._thread.run(partial(requirements_of, *loaded))
            except WebConfigError as error:
                wrong = wrong or str(error)
                continue
            except Exception as error:  # as above
                wrong = wrong or f"cannot be used: {type(error).__name__}"
                continue
            given_up = [one for one in self._in_force.config.asks if one not in loaded.config.asks]
            self._in_force = loaded
            self.guard.take(requirements)
            close_others(self.guard.busy)
            log.info("web config loaded again: file=%s %s", self._path, self.words())
            if given_up:
                log.warning("web config no longer requires: %s (file=%s)", ", ".join(given_up), self._path)
            self._warn()
            break
        if wrong:
            log.warning("web config not loaded, the previous one stays active: file=%s error=%s", self._path, wrong)

    def _warn(self) -> None:
        config = self._in_force.config
        if not config.asks:
            log.warning("web config requires nothing: everyone who reaches the port can read the pages in plain HTTP")
        elif config.users and config.tls is None:
            log.warning("clients send passwords unencrypted: the web config has no tls_server_config")
