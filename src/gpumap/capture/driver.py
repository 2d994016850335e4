"""Stands in for the NVML worker: `python -m gpumap.capture.driver FILE`, spoken to in the same lines.

Answers with what the file, an nvml.json, says at that moment. Ends when stdin does.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from gpumap.capture import contents
from gpumap.nvml_worker import wire


def answers(asked: wire.Request, files: dict[str, bytes]) -> Iterator[bytes]:
    """The lines that answer a request: an error, or the driver and then each GPU."""
    said = contents.reading(files)
    if isinstance(said, contents.Down):
        yield wire.encode_error(wire.ErrorSaid(asked.read, 0, said.reason, said.detail))
        return
    versions = said.driver_version, said.cuda_version, said.nvml_version
    yield wire.encode_driver(wire.DriverSaid(asked.read, *versions, len(said.gpus)))
    for gpu in sorted(said.gpus, key=lambda gpu: gpu.index in asked.last):
        if gpu.index not in asked.skip:
            yield wire.encode_gpu(asked.read, gpu)


def main(path: Path) -> None:
    """Answer each line of stdin until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which closes our stdin
    for line in sys.stdin.buffer:
        asked = wire.decode_request(line)
        sys.stdout.buffer.write(b"".join(answers(asked, {contents.NVML: path.read_bytes()})))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
