"""Stands in for the NVML worker: `python -m gpumap.lab.capture.driver FILE`, spoken to in the same lines.

Answers with what the file, an nvml.json, says at that moment, and tells the XID events of each text of it once, when it
comes. Ends when stdin does.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gpumap.agent.nvml_worker import wire
from gpumap.lab.capture import contents
from gpumap.lab.demo import groups
from gpumap.lab.demo.worker_loop import serve
from gpumap.model.observations import NvmlReading
from gpumap.model.readings import Uuid

POLL_SECONDS = 0.2
"""How soon an event of a frame is told that nobody asks for: frames may be shorter than the interval."""


class Player:
    """Answers requests by the file as it is; `now` is the monotonic clock."""

    def __init__(self, path: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._now = now
        self._text = b""
        self._said: NvmlReading | contents.Down = contents.Down("", "")
        self._since: dict[Uuid, float] = {}  # on our clock; a text that stays the same was said once
        self._listens = False

    @property
    def patience_seconds(self) -> float:
        return POLL_SECONDS

    def read(self, asked: wire.Request) -> Iterator[bytes]:
        """The lines that answer a request: an error; or what was listened to, the driver, and then each GPU."""
        self._listens = groups.LISTENS in asked.groups and not asked.release
        yield from self._new()
        said, now = self._said, self._now()
        if isinstance(said, contents.Down):
            yield wire.encode_error(wire.ErrorMessage(asked.read, 0, said.reason, said.detail))
            return
        if self._listens:
            yield wire.encode_listening(wire.ListeningMessage(tuple(self._heard(said))))
        elif groups.LISTENS in asked.groups:  # nobody listens to what there is, which is blind time
            deaf = (
                wire.ListeningPeriod(uuid, now, now) for uuid in dict.fromkeys(heard.uuid for heard in said.listening)
            )
            yield wire.encode_listening(wire.ListeningMessage(tuple(deaf)))
        versions = said.driver_version, said.cuda_version, said.nvml_version
        yield wire.encode_driver(wire.DriverMessage(asked.read, *versions, len(said.gpus)))
        for gpu in sorted(said.gpus, key=lambda gpu: gpu.index in asked.last):
            if gpu.index not in asked.skip:
                yield wire.encode_gpu(asked.read, groups.only(gpu, groups.told(asked.groups, release=asked.release)))

    def unasked(self) -> Iterator[bytes]:
        """The XID events of a frame that has come, if somebody listens."""
        return self._new() if self._listens else iter(())

    def _new(self) -> Iterator[bytes]:
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return  # the node is being taken down
        if text == self._text:
            return
        self._text, self._said = text, contents.reading({contents.NVML: text})
        if isinstance(self._said, contents.Down):
            return
        now = self._now()
        self._since = {heard.uuid: now - heard.since_seconds for heard in self._said.listening}
        for xid in self._said.xids if self._listens else ():
            yield wire.encode_xid(wire.XidMessage(*xid[:4], now - xid.age_seconds, xid.times))

    def _heard(self, said: NvmlReading) -> Iterator[wire.ListeningPeriod]:
        now = self._now()
        return (
            wire.ListeningPeriod(heard.uuid, self._since[heard.uuid], now - heard.until_seconds)
            for heard in said.listening
        )


def main(path: Path) -> None:
    """Answer each line of stdin until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which closes our stdin
    serve(Player(path))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
