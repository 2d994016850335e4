"""The loop of what stands in for the NVML worker: requests on stdin, answers on stdout, and what nobody asked for."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterable
from typing import Protocol

from gpumap.agent.nvml_worker import wire


class Answering(Protocol):
    """What answers. `patience_seconds`: when there may be something to say that was not asked; `None`: never."""

    @property
    def patience_seconds(self) -> float | None: ...
    def read(self, request: wire.Request, /) -> Iterable[bytes]: ...
    def unasked(self) -> Iterable[bytes]: ...


def serve(driver: Answering) -> None:
    """Answer each line of stdin until it ends."""
    received = b""
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], driver.patience_seconds)
        if readable:
            chunk = os.read(sys.stdin.fileno(), 65536)
            if not chunk:
                return
            received += chunk
        *lines, received = received.split(b"\n")
        _write(driver.unasked())
        for line in lines:
            _write(driver.read(wire.decode_request(line)))


def _write(lines: Iterable[bytes]) -> None:
    sys.stdout.buffer.write(b"".join(lines))
    sys.stdout.buffer.flush()
