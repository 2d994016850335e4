"""Work outside pods: the families of [host], made by the real sources of captured and of written nodes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpumap.agent.metrics import native
from gpumap.agent.metrics.use import HOST
from gpumap.agent.published import published
from gpumap.agent.sources.procfs import ProcfsSource
from gpumap.agent.sources.workloads import JOBS_MAX, JobIds
from gpumap.cli.commands.map import map_table
from gpumap.cli.commands.top import top_table
from gpumap.cli.filter import select_rows
from gpumap.cli.rows import NodeMaps
from gpumap.cli.table import Shape
from gpumap.lab.capture import contents, replay
from gpumap.lab.capture import format as on_disk
from gpumap.lab.capture.format import About, Capture, Frame
from gpumap.lab.capture.recorders import RecordingProcfs
from gpumap.lab.demo import texts
from gpumap.lab.node import files_of
from gpumap.lab.node_files import NodeFiles
from gpumap.model.node import Device, OwnerUse, Workload
from gpumap.model.observations import NvmlReading
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import Owner
from gpumap.model.workloads import NAMES_MAX
from tests import golden

CARD = "GPU-aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa"
MIB = 1 << 20
MEMORY, SM, PROCESSES = (family.name for family in HOST)


@dataclass(frozen=True)
class On:
    """A process on the card. `sm` is `None` if the driver has no sample of it, `mib` if it does not report memory."""

    pid: int
    path: str
    mib: int | None = 1
    sm: float | None = 0.0
    uid: int | None = None


def frame(processes: Iterable[On], offset_seconds: float = 0.0) -> Frame:
    """The files of a node without a kubelet, and with one card."""
    processes = list(processes)
    rows = [[one.pid, None if one.mib is None else one.mib * MIB, "C"] for one in processes]
    samples = [[one.pid, one.sm, 0.0, 0.0, 0.0] for one in processes if one.sm is not None]
    card = {
        "index": 0,
        "uuid": CARD,
        "memory": {"total_bytes": 1 << 40, "used_bytes": 1 << 39, "free_bytes": 1 << 39},
        "processes": rows,
        "samples": samples,
        "utilization_ratio": sum(sample[1] for sample in samples),
    }
    versions = {"driver_version": "580", "cuda_version": "13.0", "nvml_version": "13"}
    files = {
        contents.NVML: json.dumps({**versions, "gpus": [card]}).encode(),
        contents.DOWN: json.dumps({"kubelet": {"reason": "socket_missing"}}).encode(),
        contents.OWN_CGROUP: b"0::/system.slice/gpumap.service\n",
        contents.OWN_PID_IN_TREE: b"",
    }
    for one in processes:
        files[f"proc/{one.pid}/stat"] = texts.stat_text(one.pid, "python3", 100 + one.pid).encode()
        files[f"proc/{one.pid}/cgroup"] = f"0::{one.path}\n".encode()
        if one.uid is not None:
            files[f"proc/{one.pid}/status"] = f"Name:\tpython3\nUid:\t{one.uid}\t0\t0\t0\n".encode()
    return Frame(offset_seconds, files)


def collected(*frames: Iterable[On]) -> list[Snapshot]:
    """What gpumap makes of each frame; the last is collected twice if it is the only one."""
    capture = Capture(About("n"), tuple(frame(one, 5.0 * number) for number, one in enumerate(frames)))
    return asyncio.run(replay.snapshots(capture))


def values(snapshot: Snapshot, name: str) -> dict[tuple[str, ...], float]:
    """The samples of a family, by labels."""
    (family,) = (one for one in native(("host", "use"), process_metrics=False) if one.name == name)
    return {series.labels: series.value for series in family.read(snapshot)}


def named(snapshot: Snapshot, name: str = PROCESSES) -> dict[str, float]:
    """The same by `kind/name`, on one card."""
    return {f"{kind}/{work}": value for (kind, work, _), value in values(snapshot, name).items()}


def container(number: int) -> str:
    return f"/system.slice/docker-{number:012x}{'0' * 52}.scope"


@pytest.mark.parametrize("capture", golden.captures(), ids=lambda capture: capture.name)
def test_the_work_adds_up_to_the_owner_host(capture: Path) -> None:
    """On each leaf the work outside pods splits the owner `host`: processes always, memory where all of it is known."""
    for snapshot in golden.snapshots(capture):
        for leaf in snapshot.node.devices:
            splits_the_owner(snapshot, leaf)


def splits_the_owner(snapshot: Snapshot, leaf: Device) -> None:
    host = next((use for use in leaf.owners if use.owner is Owner.HOST), OwnerUse(Owner.HOST, None, 0))
    assert sum(_on(leaf, values(snapshot, PROCESSES))) == host.processes
    known = list(_on(leaf, values(snapshot, MEMORY)))
    if len(known) == len(list(_on(leaf, values(snapshot, PROCESSES)))):
        assert sum(known) == (host.memory_bytes or 0)
    else:
        assert sum(known) <= (host.memory_bytes or 0)


def _on(leaf: Device, found: Mapping[tuple[str, ...], float]) -> Iterator[float]:
    return (value for labels, value in found.items() if labels[2] == leaf.uuid)


def test_memory_that_is_not_reported_is_absent() -> None:
    (*_, last) = collected([On(1, container(1), None), On(2, container(1), 5), On(3, container(2), 7)])
    assert named(last, MEMORY) == {"docker/000000000002": 7 * MIB}
    assert named(last) == {"docker/000000000001": 2, "docker/000000000002": 1}


def test_sm_time_that_is_not_known_is_absent() -> None:
    """Without a sample of its own, work has no 0 while an unknown process used SMs."""
    (*_, last) = collected([On(1, container(1), sm=None)])
    assert named(last, SM) == {"docker/000000000001": 0.0}
    one = frame([On(1, container(1), sm=None)])
    busy = {**one.files, contents.NVML: one.files[contents.NVML].replace(b'zation_ratio": 0', b'zation_ratio": 0.5')}
    (*_, last) = asyncio.run(replay.snapshots(Capture(About("n"), (Frame(0.0, busy),))))
    assert named(last, SM) == {}


def test_the_series_end_with_the_process() -> None:
    """Work without a process has no series, and what remains keeps its own."""
    before, after = collected([On(1, container(1)), On(2, container(2))], [On(2, container(2))])
    assert set(named(before)) == {"docker/000000000001", "docker/000000000002"}
    assert set(named(after)) == {"docker/000000000002"}
    (leaf,) = after.node.devices
    assert [use.work for use in leaf.host] == [Workload("docker", "000000000002")]


def test_time_of_an_ended_process_stays_with_its_work() -> None:
    work = [On(1, container(1)), On(2, container(1), sm=0.25)]
    ended = frame(work[:1], 5.0)
    late = json.loads(ended.files[contents.NVML])
    late["gpus"][0]["samples"].append([2, 0.25, 0.0, 0.0, 0.0])
    capture = Capture(About("n"), (frame(work), Frame(5.0, {**ended.files, contents.NVML: json.dumps(late).encode()})))
    (*_, last) = asyncio.run(replay.snapshots(capture))
    assert named(last, SM) == {"docker/000000000001": 0.25}


def test_a_node_has_a_limited_number_of_names() -> None:
    """The first names stay while their work runs, also beside older container ids; the rest is one `other`."""
    first = [On(1000 + number, container(1000 + number)) for number in range(150)]
    more = [On(5000 + number, container(number)) for number in range(100)]
    before, full, after = collected(first, [*first, *more], [*first[75:], *more])
    assert len(named(before)) == 150
    assert len(named(full)) == NAMES_MAX + 1
    assert named(full)["other/other"] == 50
    assert set(named(before)) < set(named(full))
    assert "other/other" not in named(after)
    assert set(named(full)) - set(named(after)) == {"other/other", *list(named(before))[:75]}


def test_a_process_that_nothing_names() -> None:
    """Its user counts; without one it is `other`. A name with a UUID is no name either."""
    passing = "/system.slice/nightly-4706fe54-7802-4808-aa7e-ae8b567239e0.service"
    (*_, last) = collected([On(1, "/init.scope", uid=0), On(2, passing, uid=1000), On(3, "/init.scope")])
    assert named(last) == {"user/0": 1, "user/1000": 1, "other/other": 1}


def test_the_job_of_a_process_in_a_pod() -> None:
    """Slurm in a pod: the pod is the owner, no series has the job, and the JSON has it for each process."""
    (*_, last) = golden.snapshots(golden.CAPTURES / "slinky")
    assert named(last) == {}
    jobs = [(one.owner, one.work) for one in last.processes]
    assert jobs == [(Owner.ASSIGNED, Workload("slurm_job", "42")), (Owner.ASSIGNED, Workload("slurm_job", "3385"))]


PASSWD = """root:x:0:0:root:/root:/bin/bash
alice:x:1000:1000::/home/alice:/bin/bash
toor:x:0:0:another:/root:/bin/sh
1000:x:1001:1001:a name of digits:/:/bin/false
:x:1002:1002:no name:/:/bin/false
"""


def users(directory: Path, *uids: int, own: str = "/system.slice/gpumap.service") -> list[str]:
    """The names of users' work in a tree of plain files, if gpumap runs in the cgroup `own`."""
    for number, uid in enumerate(uids, 10):
        folder = directory / "proc" / str(number)
        folder.mkdir(parents=True)
        (folder / "stat").write_text(texts.stat_text(number, "python3", number))
        (folder / "cgroup").write_text(f"0::/user.slice/user-{uid}.slice/session-1.scope\n")
    (directory / "proc" / str(os.getpid())).mkdir()
    (directory / "own").mkdir(exist_ok=True)
    (directory / "own" / "cgroup").write_text(f"0::{own}\n")
    answer = ProcfsSource(directory / "proc", directory / "own").read(range(10, 10 + len(uids)), None)
    assert answer.value.pid_visibility
    return [entry.workload.name for entry in answer.value.entries if entry.workload]


def passwd(directory: Path) -> Path:
    folder = directory / "own" / "root" / "etc"
    folder.mkdir(parents=True)
    return folder / "passwd"


def test_users_have_names_on_the_bare_host(tmp_path: Path) -> None:
    """The first name of a uid counts. A name of digits may be another user's uid: it is none."""
    passwd(tmp_path).write_text(PASSWD)
    assert users(tmp_path, 0, 1000, 1001, 1002, 1003) == ["root", "alice", "1001", "1002", "1003"]


def test_users_have_uids_in_a_container(tmp_path: Path) -> None:
    """The users of gpumap's own container are not those of the host."""
    passwd(tmp_path).write_text(PASSWD)
    assert users(tmp_path, 1000, own=f"/kubepods/pod{'1' * 32}/{'a' * 64}") == ["1000"]


class Slurm:
    """A tree of plain files: processes below a directory of Slurm, which is in a cgroup of the node or of a pod."""

    def __init__(self, directory: Path, slurmd: str = "/system.slice/slurmstepd.scope") -> None:
        self._proc = directory / "proc"
        self._proc.mkdir(exist_ok=True)
        self._slurmd = slurmd
        self.searches = 0
        self.job_ids = JobIds(self._proc, self._pids)

    def _pids(self) -> Iterator[int]:
        self.searches += 1
        yield from sorted(int(folder.name) for folder in self._proc.iterdir())

    def start(self, pid: int, path: str, title: str = "python3", parent: int = 1) -> None:
        """Start a process in a directory below Slurm's; slurmstepd has the job id in its title."""
        process = self._proc / str(pid)
        process.mkdir(parents=True, exist_ok=True)
        comm = title.partition(":")[0]
        (process / "stat").write_text(texts.stat_text(pid, comm, pid).replace(" S 1 ", f" S {parent} "))
        (process / "cgroup").write_text(f"0::{self._slurmd}/{path}\n")
        (process / "cmdline").write_text(title)

    def job_id(self, pid: int, job: str) -> str | None:
        """What gpumap reads for a process of a job."""
        search = None if "kubepods" in self._slurmd else self.job_ids.search
        return self.job_ids.job_id(pid, f"{self._slurmd}/{job}", search)


SLUID = "s5K1KKYAYG5D00"
LATER = "s5K1KKYAYG5D01"
STEPD = f"{SLUID}/step_0/slurm"
TASK = f"{SLUID}/step_0/user/task_0"
IN_POD = f"/kubepods/pod{'1' * 32}/{'a' * 64}/slurmstepd.scope"


@pytest.mark.parametrize("parents", [0, 3])
@pytest.mark.parametrize("slurmd", ["/system.slice/slurmstepd.scope", IN_POD])
def test_the_parents_of_a_process_lead_to_its_job(tmp_path: Path, slurmd: str, parents: int) -> None:
    """Slurm's step starts shells and launchers, and they start the process. gpumap searches no other process."""
    slurm = Slurm(tmp_path, slurmd)
    slurm.start(10, STEPD, "slurmstepd: [42.0]")
    for number in range(parents + 1):
        slurm.start(11 + number, TASK, parent=10 + number)
    assert slurm.job_id(11 + parents, SLUID) == "42"
    slurm.start(90, TASK)
    assert slurm.job_id(90, SLUID) == "42", "its parent has ended: the job is known"
    assert not slurm.searches


def test_an_orphan_of_the_host_leads_to_one_search(tmp_path: Path) -> None:
    """The parent has ended. A search of all processes finds its job and all others, or that no process names it. The
    first answer stays: no job has two names."""
    slurm = Slurm(tmp_path)
    slurm.start(10, STEPD, "slurmstepd: [42.0]")
    slurm.start(11, TASK)
    assert slurm.job_id(11, SLUID) == "42"
    slurm.start(12, f"{LATER}/step_0/user/task_0")
    assert slurm.job_id(12, LATER) is None
    slurm.start(13, f"{LATER}/step_1/slurm", "slurmstepd: [43.1]")
    assert slurm.job_id(12, LATER) is None
    assert slurm.searches == 2
    for unnamed in (f"{SLUID[:-1]}8", f"{SLUID[:-1]}9"):
        assert slurm.job_id(14, unnamed) is None
    assert slurm.searches == 4
    assert slurm.job_id(12, LATER) is None


def test_detached_processes_of_several_jobs_have_their_job_ids_at_once(tmp_path: Path) -> None:
    """The second job starts right after a search for the first one: it has one name, from its first sample."""
    slurm = Slurm(tmp_path)
    (tmp_path / "proc" / str(os.getpid())).mkdir()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "cgroup").write_text("0::/system.slice/gpumap.service\n")
    source = ProcfsSource(tmp_path / "proc", tmp_path / "own")
    for number, sluid in enumerate((SLUID, LATER)):
        slurm.start(10 + number, f"{sluid}/step_0/slurm", f"slurmstepd: [{42 + number}.0]")
        slurm.start(20 + number, f"{sluid}/step_0/user/task_0")
        entries = source.read(range(20, 21 + number), None).value.entries
        assert [entry.workload for entry in entries] == [
            Workload("slurm_job", str(42 + job)) for job in range(number + 1)
        ]


def test_jobs_are_forgotten(tmp_path: Path) -> None:
    """A process can move to new directories for ever."""
    slurm = Slurm(tmp_path)
    for number in range(JOBS_MAX + 10):
        assert slurm.job_id(11, f"job{number}") is None
    assert slurm.searches == JOBS_MAX + 10
    for job, searches in ((JOBS_MAX, JOBS_MAX + 10), (0, JOBS_MAX + 11)):
        slurm.job_id(11, f"job{job}")
        assert slurm.searches == searches, "only the first is forgotten"


@pytest.mark.parametrize(
    "folder",
    ["/user.slice/user-1000.slice/user@1000.service/app.slice", "/system.slice/hub.service", f"/docker/{'a' * 64}"],
)
def test_only_a_slurmstepd_of_the_job_gives_its_id(tmp_path: Path, folder: str) -> None:
    """A user can take the name of slurmstepd and of the job's directory, but not make a process in the job's own."""
    slurm = Slurm(tmp_path)
    slurm.start(10, TASK)
    slurm.start(11, STEPD, "slurmstepd: [42.0]")
    forged = Slurm(tmp_path, folder)
    forged.start(12, STEPD, "slurmstepd: [7.0]")
    slurm.start(13, TASK, "slurmstepd: [8.0]", parent=12)
    (tmp_path / "proc" / str(os.getpid())).mkdir()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "cgroup").write_text("0::/system.slice/gpumap.service\n")
    entries = ProcfsSource(tmp_path / "proc", tmp_path / "own").read([10, 13], None).value.entries
    assert {entry.workload for entry in entries} == {Workload("slurm_job", "42")}


@pytest.mark.parametrize("name", ["slurm-26.05", "workstation"])
def test_a_recording_has_what_names_the_work_and_no_more(tmp_path: Path, name: str) -> None:
    """Of `status` the uid, of slurmstepd's `cmdline` the job id: the recording names the same work."""
    files = dict(on_disk.load(golden.CAPTURES / name).frames[0].files)
    for path in files:
        if path.endswith(("/status", "/cmdline")):
            files[path] += b"\nSecret:\tsecret\n"
    reading = contents.reading(files)
    assert isinstance(reading, NvmlReading)
    pids = {process.pid for gpu in reading.gpus for process in gpu.processes or ()}
    (tmp_path / "node").mkdir()
    NodeFiles(tmp_path / "node").show(files_of(files))
    recorder = RecordingProcfs(tmp_path / "node" / "proc", tmp_path / "node" / "own")
    entries = recorder.read(pids, None).value.entries
    assert len({entry.workload for entry in entries}) > 2
    recorded = recorder.recorded["procfs"]
    assert isinstance(recorded, dict)
    assert not [path for path, content in recorded.items() if b"ecret" in content]
    (tmp_path / "replay").mkdir()
    kept = files_of({**recorded, contents.NVML: b"", contents.DOWN: b"{}"})
    NodeFiles(tmp_path / "replay").show(kept)
    assert (
        ProcfsSource(tmp_path / "replay" / "proc", tmp_path / "replay" / "own").read(pids, None).value.entries
        == entries
    )


def shown(name: str, *, processes: bool = False) -> list[list[str]]:
    """The cells of `map` and `top` of a capture's node."""
    found = NodeMaps((published(golden.snapshots(golden.CAPTURES / name)[-1]),))
    tables = [top_table(found, Shape(processes=processes))] + ([] if processes else [map_table(found, Shape())])
    return [line.split() for text in tables for line in text.splitlines()]


def test_tables_name_the_work() -> None:
    """`map` and `top` have a row for each work, with its memory, SM time and name in the place of a pod's."""
    rows = shown("workstation")
    assert ["-", "systemd_unit/ollama.service", "-", "1", "5.9GiB", "24%", "-", "75%", "1", "host"] in rows
    assert ["-", "user/1000", "-", "1", "-", "-", "-", "0%", "1", "host"] in rows, "unknown is no 0"
    assert ["systemd_unit/ollama.service", "5.9GiB", "75%", "host"] in rows
    assert ["podman/vllm.service", "7.8GiB", "0%", "host"] in rows
    assert ["0", "2002", "C", "python3", "-", "user/1000", "-", "3.9GiB", "16%", "50%", "host"] in shown(
        "workstation", processes=True
    )


def test_a_map_of_one_namespace_has_no_work_outside_pods() -> None:
    found = published(golden.snapshots(golden.CAPTURES / "workstation")[-1])
    assert any(device.host for device in found.devices)
    assert all(not device.host for device in select_rows(NodeMaps((found,)), "ml", ()).maps[0].devices)
