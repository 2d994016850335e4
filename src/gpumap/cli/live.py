"""`gpumap top` and `--watch` on a terminal: repaint at each answer, at each key, and when the window changes."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import re
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import replace

from gpumap.cli.node_maps import NodeMaps, NodeMapStream
from gpumap.cli.painting import Painter, View, collected_long_ago, lines_above, notices_of, screen_of_stdout
from gpumap.cli.tables.live import Live, frame, pressed, remembered, scrolled
from gpumap.cli.terminal import repainted, wrapped
from gpumap.model.errors import FatalError
from gpumap.model.shown import one_line, printable

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The terminal's second screen, without a cursor. The first one stays as it was."""
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|.", re.DOTALL)
_NOTICES_PART = 6
"""The part of a window that notices may take."""
_NAMES = {
    **{"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "k": "up", "j": "down"},
    **{"\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[H": "home", "\x1b[F": "end", "\x1bOH": "home"},
    **{"\x1bOF": "end", "\x1b[1~": "home", "\x1b[4~": "end"},
    **{"\x1b": "escape", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace"},
}


async def show_live(answers: NodeMapStream, view: View) -> int:
    """Show the answers until `q` is pressed or the terminal is closed."""
    window = _Window(view) if view.live else _Watch(view)
    events = asyncio.Queue[NodeMaps | FatalError | str | None]()
    loop = asyncio.get_running_loop()
    with _keys(events, view.live), contextlib.ExitStack() as stack:
        loop.add_signal_handler(signal.SIGWINCH, events.put_nowait, "resize")
        stack.callback(loop.remove_signal_handler, signal.SIGWINCH)
        asking = asyncio.create_task(_ask(answers, events))
        stack.callback(asking.cancel)
        window.paint()
        while (event := await events.get()) is not None and window.take(event):
            window.paint()
    return 0


async def _ask(answers: NodeMapStream, events: asyncio.Queue[NodeMaps | FatalError | str | None]) -> None:
    async with contextlib.aclosing(answers):
        async for answer in answers:
            events.put_nowait(answer)


@contextlib.contextmanager
def _keys(events: asyncio.Queue[NodeMaps | FatalError | str | None], second_screen: bool) -> Iterator[None]:
    """Put each key that is pressed into the queue, `None` if no more can come. Restores the terminal at the end."""
    enter, leave = (_ENTER, _LEAVE) if second_screen else ("", "\n")
    terminal, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read() -> None:
        try:
            data = os.read(terminal, 4096)
        except OSError:
            data = b""
        if not data:
            loop.remove_reader(terminal)
            events.put_nowait(None)
        for key in _KEY.findall(decoder.decode(data)):
            events.put_nowait(key)

    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    without_suspend = termios.tcgetattr(terminal)
    without_suspend[6][termios.VSUSP] = b"\0"  # a shell would prompt in the middle of the frame
    termios.tcsetattr(terminal, termios.TCSADRAIN, without_suspend)
    loop.add_reader(terminal, read)
    print(end=enter, flush=True)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        with contextlib.suppress(OSError):  # the terminal was closed
            print(end=leave, flush=True)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


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
