"""The tables on a real terminal: width, colours, repainting in place, and a watch that outlives its agent."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from gpumap.agent.published import published
from gpumap.cli.terminal import cells
from tests.agent import PATIENCE_SECONDS
from tests.command import ForkOnTerminal, gpumap, run_command_in_loop
from tests.demo_process import GPUMAP, environment
from tests.snapshots import busy_node

HOME, TO_END = "\x1b[H", "\x1b[J"
STEERING = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes] | ForkOnTerminal, master: int) -> None:
        self.process = process
        self.said = ""
        self._master = master
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        os.set_blocking(master, False)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    async def until(self, holds: Callable[[str], bool], what: str) -> str:
        """Read on until what was written holds."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds(self._read()):
            assert time.monotonic() < deadline, f"{what}: {self.said!r}"
            assert self.process.poll() is None, f"{what}: it ended with {self.process.returncode}: {self.said!r}"
            await asyncio.sleep(0.02)
        return self.said

    async def end(self) -> str:
        """All that was written when it has ended by itself."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.said
            self._read()
            await asyncio.sleep(0.02)
        return self._read()

    async def press(self, *keys: str, shows: Callable[[str], bool] = lambda _: True) -> str:
        """Press keys one after the other, and give a frame that was begun after the last one and is as it should be,
        without colours."""
        for key in keys:
            self._read()
            seen = len(self.frames)
            os.write(self._master, key.encode())
            await self.until(lambda _, seen=seen: len(self.frames) > seen, f"no frame after {key!r}")  # type: ignore[misc]
        await self.until(lambda _: len(self.frames) > seen + 2 and shows(self.shown), f"not that after {keys!r}")
        return self.shown

    @property
    def shown(self) -> str:
        """The last frame that is whole."""
        return STEERING.sub("", self.frames[-2])

    async def interrupt(self) -> int | None:
        """Press Ctrl-C, and give the exit code."""
        os.write(self._master, b"\x03")
        await self.end()
        return self.process.returncode

    def _read(self) -> str:
        with contextlib.suppress(BlockingIOError, OSError):  # nothing there, or it has ended
            while part := os.read(self._master, 1 << 16):
                self.said = (self.said + self._decoder.decode(part)).replace("\r\n", "\n")
        return self.said

    @property
    def frames(self) -> list[str]:
        """What was painted, one after the other."""
        return self.said.split(HOME)[1:]


def terminal(
    *arguments: str, columns: int = 200, lines: int = 60, **variables: str
) -> contextlib.AbstractContextManager[Terminal]:
    """Call gpumap's `main` in a fork, on a new terminal of that size."""

    def start(slave: int, surroundings: Mapping[str, str]) -> ForkOnTerminal:
        return ForkOnTerminal(arguments, surroundings, os.ttyname(slave))

    return _on_terminal(start, variables, columns, lines)


def on_terminal(
    command: Sequence[str], variables: Mapping[str, str], columns: int = 200, lines: int = 60
) -> contextlib.AbstractContextManager[Terminal]:
    """Run a command with a new terminal as its controlling one: Ctrl-C reaches it."""

    def start(slave: int, surroundings: Mapping[str, str]) -> subprocess.Popen[bytes]:
        alone = ["setsid", "--ctty", "--wait", *command]
        return subprocess.Popen(alone, env=surroundings, stdin=slave, stdout=slave, stderr=slave)

    return _on_terminal(start, variables, columns, lines)


@contextlib.contextmanager
def _on_terminal(
    start: Callable[[int, Mapping[str, str]], subprocess.Popen[bytes] | ForkOnTerminal],
    variables: Mapping[str, str],
    columns: int,
    lines: int,
) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    surroundings = {
        name: value for name, value in environment().items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
    }
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    process = start(slave, {**surroundings, "TERM": "xterm-256color", **variables})
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(slave)
        os.close(master)


class FakeAgent:
    """An agent with an answer that the test chooses; `None` is an agent that is being rolled out."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] | None = msgspec.to_builtins(published(busy_node(3)))
        self.url = ""

    async def respond(self, _: web.Request) -> web.Response:
        if self.answer is None:
            return web.Response(status=503, text="the first collection is not finished\n")
        return web.json_response(self.answer)


@pytest.fixture(name="fake")
async def serve_fake() -> AsyncIterator[FakeAgent]:
    fake = FakeAgent()
    app = web.Application()
    app.router.add_get("/api/v1/map", fake.respond)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    fake.url = f"http://{host}:{port}"
    yield fake
    await runner.cleanup()


@pytest.fixture(name="hangups_count")
def let_hangups_count() -> Iterator[None]:
    """Children inherit an ignored SIGHUP, as `nohup` leaves it to its command: not those of this test."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("command", ["map", "top", "waste", "doctor"])
@pytest.mark.parametrize("columns", [80, 132])
async def test_tables_fit_the_terminal(fake: FakeAgent, command: str, columns: int) -> None:
    """Long names are shortened with …, so that rows fit; faults are coloured; it ends with the agent's code."""
    name = "a-name-as-long-as-names-may-be-" * 8
    assert fake.answer is not None
    for device in fake.answer["devices"]:
        for row in device["containers"]:
            row["pod"] = name
    for one in fake.answer["findings"]:
        one["pod"] = name
    once = ["--once"] if command == "top" else []
    with terminal(command, *once, "--url", fake.url, columns=columns) as shown:
        text = await shown.end()
    assert shown.process.returncode == 0
    assert "\x1b[3" in text
    rows = [STEERING.sub("", line) for line in text.splitlines()]
    if command != "doctor":
        table = rows[: rows.index("")] if "" in rows else rows
        assert max(map(cells, table)) <= columns
        assert any("…" in row for row in table)
    assert name not in text or command == "doctor"


@pytest.mark.parametrize("command", ["map", "top", "waste", "inspect", "doctor", "check"])
async def test_the_agent_of_the_variable_is_asked(fake: FakeAgent, command: str) -> None:
    """As in the agent's pod: the answer is that of --url, which the commands that it names do not need."""
    by_flag = await run_command_in_loop(command, "--url", fake.url)
    by_variable = await run_command_in_loop(command, GPUMAP_URL=fake.url)
    expected = " ".join(by_flag.stdout.split()).replace(f" --url {fake.url}", "")
    assert (" ".join(by_variable.stdout.split()), by_variable.returncode) == (expected, by_flag.returncode)
    assert expected


async def test_a_pipe_without_utf_8_gets_ascii_for_dashes_and_arrows(fake: FakeAgent) -> None:
    """Only letters of other languages become question marks."""
    assert fake.answer is not None
    fake.answer["sources"][0].update(up=False, reason="socket_missing", detail="ä", remedy="Mount it.")
    done = await asyncio.to_thread(gpumap, "doctor", "--url", fake.url, LC_ALL="C", PYTHONUTF8="0")
    assert "socket_missing: ? > Mount it." in done.stdout


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
async def test_colours_can_be_turned_off(fake: FakeAgent, variable: str, value: str) -> None:
    """NO_COLOR and TERM=dumb: not one escape sequence, and the same words."""
    with terminal("map", "--url", fake.url, columns=200, lines=60, **{variable: value}) as shown:
        text = await shown.end()
    assert "\x1b" not in text
    assert "pod-0" in text
    assert "GPU 2 " in text


async def test_watch_repaints_in_place(fake: FakeAgent) -> None:
    """Each frame begins at the top left, fits the terminal and clears what is left of the last one."""
    arguments = ("waste", "--watch", "--interval", "100ms", "--sort-by", "used", "--url", fake.url)
    with terminal(*arguments, columns=120, lines=20) as shown:
        await shown.until(lambda _: len(shown.frames) >= 3, "it does not repaint")
        shown.resize(100, 10)
        before = len(shown.frames)
        await shown.until(lambda _: len(shown.frames) >= before + 3, "it does not repaint")
        assert await shown.interrupt() == 0
    assert shown.said.endswith("\n")
    assert "\x1b[2J" not in shown.said
    assert "Traceback" not in shown.said
    frame = shown.frames[0]
    assert frame.endswith(TO_END)
    lines = STEERING.sub("", frame).splitlines()
    assert re.match(r"gpumap waste --sort-by used --url http://\S+   every 0.1s   \d\d:\d\d:\d\d$", lines[0])
    assert len(lines) == 20
    assert re.fullmatch(r"1-\d+ of \d+ lines   ↑↓ PgUp PgDn scroll  q quit", lines[-1])
    small = STEERING.sub("", shown.frames[-2]).splitlines()
    assert len(small) <= 10
    assert max(map(cells, small)) <= 100


@pytest.mark.parametrize("command", ["map", "waste"])
async def test_keys_scroll_a_watch(fake: FakeAgent, command: str) -> None:
    """All lines can be reached; the titles stay. `q` ends it with 0, and the last frame stays."""
    with terminal(command, "--watch", "--interval", "100ms", "--url", fake.url, columns=80, lines=10) as shown:
        await shown.until(lambda _: len(shown.frames) >= 3, "it does not repaint")
        lines = [line.rstrip() for line in shown.shown.splitlines()]
        count = int(lines[-1].split()[2])
        assert "1-" in lines[-1]
        down = await shown.press("j", shows=lambda screen: screen.splitlines()[-1].startswith("2-"))
        assert down.splitlines()[2].rstrip() == lines[2]
        pages = ["\x1b[6~"] * (count // 6 + 1)
        await shown.press(*pages, "\x1b[B", shows=lambda screen: f"-{count} of {count} lines" in screen)
        await shown.press("\x1b[H", shows=lambda screen: screen.splitlines()[-1].startswith("1-"))
        os.write(shown._master, b"q")
        await shown.end()
    assert shown.process.returncode == 0
    assert shown.said.endswith("\n")
    assert "\x1b[?1049h" not in shown.said
    assert "Traceback" not in shown.said


async def test_watch_outlives_its_agent(fake: FakeAgent) -> None:
    """While the agent answers nothing useful, a line says so above what it said last; then all is as before."""
    with terminal("map", "--watch", "--interval", "100ms", "--url", fake.url) as shown:
        await shown.until(lambda text: "pod-0" in text, "it does not show the map")
        answer, fake.answer = fake.answer, None
        await shown.until(lambda text: "answered 503" in text, "it does not say that the agent is away")
        failing = next(frame for frame in shown.frames if "answered 503" in frame)
        assert "pod-0" in failing
        fake.answer = {"version": 1, "devices": 5, "gpus": [], "unmatched": [], "sources": [], "capabilities": {}}
        await shown.until(lambda text: "did not answer with a map" in text, "it does not say that the answer is none")
        fake.answer = answer
        seen = len(shown.frames)
        await shown.until(lambda _: len(shown.frames) >= seen + 3, "it does not go on")
        assert "asking on" not in shown.frames[-2]
        assert await shown.interrupt() == 0


async def test_watch_in_a_pipe(fake: FakeAgent) -> None:
    """One block after the other on stdout; that the agent is away is said once, on stderr; SIGINT ends it with 0."""
    process = await asyncio.create_subprocess_exec(
        *(str(GPUMAP), "top", "--watch", "--interval", "50ms", "--url", fake.url),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE_SECONDS):
        await blocks(process.stdout, 2)
        answer, fake.answer = fake.answer, None
        message = await process.stderr.readline()
        assert message == f"gpumap: {fake.url}/api/v1/map answered 503 Service Unavailable; trying again\n".encode()
        await asyncio.sleep(0.3)
        fake.answer = answer
        await blocks(process.stdout, 2)
        process.send_signal(signal.SIGINT)
        rest = await process.stdout.read()
        assert (await process.wait(), await process.stderr.read()) == (0, b"")
    assert b"\x1b" not in rest


async def blocks(stream: asyncio.StreamReader, count: int) -> None:
    """Read until so many blocks have begun, an empty line before each but the first."""
    while count:
        count -= (await stream.readline()).startswith(b"NAMESPACE")


async def test_watch_of_this_node(tmp_path: Path) -> None:
    """Without --url it collects here, again and again; that nothing is there is shown, not a reason to end."""
    sources = ("--kubelet-root", "--device-checkpoint", "--nvml-library", "--pod-log-root")
    missing = [f"{flag}={tmp_path / 'missing'}" for flag in sources]
    with terminal("waste", "--watch", "--interval", "100ms", *missing) as shown:
        await shown.until(lambda _: len(shown.frames) >= 3, "it does not repaint")
        assert "No devices." in shown.frames[1]
        assert await shown.interrupt() == 0
