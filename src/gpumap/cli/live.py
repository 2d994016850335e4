"""`gpumap top` and `--watch` on a terminal: repaint at each answer, after keys, and when the window changes."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import re
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import replace

from gpumap.cli.entry import before_leaving
from gpumap.cli.node_maps import NodeMaps, NodeMapStream
from gpumap.cli.painting import Painter, View, collected_long_ago, lines_above, notices_of, screen_of_stdout
from gpumap.cli.tables.live import PASTE_BEGIN, PASTE_END, Live, frame, pressed, remembered, scrolled
from gpumap.cli.terminal import repainted, wrapped
from gpumap.model.errors import FatalError
from gpumap.model.formatting import one_line, printable

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The terminal's second screen, without a cursor. The first one stays as it was."""
_MARK_PASTES, _MARK_NO_PASTES = "\x1b[?2004h", "\x1b[?2004l"
_KEY = re.compile(r"\x1b\[200~.*?\x1b\[201~|\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|.", re.DOTALL)
_UNMARKED_PASTE = re.compile(r"[^\x1b\r\n][\r\n]+[^\x1b\r\n]")
"""Lines that arrive at once: some terminals do not mark pastes."""
_LEAVE_SECONDS = 1.0
"""How long a terminal that takes no output delays the end."""
_NOTICES_PART = 6
"""The part of a window that notices may take."""
_NAMES = {
    **{"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "k": "up", "j": "down"},
    **{"\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[H": "home", "\x1b[F": "end", "\x1bOH": "home"},
    **{"\x1bOF": "end", "\x1b[1~": "home", "\x1b[4~": "end"},
    **{"\x1b": "escape", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace"},
}


_Events = asyncio.Queue[NodeMaps | FatalError | str | None]


async def show_live(answers: NodeMapStream, view: View) -> int:
    """Show the answers until `q` is pressed or the terminal is closed. Raises FatalError if there can be none."""
    window = _Window(view) if view.live else _Watch(view)
    events = _Events()
    with _Terminal(events, view.live).taken():
        asking = asyncio.create_task(_ask(answers, events))
        asking.add_done_callback(lambda _: events.put_nowait(None))
        try:
            window.paint()
            while (event := await events.get()) is not None and window.take(event):
                if events.empty():  # one frame for all keys that have arrived
                    window.paint()
            return asking.result() if asking.done() else 0
        finally:
            asking.cancel()


async def _ask(answers: NodeMapStream, events: _Events) -> int:
    async with contextlib.aclosing(answers):
        async for answer in answers:
            events.put_nowait(answer)
    return 0


class _Terminal:
    """The terminal while a program reads keys from it: it does not show them, and perhaps it has its second screen.

    It is restored however the program ends or stops, except by SIGKILL and SIGSTOP.
    """

    def __init__(self, events: _Events, second_screen: bool) -> None:
        enter, leave = (_ENTER, _LEAVE) if second_screen else ("", "\n")
        self._enter, self._leave = enter + _MARK_PASTES, _MARK_NO_PASTES + leave
        self._events = events
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._input, self._output = sys.stdin.fileno(), sys.stdout.fileno()
        self._before = termios.tcgetattr(self._input)
        self._is_taken = False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unread = ""

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Put each key that is pressed, each paste and each change of the window into the queue; `None` if no more can
        come."""
        handlers = {signal.SIGWINCH: self._resize, signal.SIGTSTP: self._suspend, signal.SIGCONT: self._resume}
        for number, handler in handlers.items():
            self._loop.add_signal_handler(number, handler)
        before_quit = signal.signal(signal.SIGQUIT, self._quit)
        before_leaving.append(self._restore)
        self._loop.add_reader(self._input, self._read)
        try:
            self._take()
            yield
        finally:
            self._loop.remove_reader(self._input)
            self._restore()
            before_leaving.remove(self._restore)
            signal.signal(signal.SIGQUIT, before_quit)
            for number in handlers:
                self._loop.remove_signal_handler(number)

    def _take(self) -> None:
        self._is_taken = True
        tty.setcbreak(self._input, termios.TCSANOW)
        print(end=self._enter, flush=True)

    def _restore(self) -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal was closed
            if self._is_taken:
                termios.tcsetattr(self._input, termios.TCSANOW, self._before)
                self._is_taken = False
                if select.select([], [self._output], [], _LEAVE_SECONDS)[1]:
                    os.write(self._output, self._leave.encode())

    def _quit(self, *_: object) -> None:
        self._restore()
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGQUIT)

    def _suspend(self) -> None:
        self._restore()
        self._loop.remove_signal_handler(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGTSTP)
        self._loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        self._loop.call_soon(self._resume)  # without a shell that continues it, it does not stop

    def _resume(self) -> None:
        if self._task is not None and not self._task.cancelling():  # else it may stop again, in the background
            with contextlib.suppress(OSError, termios.error):
                self._take()
            self._resize()

    def _resize(self) -> None:
        self._events.put_nowait("resize")

    def _read(self) -> None:
        try:
            data = os.read(self._input, 4096)
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._input)
            self._events.put_nowait(None)
        text = self._unread + self._decoder.decode(data)
        if PASTE_BEGIN not in text and _UNMARKED_PASTE.search(text):
            text = PASTE_BEGIN + text + PASTE_END
        begin = text.find(PASTE_BEGIN, text.rfind(PASTE_END) + 1)
        end = begin if begin >= 0 else len(text)
        self._unread = text[end:]
        for key in _KEY.findall(text[:end]):
            self._events.put_nowait(key)


class _Watch:
    """A watch, which keys scroll."""

    def __init__(self, view: View) -> None:
        self._painter = Painter(view)
        self._moved = False

    def take(self, event: NodeMaps | FatalError | str) -> bool:
        """Take an answer, a failure or a key. Return whether the program goes on."""
        if isinstance(event, str):
            offset = scrolled(self._painter.offset, _NAMES.get(event, event), self._painter.page)
            self._painter.offset = self._painter.offset if offset is None else offset
            self._moved = True
            return event != "q"
        self._painter.paint(event)
        self._moved = False
        return True

    def paint(self) -> None:
        if self._moved:
            self._painter.repaint(screen_of_stdout())


class _Window:
    """What was last answered, and how the reader wants it shown."""

    def __init__(self, view: View) -> None:
        self._view = view
        shape = view.shape
        self._live = Live(order=shape.order or "finding", reverse=shape.reverse, processes=shape.processes)
        self._maps: NodeMaps | None = None
        self._failed = ""
        self._page = 1

    def take(self, event: NodeMaps | FatalError | str) -> bool:
        """Take an answer, a failure or a key. Return whether the program goes on."""
        if isinstance(event, str):
            key = event if self._live.typing and len(event) == 1 and event.isprintable() else _NAMES.get(event, event)
            live = pressed(self._live, key, self._page)
            self._live = live or self._live
            return live is not None
        if isinstance(event, FatalError):
            self._failed, self._live = one_line(event), remembered(self._live, None)
        else:
            self._maps, self._failed, self._live = event, "", remembered(self._live, event)
        return True

    def paint(self) -> None:
        size, screen = shutil.get_terminal_size(), screen_of_stdout()
        columns = max(size.columns, 1)
        order = f"by {self._live.order}{', reversed' if self._live.reverse else ''}"
        often = f"every {self._view.interval_seconds:g}s"
        parts = (*self._nodes(), order, often, time.strftime("%H:%M:%S"), self._view.head)
        head = [screen.paint(printable("   ".join(parts)), "bold")]
        head += [screen.paint(line, "red") for line in self._notice_lines(columns, max(size.lines // _NOTICES_PART, 1))]
        head += lines_above((), self._failed, screen, columns, answered=self._maps is not None)
        if self._maps is None:
            lines = head if self._failed else [*head, "", "Waiting for the first answer …"]
        else:
            shape = replace(self._view.shape, screen=screen)
            lines, self._page, self._live = frame(self._maps, self._live, shape, head, size.lines)
        print(end=repainted(lines, columns, size.lines), flush=True)

    def _nodes(self) -> Iterator[str]:
        if self._maps is not None and self._maps.fleet:
            yield f"{len(self._maps.maps)} nodes"
        elif self._maps is not None:
            (node,) = self._maps.maps
            models = {gpu.model for gpu in node.gpus}
            yield node.name
            yield f"{len(node.gpus)} x {models.pop() or 'GPU'}" if len(models) == 1 else f"{len(node.gpus)} GPUs"

    def _notice_lines(self, columns: int, most: int) -> list[str]:
        """Return what is wrong, in at most so many lines: a small window has room for devices too."""
        maps = self._maps
        notices = [] if maps is None else [*notices_of(maps, self._view), collected_long_ago(maps, time.time())]
        lines = [line for one in notices if one for line in wrapped(one, max(columns - 2, 1))]
        return lines if len(lines) <= most else [*lines[: most - 1], f"{lines[most - 1]} …"]
