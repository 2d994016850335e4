"""Processes that pidfds hold: how many, and when they are read again."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpumap.agent.sources import processes
from gpumap.agent.sources.processes import REREAD_SECONDS, KnownProcesses
from gpumap.agent.sources.procfs import ProcfsSource
from gpumap.model.node import Workload
from gpumap.model.observations import CgroupKind, CgroupMembership, PodCgroup, ProcEntry
from gpumap.model.terms import PodUid
from tests.agent import serve
from tests.machine import MIB, Node
from tests.processes import HostProcesses
from tests.test_identity_sources import CID, UID, make_process, own_at

FAR = 1 << 60
SOFT_LIMIT = 64
INNER = PodUid(UID.replace("2", "3"))
NESTED = f"/kubepods/pod{UID}/{CID}/kubepods/pod{INNER}/{CID}"
"""A pod of a kubelet that runs in a pod. For gpumap in the outer pod, the outer pod does not count."""


@contextlib.contextmanager
def children(count: int) -> Iterator[list[int]]:
    """PIDs of processes that run until the block ends."""
    running = [subprocess.Popen(["sleep", "300"]) for _ in range(count)]
    try:
        yield [child.pid for child in running]
    finally:
        for child in running:
            child.kill()
            child.wait()


@pytest.mark.parametrize(("apart", "most"), [(0.2, 1), (1.0, 1), (5.0, 3), (15.0, 7), (60.0, 7)])
def test_each_process_is_read_again_in_its_time_and_few_at_once(apart: float, most: int) -> None:
    known = KnownProcesses(processes_max=7)
    with children(7) as pids:
        for pid in pids:
            pidfd = known.open(pid)
            assert pidfd is not None
            known.keep(pidfd, ProcEntry(pid, 1, "sleep", CgroupMembership(CgroupKind.HOST)), None)
        assert known.next_to_read(100.0) == []
        rounds = max(round(REREAD_SECONDS / apart), 1)
        turns = [[pid for pid, _ in known.next_to_read(100.0 + apart * (turn + 1))] for turn in range(3 * rounds)]
        known.close()
    assert max(map(len, turns)) == most
    counts = Counter(pid for turn in turns for pid in turn)
    assert {counts[pid] for pid in pids} <= {2, 3}  # the last one may be due a moment later
    assert sum(counts.values()) >= 3 * 7 - 1


def test_a_lower_limit_of_open_files_releases_processes() -> None:
    """poll(2) refuses more descriptors than the limit. Another process may lower it at any time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    known = KnownProcesses()
    with children(3) as pids:
        for pid in pids:
            pidfd = known.open(pid)
            assert pidfd is not None
            known.keep(pidfd, ProcEntry(pid, 1, "sleep", CgroupMembership(CgroupKind.HOST)), None)
        assert not known.drop_ended(frozenset(pids))
        resource.setrlimit(resource.RLIMIT_NOFILE, (2, hard))
        try:
            assert known.drop_ended(frozenset(pids))
            assert not known.drop_ended(frozenset(pids))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert len(known) == 0
        pidfd = known.open(pids[0])
        assert pidfd is not None
        known.keep(pidfd, ProcEntry(pids[0], 1, "sleep", CgroupMembership(CgroupKind.HOST)), None)
        assert known.open(pids[1]) is None, "it holds half of the lower limit"
        known.close()


@pytest.mark.parametrize("field", ["cgroup", "comm", "status", "own"])
def test_what_changes_of_a_running_process_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """Its cgroup, its name, its user if that names its work, and gpumap's own cgroup, on which the meaning depends."""
    monkeypatch.setattr(processes, "REREAD_SECONDS", 1e-9)
    root, pid = tmp_path / "proc", os.getpid()
    make_process(root, pid, "/init.scope" if field == "status" else NESTED)
    for name, written in (("comm", "python3\n"), ("status", "Uid:\t1000\t1000\n")):
        (root / str(pid) / name).write_text(written)
    source = ProcfsSource(root, own_at(tmp_path, "/system.slice/gpumap.service"))
    (first,) = source.read([pid], FAR).value.entries
    assert source.read([pid], FAR).value.entries == (first,)
    match field:
        case "cgroup":
            make_again(root, pid, "/init.scope")
            expected = replace(first, cgroup=CgroupMembership(CgroupKind.HOST), workload=Workload("user", "1000"))
        case "comm":
            make_again(root, pid, NESTED, comm="VLLM::Engine")
            expected = replace(first, comm="VLLM::Engine")
        case "status":
            (root / str(pid) / "status").write_text("Uid:\t2000\t2000\n")
            expected = replace(first, workload=Workload("user", "2000"))
        case _:
            own_at(tmp_path, f"/kubepods/pod{UID}/{CID}/kubepods/pod{UID.replace('2', '4')}/{CID}")
            expected = replace(first, cgroup=CgroupMembership(CgroupKind.POD, (PodCgroup(INNER, CID),)))
    assert source.read([pid], FAR).value.entries == (expected,)
    source.close()


def make_again(root: Path, pid: int, path: str, comm: str = "python3") -> None:
    """Change a running process of a plain tree."""
    (root / str(pid) / "cgroup").write_text(f"0::{path}\n")
    (root / str(pid) / "comm").write_text(f"{comm}\n")
    (root / str(pid) / "stat").write_text(f"{pid} ({comm}) S {' '.join(['1'] * 18)} 77 0 0\n")


async def test_the_limit_of_a_shell_does_not_limit_how_many_are_held(directory: Path, library: Path) -> None:
    """The service raises its soft limit of open files to the hard limit. Its worker has the usual one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not hard >= 4 * SOFT_LIMIT:
        pytest.skip(f"the hard limit of this machine is {hard}")
    if not ProcfsSource(Path("/proc")).read([], None).value.pid_visibility:
        pytest.skip("processes of others are not visible here")
    node = Node(directory, library, HostProcesses())
    shell = ("sh", "-c", f'ulimit -Sn {SOFT_LIMIT} && "$@"; exit $?', "sh")
    with children(SOFT_LIMIT) as pids:
        for pid in pids:
            node.use(pid, 1, MIB)
        async with node.kubelet, serve(node, library=library, parent=shell) as agent:
            await agent.later()
            (worker,) = agent.children()
            assert sum("pidfd" in link for link in links(agent.pid)) == SOFT_LIMIT
            assert open_files(agent.pid) == (hard, hard)
            assert open_files(worker) == (min(1024, hard), hard)


def links(pid: int) -> Iterator[str]:
    """What the descriptors of a process are."""
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield os.readlink(file)


def open_files(pid: int) -> tuple[int, int]:
    """The soft and the hard limit of open files of a process."""
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)
