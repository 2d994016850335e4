"""The worker's end of the pipe to the service: whole lines from any thread, gathered, so that a write carries many."""

import os
import threading


class Output:
    """What a library prints goes to stderr from now on; only these lines go where stdout went."""

    def __init__(self) -> None:
        self._pipe = os.dup(1)
        os.dup2(2, 1)
        self._lines: list[bytes] = []
        self._lock = threading.Lock()

    def add(self, line: bytes) -> None:
        """Keep a line until `flush`."""
        self._lines.append(line)

    def flush(self) -> None:
        """Write what was added. Ends the process where nobody reads any more."""
        with self._lock:
            lines, self._lines = self._lines, []
            left = memoryview(b"".join(lines))
            try:
                while left:
                    left = left[os.write(self._pipe, left) :]
            except OSError:
                os._exit(0)
