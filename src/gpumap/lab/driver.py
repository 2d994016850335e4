"""A fake of the NVML worker: `python -m gpumap.lab.driver FOLDER`, with the same lines on stdin and stdout.

It answers with the content of FOLDER/nvml.json at that moment, in the form of a capture, and sends each XID event of
FOLDER/xids once. It ends when stdin does.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import get_type_hints

from msgspec import structs

from gpumap.agent.nvml_worker import wire
from gpumap.lab.capture import contents
from gpumap.model.observations import NvmlReading
from gpumap.model.readings import CARD, GpuReading, Uuid

POLL_SECONDS = 0.2
"""How soon the driver sends a line that no request asked for."""
XIDS = "xids"
"""The folder of events: each file has lines of the worker. The driver removes a file when it sends its lines."""
HANGS = "--hangs"
"""With this flag a hung GPU answers when its fault is over. Else it answers at once that it hangs."""
LISTENING_GROUP = "health"
"""The group for which the worker listens to XID events."""


class Player:
    """Answers requests with the current files. `now` is the monotonic clock."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic, *, hangs: bool = False) -> None:
        self._folder = folder
        self._now = clock
        self._hangs = hangs
        self._text = b""
        self._reading: NvmlReading | contents.Down = contents.Down("", "")
        self._since: dict[Uuid, float] = {}  # on this clock; each content counts once
        self._asked = wire.Request(0, 0.0, 0.0)
        self._pending: dict[int, int] = {}

    @property
    def _listens(self) -> bool:
        return LISTENING_GROUP in self._asked.groups and not self._asked.release

    def read(self, request: wire.Request) -> Iterator[bytes]:
        """Return the lines of an answer: an error; or the listening periods, the driver, and each GPU that answers."""
        self._asked = request
        self._load()
        xids = list(self._xids())
        yield from xids if self._listens else ()
        reading, now_seconds = self._reading, self._now()
        if isinstance(reading, contents.Down):
            yield wire.encode(wire.ErrorMessage(request.read, 0, reading.reason, reading.detail))
            return
        if self._listens:
            yield wire.encode(wire.ListeningMessage(tuple(self._periods(reading))))
        elif LISTENING_GROUP in request.groups:  # the worker does not listen, which is blind time
            closed = (
                wire.ListeningPeriod(uuid, now_seconds, now_seconds)
                for uuid in dict.fromkeys(period.uuid for period in reading.listening)
            )
            yield wire.encode(wire.ListeningMessage(tuple(closed)))
        versions = reading.driver_version, reading.cuda_version, reading.nvml_version
        busy = tuple(sorted(self._pending))
        yield wire.encode(wire.DriverMessage(request.read, *versions, len(reading.gpus), busy))
        for gpu in sorted(reading.gpus, key=lambda gpu: gpu.index in request.last_gpus):
            if gpu.index in request.skip or gpu.index in busy:
                continue
            if self._hangs and gpu.fault == "hung":
                self._pending[gpu.index] = request.read
            else:
                yield self._answer(request.read, gpu)

    def unasked(self) -> Iterator[bytes]:
        """The XID events that have come, if there is a listener, and GPUs that hung and no longer do."""
        if self._listens or self._pending:
            self._load()
        yield from self._xids() if self._listens else ()
        for gpu in self._reading.gpus if isinstance(self._reading, NvmlReading) else ():
            if gpu.index in self._pending and gpu.fault != "hung":
                yield self._answer(self._pending.pop(gpu.index), gpu)

    def _answer(self, read: int, gpu: GpuReading) -> bytes:
        return wire.encode(wire.GpuMessage(read, reading_for(gpu, self._asked.groups, release=self._asked.release)))

    def _load(self) -> None:
        try:
            text = (self._folder / contents.NVML).read_bytes()
        except FileNotFoundError:
            return  # the node is being removed
        if text == self._text:
            return
        self._text, self._reading = text, contents.reading({contents.NVML: text})
        if isinstance(self._reading, NvmlReading):
            now_seconds = self._now()
            self._since = {period.uuid: now_seconds - period.since_seconds for period in self._reading.listening}

    def _xids(self) -> Iterator[bytes]:
        """The events that have come. An event that comes while there is no listener is lost."""
        for path in sorted((self._folder / XIDS).glob("*")):
            yield path.read_bytes()
            path.unlink()

    def _periods(self, reading: NvmlReading) -> Iterator[wire.ListeningPeriod]:
        now_seconds = self._now()
        return (
            wire.ListeningPeriod(period.uuid, self._since[period.uuid], now_seconds - period.until_seconds)
            for period in reading.listening
        )


# --- the groups of families -------------------------------------------------------------------------------------------

_HINTS = get_type_hints(GpuReading, include_extras=True)
GROUP_FIELDS: Mapping[str, tuple[str, ...]] = {
    group: tuple(name for name, hint in _HINTS.items() if group in getattr(hint, "__metadata__", ()))
    for group in ("health", "links", "gpm", "codec", CARD)
}
_BLANK = GpuReading(index=-1)


def reading_for(gpu: GpuReading, groups: Collection[str], *, release: bool = False) -> GpuReading:
    """A reading without what these groups do not need: the NVML worker makes no calls for the others.

    With `release` it has nothing of GPM, which needs two samples, and no end of NVML between them.
    """
    if release:
        groups = [group for group in groups if group != "gpm"]
        gpu = structs.replace(gpu, pcie_source=None, pcie_transmit_bytes=None, pcie_receive_bytes=None)
    unasked = [group for group in GROUP_FIELDS if group not in groups]
    if not unasked:
        return gpu
    gpu = structs.replace(gpu, **{name: getattr(_BLANK, name) for group in unasked for name in GROUP_FIELDS[group]})
    return (
        structs.replace(gpu, instances=tuple(structs.replace(instance, activity=None) for instance in gpu.instances))
        if "gpm" in unasked
        else gpu
    )


# --- the program ------------------------------------------------------------------------------------------------------


def main(folder: Path, *, hangs: bool) -> None:
    """Answer each line of stdin until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which closes stdin
    player = Player(folder, hangs=hangs)
    received = b""
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
        if readable:
            chunk = os.read(sys.stdin.fileno(), 65536)
            if not chunk:
                return
            received += chunk
        *lines, received = received.split(b"\n")
        _write(player.unasked())
        for line in lines:
            _write(player.read(wire.decode_request(line)))


def _write(lines: Iterable[bytes]) -> None:
    sys.stdout.buffer.write(b"".join(lines))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), hangs=HANGS in sys.argv)
    except BrokenPipeError:  # the service has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
