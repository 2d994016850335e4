"""`gpumap top` on a terminal: a frame that fits, and what each key changes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpumap.cli.tables import Shape
from gpumap.cli.tables.live import Frame, Live, frame, pressed
from gpumap.cli.terminal import Screen, cells
from tests.demo_process import GPUMAP
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid
from tests.shown import maps
from tests.snapshots import busy_node
from tests.test_watch import STEERING, FakeAgent, Terminal, on_terminal, serve_fake, terminal

__all__ = ["serve_fake"]
SHAPE = Shape(screen=Screen(columns=80))


def shown(live: Live, height: int = 24, gpus: int = 3, head: tuple[str, ...] = ("head", "")) -> Frame:
    return frame(maps(busy_node(gpus)), live, SHAPE, head, height)


def rows(found: Frame) -> list[str]:
    """The rows below the devices: after the second line of titles, up to the last line."""
    titles = max(number for number, line in enumerate(found.lines) if line.split()[:1] in (["NAMESPACE"], ["DEVICE"]))
    return [line for line in found.lines[titles + 1 : -1] if line]


@pytest.mark.parametrize("gpus", [1, 8, 16])
@pytest.mark.parametrize("height", [10, 24, 50])
def test_a_frame_fills_the_window_and_no_more(gpus: int, height: int) -> None:
    """It has a line for each device as long as some rows remain, and says how many more devices there are."""
    found = shown(Live(), height, gpus)
    assert len(found.lines) == height
    assert max(map(cells, found.lines)) <= 80
    assert len(rows(found)) == found.page or found.page > len(rows(found))
    devices = sum("[|" in line or "[ " in line for line in found.lines)
    if hidden := [line for line in found.lines if line.endswith("more devices")]:
        assert devices + int(hidden[0].split()[2]) >= gpus
    else:
        assert devices >= gpus


def test_rows_scroll_to_their_end_and_no_further() -> None:
    """Each row is seen on some page; the last page is full."""
    every = rows(shown(Live(), height=500))
    page, seen, live = shown(Live()).page, [], Live()
    assert page < len(every)
    while True:
        found = shown(live)
        seen += [row for row in rows(found) if row not in seen]
        after = pressed(live, "page down", page, fleet=False)
        assert after is not None
        moved = after._replace(offset=shown(after).offset)
        if moved == live:
            break
        live = moved
    assert seen == list(dict.fromkeys(every))
    assert len(rows(shown(live))) == page
    assert pressed(live, "home", page, fleet=False) == Live()


def test_unaccounted_memory_is_the_devices() -> None:
    """It has no row: the device's own line has all that is used."""
    assert "unaccounted" not in "\n".join(shown(Live(), height=500).lines)


def test_a_group_is_the_sum_of_what_is_known() -> None:
    """A sum that lacks an unknown value is at least that much, and nothing known is no 0."""
    one, other = (Pod("ml", name, {"main": {"nvidia.com/gpu": [gpu_uuid(number)]}}) for number, name in enumerate("ab"))
    node = TestNode([Gpu(0), Gpu(1)], [one, other])
    node.processes = [Process(1, gpu_uuid(0), one, memory=3 * GIB), Process(2, gpu_uuid(1), other, memory=None)]
    node.collect()
    found = frame(maps(node.collect()), Live(group="namespace"), SHAPE, (), 24)
    titles = next(number for number, line in enumerate(found.lines) if line.startswith("NAMESPACE"))
    assert found.lines[titles + 1].split()[:4] == ["ml", "2", "2", "≥3.0GiB"]


def test_a_gpu_that_is_down_has_no_bar() -> None:
    found = maps(busy_node(3))
    assert any(not gpu.up for gpu in found.maps[0].gpus)
    lines = frame(found, Live(), SHAPE, (), 40).lines
    assert sum("down" in line for line in lines) == sum(not gpu.up for gpu in found.maps[0].gpus)


def test_a_gpu_that_is_down_is_in_the_smallest_window() -> None:
    """Devices that have no room are reached by keys, and those that are down come first."""
    found = maps(busy_node(16))
    down = [f"{gpu.index} " for gpu in found.maps[0].gpus if not gpu.up]
    lines = frame(found, Live(), SHAPE, ("head", ""), 12).lines
    assert any(line.startswith(down[0]) and "down" in line for line in lines)
    assert any("more devices" in line for line in lines)
    every = {line for line in frame(found, Live(), SHAPE, (), 200).lines if "[" in line}
    pages = (frame(found, Live(offset=offset), SHAPE, ("head", ""), 12) for offset in range(60))
    assert {line.split("[")[0].rstrip() for page in pages for line in page.lines if "[" in line} == {
        line.split("[")[0].rstrip() for line in every
    }


@pytest.mark.parametrize(
    ("query", "some"),
    [("pod-1", True), ("GPU-", True), ("gpu-f", False), ("0000", False), ("assigned", True), ("test-node-name", False)],
)
def test_the_filter_sees_what_the_reader_sees(query: str, some: bool) -> None:
    """Not the UUIDs, unless the text begins like one, and not the name of the only node."""
    assert bool(rows(shown(Live(query=query))) != ["Nothing matches the filter."]) is some


@pytest.mark.parametrize("query", ["", "nothing has this"])
def test_titles_do_not_depend_on_the_rows(query: str) -> None:
    titles = [line for line in shown(Live(query=query)).lines if line.startswith("NAMESPACE")]
    full = [line for line in shown(Live()).lines if line.startswith("NAMESPACE")]
    assert titles == full


@pytest.mark.parametrize("height", [5, 24])
def test_keys_are_shown_until_the_next_key(height: int) -> None:
    live = pressed(Live(offset=3), "?", page=5, fleet=False)
    assert live == Live(offset=3, keys=True)
    lines = shown(live, height).lines
    assert len(lines) == height
    assert max(map(cells, lines)) <= 80
    assert any("quit" in line for line in lines)
    assert pressed(live, "s", page=5, fleet=False) == Live(offset=3)
    assert pressed(live, "q", page=5, fleet=False) is None


@pytest.mark.parametrize(
    ("keys", "after"),
    [
        (["s"], Live(order="sm")),
        (["s", "s"], Live(order="sm", reverse=True)),
        (["s", "s", "m"], Live()),
        (["r"], Live(reverse=True)),
        (["g"], Live(group="namespace")),
        (["g", "g"], Live(group="device")),
        (["g", "g", "g"], Live()),
        (["g", "p"], Live(processes=True)),
        (["down", "down", "up"], Live(offset=1)),
        (["up"], Live()),
        (["down", "n"], Live(order="namespace")),
        (["/", "q", "r"], Live(query="qr", typing=True)),
        (["/", "q", "backspace", "enter"], Live()),
        (["/", "q", "enter", "down"], Live(query="q", offset=1)),
        (["/", "q", "enter", "escape"], Live()),
        (["/", "q", "escape"], Live()),
        (["/", "up"], Live(typing=True)),
        (["\x1b[Z", "é", "x"], Live()),
    ],
)
def test_what_keys_change(keys: list[str], after: Live) -> None:
    live = Live()
    for key in keys:
        following = pressed(live, key, page=5, fleet=False)
        assert following is not None
        live = following
    assert live == after


def test_nodes_are_groups_of_a_fleet_alone() -> None:
    groups, live = [], Live()
    for _ in range(4):
        following = pressed(live, "g", page=5, fleet=True)
        assert following is not None
        live = following
        groups.append(live.group)
    assert groups == ["namespace", "device", "node", ""]


def test_q_ends_it_unless_it_is_typed() -> None:
    assert pressed(Live(), "q", page=5, fleet=False) is None
    assert pressed(Live(typing=True), "q", page=5, fleet=False) is not None


# --- on a terminal ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def top(fake: FakeAgent, *flags: str, columns: int = 100, lines: int = 24) -> AsyncIterator[Terminal]:
    """Run it until it has painted an answer."""
    with terminal("top", "--interval", "100ms", *flags, "--url", fake.url, columns=columns, lines=lines) as found:
        await found.until(lambda _: len(found.frames) > 2 and "pod-0" in found.shown, "it does not show the answer")
        yield found


async def test_keys_change_what_is_shown(fake: FakeAgent) -> None:
    """Order, groups, processes and filter, on a real terminal; `q` ends it with 0 and restores the first screen."""
    async with top(fake) as found:
        assert "by memory" in found.shown.splitlines()[0]
        await found.press("s", "s", shows=lambda screen: "by sm, reversed" in screen.splitlines()[0])
        await found.press("g", shows=lambda screen: "CONTAINERS" in screen)
        await found.press("p", shows=lambda screen: "PID" in screen)
        keys = ("p", "/", *"POD-1", "\r")
        filtered = await found.press(*keys, shows=lambda screen: "filter: POD-1" in screen and "pod-2" not in screen)
        assert "pod-1" in filtered
        await found.press("\x1b", shows=lambda screen: "filter: " not in screen)
        os.write(found._master, b"q")
        await found.end()
    assert found.process.returncode == 0
    assert found.said.startswith("\x1b[?1049h\x1b[?25l")
    assert found.said.endswith("\x1b[?25h\x1b[?1049l")
    assert "Traceback" not in found.said


async def test_the_frame_follows_the_window(fake: FakeAgent) -> None:
    async with top(fake) as found:
        assert len(found.shown.splitlines()) == 24
        found.resize(60, 12)
        await found.until(lambda _: len(found.shown.splitlines()) == 12, "it does not follow")
        assert max(map(cells, found.shown.splitlines())) <= 60


async def test_an_agent_that_is_away_is_named_above_what_it_said(fake: FakeAgent) -> None:
    async with top(fake) as found:
        answer, fake.answer = fake.answer, None
        await found.until(lambda _: "answered 503" in found.shown, "it does not say so")
        assert "pod-0" in found.shown
        fake.answer = answer
        await found.until(lambda _: "answered 503" not in found.shown, "it does not go on")


@pytest.mark.parametrize("key", ["q", "\x03"], ids=["q", "Ctrl-C"])
async def test_the_terminal_is_as_before(fake: FakeAgent, key: str) -> None:
    """Keys that are pressed are shown again, and lines are edited again; the exit code is 0."""
    async with top(fake) as found:
        assert not termios.tcgetattr(found._master)[3] & termios.ECHO
        os.write(found._master, key.encode())
        await found.end()
        assert found.process.returncode == 0
        assert termios.tcgetattr(found._master)[3] & termios.ECHO
    assert found.said.endswith("\x1b[?25h\x1b[?1049l")


async def test_once_prints_the_table(fake: FakeAgent) -> None:
    with terminal("top", "--once", "--url", fake.url) as found:
        text = await found.end()
    assert "\x1b[?1049h" not in text
    assert STEERING.sub("", text).startswith("NAMESPACE")


async def test_nothing_is_repainted_on_a_dumb_terminal(fake: FakeAgent) -> None:
    with terminal("top", "--url", fake.url, TERM="dumb") as found:
        assert "\x1b" not in await found.end()


async def test_keys_from_nowhere_do_not_matter(fake: FakeAgent) -> None:
    """Without a terminal to press keys on, as through `kubectl exec` without -t, the table is printed once."""
    with on_terminal(["sh", "-c", f"{GPUMAP} top --url {fake.url} </dev/null"], {}) as found:
        text = await found.end()
    assert "pod-0" in text
    assert "\x1b[?1049h" not in text


# --- on terminals of all kinds ----------------------------------------------------------------------------------------

KUBECTL = [sys.executable, str(Path(__file__).with_name("kubectl_exec.py"))]


@pytest.mark.parametrize(("columns", "lines"), [(20, 5), (80, 24), (200, 50), (1, 1)])
async def test_every_frame_fits_the_terminal(fake: FakeAgent, columns: int, lines: int) -> None:
    """Also one that is too small for its answer: nothing wraps or scrolls, and `q` ends it."""
    with terminal("top", "--interval", "100ms", "--url", fake.url, columns=columns, lines=lines) as found:
        await found.until(lambda _: len(found.frames) > 4, "it does not repaint")
        for key in ("g", "p", "s", "\x1b[B", "/", "x", "\x1b"):
            rows = (await found.press(key)).splitlines()
            assert len(rows) <= lines
            assert max(map(cells, rows), default=0) <= columns
        os.write(found._master, b"q")
        await found.end()
    assert found.process.returncode == 0
    assert "Traceback" not in found.said


async def test_the_window_changes_its_size_again_and_again(fake: FakeAgent) -> None:
    async with top(fake, columns=80) as found:
        for columns, lines in ((200, 50), (20, 5), (1, 1), (300, 3), (80, 24)):
            found.resize(columns, lines)
            seen = len(found.frames)
            await found.until(lambda _, seen=seen: len(found.frames) > seen + 2, "it does not repaint")  # type: ignore[misc]
            assert len(found.shown.splitlines()) <= lines
            assert max(map(cells, found.shown.splitlines()), default=0) <= columns
        assert "pod-0" in found.shown


@pytest.mark.parametrize("key", ["q", "\x03"], ids=["q", "Ctrl-C"])
@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (200, 50)])
async def test_through_kubectl_exec(fake: FakeAgent, key: str, columns: int, lines: int) -> None:
    """`kubectl exec -it` has a terminal at both ends. Keys, sizes and the end pass through it."""
    command = [*KUBECTL, "exec", "-it", "pod", "--", str(GPUMAP), "top", "--interval", "100ms", "--url", fake.url]
    with on_terminal(command, {}, columns, lines) as found:
        await found.until(lambda _: len(found.frames) > 2 and "pod-0" in found.shown, "it does not show the answer")
        assert len(found.shown.splitlines()) == lines
        await found.press("s", shows=lambda screen: "by sm" in screen.splitlines()[0])
        found.resize(60, 12)
        await found.until(lambda _: len(found.shown.splitlines()) == 12, "it does not follow")
        os.write(found._master, key.encode())
        await found.end()
        assert found.process.returncode == 0
        assert termios.tcgetattr(found._master)[3] & termios.ECHO
    assert found.said.endswith("\x1b[?25h\x1b[?1049l")
    assert "Traceback" not in found.said


@pytest.mark.parametrize("flags", [[], ["-i"]], ids=["", "-i"])
async def test_kubectl_exec_without_a_terminal_prints_the_table(fake: FakeAgent, flags: list[str]) -> None:
    command = [*KUBECTL, "exec", *flags, "pod", "--", str(GPUMAP), "top", "--url", fake.url]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("NAMESPACE")
    assert "\x1b" not in done.stdout
    assert not done.stderr


async def test_a_pipe_gets_the_table(fake: FakeAgent) -> None:
    with on_terminal(["sh", "-c", f"{GPUMAP} top --url {fake.url} | cat"], {}, 80, 24) as found:
        text = await found.end()
    assert text.startswith("NAMESPACE")
    assert "\x1b" not in text


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"TERM": ""}], ids=["dumb", "unset"])
async def test_a_terminal_that_cannot_be_repainted_gets_the_table(fake: FakeAgent, variables: dict[str, str]) -> None:
    """It is printed once, in the terminal's width, and without colours."""
    with terminal("top", "--url", fake.url, columns=80, lines=24, **variables) as found:
        text = await found.end()
    assert found.process.returncode == 0
    assert text.startswith("NAMESPACE")
    assert "\x1b" not in text
    assert max(map(cells, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "variables",
    [{"LC_ALL": "C"}, {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}],
    ids=["C", "ASCII"],
)
async def test_a_locale_without_utf_8(fake: FakeAgent, variables: dict[str, str]) -> None:
    """What it cannot write is a question mark; keys and the end are as elsewhere."""
    fake.answer = {**(fake.answer or {}), "name": "knoten-ä"}
    command = [str(GPUMAP), "top", "--interval", "100ms", "--url", fake.url]
    with on_terminal(command, variables, 80, 24) as found:
        await found.until(lambda _: len(found.frames) > 2 and "pod-0" in found.shown, "it does not show the answer")
        assert "knoten-" in found.shown
        os.write(found._master, b"q")
        await found.end()
    assert found.process.returncode == 0
    assert "Traceback" not in found.said


async def test_a_gpu_that_is_down_is_named_with_its_remedy(fake: FakeAgent) -> None:
    """Which one is broken, and what to do: on the screen that a person looks at anyway."""
    async with top(fake, columns=80) as found:
        assert "GPU 2 is down: lost. " in found.shown
        assert len(found.shown.splitlines()) == 24
