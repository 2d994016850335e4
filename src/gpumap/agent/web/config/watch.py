"""Looks again and again at a web configuration and its files, and has what changed taken.

A change is taken when two looks in a row found the same: it is not read while it is being written. One that cannot be
taken is said once, and what was in force stays; its certificates are renewed all the same.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

from gpumap.agent.executors import SerialExecutor
from gpumap.agent.web.config.files import Look, reader
from gpumap.agent.web.config.guard import Guard, rules_of
from gpumap.agent.web.config.values import IF_GIVEN, NONE, REQUIRED, WebConfigError
from gpumap.agent.web.port import LetGo
from gpumap.model.errors import UsageError

LOOK_SECONDS = 2.0
_DEADLINE_SECONDS = 5.0
_WORDS = {REQUIRED: "required", IF_GIVEN: "if_given", NONE: "no"}

log = logging.getLogger("gpumap.agent.web.config")


class Watch:
    """A configuration's file, and the guard that heeds it. Raises UsageError where the file cannot be taken at once."""

    def __init__(self, path: Path, *, look_seconds: float = LOOK_SECONDS) -> None:
        self._path = path
        self._look_seconds = look_seconds
        self._read = reader(path)
        self._lane = SerialExecutor("gpumap-web-config")
        self._judged = self._read(None)
        try:
            if self._judged.asked is None:
                raise WebConfigError(self._judged.wrong)
            self.guard = Guard(rules_of(*self._judged.asked))
        except WebConfigError as error:
            raise UsageError(f"--web-config {path}: {error}") from error
        self._found = self._judged.asked

    def words(self) -> str:
        """What is asked for, for the log."""
        config = self._found.config
        certificates = _WORDS[config.tls.client_auth if config.tls else NONE]
        return f"tls={'yes' if config.tls else 'no'} client_certificates={certificates} users={len(config.users)}"

    async def follow(self, let_go: LetGo) -> None:
        """Take changes for ever, after each of which no idle connection of before goes on."""
        self._warn()
        before = self._judged
        while True:
            await asyncio.sleep(self._look_seconds)
            try:
                look = await self._lane.run(partial(self._read, self._found.config), _DEADLINE_SECONDS)
            except TimeoutError:
                continue  # a file system hangs: what is in force stays
            except Exception as error:  # no file may end the service, whatever it makes a library do
                look = Look(None, None, f"cannot be read: {type(error).__name__}")
            settled, before = look == before, look
            if settled and look != self._judged:
                self._judged = look
                await self._take(look, let_go)

    def close(self) -> None:
        self.guard.close()
        self._lane.close()

    async def _take(self, look: Look, let_go: LetGo) -> None:
        """What is asked for; where that cannot be, what is in force with its new certificates."""
        wrong = look.wrong
        for found in (look.asked, look.kept):
            if found is None:
                continue
            if found == self._found:
                break
            try:
                rules = await self._lane.run(partial(rules_of, *found))
            except WebConfigError as error:
                wrong = wrong or str(error)
                continue
            except Exception as error:  # as above
                wrong = wrong or f"cannot be used: {type(error).__name__}"
                continue
            given_up = [one for one in self._found.config.asks if one not in found.config.asks]
            self._found = found
            self.guard.take(rules)
            let_go(self.guard.busy)
            log.info("web config is taken anew: file=%s %s", self._path, self.words())
            if given_up:
                log.warning("web config no longer asks for: %s (file=%s)", ", ".join(given_up), self._path)
            self._warn()
            break
        if wrong:
            log.warning("web config is not taken, and what was in force stays: file=%s error=%s", self._path, wrong)

    def _warn(self) -> None:
        config = self._found.config
        if not config.asks:
            log.warning("web config asks for nothing: the pages are plain HTTP for whoever reaches the port")
        elif config.users and config.tls is None:
            log.warning("passwords are sent as they are: there is no tls_server_config")
