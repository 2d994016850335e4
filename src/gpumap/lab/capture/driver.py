"""A fake of the NVML worker: `python -m gpumap.lab.capture.driver FILE`, with the same lines on stdin and stdout.

It answers with the content of the file, an nvml.json, at that moment. It sends the XID events of each content once,
when the content comes. It ends when stdin does.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gpumap.agent.nvml_worker import wire
from gpumap.lab.capture import contents
from gpumap.lab.demo.fake_worker import LISTENING_GROUP, reading_for, serve
from gpumap.model.observations import NvmlReading
from gpumap.model.readings import Uuid

POLL_SECONDS = 0.2
"""How soon the driver sends an event that no request asked for: frames may be shorter than the interval."""


class Player:
    """Answers requests with the current file. `now` is the monotonic clock."""

    def __init__(self, path: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._now = now
        self._text = b""
        self._reading: NvmlReading | contents.Down = contents.Down("", "")
        self._since: dict[Uuid, float] = {}  # on this clock; each content counts once
        self._listens = False

    @property
    def patience_seconds(self) -> float:
        return POLL_SECONDS

    def read(self, asked: wire.Request) -> Iterator[bytes]:
        """Return the lines that answer a request: an error; or the listening periods, the driver, and then each
        GPU."""
        self._listens = LISTENING_GROUP in asked.groups and not asked.release
        yield from self._new()
        reading, now = self._reading, self._now()
        if isinstance(reading, contents.Down):
            yield wire.encode(wire.ErrorMessage(asked.read, 0, reading.reason, reading.detail))
            return
        if self._listens:
            yield wire.encode(wire.ListeningMessage(tuple(self._periods(reading))))
        elif LISTENING_GROUP in asked.groups:  # the worker does not listen, which is blind time
            closed = (
                wire.ListeningPeriod(uuid, now, now)
                for uuid in dict.fromkeys(period.uuid for period in reading.listening)
            )
            yield wire.encode(wire.ListeningMessage(tuple(closed)))
        versions = reading.driver_version, reading.cuda_version, reading.nvml_version
        yield wire.encode(wire.DriverMessage(asked.read, *versions, len(reading.gpus)))
        for gpu in sorted(reading.gpus, key=lambda gpu: gpu.index in asked.last):
            if gpu.index not in asked.skip:
                yield wire.encode(wire.GpuMessage(asked.read, reading_for(gpu, asked.groups, release=asked.release)))

    def unasked(self) -> Iterator[bytes]:
        """The XID events of a frame that has come, if there is a listener."""
        return self._new() if self._listens else iter(())

    def _new(self) -> Iterator[bytes]:
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return  # the node is being removed
        if text == self._text:
            return
        self._text, self._reading = text, contents.reading({contents.NVML: text})
        if isinstance(self._reading, contents.Down):
            return
        now = self._now()
        self._since = {period.uuid: now - period.since_seconds for period in self._reading.listening}
        for xid in self._reading.xids if self._listens else ():
            yield wire.encode(wire.XidMessage(*xid[:4], now - xid.age_seconds, xid.times))

    def _periods(self, reading: NvmlReading) -> Iterator[wire.ListeningPeriod]:
        now = self._now()
        return (
            wire.ListeningPeriod(period.uuid, self._since[period.uuid], now - period.until_seconds)
            for period in reading.listening
        )


def main(path: Path) -> None:
    """Answer each line of stdin until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which closes stdin
    serve(Player(path))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
