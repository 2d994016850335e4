"""Looks again and again at a web configuration and its files, and has what changed taken.

A change is taken when two looks in a row found the same: it is not read while it is being written. One that cannot be
taken is said once, and what was in force stays.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

from gpumap.errors import UsageError
from gpumap.lanes import Lane
from gpumap.web.config.files import Look, reader
from gpumap.web.config.guard import Guard, Rules, rules_of
from gpumap.web.config.values import WebConfigError
from gpumap.web.port import LetGo

LOOK_SECONDS = 2.0
_DEADLINE_SECONDS = 5.0

log = logging.getLogger("gpumap.web.config")


class Watch:
    """A configuration's file, and the guard that heeds it. Raises UsageError where the file cannot be taken at once."""

    def __init__(self, path: Path, *, look_seconds: float = LOOK_SECONDS) -> None:
        self._path = path
        self._look_seconds = look_seconds
        self._read = reader(path)
        self._lane = Lane("gpumap-web-config")
        first = self._read()
        try:
            self.guard = Guard(rules_of(first))
        except WebConfigError as error:
            raise UsageError(f"--web-config {path}: {error}") from error
        self._judged = first.fingerprint

    def words(self) -> str:
        """What is asked for, for the log."""
        rules = self.guard.rules
        certificates = "required" if rules.certificate_required else "no"
        tls, users = "yes" if rules.context else "no", len(rules.users)
        return f"tls={tls} client_certificates={certificates} users={users}"

    async def follow(self, let_go: LetGo) -> None:
        """Take changes for ever, after each of which no idle connection of before goes on."""
        if self.guard.rules.users and self.guard.rules.context is None:
            log.warning("passwords are sent as they are: there is no tls_server_config")
        before = self._judged
        while True:
            await asyncio.sleep(self._look_seconds)
            try:
                look = await self._lane.run(self._read, _DEADLINE_SECONDS)
            except TimeoutError:
                continue  # a file system hangs: what is in force stays
            settled, before = look.fingerprint == before, look.fingerprint
            if settled and look.fingerprint != self._judged:
                self._judged = look.fingerprint
                await self._take(look, let_go)

    def close(self) -> None:
        self.guard.close()
        self._lane.close()

    async def _take(self, look: Look, let_go: LetGo) -> None:
        try:
            rules = await self._lane.run(partial(rules_of, look))
            _refuse_to_open(self.guard.rules, rules)
        except WebConfigError as error:
            log.warning("web config is not taken, and what was in force stays: file=%s error=%s", self._path, error)
            return
        self.guard.take(rules)
        let_go(self.guard.busy)
        log.info("web config is taken anew: file=%s %s", self._path, self.words())


def _refuse_to_open(old: Rules, new: Rules) -> None:
    """Raise WebConfigError for a change that gives up what is asked for: a file cut off by a full disk says as much as
    an empty one."""
    given_up = (
        ("TLS", old.context is not None and new.context is None),
        ("basic_auth_users", bool(old.users) and not new.users),
        ("client_allowed_sans", bool(old.allowed_sans) and not new.allowed_sans),
        ("client certificates", old.certificate_required and not new.certificate_required),
    )
    for what, is_given_up in given_up:
        if is_given_up:
            raise WebConfigError(f"{what} can be given up by a restart alone")
