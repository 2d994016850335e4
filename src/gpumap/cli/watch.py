"""Shows the maps of nodes once, or again and again until a key or a signal ends it.

On a terminal it repaints at each answer, after keys, and when the window changes. A watch goes on after an agent's
failure; a single command does not.
"""

from __future__ import annotations

import argparse
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

from gpumap.cli.args import seconds_of
from gpumap.cli.main import before_leaving, print_notices, until_stopped
from gpumap.cli.rows import NodeMaps, NodeMapStream
from gpumap.cli.screen import (
    Report,
    View,
    collected_long_ago,
    is_dumb,
    is_interactive,
    lines_above,
    notices_of,
    screen_of_stdout,
    take_any_text,
    text_of,
    warn_if_stale,
)
from gpumap.cli.table import Shape
from gpumap.cli.terminal import Screen, repainted
from gpumap.cli.unknowns import is_blind
from gpumap.model.errors import FatalError, UsageError
from gpumap.model.formatting import one_line, printable

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The terminal's second screen, without a cursor. The first one stays as it was."""
_MARK_PASTES, _MARK_NO_PASTES = "\x1b[?2004h", "\x1b[?2004l"
_KEY = re.compile(r"\x1b\[200~.*?\x1b\[201~|\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|.", re.DOTALL)
_UNMARKED_PASTE = re.compile(r"[^\x1b\r\n][\r\n]+[^\x1b\r\n]")
"""Lines that arrive at once: some terminals do not mark pastes."""
_LEAVE_SECONDS = 1.0
"""How long a terminal that takes no output delays the end."""
PASTE_BEGIN, PASTE_END = "\x1b[200~", "\x1b[201~"
"""A terminal sends them around pasted text. All of it is one key, which is text of the filter, or does nothing."""
KEY_NAMES = {
    **{"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "k": "up", "j": "down"},
    **{"\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[H": "home", "\x1b[F": "end", "\x1bOH": "home"},
    **{"\x1bOF": "end", "\x1b[1~": "home", "\x1b[4~": "end"},
    **{"\x1b": "escape", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace"},
}


_Events = asyncio.Queue[NodeMaps | FatalError | str | None]


def read_view(args: argparse.Namespace, report: Report, shape: Shape, head: str, interval: str) -> View:
    """Read how the report is shown, and how often: `interval` is the default of --interval. Raises UsageError."""
    live = report.window is not None and not args.once and args.output in ("table", "wide") and is_interactive()
    interval_seconds = seconds_of("--interval", args.interval or interval)
    if args.interval is not None and not (args.watch or live):
        raise UsageError("--interval requires --watch")
    return View(report, args.output, shape, head, args.watch or live, interval_seconds, live)


async def show_live(answers: NodeMapStream, view: View) -> int:
    """Show the answers until `q` is pressed or the terminal is closed. Raises FatalError if there can be none."""
    window = view.report.window(view) if view.live and view.report.window else Painter(view)
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
        self._saved_attributes = termios.tcgetattr(self._input)
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
        quit_handler = signal.signal(signal.SIGQUIT, self._quit)
        before_leaving.append(self._restore)
        self._loop.add_reader(self._input, self._read)
        try:
            self._take()
            yield
        finally:
            self._loop.remove_reader(self._input)
            self._restore()
            before_leaving.remove(self._restore)
            signal.signal(signal.SIGQUIT, quit_handler)
            for number in handlers:
                self._loop.remove_signal_handler(number)

    def _take(self) -> None:
        self._is_taken = True
        tty.setcbreak(self._input, termios.TCSANOW)
        print(end=self._enter, flush=True)

    def _restore(self) -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal was closed
            if self._is_taken:
                termios.tcsetattr(self._input, termios.TCSANOW, self._saved_attributes)
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


def scrolled(offset: int, key: str, page: int) -> int | None:
    """Return the first row that is shown after a key; `None` if the key does not scroll."""
    moves = {"up": -1, "down": 1, "page up": -page, "page down": page, "home": -offset, "end": 1 << 30}
    return max(offset + moves[key], 0) if key in moves else None


class Painter:
    """Shows one answer after the other: over the last one on a terminal, else below it."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.in_place = sys.stdout.isatty() and not is_dumb() and view.form in ("table", "wide")
        self._last = ""
        self._failed = ""
        self._old = ""
        self._notices: list[str] = []
        self._begun = False
        self._moved = False
        self._offset, self._page = 0, 1
        """The first line that is shown of the report, below its titles; and how many there is room for."""

    def take(self, event: NodeMaps | FatalError | str) -> bool:
        """Take an answer, a failure or a key. Return whether the program goes on."""
        if not isinstance(event, str):
            self.show(event)
            return True
        offset = scrolled(self._offset, KEY_NAMES.get(event, event), self._page)
        self._offset = self._offset if offset is None else offset
        self._moved = True
        return event != "q"

    def paint(self) -> None:
        if self._moved:
            self._repaint(screen_of_stdout())

    def show(self, answer: NodeMaps | FatalError) -> None:
        """Show an answer. After a failure print its reason once, and keep what was shown last."""
        screen, self._moved = screen_of_stdout(), False
        try:
            if isinstance(answer, FatalError):
                raise answer
            text, notices = text_of(answer, self._view, screen), notices_of(answer, self._view)
        except FatalError as error:
            self._show_failure(one_line(error), screen)
            return
        self._failed = ""
        self._last = text
        was_old, self._old = self._old, collected_long_ago(answer, time.time())
        last_notices, self._notices = self._notices, notices
        if not self.in_place:
            print_notices(notice for notice in self._notices if notice not in last_notices)
        if self._old and not was_old and not self.in_place:
            warn_if_stale(answer)
        if self.in_place:
            self._repaint(screen)
        else:
            separator = {"yaml": "---\n", "json": ""}.get(self._view.form, "\n")
            print(end=(separator if self._begun else "") + text, flush=True)
        self._begun = True

    def leave(self) -> None:
        """Let the shell's prompt begin on a line of its own."""
        if self.in_place:
            print(flush=True)

    def _show_failure(self, failure: str, screen: Screen) -> None:
        if self.in_place:
            self._failed = failure
            self._repaint(screen)
        elif failure != self._failed:
            print_notices([f"{failure}; trying again"])
            self._failed = failure

    def _repaint(self, screen: Screen) -> None:
        """Paint what was last answered."""
        head = f"{self._view.head}   every {self._view.interval_seconds:g}s   {time.strftime('%H:%M:%S')}"
        size = shutil.get_terminal_size()
        columns = max(size.columns, 1)
        lines = [screen.paint(printable(head), "bold")]
        lines += lines_above([*self._notices, self._old], self._failed, screen, columns, answered=bool(self._last))
        report = self._last.splitlines()
        if is_interactive() and len(lines) + 1 + len(report) > size.lines:
            report = self._scrolled(report, size.lines - len(lines) - 2)
        print(end=repainted([*lines, "", *report], columns, size.lines), flush=True)

    def _scrolled(self, report: list[str], room: int) -> list[str]:
        """Return the lines of a report that have room, and one on the others. The titles stay."""
        titles = 1 if self._view.shape.headers else 0
        self._page, rows = max(room - titles, 1), report[titles:]
        self._offset = min(self._offset, max(len(rows) - self._page, 0))
        end = self._offset + self._page
        foot = f"{self._offset + 1}-{min(end, len(rows))} of {len(rows)} lines   ↑↓ PgUp PgDn scroll  q quit"
        return [*report[:titles], *rows[self._offset : end], foot]


def run(answers: NodeMapStream, view: View) -> int:
    """Show the answers until they end or a signal comes. Return the exit code."""
    return asyncio.run(until_stopped(_show(answers, view)))


async def _show(answers: NodeMapStream, view: View) -> int:
    """Print the first answer, or each. Return 1 if a node is missing, or neither its kubelet nor NVML answers."""
    take_any_text()
    painter = Painter(view) if view.watch else None
    if view.live or (painter is not None and painter.in_place and is_interactive()):
        return await show_live(answers, view)
    try:
        async with contextlib.aclosing(answers):
            async for answer in answers:
                if painter is not None:
                    painter.show(answer)
                    continue
                if isinstance(answer, FatalError):
                    raise answer
                text, notices = text_of(answer, view, screen_of_stdout()), notices_of(answer, view)
                print(end=text, flush=True)
                print_notices(notices)
                knows_nothing = any(map(is_blind, answer.maps))
                if not knows_nothing:  # the notices say so already
                    warn_if_stale(answer)
                return 1 if answer.missing or knows_nothing else 0
    finally:
        if painter is not None:
            painter.leave()
    return 1
