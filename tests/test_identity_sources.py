"""The checkpoint, the log names and /proc: both formats, broken ones, and what is not read twice."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpumap.agent.sources import processes
from gpumap.agent.sources.checkpoint import CheckpointSource, parse
from gpumap.agent.sources.dra import DraSource
from gpumap.agent.sources.identity import PodIdentitySource, PodLogsSource
from gpumap.agent.sources.processes import KnownProcesses
from gpumap.agent.sources.procfs import ProcfsSource
from gpumap.agent.sources.workloads import ANCESTORS_MAX
from gpumap.lab.capture.recorders import RecordingProcfs
from gpumap.model.observations import (
    CgroupKind,
    CgroupMembership,
    ClaimPods,
    Complaint,
    DraState,
    PodCgroup,
    ProcEntry,
    SourceError,
)
from gpumap.model.terms import ContainerName, PodUid
from tests.agent import PATIENCE_SECONDS

UID = "2c48913c-b29f-11e7-9350-020968147796"
CID = "0537ac6c84027b804ba9fa205cc9043ef6bcbc8467dafa6b88b30aa7f4adf18e"
ROW = {"PodUID": UID, "ContainerName": "main", "ResourceName": "nvidia.com/gpu"}


def checkpoint(*rows: object, registered: object = None) -> bytes:
    return json.dumps({"Data": {"PodDeviceEntries": rows or None, "RegisteredDevices": registered}}).encode()


def test_both_formats_of_the_checkpoint() -> None:
    """Ids come as a list (kubelet ≤ 1.19) or by NUMA node, -1 being none."""
    first = parse(checkpoint({**ROW, "DeviceIDs": ["b", "a"]})).value
    later = parse(checkpoint({**ROW, "DeviceIDs": {"0": ["a"], "-1": ["b"]}, "BootID": "unheard of"})).value
    assert first.entries == later.entries
    assert first.entries[0].ids == {"a", "b"}


def test_empty_and_partly_broken_checkpoints() -> None:
    """null is none; rows that are no rows cost only themselves, with one complaint; half a character is U+FFFD."""
    assert parse(checkpoint(registered=None)).value.entries == ()
    answer = parse(checkpoint({**ROW, "DeviceIDs": ["a"]}, 7, {"PodUID": 1}, {**ROW, "PodUID": "\ud800"}))
    assert [(entry.pod_uid, entry.ids) for entry in answer.value.entries] == [(UID, {"a"}), ("\ufffd", frozenset())]
    assert answer.complaints == (Complaint("checkpoint_row", "PodDeviceEntries[1]: incomplete, and 1 more row"),)
    assert parse(checkpoint(registered={"nvidia.com/gpu": ["a", "a", 3]})).value.registered[0].ids == ("a",)


def test_unchanged_checkpoint_is_not_read_again(tmp_path: Path) -> None:
    """The same file gives the very same object; one renamed into its place is read."""
    path = tmp_path / "checkpoint"
    path.write_bytes(checkpoint({**ROW, "DeviceIDs": ["a"]}))
    source = CheckpointSource((path,))
    first = source.read().value
    assert source.read().value is first
    (tmp_path / "new").write_bytes(checkpoint({**ROW, "DeviceIDs": ["b"]}))
    (tmp_path / "new").rename(path)
    assert source.read().value.entries[0].ids == {"b"}


def test_newest_checkpoint_is_read(tmp_path: Path) -> None:
    """The other one is a copy from when the kubelet's root was moved."""
    paths = copied, written = tmp_path / "copied", tmp_path / "written"
    for path, one, seconds in ((copied, "a", 1e9), (written, "b", 2e9)):
        path.write_bytes(checkpoint({**ROW, "DeviceIDs": [one]}))
        os.utime(path, (seconds, seconds))
    assert CheckpointSource(paths).read().value.entries[0].ids == {"b"}
    assert CheckpointSource(paths[::-1]).read().value.entries[0].ids == {"b"}


def make_pod(root: Path, *, uid: str = UID, name: str = "pod", container: str = "main", cid: str = CID) -> None:
    """A pod's log directory and its container's link, as the kubelet makes them."""
    tree = f"ml_{name}_{uid}"
    (root / "pods" / tree / container).mkdir(parents=True)
    (root / "containers").mkdir(exist_ok=True)
    full = f"{name}_ml_{container}-{cid}"[:251]
    (root / "containers" / f"{full}.log").symlink_to(f"/var/log/pods/{tree}/{container}/0.log")


def test_names_of_log_directories_and_links(tmp_path: Path) -> None:
    """Trees give UID, names and containers; links tie a container id to its name without following them."""
    make_pod(tmp_path)
    (tmp_path / "pods" / "not-a-pod").mkdir()
    (tmp_path / "containers" / "strange.log").symlink_to("/elsewhere")
    (tmp_path / "containers" / "plain.log").touch()
    logs = PodLogsSource(tmp_path).read(time.time()).value
    assert [(tree.pod_uid, tree.namespace, tree.pod, tree.containers) for tree in logs.trees] == [
        (UID, "ml", "pod", ("main",))
    ]
    assert [(link.container_id, link.name) for link in logs.links] == [(CID, ContainerName("ml", "pod", "main"))]


def test_long_names_cut_the_container_id(tmp_path: Path) -> None:
    """What is left of an id is kept if it still distinguishes containers; the target names them in full."""
    make_pod(tmp_path, name="p" * 180, container="c" * 30)
    make_pod(tmp_path, uid=UID.replace("2", "3"), name="q" * 205, container="c" * 30)
    links = PodLogsSource(tmp_path).read(time.time()).value.links
    assert [(link.name.pod[0], CID.startswith(link.container_id), len(link.container_id)) for link in links] == [
        ("p", True, 251 - 180 - len("_ml_") - 30 - 1)
    ]


def test_unchanged_directories_give_the_same_object_and_changes_are_seen(tmp_path: Path) -> None:
    """Once settled, nothing is listed again; a new pod, a new container and a removed link are seen at once."""
    make_pod(tmp_path)
    source = PodLogsSource(tmp_path)
    later = time.time() + 3600
    first = source.read(later).value
    assert source.read(later).value is first
    make_pod(tmp_path, uid=UID.replace("2", "3"), name="other", cid="f" * 64)
    assert len(source.read(later).value.trees) == 2
    (tmp_path / "pods" / f"ml_pod_{UID}" / "debugger").mkdir()
    os.utime(tmp_path / "pods" / f"ml_pod_{UID}", (later, later - 60))
    assert ("debugger", "main") in [tree.containers for tree in source.read(later).value.trees]


def test_change_in_the_same_tick_is_seen(tmp_path: Path) -> None:
    """A directory that changed just now is read again even if its time stamp is the same."""
    make_pod(tmp_path)
    source = PodLogsSource(tmp_path)
    stamp = (tmp_path / "pods" / f"ml_pod_{UID}").stat()
    assert source.read(time.time()).value.trees[0].containers == ("main",)
    (tmp_path / "pods" / f"ml_pod_{UID}" / "second").mkdir()
    os.utime(tmp_path / "pods" / f"ml_pod_{UID}", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert source.read(time.time()).value.trees[0].containers == ("main", "second")


def identity_below(root: Path) -> PodIdentitySource:
    """All that identity is read from, below a folder."""
    dra = DraSource(root / "dra_manager_state", root / "plugins" / "gpu.nvidia.com" / "checkpoint.json")
    return PodIdentitySource(CheckpointSource((root / "checkpoint",)), PodLogsSource(root / "log"), dra, time.time)


def test_identity_needs_one_of_its_two_sources(tmp_path: Path) -> None:
    """One of them is enough, and the absence of the other is no complaint. Without both, the source fails."""
    path = tmp_path / "checkpoint"
    source = identity_below(tmp_path)
    with pytest.raises(SourceError) as caught:
        source.read()
    assert [one.reason for one in caught.value.complaints] == ["checkpoint_missing", "pod_logs_missing"]
    make_pod(tmp_path / "log")
    answer = source.read()
    assert (answer.value.checkpoint, answer.complaints) == (None, ())
    path.write_bytes(b"{")
    assert [one.reason for one in source.read().complaints] == ["checkpoint_corrupt"]
    path.write_bytes(checkpoint())
    answer = source.read()
    assert answer.value.checkpoint is not None
    assert answer.value.logs is not None


def test_dra_state_is_part_of_identity_but_not_enough_for_it(tmp_path: Path) -> None:
    """It has UIDs and claims but no names: it is no answer by itself; beside another file it is the same object."""
    state = {"version": "v1", "entries": [{"ClaimName": "gpus", "Namespace": "ml", "PodUIDs": {UID: {}}}]}
    (tmp_path / "dra_manager_state").write_text(json.dumps(state))
    source = identity_below(tmp_path)
    with pytest.raises(SourceError) as caught:
        source.read()
    assert [one.reason for one in caught.value.complaints] == ["checkpoint_missing", "pod_logs_missing"]
    (tmp_path / "checkpoint").write_bytes(checkpoint())
    first = source.read()
    assert first.value.dra.claims == (ClaimPods("ml", "gpus", (PodUid(UID),)),)
    assert first.complaints == ()
    assert source.read().value.dra is first.value.dra


def test_every_files_complaints_are_reported(tmp_path: Path) -> None:
    """What is broken costs only itself: DRA's state first, then the checkpoint's rows."""
    (tmp_path / "dra_manager_state").write_text("{")
    (tmp_path / "checkpoint").write_bytes(checkpoint(7))
    answer = identity_below(tmp_path).read()
    assert [one.reason for one in answer.complaints] == ["dra_state_corrupt", "checkpoint_row"]
    assert answer.value.checkpoint is not None
    assert answer.value.dra == DraState()


def make_process(root: Path, pid: int, path: str, *, start: int = 77, comm: str = "python3", parent: int = 1) -> None:
    """A process of a plain-file tree."""
    (root / str(pid)).mkdir(parents=True, exist_ok=True)
    (root / str(pid) / "cgroup").write_text(f"0::{path}\n")
    (root / str(pid) / "stat").write_text(f"{pid} ({comm}) S {parent} {' '.join(['1'] * 17)} {start} 0 0\n")


def own_at(tmp_path: Path, path: str) -> Path:
    (tmp_path / "own").mkdir(exist_ok=True)
    (tmp_path / "own" / "cgroup").write_text(f"0::{path}\n")
    return tmp_path / "own"


def test_plain_file_tree_is_read_as_proc(tmp_path: Path) -> None:
    """Name, start and cgroup of what was asked for; who left is missing; who cannot be read is reported."""
    root = tmp_path / "proc"
    make_process(root, 10, f"/kubepods/pod{UID}/{CID}", comm="a) b (c")
    make_process(root, 11, "/system.slice/x.service")
    make_process(root, 12, "/x")
    (root / "12" / "stat").write_text("nonsense")
    answer = ProcfsSource(root, own_at(tmp_path, "/system.slice/gpumap.service")).read([10, 11, 12, 13], None)
    assert answer.value.pid_visibility
    assert [(entry.pid, entry.start, entry.comm, entry.cgroup.kind) for entry in answer.value.entries] == [
        (10, 77, "a) b (c", CgroupKind.POD),
        (11, 77, "python3", CgroupKind.HOST),
    ]
    assert answer.value.unreadable == (12,)
    assert [complaint.reason for complaint in answer.complaints] == ["unreadable"]


def test_process_that_started_after_the_question_is_unreadable(tmp_path: Path) -> None:
    """NVML may have listed the PID before this process began, or read its GPU late."""
    root, pid = tmp_path / "proc", os.getpid()  # of a process that runs on any machine: the source holds it by a pidfd
    make_process(root, pid, f"/kubepods/pod{UID}/{CID}", start=500)
    source = ProcfsSource(root, own_at(tmp_path, "/"))
    assert [entry.pid for entry in source.read([pid], 500).value.entries] == [pid]
    assert source.read([pid], 500).value.unreadable == ()
    found = source.read([pid], 499)
    assert (found.value.entries, found.value.unreadable, found.complaints) == ((), (pid,), ())


def test_reused_pid_is_of_no_container_also_if_the_clock_failed_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML lists a dead process, and its PID is another process's now. The first read did not know what time it was."""
    monkeypatch.setattr(processes, "SHARE_OF_DESCRIPTORS", 0)
    root, pid, far = tmp_path / "proc", os.getpid(), 1 << 60
    make_process(root, pid, f"/kubepods/pod{UID}/{CID}", start=1)
    (root / "self").symlink_to(str(pid))
    source = ProcfsSource(root, own_at(tmp_path, "/system.slice/gpumap.service"))
    for ticks in (None, far):
        assert [entry.pid for entry in source.read([pid], ticks).value.entries] == [pid]
    now = source.clock_ticks() or 0
    (root / str(pid) / "stat").write_text(f"{pid} (other) S {' '.join(['1'] * 18)} {now + 1} 0 0\n")
    assert source.read([pid], far).value.unreadable == (pid,)
    while (source.clock_ticks() or 0) <= now:
        time.sleep(0.005)
    source.read([], far)
    assert [entry.comm for entry in source.read([pid], far).value.entries] == ["other"], "NVML lists the process again"


@pytest.mark.parametrize(
    ("own", "processes", "visible"),
    [
        ("/", {"10": f"/../../kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-{CID}.scope"}, True),
        ("/", {"1": "/", "7": f"/../cri-containerd-{CID}.scope"}, False),
        ("/", {}, False),
        (f"/kubepods/pod{UID}/{CID}", {"1": f"/kubepods/pod{UID}/{CID}"}, False),
        (f"/kubepods/pod{UID}/{CID}", {"1": "/init.scope"}, True),
        ("/system.slice/gpumap.service", {"1": "/init.scope"}, False),
    ],
)
def test_pid_visibility_by_what_can_be_seen(tmp_path: Path, own: str, processes: dict[str, str], visible: bool) -> None:
    """Seeing one process that is certainly outside gpumap's own pod is what makes PIDs visible."""
    root = tmp_path / "proc"
    root.mkdir()
    for pid, path in processes.items():
        make_process(root, int(pid), path)
    assert ProcfsSource(root, own_at(tmp_path, own)).read([], None).value.pid_visibility is visible


def test_tree_of_another_pid_namespace_is_not_believed(tmp_path: Path) -> None:
    """Where `self` names another PID than ours the tree is of another namespace: the host's /proc in a pod."""
    root = tmp_path / "proc"
    make_process(root, 10, f"/../../pod{UID}/{CID}")
    (root / "self").symlink_to(str(os.getpid() + 1))
    answer = ProcfsSource(root, own_at(tmp_path, "/")).read([10], None)
    assert (answer.value.pid_visibility, answer.value.entries) == (False, ())
    assert "another PID namespace" in answer.value.visibility_reason
    (root / "self").unlink()
    (root / "self").symlink_to(str(os.getpid()))
    assert ProcfsSource(root, own_at(tmp_path, "/")).read([10], None).value.pid_visibility


def test_own_process_on_the_real_proc() -> None:
    """The real tree: the entry of a running child is read, an ended child is missing, and the clock is known."""
    source = ProcfsSource(Path("/proc"))
    ticks = source.clock_ticks()
    assert ticks is not None
    with subprocess.Popen(["sleep", "60"]) as child:
        answer = source.read([child.pid], None)
        if not answer.value.pid_visibility:
            pytest.skip(answer.value.visibility_reason)
        assert [(entry.pid, entry.comm) for entry in answer.value.entries] == [(child.pid, "sleep")]
        assert answer.value.entries[0].start >= ticks - 1
        assert source.read([child.pid], ticks - 1000).value.entries == ()
        child.kill()
    assert source.read([child.pid], None).value.entries == ()
    assert PodUid(UID)


def test_running_process_is_read_once_and_an_ended_one_forgotten() -> None:
    """A process that still runs keeps its entry; the others free their descriptors."""
    source = ProcfsSource(Path("/proc"))
    if not source.read([], None).value.pid_visibility:
        pytest.skip("processes of others are not visible here")
    before = len(os.listdir("/proc/self/fd"))
    with subprocess.Popen(["sleep", "60"]) as one, subprocess.Popen(["sleep", "60"]) as two:
        far = 1 << 60
        first = source.read([one.pid, two.pid], far).value.entries
        again = source.read([one.pid, two.pid], far).value.entries
        assert [a is b for a, b in zip(first, again, strict=True)] == [True, True]
        one.kill()
        one.wait()
        assert [entry.pid for entry in source.read([one.pid, two.pid], far).value.entries] == [two.pid]
        two.kill()
    assert source.read([], far).value.entries == ()
    assert len(os.listdir("/proc/self/fd")) == before


def test_pid_visibility_that_is_lost_is_noticed(tmp_path: Path) -> None:
    """When the only process outside gpumap's own pod has gone, nothing is visible any more, on an idle node too."""
    root = tmp_path / "proc"
    make_process(root, 7, "/system.slice/sshd.service")
    make_process(root, 9, f"/kubepods/pod{UID}/{CID}")
    source = ProcfsSource(root, own_at(tmp_path, f"/kubepods/pod{UID}/{CID}"))
    assert source.read([], None).value.pid_visibility
    shutil.rmtree(root / "7")
    for pids in ([], [9], []):
        answer = source.read(pids, None).value
        assert (answer.pid_visibility, answer.entries) == (False, ())


def test_descriptors_are_left_for_others() -> None:
    """No more processes are held than may be; the others are read each time, and are reported all the same."""
    known = KnownProcesses(processes_max=2)
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(subprocess.Popen(["sleep", "60"])) for _ in range(3)]
        for child in children[:2]:
            pidfd = known.open(child.pid)
            assert pidfd is not None
            known.keep(pidfd, ProcEntry(child.pid, 1, "sleep", CgroupMembership(CgroupKind.HOST)), None)
        assert known.open(children[2].pid) is None
        for child in children:
            child.kill()
    known.close()


def test_zombie_gives_no_visibility_and_has_no_owner(tmp_path: Path) -> None:
    """On cgroup v1 an ending process has left its cgroups: it neither makes PIDs visible nor belongs to the host."""
    root = tmp_path / "proc"
    make_process(root, 40, "/")
    (root / "40" / "stat").write_text(f"40 (defunct) Z {' '.join(['1'] * 18)} 77 0 0\n")
    source = ProcfsSource(root, own_at(tmp_path, f"/kubepods/pod{UID}/{CID}"))
    assert not source.read([], None).value.pid_visibility
    make_process(root, 41, "/init.scope")
    answer = source.read([40, 41], None).value
    assert [entry.cgroup.kind for entry in answer.entries] == [CgroupKind.UNKNOWN, CgroupKind.HOST]


def test_a_process_without_its_main_thread_is_that_of_the_others(tmp_path: Path) -> None:
    """The kernel shows it as a zombie that has left its cgroups on cgroup v1, while its other threads use the GPU."""
    root = tmp_path / "proc"
    ended = f"(python3) Z {' '.join(['1'] * 18)} 77 0 0\n"
    make_process(root, 40, "/")
    (root / "40" / "stat").write_text(f"40 {ended}")
    make_process(root / "40" / "task", 40, "/")
    (root / "40" / "task" / "40" / "stat").write_text(f"40 {ended}")
    (root / "40" / "task" / "41").mkdir()
    make_process(root / "40" / "task", 42, f"/kubepods/pod{UID}/{CID}")
    make_process(root, 41, "/init.scope")
    answer = ProcfsSource(root, own_at(tmp_path, f"/kubepods/pod{UID}/{CID}")).read([40], None).value
    assert [(pod.pod_uid, pod.container_id) for pod in answer.entries[0].cgroup.pods] == [(UID, CID)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="main threads that end")
def test_a_live_process_whose_main_thread_has_ended() -> None:
    """A real one, in whatever cgroup this test is: its owner is that of this test's process."""
    code = (
        "import ctypes, platform, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[platform.machine()], 0)\n"  # exit(2), of a thread
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            state = Path(f"/proc/{process.pid}/stat")
            deadline = time.monotonic() + PATIENCE_SECONDS
            while ") Z " not in state.read_text():
                assert time.monotonic() < deadline, "the main thread does not end"
                time.sleep(0.01)
            source = ProcfsSource(Path("/proc"))
            answer = source.read([process.pid, os.getpid()], 1 << 60).value
            source.close()
            if not answer.pid_visibility:
                pytest.skip("processes of others are not visible here")
            of = {entry.pid: entry.cgroup for entry in answer.entries}
            assert of[process.pid] == of[os.getpid()]
        finally:
            process.kill()


def test_process_that_outlives_its_cgroup_keeps_its_pod(tmp_path: Path) -> None:
    """A removed cgroup is marked as deleted in the path, which still names the pod and the container."""
    root = tmp_path / "proc"
    make_process(root, 40, f"/kubepods/pod{UID}/{CID} (deleted)")
    answer = ProcfsSource(root, own_at(tmp_path, "/")).read([40], None).value
    assert [(pod.pod_uid, pod.container_id) for pod in answer.entries[0].cgroup.pods] == [(UID, CID)]


# --- docker in a pod: the parents of its processes decide ------------------------------------------------------------

FAR = 1 << 60
DOCKER = f"/docker/{'d' * 64}"
POD = f"/kubepods/pod{UID}/{CID}"
OTHER_UID = PodUid(UID.replace("2", "3"))
OTHER_POD = f"/kubepods/pod{OTHER_UID}/{CID}"
HOST = CgroupMembership(CgroupKind.HOST, (), "d" * 64)
UNKNOWN = CgroupMembership(CgroupKind.UNKNOWN)
IN_POD = CgroupMembership(CgroupKind.POD, (PodCgroup(PodUid(UID), CID),))
SHIM, DAEMON, NO_PID = 5_000_001, 5_000_002, 5_000_003  # above the largest possible PID


def read_cgroup(source: ProcfsSource | RecordingProcfs, not_after: int | None = FAR) -> CgroupMembership:
    (entry,) = source.read([os.getpid()], not_after).value.entries
    return entry.cgroup


def docker_source(tmp_path: Path, path: str = DOCKER, *, parent: int = SHIM, has_kubelet: bool = True) -> ProcfsSource:
    """A tree with a process of docker, which uses a GPU, and its shim. It has the PID of a process that runs."""
    make_process(tmp_path / "proc", os.getpid(), path, start=9, parent=parent)
    (tmp_path / "proc" / str(os.getpid()) / "comm").write_text("python3\n")
    make_process(tmp_path / "proc", SHIM, "/system.slice/docker.service", start=8, parent=DAEMON)
    return ProcfsSource(tmp_path / "proc", own_at(tmp_path, "/system.slice/gpumap.service"), has_kubelet=has_kubelet)


@pytest.mark.parametrize(
    ("path", "start", "parent", "expected"),
    [
        (POD, 7, 1, IN_POD),
        (POD, 7, NO_PID, IN_POD),  # its own parents do not count
        ("/system.slice/docker.service", 7, 1, HOST),
        ("/system.slice/docker.service", 7, 0, HOST),  # started from outside the PID namespace
        ("/system.slice/docker.service", 7, NO_PID, UNKNOWN),  # hidden, or it has just ended
        ("/system.slice/docker.service", 7, SHIM, UNKNOWN),  # a circle
        (POD, 99, 1, UNKNOWN),  # a later process with the PID of the parent
        (f"{POD}\n1:pids:{OTHER_POD}", 7, 1, UNKNOWN),
        ("/kubepods/podX", 7, 1, UNKNOWN),
        (f"/k8s.io/{CID}", 7, 1, CgroupMembership(CgroupKind.UNKNOWN, (), CID)),  # a link may name its pod
    ],
)
def test_an_ancestor_in_a_pod_decides(
    tmp_path: Path, path: str, start: int, parent: int, expected: CgroupMembership
) -> None:
    """The nearest one, above a shim outside pods. If an ancestor cannot be read, the owner is unknown."""
    docker_source(tmp_path)
    make_process(tmp_path / "proc", DAEMON, path, start=start, parent=parent)
    recorder = RecordingProcfs(tmp_path / "proc", tmp_path / "own")
    assert read_cgroup(recorder) == expected
    recorder.close()
    recorded = recorder.recorded["procfs"]
    assert isinstance(recorded, dict)
    assert (f"proc/{SHIM}/stat" in recorded) == (expected != HOST)
    replay = tmp_path / "replay"
    for name, content in recorded.items():
        (replay / name).parent.mkdir(parents=True, exist_ok=True)
        (replay / name).write_bytes(content)
    assert read_cgroup(ProcfsSource(replay / "proc", replay / "own"), None) == expected


def test_an_ancestor_that_cannot_be_read_makes_the_owner_unknown_for_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpumap tries again. In a tree of plain files, a capture, ancestors that did not decide are missing."""
    monkeypatch.setattr(processes, "REREAD_SECONDS", 1e-9)
    source = docker_source(tmp_path)
    assert (read_cgroup(source), read_cgroup(source, None)) == (UNKNOWN, HOST)
    (tmp_path / "proc" / str(DAEMON)).mkdir()
    (tmp_path / "proc" / str(DAEMON) / "stat").write_text("")
    source = docker_source(tmp_path)
    assert (read_cgroup(source), read_cgroup(source, None)) == (UNKNOWN, UNKNOWN)
    make_process(tmp_path / "proc", DAEMON, POD, start=7)
    assert read_cgroup(source) == IN_POD
    source.close()


@pytest.mark.parametrize(("path", "has_kubelet", "expected"), [(OTHER_POD, True, OTHER_UID), (DOCKER, False, None)])
def test_parents_count_only_outside_pods_and_with_a_kubelet(
    tmp_path: Path, path: str, has_kubelet: bool, expected: PodUid | None
) -> None:
    """The cgroup of the process itself comes first."""
    source = docker_source(tmp_path, path, has_kubelet=has_kubelet)
    make_process(tmp_path / "proc", DAEMON, POD, start=7)
    assert [pod.pod_uid for pod in read_cgroup(source).pods] == ([expected] if expected else [])
    source.close()


@pytest.mark.parametrize(("path", "expected"), [(POD, IN_POD), ("/init.scope", HOST)])
@pytest.mark.parametrize("not_after", [None, FAR])
def test_parents_are_read_once_for_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, expected: CgroupMembership, not_after: int | None
) -> None:
    """If a parent ends, its children get another one. A new process with the same PID has its own parents."""
    monkeypatch.setattr(processes, "REREAD_SECONDS", 1e-9)
    source = docker_source(tmp_path)
    make_process(tmp_path / "proc", DAEMON, path, start=7)
    assert read_cgroup(source, not_after) == expected
    make_process(tmp_path / "proc", NO_PID, OTHER_POD, start=1)
    for start, last in ((9, expected), (10, CgroupMembership(CgroupKind.POD, (PodCgroup(OTHER_UID, CID),)))):
        make_process(tmp_path / "proc", os.getpid(), f"{DOCKER}/{start}", start=start, parent=NO_PID)
        assert read_cgroup(source, not_after) == last
    source.close()


def test_the_number_of_ancestors_to_read_is_limited(tmp_path: Path) -> None:
    """A pod above more of them is not found: the owner is unknown."""
    for count, expected in ((ANCESTORS_MAX, IN_POD), (ANCESTORS_MAX + 1, UNKNOWN)):
        source = docker_source(tmp_path, parent=NO_PID)
        for pid in range(NO_PID, NO_PID + count):
            make_process(tmp_path / "proc", pid, DOCKER, start=9, parent=pid + 1)
        make_process(tmp_path / "proc", NO_PID + count - 1, POD, start=9)
        assert read_cgroup(source) == expected
        source.close()
