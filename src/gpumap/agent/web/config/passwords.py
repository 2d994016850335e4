"""Checks passwords of users. A bcrypt check costs as much CPU time as its hash requires.

So results are remembered, right and wrong ones, and checks are limited. One check runs at a time in a thread, with a
pause after each wrong one. At most one waits for each client address, and at most `PLACES` in all. The address with
the fewest wrong passwords is next. If no place is left, the one with the most is refused. No result shows which names
exist.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from gpumap.agent.executors import SerialExecutor

PLACES = 32
_REMEMBERED_MAX = 100
_ADDRESSES_MAX = 1024
"""Number of addresses whose wrong passwords are counted."""
_PAUSES = 3.0
"""Pause after a wrong password, as a multiple of the time of its check: wrong passwords get a quarter of a CPU."""
_PAUSE_SECONDS_MAX = 1.0
"""Maximum of that pause. With costly hashes, wrong passwords then get more CPU, but a right one waits no longer."""
_BCRYPT_BYTES = 72
"""bcrypt never reads more of a password, and the module refuses a longer one."""


class _Check(NamedTuple):
    """A check that waits or runs. `result` is None if it lost its place to another one."""

    digest: bytes
    password: bytes
    hashed: bytes
    is_known: bool
    result: asyncio.Future[bool | None]


def _check(password: bytes, hashed: bytes) -> bool:
    import bcrypt  # only a configuration with users needs it

    return bcrypt.checkpw(password, hashed)


class Passwords:
    """The current users (`users`, names and hashes), and the results of past checks."""

    def __init__(self, places: int = PLACES, check: Callable[[bytes, bytes], bool] = _check) -> None:
        """`check` returns whether a password fits a hash; it runs in a thread."""
        self.users: Mapping[str, str] = {}
        self._places = places
        self._check = check
        self._key = secrets.token_bytes(32)
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._wrong: OrderedDict[bytes, None] = OrderedDict()
        """Kept separately, because guesses must not displace right results."""
        self._failures: OrderedDict[str, int] = OrderedDict()
        self._checks: dict[str, _Check] = {}
        """By client address, in the order of arrival. One of them runs."""
        self._running = ""
        self._worker: asyncio.Task[None] | None = None
        self._thread = SerialExecutor("gpumap-passwords")

    async def are_right(self, user: str, password: str, address: str) -> bool | None:
        """Return whether user and password match; None if too many clients ask. `address` is the client's."""
        hashed = self.users.get(user)
        is_known = hashed is not None
        # An unknown name is checked against the hash of some user, always the same for a name, so it takes as long.
        hashed = hashed if hashed is not None else self._some_hash(user)
        # Only this process knows the key, so the time to find a digest among others does not reveal a password.
        digest = self._digest(user, hashed, password, "known" if is_known else "")
        if digest in self._right or digest in self._wrong:
            remembered = self._right if digest in self._right else self._wrong
            remembered.move_to_end(digest)
            return remembered is self._right
        # A page makes many requests at once with one password: that is one check.
        check = next((one for one in self._checks.values() if one.digest == digest), None)
        if check is None:
            host = host_of(address)
            if host in self._checks or not self._has_place(host):
                return None
            word = password.encode(errors="surrogateescape")[:_BCRYPT_BYTES]
            result: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()
            check = self._checks[host] = _Check(digest, word, hashed.encode(), is_known, result)
            if self._worker is None or self._worker.done():
                self._worker = asyncio.create_task(self._work(), name="gpumap-passwords")
        return await asyncio.shield(check.result)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
        self._thread.close()

    def _has_place(self, host: str) -> bool:
        """Return whether a check may wait. The host with the most wrong passwords loses a place, if it has more
        than this one."""
        if len(self._checks) < self._places:
            return True
        waiting = [one for one in self._checks if one != self._running]
        worst = max(waiting, key=self._failures_of, default=host)
        if self._failures_of(worst) <= self._failures_of(host):
            return False
        self._checks.pop(worst).result.set_result(None)
        return True

    async def _work(self) -> None:
        """Check one after the other, until none is left."""
        while self._checks:
            host = self._running = min(self._checks, key=self._failures_of)
            check = self._checks[host]
            began = time.monotonic()
            try:
                fits = await self._thread.run(partial(self._check, check.password, check.hashed))
            except Exception as error:  # a library may fail for a password; the next one is checked
                check.result.set_exception(error)
                continue
            finally:
                del self._checks[host]
                self._running = ""
            is_right = fits and check.is_known
            self._remember(host, check.digest, is_right)
            check.result.set_result(is_right)
            if not is_right:
                await asyncio.sleep(min(_PAUSE_SECONDS_MAX, _PAUSES * (time.monotonic() - began)))

    def _remember(self, host: str, digest: bytes, is_right: bool) -> None:
        remembered = self._right if is_right else self._wrong
        remembered[digest] = None
        if len(remembered) > _REMEMBERED_MAX:
            remembered.popitem(last=False)
        failures = 0 if is_right else self._failures.pop(host, 0) + 1
        self._failures.pop(host, None)
        if failures:
            self._failures[host] = failures
            if len(self._failures) > _ADDRESSES_MAX:
                self._failures.popitem(last=False)

    def _failures_of(self, host: str) -> int:
        return self._failures.get(host, 0)

    def _some_hash(self, user: str) -> str:
        hashes = list(self.users.values())
        return hashes[int.from_bytes(self._digest(user, "", "")) % len(hashes)]

    def _digest(self, *words: str) -> bytes:
        digest = hashlib.blake2b(key=self._key, digest_size=32)
        for word in words:
            data = word.encode(errors="surrogateescape")
            digest.update(len(data).to_bytes(8) + data)
        return digest.digest()


def host_of(address: str) -> str:
    """Return all addresses that one host may have: its IPv4 address, or the /64 around its IPv6 address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:  # the form of IPv4 on a socket for both
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((int(found), 64), strict=False))
    return str(found)
