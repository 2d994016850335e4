"""Asks gpumaps for their pages many times a second, from inside their pods' networks, and keeps every answer."""

from __future__ import annotations

import ctypes
import http.client
import os
import re
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

POLL_SECONDS = 0.08
ANSWER_SECONDS = 30.0
PORT = 9401
CLONE_NEWNET = 0x40000000
_OWN = re.compile(rb"^(process_|python_|# ).*\n", re.MULTILINE)
"""What a page has of gpumap itself, which changes with each request."""


class Answer(NamedTuple):
    """The same text, from the first request that got it to the last one."""

    path: str
    pid: int
    first_at: float
    last_at: float
    polls: int
    packed: bytes

    @property
    def text(self) -> str:
        return zlib.decompress(self.packed).decode()


class Missed(NamedTuple):
    """A request that was not answered, though there was a gpumap."""

    path: str
    pid: int
    at: float
    why: str


class Recorder:
    """Polls one gpumap. `pid` gives a process of it, or None while there is none."""

    PATHS = ("/metrics", "/api/v1/map")

    def __init__(self, name: str, proc: Path, pid: Callable[[], int | None]) -> None:
        self.name = name
        self.answers: list[Answer] = []
        self.missed: list[Missed] = []
        self.polls = 0
        self.pause_seconds = POLL_SECONDS
        self._proc = proc
        self._pid = pid
        self._entered: int | None = None
        self._bodies: dict[str, bytes] = {}
        self._positions: dict[str, int] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"recorder {name}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def latest(self, path: str = "/metrics") -> Answer | None:
        """The newest answer."""
        position = self._positions.get(path)
        return None if position is None else self.answers[position]

    def _run(self) -> None:
        while not self._ending.wait(self.pause_seconds):
            pid = self._pid()
            if pid is not None and self._enter(pid):
                for path in self.PATHS:
                    self._ask(path, pid)

    def _enter(self, pid: int) -> bool:
        """Enter the network of its pod. Only this thread does: the rest of the process stays where it is."""
        if pid == self._entered:
            return True
        try:
            descriptor = os.open(self._proc / str(pid) / "ns" / "net", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(descriptor)
        self._entered = pid
        return True

    def _ask(self, path: str, pid: int) -> None:
        asked_at = time.time()
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=ANSWER_SECONDS)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.missed.append(Missed(path, pid, asked_at, repr(error)))
            return
        finally:
            connection.close()
        self.polls += 1
        if response.status != http.client.OK:
            self.missed.append(Missed(path, pid, asked_at, f"{response.status} {body[:200]!r}"))
            return
        self._keep(path, pid, time.time(), body)

    def _keep(self, path: str, pid: int, at: float, body: bytes) -> None:
        own = _OWN.sub(b"", body)
        last = self.latest(path)
        if last is not None and last.pid == pid and self._bodies[path] == own:
            position = self._positions[path]
            self.answers[position] = last._replace(last_at=at, polls=last.polls + 1)
            return
        self._bodies[path] = own
        self.answers.append(Answer(path, pid, at, at, 1, zlib.compress(body, 1)))
        self._positions[path] = len(self.answers) - 1
