"""`python -m gpumap.agent.nvml_worker [--library PATH]`: requests on stdin, answers on stdout (see `wire`).

It ends as soon as stdin ends: then the parent process exited or no longer needs it. It imports little, to start fast.
"""

import contextlib
import gc
import os
import resource
import signal
import sys
import threading
from types import SimpleNamespace
from typing import NoReturn

if __name__ == "__main__":
    # pynvml and msgspec import these, which the worker does not use. They cost 2.5 MiB and 40 ms of its start.
    sys.modules |= {"ctypes.util": SimpleNamespace(find_library=None), "typing_extensions": None}  # type: ignore[dict-item]

from gpumap.agent.nvml_worker import wire
from gpumap.agent.nvml_worker.library import Library
from gpumap.agent.nvml_worker.read_scheduler import ReadScheduler

DESCRIPTORS = 1024
"""The usual soft limit of open files, for which libraries are made: select(2) takes only these. The service raises its
own."""


def main(arguments: list[str]) -> NoReturn:
    library = _library_path(arguments)
    # With it, NVML counts MPS locality domains instead of GPUs (nvml.h 13.5), and most calls are not supported.
    os.environ.pop("NVML_MPS_DEVICE_ENUMERATION", None)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # refused: see `own_process.raise_limit`
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(DESCRIPTORS, hard), hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which ends the worker
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the same
    threading.excepthook = _die
    gc.freeze()  # a reading leaves no cycles behind, and imported modules stay
    scheduler = ReadScheduler(Library(library), wire.Output(), os._exit)
    threading.Thread(target=scheduler.run, name="scheduler", daemon=True).start()
    for line in sys.stdin.buffer:
        try:
            scheduler.ask(wire.decode_request(line))
        except ValueError as error:
            sys.stderr.write(f"not a request: {error}\n")
            os._exit(2)
    os._exit(0)  # a thread may hang in the driver: do not wait


def _library_path(arguments: list[str]) -> str | None:
    match arguments:
        case []:
            return None
        case ["--library", path]:
            return path
    raise SystemExit("usage: python -m gpumap.agent.nvml_worker [--library PATH]")


def _die(crash: threading.ExceptHookArgs) -> None:
    """A bug ends the process, as a crash of the library does; the service reports it and starts another."""
    import traceback  # import it late: a running worker does not need it

    traceback.print_exception(crash.exc_value)
    sys.stderr.flush()
    os._exit(70)


if __name__ == "__main__":
    main(sys.argv[1:])
