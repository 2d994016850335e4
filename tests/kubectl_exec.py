"""Plays `kubectl exec [-i] [-t] POD -- COMMAND`: runs the command as a container's runtime does.

With -t the command has a terminal of its own, of the size of kubectl's, and TERM=xterm; kubectl's terminal is raw and
passes on every key. Without -t it has pipes, and no TERM.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import tty


def main(words: list[str]) -> int:
    command = words[words.index("--") + 1 :]
    flags = {letter for word in words[: words.index("--")] if word.startswith("-") for letter in word[1:]}
    environment = {name: value for name, value in os.environ.items() if name not in ("TERM", "COLUMNS", "LINES")}
    if "t" in flags:
        return with_terminal(command, environment | {"TERM": "xterm"})
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False).returncode


def with_terminal(command: list[str], environment: dict[str, str]) -> int:
    child, terminal = pty.fork()
    if not child:
        os.execvpe(command[0], command, environment)

    def resize(*_: object) -> None:
        size = fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)

    resize()
    signal.signal(signal.SIGWINCH, resize)
    before = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        relay(terminal)
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def relay(terminal: int) -> None:
    """Pass on what is typed and what is written, until the command ends."""
    while True:
        for one in select.select([0, terminal], [], [])[0]:
            try:
                part = os.read(one, 1 << 16)
            except OSError:  # the command's side is closed
                return
            os.write(1 if one == terminal else terminal, part)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
