"""Whether a user's password is right, as bcrypt hashes tell; a check costs as much CPU time as its hash asks for.

So what was right is remembered, and what is wrong is bounded: one check at a time, in a thread of its own, a pause
after each that failed, and no more waiting than a scraper's patience lets. Nothing here tells which names are known.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from functools import partial

from gpumap.lanes import Lane

_REMEMBERED_MAX = 100
_WAITING_MAX = 32
_WAITING_OF_ONE_MAX = 4
"""From one address: it may keep others waiting for so many checks."""
_PAUSES = 3.0
"""How long no check is made after one that failed, by what that took: wrong passwords get a quarter of a CPU."""
_PAUSE_SECONDS_MAX = 1.0
_BCRYPT_BYTES = 72
"""bcrypt has never read more of a password; the module wants to be told so."""


class Verdict(enum.Enum):
    RIGHT = "right"
    WRONG = "wrong"
    BUSY = "busy"
    """It was not checked: too many are."""


class Passwords:
    """The users of now (`users`, names and hashes), and who among them has shown the right password."""

    def __init__(self) -> None:
        self.users: Mapping[str, str] = {}
        self._key = secrets.token_bytes(32)
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._checks: dict[bytes, asyncio.Task[bool]] = {}
        self._waiting: Counter[str] = Counter()
        self._turn = asyncio.Lock()
        self._lane = Lane("gpumap-passwords")

    async def check(self, user: str, password: str, address: str) -> Verdict:
        """Whether they belong together; `address` is whose word that is."""
        hashed = self.users.get(user)
        known = hashed is not None
        # Who is not known is checked against some user's hash, always the same for a name: it takes as long.
        hashed = hashed if hashed is not None else self._some_hash(user)
        # Nobody else knows the key, so how long it takes to find a digest among others tells nothing of a password.
        digest = self._digest(user, hashed, password)
        if known and digest in self._right:
            self._right.move_to_end(digest)
            return Verdict.RIGHT
        check = self._checks.get(digest)
        if check is None:
            if self._waiting.total() >= _WAITING_MAX or self._waiting[address] >= _WAITING_OF_ONE_MAX:
                return Verdict.BUSY
            check = asyncio.create_task(self._check(digest, hashed, password, known))
            self._checks[digest] = check
            self._waiting[address] += 1
            check.add_done_callback(partial(self._checked, digest, address))
        # The one who asked may go away: what was found is for the next time.
        return Verdict.RIGHT if await asyncio.shield(check) else Verdict.WRONG

    def close(self) -> None:
        for check in self._checks.values():
            check.cancel()
        self._lane.close()

    async def _check(self, digest: bytes, hashed: str, password: str, known: bool) -> bool:
        import bcrypt

        async with self._turn:
            began = time.monotonic()
            word = password.encode(errors="surrogateescape")[:_BCRYPT_BYTES]
            right = await self._lane.run(partial(bcrypt.checkpw, word, hashed.encode())) and known
            if right:
                self._right[digest] = None
                if len(self._right) > _REMEMBERED_MAX:
                    self._right.popitem(last=False)
            else:
                await asyncio.sleep(min(_PAUSE_SECONDS_MAX, _PAUSES * (time.monotonic() - began)))
            return right

    def _checked(self, digest: bytes, address: str, check: asyncio.Task[bool]) -> None:
        self._checks.pop(digest, None)
        self._waiting[address] -= 1
        if not self._waiting[address]:
            del self._waiting[address]
        if not check.cancelled():
            check.exception()  # whoever waited has it

    def _some_hash(self, user: str) -> str:
        hashes = list(self.users.values())
        return hashes[int.from_bytes(self._digest(user, "", "")) % len(hashes)]

    def _digest(self, *words: str) -> bytes:
        digest = hashlib.blake2b(key=self._key, digest_size=32)
        for word in words:
            data = word.encode(errors="surrogateescape")
            digest.update(len(data).to_bytes(8) + data)
        return digest.digest()
