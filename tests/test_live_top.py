"""`gpumap top` on a terminal: a frame that fits, and what each key changes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gpumap.agent.published import published
from gpumap.cli.commands.top import REPORT
from gpumap.cli.commands.top_screen import Frame, Live, TopWindow, frame, pressed, remembered
from gpumap.cli.rows import NodeMaps
from gpumap.cli.screen import View
from gpumap.cli.table import Shape
from gpumap.cli.terminal import Screen, cells
from gpumap.model import remedies
from gpumap.model.findings import faulty_gpus
from gpumap.model.formatting import ELLIPSIS
from gpumap.model.node import decode
from gpumap.model.terms import FINDINGS
from tests import golden
from tests.demo_process import GPUMAP, demo, fetch
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid
from tests.shown import changed, changed_in, maps, with_gpus
from tests.snapshots import busy_node
from tests.test_watch import STEERING, FakeAgent, Terminal, let_hangups_count, on_terminal, serve_fake, terminal

__all__ = ["let_hangups_count", "serve_fake"]
SHAPE = Shape(screen=Screen(columns=80))


def shown(live: Live, height: int = 24, gpus: int = 3, columns: int = 80) -> Frame:
    return frame(maps(busy_node(gpus)), live, Shape(screen=Screen(columns=columns)), ("head",), height)


def rows(found: Frame) -> list[str]:
    """The rows: after the line of titles, up to the last line."""
    titles = next(place for place, line in enumerate(found.lines) if " DEVICE " in line)
    return [line for line in found.lines[titles + 1 : -1] if line]


def press(live: Live, *keys: str, page: int = 5) -> Live:
    for key in keys:
        following = pressed(live, key, page)
        assert following is not None
        live = following
    return live


@pytest.fixture(scope="module", name="sharing")
def every_way_to_share(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeMaps]:
    folder = tmp_path_factory.mktemp("sharing") / "demo"
    folder.mkdir()
    with demo(folder, "--scenario", "sharing") as url:
        yield NodeMaps((decode(fetch(f"{url}/api/v1/map")[0].encode()),))


def stalled() -> NodeMaps:
    stuck = Pod("ml", "stuck", {"main": {"nvidia.com/gpu": [gpu_uuid(0)]}})
    node = TestNode([Gpu(0)], [stuck], [Process(1, gpu_uuid(0), stuck, memory=GIB, sm=1.0)])
    found = with_gpus(published(node.watch()), lambda one: changed(one, busy_without_work_seconds=700.0))
    return NodeMaps((found,))


@pytest.mark.parametrize("node", ["sharing", "stalled", "mig-users", "mixed-node", "lost-gpu", "busy 8", "busy 16"])
@pytest.mark.parametrize(("columns", "height"), [(80, 24), (200, 50), (40, 10), (20, 5)])
def test_a_frame_fills_the_window_and_no_more(sharing: NodeMaps, node: str, columns: int, height: int) -> None:
    """Whatever it shows. No title is cut, and what is wrong comes first, since when."""
    found = {"sharing": lambda: sharing, "stalled": stalled}.get(node, lambda: maps_of(node))()
    shape = Shape(screen=Screen(columns=columns))
    for keys in ((), ("enter",), ("p",), ("?",), ("/", "x"), ("/", "p", "enter"), ("end", "enter")):
        lines = frame(found, press(Live(), *keys), shape, ("head",), height).lines
        assert len(lines) == height
        assert max(map(cells, lines)) <= columns, lines
    lines = frame(found, Live(), shape, ("head",), height).lines
    titles = next(place for place, line in enumerate(lines) if " POD" in line)
    assert ELLIPSIS not in lines[titles]
    of_findings = [line.strip("> ").split() for line in lines[titles + 1 : -1]]
    kinds = [words[0].lower() for words in of_findings if words and words[0].lower() in FINDINGS]
    assert kinds == sorted(kinds, key=FINDINGS.index)
    findings = found.maps[0].findings or ()
    wastes = [finding for finding in findings if finding.finding != "fault"]
    expected = [finding.finding for finding in (*faulty_gpus(findings), *wastes)]
    assert kinds == expected[: len(kinds)]
    assert len(kinds) >= min(len(expected), height // 3 - 1)
    if node == "stalled":
        assert kinds == ["stalled"]


def maps_of(node: str) -> NodeMaps:
    """A node with so many GPUs that has a bit of everything, or a capture."""
    busy, _, gpus = node.partition("busy ")
    return maps(busy_node(int(gpus)) if gpus else golden.snapshots(golden.CAPTURES / busy)[-1])


@pytest.mark.parametrize(("columns", "height"), [(80, 24), (40, 12)])
@pytest.mark.parametrize("gpus", [1, 8, 16, 64])
def test_gpus_take_a_third_of_the_window(gpus: int, columns: int, height: int) -> None:
    """Each has its free memory. Those that are broken are always there. What has no room is counted."""
    lines = shown(Live(), height, gpus, columns).lines
    titles = next(place for place, line in enumerate(lines) if line.startswith("GPU "))
    end = next(place for place, line in enumerate(lines) if "  FINDING " in line)
    assert end - titles <= height // 3 + 1
    assert "FREE" in lines[titles] or gpus > 8
    text = "\n".join(lines[titles + 1 : end])
    indices = re.findall(r"(?:^|  )([0-9]+)!? +(?:[▁-█ ]* )?(?:[0-9]+%|-)", text, re.MULTILINE)
    more = re.search(r"and (\d+) more", text)
    assert len({*indices}) + (int(more[1]) if more else 0) == gpus
    assert more is None or gpus > 8
    for gpu in published(busy_node(gpus)).gpus:
        assert gpu.up or f"{gpu.index}!" in text


def test_free_memory_is_for_someone() -> None:
    """For a holder, for those who share the GPU, for any pod, or for none and why; `-` if that is not known."""
    trainer = Pod("ml", "trainer", {"main": {"nvidia.com/gpu": [gpu_uuid(0)]}})
    replicas = [Pod("ml", f"part-{name}", {"main": {"nvidia.com/gpu": [f"{gpu_uuid(1)}::{name}"]}}) for name in "01"]
    squatter = Pod("ml", "squatter", {"main": {}})
    offered = {"nvidia.com/gpu": [gpu_uuid(0), *(f"{gpu_uuid(1)}::{name}" for name in "01"), *map(gpu_uuid, (2, 3, 4))]}
    node = TestNode([*map(Gpu, range(6))], [trainer, *replicas, squatter], allocatable=offered)
    node.processes = [
        Process(1, gpu_uuid(0), trainer, memory=70 * GIB),
        Process(2, gpu_uuid(2), squatter, memory=2 * GIB),
        Process(3, gpu_uuid(4), None, memory=2 * GIB),
    ]
    known = published(node.watch())
    node.down.add("kubelet")
    unknown = published(node.watch())
    texts = []
    for document in (known, unknown):
        lines = frame(NodeMaps((document,)), Live(), SHAPE, (), 24).lines
        titles = next(place for place, line in enumerate(lines) if line.startswith("GPU "))
        start = lines[titles].index("FREE")
        texts.append([" ".join(line[start:].split()) for line in lines[titles + 1 : titles + 7]])
    assert texts[0] == [
        "9.9GiB granted to trainer",
        "79.9GiB shared by 2: part-0, part-1",
        "77.9GiB not held, squatter",
        "79.9GiB free",
        "77.9GiB not held, used by host",
        "79.9GiB holders not known, not offered",
    ]
    assert texts[1][3] == "79.9GiB -"


@pytest.mark.parametrize(
    ("keys", "columns", "titles"),
    [
        ("", 80, "FINDING FOR DEVICE NAMESPACE POD WASTE MEMORY SM"),
        ("m", 80, "FINDING FOR DEVICE NAMESPACE POD WASTE MEMORY SM"),
        ("p", 80, "FINDING DEVICE PID PROCESS NAMESPACE POD MEMORY SM"),
        ("pw", 80, "FINDING DEVICE PID PROCESS POD WASTE MEMORY SM"),
        ("", 40, "FINDING DEVICE POD MEMORY SM"),
        ("n", 40, "FINDING NAMESPACE POD MEMORY"),
        ("ps", 40, "FINDING PID POD MEMORY SM"),
        ("", 20, "FINDING POD"),
        ("m", 20, "POD MEMORY"),
    ],
)
def test_columns_depend_on_the_width_and_the_view(keys: str, columns: int, titles: str) -> None:
    """And not on the rows, such as those of long names or without findings. The sorted column always stays."""
    short = TestNode([Gpu(0)], [Pod("ml", "a", {"main": {"nvidia.com/gpu": [gpu_uuid(0)]}})]).collect()
    long = Pod("team-of-research", "n" * 50, {name: {"nvidia.com/gpu": [gpu_uuid(0)]} for name in ("main", "sidecar")})
    for answer in (maps(short), maps(TestNode([Gpu(0)], [long]).watch()), maps(busy_node(8)), stalled()):
        live = press(Live(), *keys)
        lines = frame(answer, live, Shape(screen=Screen(columns=columns)), (), 24).lines
        assert titles.split() in [line.split() for line in lines]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_title_fits(columns: int) -> None:
    """A node's long name is shortened, and what has no room is left out; the order stays."""
    node = changed(published(busy_node(8)), name=f"gpu-node-{'x' * 36}-last")
    window = TopWindow(View(REPORT, "table", SHAPE, "gpumap top --url http://127.0.0.1:9401", True, 2.0, True))
    window.take(NodeMaps((node,)))
    title = window._title(columns)
    assert cells(title) <= columns
    assert re.match(r"gpu-node.*last  by finding( |$)", title)
    assert title.endswith("gpumap top --url http://127.0.0.1:9401") is (columns == 200)


def test_a_model_is_in_the_table_only_if_models_differ() -> None:
    (node,) = maps(busy_node(3)).maps
    mixed = with_gpus(node, lambda gpu: changed(gpu, model="NVIDIA L4"), 1)
    for shown_node, has_models in ((node, False), (mixed, True)):
        assert (" MODEL " in "\n".join(frame(NodeMaps((shown_node,)), Live(), SHAPE, (), 24).lines)) is has_models


def test_the_history_of_a_gpu_has_gaps() -> None:
    """What is not known is a gap, and not 0: a node without an answer, and a GPU that reports no utilization."""
    node = published(busy_node(3))
    gpu = next(one for one in node.gpus if one.reading and not one.partitioned)
    live = Live()
    for at, ratio in enumerate((0.0, 1.0, None, 0.5)):
        reading = changed_in(gpu, "reading", utilization_ratio=ratio)
        live = remembered(live, NodeMaps((changed(node, timestamp=float(at + 1), gpus=(reading,)),)))
        if ratio == 0.5:
            assert remembered(live, NodeMaps((changed(node, timestamp=float(at + 1)),))) == live, "no new collection"
    live = remembered(live, None)
    line = next(line for line in frame(NodeMaps((node,)), live, SHAPE, (), 24).lines if "▁█ ▅" in line)
    assert "▁█ ▅  " in line


def test_the_cursor_reaches_each_row_and_follows_its_own() -> None:
    """It is always in the window. If the order changes meanwhile, the same row stays selected."""
    found = shown(Live())
    every = rows(shown(Live(), height=500))
    seen = []
    for _ in range(len(every) + 3):
        (at_cursor,) = (line for line in rows(found) if line.startswith(">"))
        seen.append(at_cursor[1:])
        found = shown(press(found.live, "down"))
    assert list(dict.fromkeys(seen)) == [line[1:] for line in every]
    live = found.live
    turned = shown(live._replace(reverse=True, order="memory")).live
    assert turned.selected == live.selected
    assert turned.cursor != live.cursor
    assert press(live, "home").cursor == 0


def test_details_say_what_the_row_has_no_room_for() -> None:
    """Grant, peak, processes, since when, and what to do; Esc closes them, and the same row is selected."""
    pod, squatter = Pod("ml", "work", {"main": {"nvidia.com/gpu": [gpu_uuid(0)]}}), Pod("ml", "squat", {"main": {}})
    node = TestNode([Gpu(0)], [pod, squatter])
    node.processes = [
        Process(10, gpu_uuid(0), pod, memory=3 * GIB, comm="torchrun"),
        Process(11, gpu_uuid(0), squatter, memory=2 * GIB, comm="miner"),
    ]
    found = maps(node.watch())
    listed = frame(found, Live(), SHAPE, ("head",), 24)
    text = " ".join(frame(found, press(listed.live, "enter"), SHAPE, ("head",), 24).lines)
    for said in (
        "ml/squat/main on 0",
        "SQUATTER for",
        "PID 11 miner",
        remedies.advice(remedies.FINDINGS["squatter"])[:30],
        "2.0GiB",
    ):
        assert said in text
    assert "torchrun" not in text
    second = frame(found, press(listed.live, "down", "enter"), SHAPE, ("head",), 24)
    text = " ".join(second.lines)
    assert "1 GPU, 1 slot of nvidia.com/gpu" in text
    assert "torchrun" in text
    assert press(second.live, "escape").details is False
    assert frame(found, press(second.live, "escape"), SHAPE, ("head",), 24).live.cursor == 1


def test_details_of_a_row_that_is_gone() -> None:
    """They do not change to another row. If only the finding changes, it is still the same row."""
    pods = [Pod("ml", name, {"main": {"nvidia.com/gpu": [gpu_uuid(gpu)]}}) for gpu, name in enumerate(("one", "two"))]
    node = TestNode([Gpu(0), Gpu(1)], pods)
    live = press(frame(maps(node.collect()), Live(), SHAPE, (), 24).live, "enter")
    found = frame(maps(node.watch()), live, SHAPE, (), 24)
    assert (found.lines[0], found.lines[1][:8]) == ("ml/one/main on 0", "idle for")
    node.pods = pods[1:]
    found = frame(maps(node.collect()), found.live, SHAPE, (), 24)
    assert found.lines[0] == "This row is gone."
    assert frame(maps(node.collect()), press(found.live, "escape"), SHAPE, (), 24).live.cursor == 0


def test_two_containers_of_a_pod_do_not_look_alike() -> None:
    """In a small window POD has the names of containers, and only then."""
    ids = {"nvidia.com/gpu.shared": [f"{gpu_uuid(0)}::0"]}
    for containers, with_names in ({"a": ids}, False), ({"a": ids, "b": ids}, True):
        found = maps(TestNode([Gpu(0)], [Pod("ml", "pod", containers)]).collect())
        lines = frame(found, Live(), replace(SHAPE, screen=Screen(columns=40)), (), 24).lines
        assert any("pod/b" in line for line in lines) is with_names


def test_help_has_room() -> None:
    lines = shown(Live(keys=True)).lines
    assert max(map(len, lines)) <= 80
    assert any(line.endswith("finding:idle") for line in lines)


def test_unaccounted_memory_is_the_gpus() -> None:
    """It has no row: the GPU's own line has all that is used."""
    assert "unaccounted" not in "\n".join(shown(Live(), height=500).lines)


@pytest.mark.parametrize(
    ("query", "some"),
    [
        *(("pod-1", True), ("GPU-00000000", True), ("gpu-f", False), ("-0000", False), ("assigned", True)),
        *(("test-node-name", False), ("squatter", True), ("host squatter", False)),
        *(
            ("gpu:0", True),
            ("gpu:77", False),
            ("uuid:gpu-0000", True),
            ("ns:nowhere", False),
            ("finding:squatter", True),
            ("pod:squatter", False),
        ),
    ],
)
def test_the_filter_sees_what_the_reader_sees(query: str, some: bool) -> None:
    """Not the UUIDs, unless the text is as long as a part of one, and not the name of the only node."""
    nothing = "Nothing matches. Try gpu: uuid: model: xid: ns: pod: container: owner: finding:"
    assert (nothing not in shown(Live(query=query)).lines) is some


def test_one_row_is_no_rows() -> None:
    assert "  1 row  " in shown(Live(query="unmatched")).lines[-1]


@pytest.mark.parametrize("query", ["", "nothing has this"])
def test_titles_do_not_depend_on_the_rows(query: str) -> None:
    titles = [line for line in shown(Live(query=query)).lines if " DEVICE " in line]
    assert titles == [line for line in shown(Live()).lines if " DEVICE " in line]


@pytest.mark.parametrize(
    ("keys", "after"),
    [
        (["s"], Live(order="sm")),
        (["s", "s"], Live(order="sm", reverse=True)),
        (["s", "s", "f"], Live()),
        (["w"], Live(order="waste")),
        (["r"], Live(reverse=True)),
        (["f"], Live()),
        (["p"], Live(processes=True)),
        (["down", "down", "up"], Live(cursor=1)),
        (["up"], Live()),
        (["page down"], Live(cursor=5)),
        (["down", "n"], Live(order="namespace")),
        (["down", "enter", "down"], Live(cursor=1, details=True, offset=1)),
        (["down", "enter", "s"], Live(cursor=1, details=True)),
        (["down", "enter", "escape"], Live(cursor=1)),
        (["/", "q", "r"], Live(query="qr", typing=True)),
        (["/", "q", "backspace", "enter"], Live()),
        (["/", "q", "enter", "down"], Live(query="q", cursor=1)),
        (["/", "q", "enter", "escape"], Live()),
        (["/", "q", "escape"], Live()),
        (["/", "up"], Live(typing=True)),
        (["/", "\x1b[200~q\n\x1b]0;x\x07\x1b[201~"], Live(typing=True, query="q  ]0;x ")),
        (["/", *(["\x1b[200~xy\x1b[201~"] * 200)], Live(typing=True, query="xy" * 128)),
        (["\x1b[200~q\x1b[201~"], Live()),
        (["?", "s"], Live()),
        (["\x1b[Z", "é", "x"], Live()),
    ],
)
def test_what_keys_change(keys: list[str], after: Live) -> None:
    assert press(Live(), *keys) == after


def test_q_ends_it_unless_it_is_typed() -> None:
    assert pressed(Live(), "q", page=5) is None
    assert pressed(Live(keys=True), "q", page=5) is None
    assert pressed(Live(typing=True), "q", page=5) is not None


# --- on a terminal ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def top(fake: FakeAgent, *flags: str, columns: int = 100, lines: int = 24) -> AsyncIterator[Terminal]:
    """Run it until it has painted an answer."""
    with terminal("top", "--interval", "100ms", *flags, "--url", fake.url, columns=columns, lines=lines) as found:
        await found.until(lambda _: len(found.frames) > 2 and "pod-1" in found.shown, "it does not show the answer")
        yield found


async def test_keys_change_what_is_shown(fake: FakeAgent) -> None:
    """Order, groups, processes and filter, on a real terminal; `q` ends it with 0 and restores the first screen."""
    async with top(fake) as found:
        assert "by finding" in found.shown.splitlines()[0]
        await found.press("j", "\r", shows=lambda screen: "Cordon the node" in screen and "Esc back" in screen)
        await found.press("\x1b", shows=lambda screen: " DEVICE " in screen)
        await found.press("s", "s", shows=lambda screen: "by sm, reversed" in screen.splitlines()[0])
        await found.press("p", shows=lambda screen: "PID" in screen)
        keys = ("p", "/", *"POD-1", "\r")
        filtered = await found.press(*keys, shows=lambda screen: "filter: POD-1" in screen and "pod-2" not in screen)
        assert "pod-1" in filtered
        await found.press("\x1b", shows=lambda screen: "filter: POD" not in screen)
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
        assert "pod-1" in found.shown
        fake.answer = answer
        await found.until(lambda _: "answered 503" not in found.shown, "it does not go on")


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("q", 0),
        ("\x03", 0),
        ("\x1c", -signal.SIGQUIT),
        (signal.SIGTERM, 0),
        (signal.SIGHUP, 0),
        (signal.SIGQUIT, -signal.SIGQUIT),
    ],
    ids=["q", "Ctrl-C", "Ctrl-\\", "SIGTERM", "SIGHUP", "SIGQUIT"],
)
@pytest.mark.usefixtures("hangups_count")
async def test_the_terminal_is_as_before(fake: FakeAgent, end: str | signal.Signals, code: int) -> None:
    """Keys that are pressed are shown again, lines are edited again, and pastes are not marked, whatever ends it."""
    async with top(fake) as found:
        assert not termios.tcgetattr(found._master)[3] & termios.ECHO
        if isinstance(end, signal.Signals):
            found.process.send_signal(end)
        else:
            os.write(found._master, end.encode())
        await found.end()
        assert found.process.returncode == code
        assert termios.tcgetattr(found._master)[3] & termios.ECHO
    assert found.said.endswith("\x1b[?2004l\x1b[?25h\x1b[?1049l")


@pytest.mark.parametrize("stop", ["TSTP", "STOP"])
async def test_it_can_be_suspended(fake: FakeAgent, stop: str) -> None:
    """After Ctrl-Z the terminal is the shell's; `fg` paints again, also if nothing could be restored before."""
    shell = f"{GPUMAP} top --interval 100ms --url {fake.url}; kill -0 %1 && echo suspended; fg >/dev/null; echo ended"
    with on_terminal(["sh", "-mc", shell], {}, 100, 24) as found:
        await found.until(lambda _: len(found.frames) > 2 and "pod-1" in found.shown, "it does not show the answer")
        if stop == "TSTP":
            os.write(found._master, b"\x1a")
        else:
            os.kill(os.tcgetpgrp(found._master), signal.SIGSTOP)
        await found.until(lambda said: "\x1b[?1049h" in said.partition("suspended\n")[2], "it does not go on")
        assert ("\x1b[?1049lsuspended" in found.said) is (stop == "TSTP")
        seen = len(found.frames)
        await found.until(lambda _: len(found.frames) > seen + 2, "it does not paint")
        os.write(found._master, b"q")
        await found.end()
    assert found.said.endswith("\x1b[?1049lended\n")


async def test_keys_that_arrive_together_take_one_frame(fake: FakeAgent) -> None:
    """Thousands of them delay neither what follows nor a signal."""
    async with top(fake) as found:
        seen = len(found.frames)
        os.write(found._master, b"j" * 3000 + b"s")
        await found.until(lambda _: "by sm" in found.shown.splitlines()[0], "it does not sort")
        assert len(found.frames) - seen < 300


@pytest.mark.parametrize(
    "text",
    ["\x1b[200~one\nq\x1b[201~", "\x1b[200~q\x1b[200~one\nq\x1b[201~", "one\nq"],
    ids=["marked", "with a mark", "unmarked"],
)
async def test_pasted_text_is_no_key(fake: FakeAgent, text: str) -> None:
    """Lines with a `q` do not end it; while the filter is typed, they are a part of it."""
    async with top(fake) as found:
        if "\x1b" in text:
            os.write(found._master, text.replace("q", "q" * 3000).encode())
        await found.press("/", shows=lambda screen: "filter: _" in screen)
        assert "Nothing matches." in await found.press(text, shows=lambda screen: "one q_" in screen)
        assert await found.interrupt() == 0


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
        for key in ("\r", "\x1b", "p", "s", "\x1b[B", "/", "x", "\x1b"):
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
        assert "pod-1" in found.shown


@pytest.mark.parametrize("key", ["q", "\x03"], ids=["q", "Ctrl-C"])
@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (200, 50)])
async def test_through_kubectl_exec(fake: FakeAgent, key: str, columns: int, lines: int) -> None:
    """`kubectl exec -it` has a terminal at both ends. Keys, sizes and the end pass through it."""
    command = [*KUBECTL, "exec", "-it", "pod", "--", str(GPUMAP), "top", "--interval", "100ms", "--url", fake.url]
    with on_terminal(command, {}, columns, lines) as found:
        await found.until(lambda _: len(found.frames) > 2 and "pod-1" in found.shown, "it does not show the answer")
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
    """gpumap's own signs are ASCII, other letters question marks. Keys and the end are as elsewhere."""
    fake.answer = {**(fake.answer or {}), "name": "knoten-ä"}
    command = [str(GPUMAP), "top", "--interval", "100ms", "--url", fake.url]
    with on_terminal(command, variables, 80, 24) as found:
        await found.until(lambda _: len(found.frames) > 2 and "pod-1" in found.shown, "it does not show the answer")
        assert "knoten-?" in found.shown
        assert found.shown.isascii()
        os.write(found._master, b"q")
        await found.end()
    assert found.process.returncode == 0
    assert "Traceback" not in found.said


async def test_a_gpu_that_is_down_is_named_with_its_remedy(fake: FakeAgent) -> None:
    """Which one is broken, and what to do: on the screen that a person looks at anyway."""
    async with top(fake, columns=80) as found:
        assert "fell off the bus" in found.shown
        remedy = next(remedies.advice(gpu.remedies["fault"]) for gpu in published(busy_node(3)).gpus if not gpu.up)
        await found.press("/", *"bus", "\r", "\r", shows=lambda screen: remedy.split(".")[0][:40] in screen)
        assert len(found.shown.splitlines()) == 24


def test_a_source_that_is_down_is_in_the_first_lines() -> None:
    """The kubelet's rows may be old, and nothing that holds can be judged."""
    node = TestNode([Gpu(0)], [Pod("ml", "work", {"main": {"nvidia.com/gpu": [gpu_uuid(0)]}})])
    node.collect()
    node.down = {"kubelet"}
    lines = frame(maps(node.collect()), Live(), SHAPE, ("head",), 24).lines
    assert "kubelet is down" in " ".join(lines[1:3])
