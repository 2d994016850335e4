"""Derived identities: uuids, pod UIDs, container ids and PIDs that depend only on names.

Two processes with the same scenario derive the same ones. Nothing here is random.
"""

from __future__ import annotations

import hashlib
import uuid

MAX_PID = 4_000_000
"""Below the largest pid_max that Linux allows (4194304)."""


def digest(*parts: object) -> str:
    """64 hex digits, as a container id has."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def derived_uuid(*parts: object) -> str:
    """A UUID in the form of a random one (version 4)."""
    return str(uuid.UUID(hex=digest(*parts)[:32], version=4))


def number(limit: int, *parts: object) -> int:
    """A number from 0 to below `limit`."""
    return int(digest(*parts)[:12], 16) % limit


class Pids:
    """PIDs of `actors` processes: each actor has a range of its own, and another one in each round."""

    STRIDE = 37
    FIRST = 3001

    def __init__(self, node: str, actors: int) -> None:
        self._node = node
        self._span = self.STRIDE * max(actors, 1)
        self._rounds = max(2, (MAX_PID - self.FIRST) // self._span)

    def of(self, actor: int, play: int) -> int:
        """`play` counts the plays; an actor that is always there keeps the PID of play 0."""
        inside = number(self.STRIDE, self._node, actor, play)
        return self.FIRST + (play % self._rounds) * self._span + actor * self.STRIDE + inside
