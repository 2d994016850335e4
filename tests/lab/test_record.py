"""`gpumap record`: a node's sources become a folder that is a complete test, and nothing secret is in it."""

from __future__ import annotations

import argparse
import asyncio
import base64
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gpumap.agent.exposition import Exposition
from gpumap.agent.flags import add_flags
from gpumap.agent.join import grants
from gpumap.agent.metrics import GROUPS
from gpumap.agent.settings import Settings, resolve
from gpumap.agent.sources import checkpoint
from gpumap.agent.sources.checkpoint import parse as parse_checkpoint
from gpumap.agent.sources.dra import DraSource
from gpumap.agent.sources.nvml import worker_command
from gpumap.lab.capture import checkpoints, contents, replay
from gpumap.lab.capture import format as on_disk
from gpumap.lab.capture.record import Recorder
from gpumap.lab.capture.recorders import RecordingIdentity
from gpumap.lab.demo.texts import stat_text
from gpumap.model import plugins
from gpumap.model.node import SourceHealth
from gpumap.model.observations import ClaimPods, DraState, NvmlReading, PreparedDevice
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import PodUid, Source
from tests import agent, golden, standin
from tests.captured import found_in
from tests.command import run_command
from tests.demo_process import GPUMAP, environment
from tests.exposed import Page
from tests.kubelet import Hang, Raw, Slow
from tests.machine import GIB, Node, gpu_uuid
from tests.pci import add_function
from tests.processes import PlainProcesses

PATIENCE_SECONDS = 300.0
INTEGRALS = frozenset(family.name for family in GROUPS["accounting"])
"""What they say goes by the time between two collections."""


@pytest.fixture(name="node")
async def make_node(directory: Path, library: Path) -> AsyncIterator[Node]:
    """A node with a holder at work, an idle one, a squatter, docker in a pod and a process of the host."""
    node = Node(directory / "n", library, PlainProcesses(directory / "n" / "proc"))
    trainer = node.admit("trainer", main=[gpu_uuid(1)], sidecar=[])
    node.admit("notebook", namespace="research", main=[f"{gpu_uuid(0)}::0"])
    node.run(trainer.cgroup("main"), 1, 8 * GIB, sm_percent=70)
    node.run(trainer.cgroup("sidecar"), 2, GIB)
    node.run("/system.slice/monitor.service", 2, GIB)
    node.use(node.processes.start_child(f"/docker/{'d' * 64}", trainer.cgroup("main")), 1, GIB)
    async with node.kubelet:
        yield node


def settings_of(*flags: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return resolve(parser.parse_args(flags), {})


async def run_record(node: Node, *arguments: str, stop: asyncio.Event | None = None) -> tuple[int, str, str]:
    """Run the installed command over a node; `stop` is answered with Ctrl-C."""
    process = await asyncio.create_subprocess_exec(
        *(str(GPUMAP), "record", *arguments, *node.flags),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(**standin.environment(node.library, node.state)),
    )
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            if stop is not None:
                await stop.wait()
                process.send_signal(signal.SIGINT)
            out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert b"Traceback" not in errors, errors
    return process.returncode or 0, out.decode(), errors.decode()


# --- a recording is a test --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(), ("--anonymize",)], ids=["plain", "anonymized"])
async def test_a_recording_is_a_test_without_changes(node: Node, directory: Path, flags: tuple[str, ...]) -> None:
    """Record, copy the folder, replay it: the page is the one that is in it."""
    for index in range(4):  # NVML has three
        add_function(node.sys, f"0000:{0x3B + index:02x}:00.0", driver_override="private-driver" if index == 0 else "")
    (directory / "n/proc/2").mkdir()
    (directory / "n/proc/2/stat").write_text(stat_text(2, "kthreadd", 1))
    (directory / "n/proc/2/cgroup").write_text("0::/\n")
    code, out, errors = await run_record(node, str(directory / "new"), *flags)
    assert (code, errors) == (0, "")
    assert f"gpumap demo --capture {directory}/new" in out
    assert ("names and UUIDs unchanged" in out) == (not flags)
    copied = shutil.copytree(directory / "new", directory / "copied")
    page = await replay.page(on_disk.load(copied))
    assert page == (copied / on_disk.EXPECTED).read_bytes()
    assert b"gpumap_container_unassigned_use{" in page
    reason = (await replay.snapshots(on_disk.load(copied)))[-1].node.missing_gpus_reason
    assert reason == "1 GPU on PCI is not in NVML, for less than 2m"
    assert "private" not in (copied / contents.PCI).read_text()
    hosts = Page(page.decode()).by("gpumap_host_gpu_memory_used_bytes", "workload_kind")
    assert hosts == {"systemd_unit": GIB}, "docker in a pod is not of the host"


@pytest.mark.parametrize("flags", [(), ("--anonymize",)], ids=["plain", "anonymized"])
async def test_what_schedulers_share_is_recorded(node: Node, directory: Path, flags: tuple[str, ...]) -> None:
    """A scheduler's mapping files: a replay gives the page again, a damaged file is a complaint there too."""
    one, other = node.admit("one", main=[]), node.admit("other", main=[])
    node.run(one.cgroup("main"), 1, GIB)
    node.run(other.cgroup("main"), 1, GIB)
    folder = directory / "map"
    folder.mkdir()
    record = {"schemaVersion": 1, "pod": "one", "namespace": "ml", "podUID": one.uid, "requestedMemoryMiB": 2048}
    file = folder / f"{one.containers['main']}.json"
    file.write_text(json.dumps({**record, "gpuDevices": [{"index": 0, "minorNumber": 1, "uuid": ""}], "secret": "x"}))
    (folder / f"{'f' * 64}.json").write_text("{")
    code, _, errors = await run_record(node, str(directory / "new"), *flags, "--gpu-fractioning-map", str(folder))
    assert (code, errors) == (0, "")
    capture = on_disk.load(directory / "new")
    page = (directory / "new" / on_disk.EXPECTED).read_text()
    assert page == (await replay.page(capture)).decode()
    assert page.count("gpumap_allocation_info{") == 3, "two of the kubelet, and one that shares a GPU"
    assert f'uuid="{gpu_uuid(1)}"}} {2 * GIB}\n' in page or flags
    assert re.search(r'gpumap_source_errors_total{source="pod_identity",reason="gpu_fractioning_corrupt"} [1-9]', page)
    assert "secret" not in "".join(text.decode(errors="replace") for text in capture.frames[0].files.values())
    assert not found_in(directory / "new", {"one", "other", one.uid.replace("-", "")}) or not flags


async def test_a_recording_has_the_samples_of_the_agent(node: Node, directory: Path) -> None:
    """The page of a recording has the very samples that the agent serves from the same node, but for times."""
    await run_record(node, str(directory / "new"), "--node-name", "here")
    expected = Page((directory / "new" / on_disk.EXPECTED).read_text())
    async with agent.serve(
        node, "--node-name", "here", "--collect", "all", "--process-metrics", "--no-push", library=node.library
    ) as running:
        served = await running.later(3)
    left_out = ("gpumap_source_", "gpumap_collections_total", "gpumap_build_info", "python_", "process_")
    families = {name for name in expected.samples.keys() | served.samples.keys() if not name.startswith(left_out)}
    families -= replay.CLOCK_DEPENDENT | INTEGRALS
    assert "gpumap_container_gpu_memory_used_bytes" in families
    assert {name: expected.samples.get(name) for name in families} == {
        name: served.samples.get(name) for name in families
    }


def without_integrals(page: bytes) -> list[str]:
    return [line for line in page.decode().splitlines() if INTEGRALS.isdisjoint(re.findall(r"\w+", line)[:3])]


def kubelet_of(snapshot: Snapshot) -> SourceHealth:
    return next(health for health in snapshot.node.sources if health.source == Source.KUBELET)


# --- frames -----------------------------------------------------------------------------------------------------------


@pytest.fixture(name="recorder")
async def make_recorder(node: Node, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Recorder]:
    """Collects when the test says so."""
    for name, value in standin.environment(node.library, node.state).items():
        monkeypatch.setenv(name, value)
    recorder = Recorder(settings_of(*node.flags, "--node-name", "here"), worker_command(None))
    yield recorder
    await recorder.close()


async def test_frames_hold_only_what_changed(node: Node, directory: Path, recorder: Recorder) -> None:
    """A pod that ends between two collections is a frame with the kubelet's new answer and what is gone."""
    first, _ = await recorder.frame()
    same, _ = await recorder.frame()
    assert {name for name in same if same[name] != first[name]} == {"nvml.json"}  # though the kubelet shuffles
    later, before = (contents.reading(files) for files in (same, first))
    assert isinstance(later, NvmlReading)
    assert isinstance(before, NvmlReading)
    gpus = tuple(structs.replace(gpu, sampled_seconds=None) for gpu in later.gpus)  # it was read before its time
    assert replace(later, gpus=gpus, listening=before.listening) == before
    squatter = node.admit("squatter", main=[])
    pid = node.run(squatter.cgroup("main"), 2, GIB)
    second, _ = await recorder.frame()
    node.release(pid)
    node.delete(squatter)
    third, snapshot = await recorder.frame()
    frames = [on_disk.Frame(5.0 * number, files) for number, files in enumerate((first, same, second, third))]
    capture = on_disk.Capture(recorder.about(), tuple(frames))
    page = await replay.page(capture)
    on_disk.write(capture, directory / "new", page)
    changed = {
        number: {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        for number in ("0001", "0002", "0003")
        for folder in [directory / "new" / "frames" / number]
    }
    assert changed["0001"] == {"frame.json", "nvml.json"}
    assert changed["0002"] == {
        "frame.json",
        "kubelet/list.pb",
        "log.tree",
        "nvml.json",
        f"proc/{pid}/stat",
        f"proc/{pid}/cgroup",
    }
    assert f"proc/{pid}/stat" in json.loads((directory / "new/frames/0003/frame.json").read_text())["gone"]
    loaded = on_disk.load(directory / "new")
    assert [dict(frame.files) for frame in loaded.frames] == [first, same, second, third]
    assert loaded.about == capture.about
    assert without_integrals(page) == without_integrals(Exposition(replay.families()).render(snapshot))


async def test_an_answer_that_cannot_be_decoded_is_kept(node: Node, recorder: Recorder) -> None:
    """What gpumap does not understand is what a bug report is for: its bytes are there as they came."""
    node.kubelet.misbehave(Raw(b"\xff\xff"))
    files, snapshot = await recorder.frame()
    assert files["kubelet/list.pb"] == b"\xff\xff"
    capture = on_disk.Capture(recorder.about(), (on_disk.Frame(0.0, files),))
    assert kubelet_of((await replay.snapshots(capture))[-1]).reason == kubelet_of(snapshot).reason == "decode"


class Gate:
    """A `--resource` that keeps waiting, until it is opened, who asks it in the thread that reads pod identity."""

    def __init__(self, resource: re.Pattern[str]) -> None:
        self.opened = threading.Event()
        self.pattern = resource.pattern

    def fullmatch(self, name: str) -> re.Match[str] | None:
        if threading.current_thread().name == "gpumap-identity":
            self.opened.wait(PATIENCE_SECONDS)
        return re.fullmatch(self.pattern, name)


async def test_a_late_answer_is_in_no_frame(node: Node, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that was given up ends while its frame is not done yet: the page knows nothing of it, nor the capture."""
    for name, value in standin.environment(node.library, node.state).items():
        monkeypatch.setenv(name, value)
    settings = settings_of(*node.flags, "--node-name", "here")
    gate = Gate(settings.resource)
    recorder = Recorder(replace(settings, resource=cast("re.Pattern[str]", gate)), worker_command(None))
    try:
        node.kubelet.misbehave(Slow(1.0), times=1)
        asking = asyncio.create_task(recorder.frame())
        async with asyncio.timeout(PATIENCE_SECONDS):
            await node.kubelet.called()  # the last to be asked
            gate.opened.set()
            late, snapshot = await asking
            files, _ = await recorder.frame()
    finally:
        gate.opened.set()
        await recorder.close()
    identity = next(health for health in snapshot.node.sources if health.source == Source.POD_IDENTITY)
    assert (identity.up, identity.reason) == (False, "deadline_exceeded")
    assert not late.keys() & {contents.CHECKPOINT, contents.LOG_TREE}
    assert {contents.down(late)[name].reason for name in ("checkpoint", "pod_logs")} == {"deadline_exceeded"}
    assert files.keys() >= {contents.CHECKPOINT, contents.LOG_TREE}


async def test_ctrl_c_ends_it_early_and_keeps_what_there_is(node: Node, directory: Path) -> None:
    """A recording of an hour that is interrupted is a complete, shorter one."""
    stop = asyncio.Event()
    recording = asyncio.create_task(
        run_record(node, str(directory / "new"), "--for", "1h", "--interval", "200ms", stop=stop)
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        await node.kubelet.called(times=3)
    stop.set()
    code, out, errors = await recording
    assert (code, errors) == (0, "")
    assert "Recorded" in out
    capture = on_disk.load(directory / "new")
    assert len(capture.frames) >= 2
    assert await replay.page(capture) == (directory / "new" / on_disk.EXPECTED).read_bytes()


async def test_stopped_before_the_first_collection_it_leaves_nothing(node: Node, directory: Path) -> None:
    """No half of a capture, and no temporary folder either."""
    node.kubelet.misbehave(Hang())
    stop = asyncio.Event()
    recording = asyncio.create_task(run_record(node, str(directory / "new"), stop=stop))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await node.kubelet.called()
    stop.set()
    code, out, errors = await recording
    assert (code, out) == (0, "")
    assert "before anything was recorded" in errors
    assert os.listdir(directory) == ["n"]


# --- bad luck and bad input -------------------------------------------------------------------------------------------


def test_sources_that_are_down_are_recorded_so(directory: Path) -> None:
    """On a machine that is no GPU node it writes a capture and says what is missing; exit 1: no source answers."""
    flags: tuple[str, ...] = (
        "--kubelet-root",
        str(directory / "none"),
        "--device-checkpoint",
        str(directory / "no-file"),
    )
    flags += ("--pod-log-root", str(directory / "none"), "--nvml-library", str(directory / "none.so"))
    done = run_command("record", str(directory / "new"), *flags, "--proc", str(directory / "none"))
    assert done.returncode == 1, done.stderr
    lines = done.stderr.splitlines()
    assert [line.split()[1] for line in lines] == ["kubelet", "nvml", "procfs", "pod_identity"]
    assert all("is down, and is recorded so" in line for line in lines)
    down = contents.down({contents.DOWN: (directory / "new" / contents.DOWN).read_bytes()})
    assert {name: why.reason for name, why in down.items()} == {
        "kubelet": "socket_missing",
        "checkpoint": "checkpoint_missing",
        "pod_logs": "pod_logs_missing",
        "procfs": "unreadable",
    }
    assert golden.page(directory / "new") == (directory / "new" / on_disk.EXPECTED).read_bytes()


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("full", "is there already, and is not an empty folder"),
        ("file", "is there already, and is not an empty folder"),
        ("link", "is there already, and is not an empty folder"),
        ("none/new", "is not a folder"),
        ("/proc/new", "cannot be written"),
    ],
)
def test_it_writes_over_nothing(directory: Path, place: str, expected: str) -> None:
    """A folder with something in it, a file, a link, a parent that is not there: one line, exit 2, before it looks."""
    (directory / "full").mkdir()
    (directory / "full" / "note").write_text("mine")
    (directory / "file").write_text("mine")
    (directory / "link").symlink_to(directory / "elsewhere")
    done = run_command("record", str(directory / place))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert expected in done.stderr
    assert (directory / "full" / "note").read_text() == (directory / "file").read_text() == "mine"


def test_a_resource_that_a_capture_cannot_bring_is_refused_first(directory: Path) -> None:
    done = run_command("record", str(directory / "new"), "--resource", "(a+)+")
    assert done.returncode == 2
    assert done.stderr.startswith("gpumap: --resource repeats a group")
    assert len(done.stderr.splitlines()) == 1
    assert os.listdir(directory) == []


# --- nothing secret ---------------------------------------------------------------------------------------------------

SECRET = "hunter2"


def _field(number: int, said: bytes) -> bytes:
    assert len(said) < 128
    return bytes([number << 3 | 2, len(said)]) + said


def _pair(key: str, value: str) -> bytes:
    return _field(1, key.encode()) + _field(2, value.encode())


def plugin_answer() -> bytes:
    """A ContainerAllocateResponse with something secret in every place where a plugin may put it."""
    envs = [("NVIDIA_VISIBLE_DEVICES", gpu_uuid(1)), ("DB_PASSWORD", SECRET), ("NVIDIA_TOKEN", SECRET)]
    return b"".join(
        (
            *(_field(1, _pair(*env)) for env in envs),
            _field(2, _pair("/etc/secret", f"/mnt/{SECRET}")),
            _field(3, _pair("/dev/nvidia0", "/dev/nvidia0") + _field(3, b"rw")),
            _field(3, _pair("/dev/nvidia0", f"/dev/mapper/{SECRET}")),
            _field(4, _pair("vendor.example/token", SECRET)),
            _field(4, _pair("tencent.com/vcuda-device", "/dev/nvidia0")),
            _field(5, _field(1, b"nvidia.com/gpu=0")),
            _field(5, _field(1, f"vendor.example/nic={SECRET}".encode())),
            _field(9, SECRET.encode()),
        )
    )


async def test_nothing_secret_is_in_a_recording(node: Node, directory: Path) -> None:
    """No environment, mount, annotation, unknown field, other device, log or memory map; no other user may read it."""
    place = node.kubelet_root / "device-plugins" / "kubelet_internal_checkpoint"
    document = json.loads(place.read_text())
    for row in document["Data"]["PodDeviceEntries"]:
        row |= {"AllocResp": base64.b64encode(plugin_answer()).decode(), "Extra": SECRET}
    nic = {"PodUID": "1", "ContainerName": SECRET, "ResourceName": "vendor.example/nic", "DeviceIDs": [SECRET]}
    document["Data"]["PodDeviceEntries"].append(nic | {"AllocResp": SECRET})
    document["Data"]["RegisteredDevices"]["vendor.example/nic"] = [SECRET]
    document["Data"]["More"] = document["More"] = SECRET
    place.write_text(json.dumps(document))
    pods = node.directory / "log" / "pods"
    for folder in pods.glob("*/*"):
        (folder / "0.log").write_text(SECRET)
        (folder / f"{SECRET}.log").write_text("")
    for process in node.processes.root.iterdir():
        (process / "environ").write_text(f"TOKEN={SECRET}")
        (process / "cmdline").write_text(f"train --token {SECRET}")
        stat = (process / "stat").read_text()
        (process / "stat").write_text(stat.replace("371118080", SECRET))
    code, _, errors = await run_record(node, str(directory / "new"))
    assert (code, errors) == (0, "")
    assert found_in(directory / "new", {SECRET}) == set()
    for path in (directory / "new").rglob("*"):
        assert SECRET.encode() not in (path.read_bytes() if path.is_file() else b"")
        assert path.stat().st_mode & 0o777 == (0o600 if path.is_file() else 0o700)
    assert (directory / "new").stat().st_mode & 0o777 == 0o700
    rows = json.loads((directory / "new" / contents.CHECKPOINT).read_text())["Data"]["PodDeviceEntries"]
    assert {row["ResourceName"] for row in rows} == {"nvidia.com/gpu", "nvidia.com/gpu.shared"}
    kept = base64.b64decode(rows[0]["AllocResp"])
    for word in ("NVIDIA_VISIBLE_DEVICES", gpu_uuid(1), "/dev/nvidia0", "vcuda-device", "nvidia.com/gpu=0"):
        assert word.encode() in kept


def dra_files(root: Path, uid: PodUid) -> None:
    """DRA's files below a kubelet's root, as their writers write them, with secrets wherever there can be one."""
    device = {"PoolName": SECRET, "DeviceName": "gpu-0", "RequestNames": [SECRET], "CDIDeviceIDs": [SECRET]}
    entry = {"ClaimUID": SECRET, "ClaimName": "gpus", "Namespace": "ml", "PodUIDs": {uid: {}}, "More": SECRET}
    nic = {"ClaimName": "nics", "Namespace": "ml", "PodUIDs": {uid: {}}, "DriverState": {SECRET: {"Devices": [device]}}}
    data = {"kind": "DRACheckpoint", "Entries": [{**entry, "DriverState": {"gpu.nvidia.com": {}}}, nic], "More": SECRET}
    (root / "dra_manager_state").write_text(json.dumps({"Data": json.dumps(data), "Checksum": 1, "More": SECRET}))
    given: dict[str, object] = {"driver": "gpu.nvidia.com", "device": "gpu-0", "shareID": "6b0f", "pool": SECRET}
    given |= {"request": SECRET, "adminAccess": True, "consumedCapacity": {"memory": "10Gi", "other": SECRET}}
    answer = {"DeviceName": "gpu-0", "ShareID": "6b0f", "CDIDeviceIDs": [SECRET], "Metadata": {"more": SECRET}}
    claim = {
        "checkpointState": "PrepareCompleted",
        "name": "gpus",
        "namespace": "ml",
        "status": {"allocation": {"devices": {"results": [given], "config": [{"opaque": SECRET}]}}, "more": SECRET},
        "preparedDevices": [
            {"devices": [{"gpu": {"info": {"uuid": gpu_uuid(0)}, "device": answer}}], "configState": SECRET}
        ],
    }
    unfinished = {**claim, "name": SECRET, "checkpointState": "PrepareStarted"}
    versions = {
        "v2": {"preparedClaims": {SECRET: claim, "2": unfinished}, "nodeBootID": SECRET},
        "v1": {"more": SECRET},
    }
    folder = root / "plugins" / "gpu.nvidia.com"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checkpoint.json").write_text(json.dumps({"checksum": 1, **versions}))


async def test_of_dra_stays_what_was_read(node: Node, directory: Path, recorder: Recorder) -> None:
    """Claims, their pods, the devices behind names; no configuration, pool, request or CDI name, nor a claim's UID."""
    uid = next(iter(node.pods)).uid
    dra_files(node.kubelet_root, uid)
    code, _, errors = await run_record(node, str(directory / "new"))
    assert (code, errors) == (0, "")
    for path in (directory / "new").rglob("*"):
        assert SECRET.encode() not in (path.read_bytes() if path.is_file() else b"")
    files, _ = await recorder.frame()
    same, _ = await recorder.frame()
    assert same[contents.DRA_STATE] is files[contents.DRA_STATE], "what did not change is not written anew"
    state = directory / "new" / contents.DRA_STATE
    answer = DraSource(state, directory / "new" / contents.DRA_CHECKPOINT).read()
    assert answer == (
        DraState(
            (ClaimPods("ml", "gpus", (uid,)), ClaimPods("ml", "nics", (uid,))),
            (PreparedDevice("ml", "gpus", "gpu-0", "6b0f", Uuid(gpu_uuid(0)), True, 10 << 30),),
        ),
        (),
    )


@given(st.binary(max_size=80) | st.binary(max_size=20).map(lambda said: plugin_answer() + said))
def test_any_bytes_for_a_plugins_answer(message: bytes) -> None:
    """Whatever a plugin answered, cutting ends and leaves nothing that was not allowed."""
    assert SECRET.encode() not in checkpoints.cut_answer(message)


READ_NAMES = (
    "NVIDIA_VISIBLE_DEVICES",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_DEVICE_MEMORY_LIMIT_0",
    "CUDA_DEVICE_SM_LIMIT",
    "VOLCANO_GPU_ALLOCATED",
    "VOLCANO_GPU_FACTOR",
    "ALIYUN_COM_GPU_MEM_IDX",
    "ALIYUN_COM_GPU_MEM_DEV",
)
UNREAD_NAMES = (
    "NVIDIA_DRIVER_CAPABILITIES",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_OVERSUBSCRIBE",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_DEVICE_MEMORY_LIMIT",
    "CUDA_DEVICE_SM_LIMIT_0",
    "VOLCANO_GPU_TOTAL",
    "ALIYUN_COM_GPU_MEM_POD",
    "volcano.sh/gpu-index",
    "tencent.com/vcuda-core",
)


def test_each_kept_name_is_used() -> None:
    """Each name on the list of plugins' words is one that gpumap makes something of; no other is on it."""
    modules = (plugins, grants)
    source = "".join(map(inspect.getsource, modules))
    for name in READ_NAMES:
        assert checkpoint.ENVS.fullmatch(name)
        assert name.removesuffix("_0") in source
    for name in UNREAD_NAMES:
        message = _pair(name, "0")
        assert checkpoints.cut_answer(_field(1, message) + _field(4, message)) == b""


def nested(depth: int) -> object:
    """Ids that lie as deep as JSON's own reader still goes, where a recursion of ours would not."""
    inner: object = []
    for _ in range(depth):
        inner = {"0": inner}
    return inner


ODD_IDS: dict[str, object] = {
    "deep": nested(700),
    "keys that are no node's": {"0": ["b"], "": ["a"], "node": ["c"], "\ud800": ["d"], "-1": ["e", "a"]},
    "half a character": {"0": ["a", "\ud800"]},
    "no list": {"0": "a", "1": 3, "2": None},
    "a text": "a",
}


@pytest.mark.parametrize("ids", ODD_IDS.values(), ids=ODD_IDS)
def test_a_cut_checkpoint_reads_as_the_whole(ids: object) -> None:
    """Whatever the ids are: gpumap reads the same from what is left."""
    row = {"PodUID": "u", "ContainerName": "c", "ResourceName": "nvidia.com/gpu", "DeviceIDs": ids}
    data = {"PodDeviceEntries": [row], "RegisteredDevices": {"nvidia.com/gpu": ids, "\ud800": ["a"]}}
    text = json.dumps({"Data": data}).encode()
    assert parse_checkpoint(checkpoints.cut_checkpoint(text, lambda name: True)) == parse_checkpoint(text)


def test_names_that_no_kubelet_gives_are_left_out(directory: Path, node: Node) -> None:
    """A blank or a line's end in a name could not be in log.tree; a link to elsewhere keeps its last three steps."""
    log = node.directory / "log"
    (log / "pods" / "a b_c_d").mkdir()
    (log / "pods" / "a\nb_c_d").mkdir()
    (log / "containers" / "odd name.log").symlink_to("/var/log/pods/x_y_z/c/0.log")
    (log / "containers" / "long.log").symlink_to(f"/data/logs/x_y_z/{'c' * 300}/0.log")
    (log / "containers" / "half.log").symlink_to(b"/data/logs/x_y_z/\xff/0.log".decode(errors="surrogateescape"))
    (log / "containers" / "short.log").symlink_to("/etc/passwd")
    (log / "containers" / "other.log").symlink_to("/data/logs/x_y_z/c/0.log")
    nowhere = directory / "none"
    tapped = RecordingIdentity((nowhere,), log, (nowhere, nowhere), lambda name: True)
    tapped.read()
    files = tapped.recorded["pod_logs"]
    assert isinstance(files, dict)
    entries = contents.log_entries(files) or ()
    assert {entry.target for entry in entries if entry.path.endswith("/other.log")} == {"/var/log/pods/x_y_z/c/0.log"}
    assert not [entry for entry in entries if "odd" in entry.path or "short" in entry.path or "_c_d" in entry.path]
    assert not [entry for entry in entries if entry.path.endswith(("/long.log", "/half.log"))]
    assert len([entry for entry in entries if entry.kind == "d"]) == 2 + 2 + 3
