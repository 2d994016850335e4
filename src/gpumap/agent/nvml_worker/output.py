"""The worker's end of the pipe to the service: whole lines from any thread. One write carries many lines."""

import os
import threading


class Output:
    """From now on, prints of a library go to stderr; only these lines go to stdout."""

    def __init__(self) -> None:
        self._pipe = os.dup(1)
        os.dup2(2, 1)
        self._lines: list[bytes] = []
        self._adding = threading.Lock()
        self._writing = threading.Lock()  # its own lock: a full pipe must not stop threads that add lines

    def add(self, line: bytes) -> None:
        """Keep a line until `flush`."""
        with self._adding:
            self._lines.append(line)

    def flush(self) -> None:
        """Write the added lines. End the process if no process reads them."""
        with self._writing:
            with self._adding:
                lines, self._lines = self._lines, []
            left = memoryview(b"".join(lines))
            try:
                while left:
                    left = left[os.write(self._pipe, left) :]
            except OSError:
                os._exit(0)

    def close(self) -> None:
        """Write the added lines and close the pipe. Later writers wait for ever."""
        self.flush()
        self._writing.acquire()
        os.close(self._pipe)
