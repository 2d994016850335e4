"""Runs a command: each failure is one line and an exit code.

It imports almost nothing by itself, so that Ctrl-C during the other imports is no traceback either.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING

from gpumap.model.errors import FatalError, UsageError

if TYPE_CHECKING:
    import signal
    from types import FrameType


def guarded(prepare: Callable[[], Callable[[], int]]) -> int:
    """Prepare and run. 0: done, or stopped by a signal; 1: failed at run time; 2: a flag or file cannot be used."""
    return _flushed(_run(prepare))


def _run(prepare: Callable[[], Callable[[], int]]) -> int:
    try:
        import signal

        # This handler is for the time before a command's event loop has its own: nothing needs a clean end yet.
        # Python may lose an exception during imports, or while it creates the loop.
        handle_ending_signals(leave)
        # `serve` releases the driver on it. By default it ends a process, and `pkill` reaches all processes of gpumap.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        return prepare()()
    except UsageError as error:
        return _failed(str(error), 2)
    except FatalError as error:
        return _failed(str(error), 1)
    except SystemExit as end:  # of argparse, after --help and --version
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        return 0  # the reader has closed the pipe
    except OSError as error:
        return _failed(error.strerror or str(error), 1)
    except MemoryError:
        return _failed("there is not enough memory", 1)
    except Exception as error:
        return _failed(f"internal error, please report it: {type(error).__name__}: {error}", 1)


def handle_ending_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """Set the handler of the signals that end a command. SIGHUP stays ignored after `nohup`."""
    import signal

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


before_leaving: list[Callable[[], object]] = []
"""Restores the terminal."""


def leave(*_: object) -> None:
    """End the process at once."""
    for step in before_leaving:
        step()
    os._exit(0)


def print_notices(sentences: Iterable[str]) -> None:
    """Print what a command reports beside its output: a line each on stderr, printable whatever names it contains."""
    from gpumap.model.formatting import one_line

    for sentence in sentences if sys.stderr is not None else ():  # print would take standard output instead
        try:
            print(f"gpumap: {one_line(sentence)}", file=sys.stderr, flush=True)
        except OSError:  # the reader has closed the pipe, or the disk is full
            _discard(sys.stderr.fileno())


def _failed(reason: str, code: int) -> int:
    print_notices([reason])
    return code


def _flushed(code: int) -> int:
    """Write what is buffered; return the exit code. Drop it if the reader has closed the pipe."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        _discard(sys.stdout.fileno())
        if not code and not isinstance(error, BrokenPipeError):
            return _failed(error.strerror or str(error), 1)
    return code


def _discard(descriptor: int) -> None:
    """Drop what cannot be written there: the interpreter flushes again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


_END_SECONDS = 3.0
"""Time for a clean end."""


async def until_stopped(work: Coroutine[None, None, int]) -> int:
    """Run to the end and return the result, or 0 if a signal comes. It cancels the work.

    The process ends at once on a second signal, or if the work does not end in time: it may be computing. The event
    loop's own handlers wait until it does not. These run between two steps of Python, and inside a regular expression.
    """
    import asyncio
    import signal

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None  # noqa: S101 -- this is a coroutine

    def stop(*_: object) -> None:
        handle_ending_signals(leave)
        signal.signal(signal.SIGALRM, leave)
        signal.setitimer(signal.ITIMER_REAL, _END_SECONDS)
        loop.call_soon_threadsafe(task.cancel)

    handle_ending_signals(stop)
    try:
        return await work
    except asyncio.CancelledError:
        return 0
    finally:
        handle_ending_signals(leave)
