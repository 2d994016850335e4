"""The log on standard error: one line per event, as text or JSON, in UTC. Only the level debug has tracebacks."""

import json
import logging
import sys
import time

from gpumap.model.text import printable


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


def _without_traceback(record: logging.LogRecord) -> bool:
    """Replace a library's traceback by the name and text of the error."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        record.msg, record.args = f"{record.getMessage()} error={type(error).__name__} detail={str(error)!r}", None
    record.exc_info = record.exc_text = None
    return True


def set_up_log(form: str, level: str) -> None:
    """Send the log to standard error."""
    logging.raiseExceptions = False  # a closed standard error must not cause a traceback
    handler = logging.StreamHandler(sys.stderr)
    if level != "debug":
        handler.addFilter(_without_traceback)
    handler.setFormatter(_Json() if form == "json" else _Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("gpumap").setLevel(level.upper())
