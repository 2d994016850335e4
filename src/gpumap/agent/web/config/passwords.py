"""Whether a user's password is right, as bcrypt hashes tell; a check costs as much CPU time as its hash asks for.

So what was right is remembered, and what is wrong is bounded: one check at a time, in a thread of its own, a pause
after each that failed, and turns by network. Nothing here tells which names are known.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial

from gpumap.agent.executors import SerialExecutor
from gpumap.agent.web.config.fair_queue import Turns, network_of

_REMEMBERED_MAX = 100
_PAUSES = 3.0
"""How long no check is made after one that failed, by what that took: wrong passwords get a quarter of a CPU."""
_PAUSE_SECONDS_MAX = 1.0
"""With costly hashes they get more than that: who is right shall not wait longer."""
_BCRYPT_BYTES = 72
"""bcrypt has never read more of a password; the module wants to be told so."""


class Passwords:
    """The users of now (`users`, names and hashes), and who among them has shown the right password."""

    def __init__(self) -> None:
        self.users: Mapping[str, str] = {}
        self._key = secrets.token_bytes(32)
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._turns = Turns()
        self._lane = SerialExecutor("gpumap-passwords")

    async def are_right(self, user: str, password: str, address: str) -> bool | None:
        """Whether user and password belong together; None: too many ask. `address` is whose word it is."""
        hashed = self.users.get(user)
        known = hashed is not None
        # Who is not known is checked against some user's hash, always the same for a name: it takes as long.
        hashed = hashed if hashed is not None else self._some_hash(user)
        # Nobody else knows the key, so how long it takes to find a digest among others tells nothing of a password.
        digest = self._digest(user, hashed, password)
        if known and digest in self._right:
            self._right.move_to_end(digest)
            return True
        if not await self._turns.take(network_of(address)):
            return None
        try:
            # A page asks for many things at once: the first of them may have been right meanwhile.
            return (known and digest in self._right) or await self._check(digest, hashed, password, known)
        finally:
            self._turns.pass_on()

    def close(self) -> None:
        self._lane.close()

    async def _check(self, digest: bytes, hashed: str, password: str, known: bool) -> bool:
        import bcrypt

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

    def _some_hash(self, user: str) -> str:
        hashes = list(self.users.values())
        return hashes[int.from_bytes(self._digest(user, "", "")) % len(hashes)]

    def _digest(self, *words: str) -> bytes:
        digest = hashlib.blake2b(key=self._key, digest_size=32)
        for word in words:
            data = word.encode(errors="surrogateescape")
            digest.update(len(data).to_bytes(8) + data)
        return digest.digest()
