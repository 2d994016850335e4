"""`python -m gpumap.agent.nvml_worker [--library PATH]`: requests on stdin, answers on stdout (see `wire`).

Ends at once when stdin does: whoever started it is gone, or has no more use for it. Imports little, to start fast.
"""

import gc
import os
import signal
import sys
import threading
from typing import NoReturn

from gpumap.agent.nvml_worker import wire
from gpumap.agent.nvml_worker.library import Library
from gpumap.agent.nvml_worker.output import Output
from gpumap.agent.nvml_worker.read_scheduler import ReadScheduler


def main(arguments: list[str]) -> NoReturn:
    library = _library_path(arguments)
    # With it, NVML counts MPS locality domains instead of GPUs (nvml.h 13.5), and most calls are not supported.
    os.environ.pop("NVML_MPS_DEVICE_ENUMERATION", None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which ends us
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # likewise
    threading.excepthook = _die
    gc.freeze()  # a reading leaves no cycles behind, and what was imported stays
    scheduler = ReadScheduler(Library(library), Output(), os._exit)
    threading.Thread(target=scheduler.run, name="scheduler", daemon=True).start()
    for line in sys.stdin.buffer:
        try:
            scheduler.ask(wire.decode_request(line))
        except ValueError as error:
            sys.stderr.write(f"not a request: {error}\n")
            os._exit(2)
    os._exit(0)  # a thread may hang in the driver: nothing is waited for


def _library_path(arguments: list[str]) -> str | None:
    match arguments:
        case []:
            return None
        case ["--library", path]:
            return path
    raise SystemExit("usage: python -m gpumap.agent.nvml_worker [--library PATH]")


def _die(crash: threading.ExceptHookArgs) -> None:
    """A mistake of ours ends the process, as one of the library's would; the service tells, and starts another."""
    import traceback  # not before: a worker that lives has no use for it

    traceback.print_exception(crash.exc_value)
    sys.stderr.flush()
    os._exit(70)


if __name__ == "__main__":
    main(sys.argv[1:])
