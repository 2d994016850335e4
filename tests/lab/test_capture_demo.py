"""`gpumap demo --capture` plays a recorded node; a folder that is no capture is one line and exit 2, and no harm."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from gpumap.agent.nvml_worker import wire
from gpumap.agent.settings import resolve
from gpumap.lab.capture import contents, limits, replay
from gpumap.lab.capture import format as on_disk
from gpumap.lab.capture.contents import Down
from gpumap.lab.capture.limits import LIMITS, Limits
from gpumap.lab.capture.run import load_capture
from gpumap.lab.driver import Player
from gpumap.lab.node import PlayedNode, files_of
from gpumap.lab.node_files import NodeFiles
from gpumap.model.errors import FatalError, UsageError
from gpumap.model.observations import NvmlReading
from gpumap.model.readings import SAMPLES_NEW, Activity, GpuReading, Listening, ProcessSample, Uuid, XidError
from gpumap.model.terms import DEFAULT_RESOURCE_PATTERN
from tests import agent, golden
from tests.exposed import Page

OWNERS = golden.CAPTURES / "owners"
PATIENCE_SECONDS = 300.0


@pytest.fixture(name="copy")
def make_copy(directory: Path) -> Path:
    """A capture to be broken."""
    return shutil.copytree(OWNERS, directory / "copy")


def with_files(capture: on_disk.Capture, **changed: bytes | None) -> dict[str, bytes]:
    files = {**capture.frames[0].files, **changed}
    return {name: message for name, message in files.items() if message is not None}


# --- playing ----------------------------------------------------------------------------------------------------------


async def test_a_capture_is_served_as_a_node(directory: Path) -> None:
    """The page of `demo --capture` says of containers what the capture's page says; nothing is left behind."""
    expected = Page((OWNERS / on_disk.EXPECTED).read_text())
    async with agent.run_agent(
        "demo", "--capture", str(OWNERS), "--interval", "100ms", "--collect", "all", TMPDIR=str(directory)
    ) as running:
        page = await running.later(3)
        document = json.loads((await running.get("/api/v1/map")).text)
    served = {row for row in page.container_series() if row[0] not in replay.CLOCK_DEPENDENT}
    assert served == expected.container_series()
    assert document["name"] == "made-node"
    assert {source["source"] for source in document["sources"] if source["up"]} >= {"kubelet", "nvml", "procfs"}
    assert os.listdir(directory) == []


async def test_frames_are_played_in_their_time_and_again(directory: Path) -> None:
    """What changed between frames changes on the page, and after the last frame comes the first."""
    capture = on_disk.load(OWNERS)
    later = with_files(capture, **{"kubelet/list.json": b"{}"})
    frames = (capture.frames[0], on_disk.Frame(0.7, later))
    on_disk.write(replace(capture, frames=frames), directory / "two", b"")
    async with agent.run_agent("demo", "--capture", str(directory / "two"), "--interval", "50ms") as running:
        for has_holders in (True, False, True, False):

            def holds(page: Page, wanted: bool = has_holders) -> bool:
                return page.up("kubelet") and bool(page.samples.get("gpumap_allocation_info")) == wanted

            await running.until(holds, f"holders: {has_holders}")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("kubelet", "socket_missing"),
        ("kubelet", "connection_refused"),
        ("kubelet", "deadline_exceeded"),
        ("kubelet", "permission_denied"),
        ("kubelet", "unavailable"),
        ("kubelet", "unimplemented"),
        ("kubelet", "message_too_large"),
        ("kubelet", "decode"),
        ("kubelet", "internal"),
        ("checkpoint", "checkpoint_missing"),
        ("checkpoint", "checkpoint_unreadable"),
        ("checkpoint", "checkpoint_corrupt"),
        ("pod_logs", "pod_logs_missing"),
        ("pod_logs", "pod_logs_unreadable"),
        ("procfs", "unreadable"),
    ],
)
async def test_a_source_that_was_down_is_down_again(source: str, reason: str) -> None:
    """Each for the reason that it gave; when it was up in the frame before, it is up there."""
    capture = on_disk.load(OWNERS)
    places = {
        "kubelet": "kubelet/list.json",
        "checkpoint": contents.CHECKPOINT,
        "pod_logs": contents.LOG_TREE,
        "procfs": contents.OWN_CGROUP,
    }
    # One identity source is enough: without the other it shows.
    other = {"checkpoint": contents.LOG_TREE, "pod_logs": contents.CHECKPOINT}.get(source)
    up = with_files(capture, **({other: None} if other else {}))
    down = {name: message for name, message in up.items() if name != places[source]}
    down[contents.DOWN] = contents.down_text({source: Down(reason, "in this test")})
    frames = (on_disk.Frame(0.0, up), on_disk.Frame(1.0, down), on_disk.Frame(2.0, up))
    contents.check(down)
    shown = "pod_identity" if other else source
    found = [
        next(health for health in snapshot.node.sources if health.source == shown)
        for snapshot in await replay.snapshots(replace(capture, frames=frames))
    ]
    assert [health.up for health in found] == [True, False, True]
    assert found[1].reason == reason or found[1].errors[reason] > 0


async def test_a_replay_takes_the_time_that_the_capture_took() -> None:
    """A List that is older than it may be is not believed, though its frame was replayed a moment ago."""
    capture = on_disk.load(OWNERS)
    away = with_files(capture, **{"kubelet/list.json": None})
    away[contents.DOWN] = contents.down_text({"kubelet": Down("socket_missing", "")})
    frames = (capture.frames[0], on_disk.Frame(50.0, away), on_disk.Frame(70.0, away))
    snapshots = await replay.snapshots(replace(capture, frames=frames))
    holders = [any(row.slots for row in snapshot.containers) for snapshot in snapshots]
    assert holders == [True, True, False]


def answers_of(player: Player, asked: wire.Request) -> list[wire.Answer]:
    return [wire.decode(line) for line in player.read(asked)]


GPU = Uuid("GPU-b1028956-cfa2-4990-bf4a-5da9abb51763")
HEALTHY = GpuReading(
    0,
    uuid=GPU,
    performance_state=0,
    nvlink_receive_bytes=5,
    activity=Activity(0.5, 0.25, None, 0.125, video_ratio=0.75),
    samples_from=SAMPLES_NEW,
    samples=(ProcessSample(7, 0.5, 0.25, 0.0, 0.0, 0.125, 0.75),),
)
XIDS = NvmlReading("1", "2", "3", (HEALTHY,), (XidError(GPU, 31, None, None, 2.5, 2),), (Listening(GPU, 100.0, 0.25),))


@pytest.fixture(name="played")
async def play_owners(directory: Path) -> AsyncIterator[Callable[[NvmlReading], Awaitable[None]]]:
    """Set the reading of the driver on a node."""
    capture = on_disk.load(OWNERS)
    node = PlayedNode(capture, directory)

    async def show(reading: NvmlReading) -> None:
        await node.show(on_disk.Frame(0.0, with_files(capture, **{contents.NVML: contents.reading_text(reading)})))

    yield show
    await node.stop()


async def test_a_frames_xid_events_are_reported_once(
    directory: Path, played: Callable[[NvmlReading], Awaitable[None]]
) -> None:
    """However often a frame is read; when it comes again, so do they. Listening goes on as long as the frame lasts."""
    now, began = 1000.0, time.monotonic()
    player = Player(directory, lambda: now)
    await played(XIDS)
    assert list(player.unasked()) == []
    xid, received, driver, gpu = answers_of(player, wire.Request(1, 1.0, 5.0, groups=replay.GROUPS))
    assert isinstance(xid, wire.XidMessage)
    assert structs.replace(xid, monotonic=0.0) == wire.XidMessage(GPU, 31, None, None, 0.0, 2)
    assert began - 2.5 <= xid.monotonic <= time.monotonic() - 2.5
    assert received == wire.ListeningMessage((wire.ListeningPeriod(GPU, 900.0, 999.75),))
    assert (isinstance(driver, wire.DriverMessage), gpu) == (True, wire.GpuMessage(1, HEALTHY))
    now = 1500.0
    await played(XIDS)
    received, *_ = answers_of(player, wire.Request(2, 1.0, 5.0, groups=replay.GROUPS))
    assert received == wire.ListeningMessage((wire.ListeningPeriod(GPU, 900.0, 1499.75),))
    await played(replace(XIDS, xids=()))
    assert list(player.unasked()) == []
    await played(XIDS)
    await played(replace(XIDS, xids=()))  # a frame that the driver does not see is not lost
    (late,) = map(wire.decode, player.unasked())
    assert isinstance(late, wire.XidMessage)
    assert (late.code, late.times) == (31, 2)
    assert list(player.unasked()) == []


async def test_the_program_reports_events_between_two_reads(
    directory: Path, played: Callable[[NvmlReading], Awaitable[None]]
) -> None:
    """No request needs to ask, and it exits with 0 when stdin ends."""
    await played(replace(XIDS, xids=()))
    command = [sys.executable, "-m", "gpumap.lab.driver", str(directory)]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_SECONDS):
        process.stdin.write(wire.encode(wire.Request(1, 1.0, 5.0, groups=replay.GROUPS)))
        kinds = [type(wire.decode(await process.stdout.readline())) for _ in range(3)]
        await played(XIDS)
        answer = wire.decode(await process.stdout.readline())
        process.stdin.close()
        assert await process.wait() == 0
    assert kinds == [wire.ListeningMessage, wire.DriverMessage, wire.GpuMessage]
    assert isinstance(answer, wire.XidMessage)
    assert (answer.uuid, answer.code) == (GPU, 31)


# --- what is no capture -----------------------------------------------------------------------------------------------


def _replace(name: str, text: str) -> Callable[[Path], None]:
    def change(copy: Path) -> None:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text(text)

    return change


def _add_log(line: str) -> Callable[[Path], None]:
    def change(copy: Path) -> None:
        with (copy / "log.tree").open("a") as file:
            file.write(line + "\n")

    return change


def _about(**changed: object) -> Callable[[Path], None]:
    def change(copy: Path) -> None:
        message = json.loads((copy / "capture.json").read_text())
        (copy / "capture.json").write_text(json.dumps({**message, **changed}))

    return change


def _huge(copy: Path) -> None:
    with (copy / "nvml.json").open("ab") as file:
        file.truncate(LIMITS.file_bytes + 1)


def _link(copy: Path) -> None:
    (copy / "nvml.json").unlink()
    (copy / "nvml.json").symlink_to("/etc/passwd")


def _fifo(copy: Path) -> None:
    (copy / "log.tree").unlink()
    os.mkfifo(copy / "log.tree")


def _linked_frames(copy: Path) -> None:
    (copy.parent / "elsewhere").mkdir()
    (copy / "frames").symlink_to(copy.parent / "elsewhere")


def _later_frame(name: str, text: str) -> Callable[[Path], None]:
    return _replace(f"frames/{name}", text)


BROKEN: list[tuple[str, Callable[[Path], None], str]] = [
    ("no folder", shutil.rmtree, "capture.json: No such file or directory"),
    ("no capture.json", lambda copy: (copy / "capture.json").unlink(), "capture.json: No such file"),
    ("no JSON", _replace("capture.json", "{"), "capture.json: is not JSON"),
    ("version", _about(version=2), "capture.json: version: Invalid value 2"),
    ("half a GPU", _replace("nvml.json", '{"gpus": [{"index": 0, "model": "\\ud800"}]}'), "nvml.json: is not JSON"),
    ("resource", _about(resource="("), "resource is not a regular expression"),
    ("no NVML", lambda copy: (copy / "nvml.json").unlink(), "no nvml.json"),
    (
        "an XID",
        _replace("nvml.json", '{"gpus": [], "xids": [["GPU-x", -1, null, null, 1]]}'),
        "nvml.json: xids[0][1]: Expected `int` >= 0",
    ),
    ("no List", lambda copy: (copy / "kubelet/list.json").unlink(), "no kubelet/list.pb or kubelet/list.json"),
    ("List", _replace("kubelet/list.json", '{"pods": 3}'), "kubelet/list.json: "),
    ("a pod", _replace("pods_api.json", '[{"spec": 3}]'), "pods_api.json: Failed to parse spec field"),
    (
        "down",
        _replace("down.json", '{"nvml": {"reason": "x"}}'),
        "down.json: expected one of kubelet|checkpoint",
    ),
    ("up", _add_log("d 755 ../../evil 0 -> "), "is no name below var/log/"),
    ("up within", _add_log("d 755 var/log/pods/../../../../evil 0 -> "), "is no name below var/log/"),
    ("absolute", _add_log("f 644 /tmp/evil 0 -> "), "is no name below var/log/"),
    ("elsewhere", _add_log("f 644 etc/evil 0 -> "), "is no name below var/log/"),
    ("mode", _add_log("f jane var/log/pods/x 0 -> "), "is no name below var/log/"),
    ("a link out", _add_log("l 777 var/log/containers/x.log 9 -> /etc/passwd"), "is no link of var/log/containers/"),
    ("a link up", _add_log("l 777 var/log/containers/x.log 9 -> /var/log/pods/../../x"), "is no link of"),
    ("twice", _add_log("f 644 var/log/pods/x 0 -> \nf 644 var/log/pods/x 0 -> "), "a name exists twice"),
    ("huge", _huge, "nvml.json: is larger than 64 MiB"),
    ("a link", _link, "nvml.json: is not a regular file"),
    ("a pipe", _fifo, "log.tree: is not a regular file"),
    ("a long name", _add_log(f"d 755 var/log/pods/{'a' * 300}_b_c 0 -> "), "a name is longer than 255 bytes"),
    ("many bytes", _add_log(f"d 755 var/log/pods/{'é' * 128} 0 -> "), "a name is longer than 255 bytes"),
    (
        "a long link",
        _add_log(f"l 777 var/log/containers/x.log 9 -> /var/log/pods/a/b/{'c' * 256}"),
        "a name is longer than 255 bytes",
    ),
    ("long resource", _about(resource="x" * 1025), "resource is longer than 1024 characters"),
    ("steep resource", _about(resource="(a+)+b"), "resource repeats a group"),
    ("frames elsewhere", _linked_frames, "/frames: is a link"),
    ("no frame", _later_frame("first/frame.json", "{}"), "frames/first: is not a frame"),
    ("backwards", _later_frame("0001/frame.json", '{"offset_seconds": -1}'), "offset_seconds is not a number"),
    (
        "nothing left",
        _later_frame("0001/frame.json", '{"offset_seconds": 1, "gone": ["nvml.json"]}'),
        "/frames/0001: no nvml.json",
    ),
]


@pytest.mark.parametrize(("change", "expected"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_what_is_no_capture_is_refused_in_one_line(copy: Path, change: Callable[[Path], None], expected: str) -> None:
    change(copy)
    with pytest.raises(UsageError) as refused:
        load_capture(copy)
    assert str(refused.value).startswith(f"--capture {copy}")
    assert expected in str(refused.value)


def _big(name: str) -> Callable[[Path], None]:
    """A file that takes no room on the disk."""

    def change(copy: Path) -> None:
        _later_frame("0001/frame.json", '{"offset_seconds": 1}')(copy)
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        with (copy / name).open("wb") as file:
            file.truncate(2 << 20)

    return change


def _processes(number: int) -> Callable[[Path], None]:
    def change(copy: Path) -> None:
        for pid in range(1000, 1000 + number):
            _replace(f"proc/{pid}/cgroup", "")(copy)

    return change


def _frames(number: int) -> Callable[[Path], None]:
    """Each with a file that changed."""

    def change(copy: Path) -> None:
        for frame in range(1, number):
            _later_frame(f"{frame:04}/frame.json", f'{{"offset_seconds": {frame}}}')(copy)
            _later_frame(f"{frame:04}/proc/101/cgroup", f"0::/{frame}")(copy)

    return change


def _wordy(copy: Path) -> None:
    _later_frame("0001/frame.json", json.dumps({"offset_seconds": 1, "gone": ["x" * (2 << 20)]}))(copy)


LIMITED: list[tuple[str, Callable[[Path], None], Limits, str]] = [
    ("the first frame", _big("proc/999/cgroup"), Limits(total_bytes=1 << 20), "is larger than 1 MiB"),
    ("a later frame", _big("frames/0001/proc/999/cgroup"), Limits(total_bytes=1 << 20), "is larger than 1 MiB"),
    ("a frame's own words", _wordy, Limits(description_bytes=1 << 20), "frame.json: is larger than 1 MiB"),
    ("files of a frame", _processes(50), Limits(frame_files=50), "more than 50 files"),
    ("files of all frames", _frames(20), Limits(files=100), "more than 100 files, each counted once a frame"),
    ("frames", _frames(20), Limits(frames=10), "more than 10 frames"),
]


@pytest.mark.parametrize(
    ("change", "limits", "expected"), [row[1:] for row in LIMITED], ids=[row[0] for row in LIMITED]
)
def test_limits_hold_for_every_frame(copy: Path, change: Callable[[Path], None], limits: Limits, expected: str) -> None:
    """Bytes, files and frames are counted before they are read, in the first frame too."""
    change(copy)
    on_disk.load(copy)
    with pytest.raises(UsageError, match=re.escape(expected)):
        on_disk.load(copy, limits)


@pytest.mark.parametrize(
    ("pattern", "allowed"),
    [
        (DEFAULT_RESOURCE_PATTERN, True),
        (DEFAULT_RESOURCE_PATTERN + r"|acme\.com/gpu", True),
        (r"acme\.com/gpu|" + DEFAULT_RESOURCE_PATTERN, True),
        (r"(nvidia|amd)\.com/.+", True),
        (r"nvidia\.com/(?!.*mps).+", True),
        (".*[+*?(]gpu.*", True),
        ("(a|a)*b", False),
        ("(?:a{1,9}){1,9}", False),
        ("a?a?a?a?aaaa", False),
        ("(a|a)(a|a)(a|a)(a|a)", False),
        ("(?P<a>a*a*a*a*:b)", False),
        (r"(a)\1", False),
        ("(?x:#[\n(a+)+#]\n)b", False),
        ("[[a]", False),
        (DEFAULT_RESOURCE_PATTERN + "a*", False),
    ],
)
def test_an_expression_that_may_take_for_ever_is_refused(pattern: str, allowed: bool) -> None:
    """What people write for their resources may be in a capture; what only costs time may not."""
    assert (limits.refused(pattern) is None) == allowed


async def test_a_node_that_cannot_be_shown_leaves_nothing_running(directory: Path) -> None:
    """One line that names the file; the kubelet that had started already is stopped."""
    (directory / "nvml.json" / "in the way").mkdir(parents=True)
    node = PlayedNode(on_disk.load(OWNERS), directory)
    with pytest.raises(FatalError, match=r"cannot play the node: .*"):
        async with node.playing():
            pytest.fail("it cannot be played")
    socket = node.settings(resolve(argparse.Namespace(), {})).kubelet_socket
    assert socket.parent.is_dir()
    assert not socket.exists()


def test_only_what_changed_is_touched(directory: Path) -> None:
    """A file that stays is the same file; what changes is replaced whole; what goes is gone, also as another kind."""
    files = NodeFiles(directory)
    capture = on_disk.load(OWNERS)
    files.show(files_of(capture.frames[0].files))
    before = {path: path.lstat().st_ino for path in directory.rglob("*")}
    cgroup = b"0::/system.slice/other.service\n"
    later = with_files(capture, **{"proc/101/cgroup": cgroup, "proc/102/stat": None, "proc/102/cgroup": None})
    later |= {contents.DOWN: contents.down_text({"checkpoint": Down("checkpoint_unreadable", "")})}
    files.show(files_of(later))
    after = {path: path.lstat().st_ino for path in directory.rglob("*")}
    names = {str(path.relative_to(directory)) for path in before.keys() ^ after.keys()}
    assert names == {"proc/102", "proc/102/stat", "proc/102/cgroup"}
    replaced = {
        str(path.relative_to(directory)) for path in before.keys() & after.keys() if before[path] != after[path]
    }
    assert replaced - {"kubelet/device-plugins/kubelet_internal_checkpoint"} == {"proc/101/cgroup"}
    assert (directory / "proc/101/cgroup").read_bytes() == cgroup
    assert (directory / "kubelet/device-plugins/kubelet_internal_checkpoint").is_dir()
    files.show(files_of(capture.frames[0].files))
    assert {path.relative_to(directory) for path in directory.rglob("*")} == {
        path.relative_to(directory) for path in before
    }
