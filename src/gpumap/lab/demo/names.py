"""Derived identities: uuids, pod UIDs, container ids and PIDs that depend only on names.

Two processes with the same scenario derive the same ones. Nothing here is random.
"""

from __future__ import annotations

import hashlib
import uuid

MAX_PID = 4_000_000
"""Below the largest pid_max that Linux allows (4194304)."""
_FIRST_PID = 3001
_PIDS_OF_ACTOR = 37


def digest(*parts: object) -> str:
    """64 hex digits, as a container id has."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def derived_uuid(*parts: object) -> str:
    """A UUID in the form of a random one (version 4)."""
    return str(uuid.UUID(hex=digest(*parts)[:32], version=4))


def number(limit: int, *parts: object) -> int:
    """A number from 0 to below `limit`."""
    return int(digest(*parts)[:12], 16) % limit


def pid_of(node: str, actor: int, actors: int, play: int) -> int:
    """A PID: each of the node's `actors` has a range of its own, and another one in each round of plays.

    `play` counts the plays; an actor that is always there keeps the PID of play 0.
    """
    span = _PIDS_OF_ACTOR * actors
    rounds = max(2, (MAX_PID - _FIRST_PID) // span)
    inside = number(_PIDS_OF_ACTOR, node, actor, play)
    return _FIRST_PID + play % rounds * span + actor * _PIDS_OF_ACTOR + inside
