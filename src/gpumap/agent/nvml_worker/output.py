"""The worker's end of the pipe to the service: whole lines from any thread, gathered, so that a write carries many."""

import os
import threading


class Output:
    """What a library prints goes to stderr from now on; only these lines go where stdout went."""

    def __init__(self) -> None:
        self._pipe = os.dup(1)
        os.dup2(2, 1)
        self._lines: list[bytes] = []
        self._adding = threading.Lock()
        self._writing = threading.Lock()  # of its own: a pipe that is full must keep nobody from adding

    def add(self, line: bytes) -> None:
        """Keep a line until `flush`."""
        with self._adding:
            self._lines.append(line)

    def flush(self) -> None:
        """Write what was added. Ends the process where nobody reads any more."""
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
        """Write what was added, and close the pipe: nobody can write any more, and waits for ever."""
        self.flush()
        self._writing.acquire()
        os.close(self._pipe)
