"""The log on standard error: one line per event, as text or JSON, in UTC. Only the level debug has tracebacks.

The log never waits: if no process reads standard error and its pipe is full, lines are lost, and a later line says how
many. Otherwise a blocked reader would stop collections and pages.
"""

import json
import logging
import os
import select
import sys
import time

from gpumap.model.formatting import printable


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record) if record.exc_info else printable(" ".join(super().format(record).splitlines()))


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _drop_traceback(record: logging.LogRecord) -> bool:
    """Replace a library's traceback by the name and text of the error."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        record.msg, record.args = f"{record.getMessage()} error={type(error).__name__} detail={str(error)!r}", None
    record.exc_info = record.exc_text = None
    return True


PATIENCE_SECONDS = 0.1
"""The first line that standard error does not take waits so long. The next ones do not wait."""


class _Lines(logging.Handler):
    """Writes whole lines to a file descriptor, as long as it takes them."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._unwritten = b""
        """The rest of a line that was written in part."""
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._write()
        if self._unwritten or not self._takes_more():
            self._lost += 1
            return
        if self._lost:
            lost = logging.makeLogRecord({"levelno": logging.WARNING, "levelname": "WARNING"})
            lost.msg, lost.args = "standard error was blocked: log lines are lost count=%d", (self._lost,)
            self._unwritten = self._line(lost)
            self._lost = 0
        self._unwritten += self._line(record)
        self._write()

    def _line(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def _takes_more(self) -> bool:
        """Return whether a write of PIPE_BUF bytes does not block, pipe(7). poll(2) fails if no file may be open."""
        return bool(select.select((), (self._descriptor,), (), 0.0 if self._lost else PATIENCE_SECONDS)[1])

    def _write(self) -> None:
        try:
            while self._unwritten and self._takes_more():
                self._unwritten = self._unwritten[os.write(self._descriptor, self._unwritten[: select.PIPE_BUF]) :]
        except BlockingIOError:
            pass  # another program made the descriptor non-blocking
        except OSError:
            self._unwritten = b""  # no reader will come back


def set_up_log(form: str, level: str) -> None:
    """Send the log to standard error."""
    logging.raiseExceptions = False  # a closed standard error must not cause a traceback
    handler = _Lines(sys.stderr.fileno()) if sys.stderr is not None else logging.NullHandler()
    if level != "debug":
        handler.addFilter(_drop_traceback)
    handler.setFormatter(_Json() if form == "json" else _Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("gpumap").setLevel(level.upper())
