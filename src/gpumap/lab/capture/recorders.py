"""The real sources, each in a recorder that keeps the source's answers in the form of a capture's files.

A recorder returns exactly what its source returns. It drops what must not be in a capture before it keeps anything. Of
the checkpoint it keeps only GPUs; of `stat` only the name, state and start of a process, of `status` its uid.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from gpumap.agent.sources.checkpoint import CheckpointSource, newest_first
from gpumap.agent.sources.dra import DraSource
from gpumap.agent.sources.fractioning import FractioningSource
from gpumap.agent.sources.identity import PodIdentitySource, PodLogsSource
from gpumap.agent.sources.kubelet import KubeletSource
from gpumap.agent.sources.nvml import NvmlSource
from gpumap.agent.sources.procfs import ProcfsSource
from gpumap.lab.capture import checkpoints, contents
from gpumap.lab.capture.checkpoints import sharing_files
from gpumap.lab.capture.contents import Down, LogEntry
from gpumap.model.observations import (
    Complaint,
    DraState,
    KubeletAnswer,
    NvmlReading,
    PodIdentity,
    ProcEntry,
    ProcTable,
    SourceAnswer,
    SourceError,
)
from gpumap.model.terms import PodUid

Files = dict[str, bytes]
Recorded = dict[str, Files | Down]
"""The answers in this collection, or why a source is down, by the names of `down.json`; empty: it has not answered."""


class RecordingKubelet(KubeletSource):
    """Keeps the answers' own bytes. Those of an unchanged List stay, although kubelets shuffle each answer."""

    def __init__(self, socket_path: Path) -> None:
        super().__init__(socket_path, on_answer=self._keep_raw)
        self.recorded: Recorded = {}
        self.version = "v1"
        self._raw: Files = {}
        self._last_answer: KubeletAnswer | None = None
        self._kept: Files = {}
        self._starts: list[str] = []

    async def read(self, timeout_seconds: float) -> SourceAnswer[KubeletAnswer]:
        self._raw = {}
        try:
            answer = await super().read(timeout_seconds)
        except SourceError as error:
            why = error.complaints[-1]
            undecoded = why.reason == "decode" and f"{contents.LIST}.pb" in self._raw
            self.recorded = {"kubelet": self._add_starts(self._raw) if undecoded else Down(*why)}
            raise
        last_answer, self._last_answer = self._last_answer, answer.value
        unchanged = {
            f"{contents.LIST}.pb": last_answer is not None and last_answer.pods == answer.value.pods,
            f"{contents.ALLOCATABLE}.pb": last_answer is not None
            and last_answer.allocatable == answer.value.allocatable,
        }
        self._kept = {name: self._kept.get(name, raw) if unchanged[name] else raw for name, raw in self._raw.items()}
        if not self._starts or self._starts[-1] != answer.value.socket:
            self._starts.append(answer.value.socket)
        self.recorded = {"kubelet": self._add_starts(self._kept)}
        return answer

    def _add_starts(self, files: Files) -> Files:
        return {**files, contents.SOCKET: b"%d\n" % len(self._starts)} if len(self._starts) > 1 else files

    def _keep_raw(self, method: str, answer: bytes) -> None:
        listing = method.endswith("/List")
        if listing:
            self.version = method.removeprefix("/").partition(".")[0]
        self._raw[f"{contents.LIST if listing else contents.ALLOCATABLE}.pb"] = answer


class RecordingNvml(NvmlSource):
    """Keeps the worker's readings."""

    recorded: Mapping[str, bytes] = {}

    async def read(self, interval_seconds: float, timeout_seconds: float) -> SourceAnswer[NvmlReading]:
        try:
            answer = await super().read(interval_seconds, timeout_seconds)
        except SourceError as error:
            self.recorded = {contents.NVML: contents.reading_text(Down(*error.complaints[-1]))}
            raise
        self.recorded = {contents.NVML: contents.reading_text(answer.value)}
        return answer


class RecordingProcfs(ProcfsSource):
    """Keeps `cgroup`, a bare `stat` and the uid of processes; of slurmstepds also the title.

    These are the processes asked for, parents that decide, one that shows PID visibility, kthreadd, and gpumap.
    """

    def __init__(self, root: Path, own_folder: Path, *, has_kubelet: bool = True) -> None:
        super().__init__(root, own_folder, has_kubelet=has_kubelet)
        self.recorded: Recorded = {}
        self._kept: dict[ProcEntry, Files] = {}

    def read(
        self, pids: Iterable[int], not_after: int | None, pod_uids: frozenset[PodUid] = frozenset()
    ) -> SourceAnswer[ProcTable]:
        try:
            answer = super().read(pids, not_after, pod_uids)
            self.recorded = {"procfs": self._files(answer.value)}
        except SourceError as error:
            self.recorded = {"procfs": Down(*error.complaints[-1])}
            raise
        except OSError as error:
            self.recorded = {"procfs": Down("unreadable", f"{error.filename}: {error.strerror}")}
        return answer

    def _files(self, table: ProcTable) -> Files:
        files: Files = {contents.OWN_CGROUP: (self._own_entry / "cgroup").read_bytes()}
        if table.pid_visibility:
            pid = self.pid_outside_pod
            files |= {contents.OWN_PID_IN_TREE: b""} if pid is None else _process(self._root, pid)
        if table.is_machine:
            files |= _process(self._root, 2)
        kept_files = self._kept
        self._kept = {entry: kept_files.get(entry) or self._entry_files(entry) for entry in table.entries}
        for entry_files in self._kept.values():
            files |= entry_files
        for pid in self.pod_pids.values():
            files |= _process(self._root, pid)
        for job in self.job_ids.known():
            files |= _process(self._root, job.stepd, "cmdline")
            for pid in job.parents:
                files |= _process(self._root, pid)
        for pid in table.unreadable:
            files |= _unreadable(pid)
        return files

    def _entry_files(self, entry: ProcEntry) -> Files:
        is_user = entry.workload is not None and entry.workload.kind == "user"  # the uid names it
        files: Files = {}
        for pid in self.ancestors.pids(entry.pid):
            files |= _process(self._root, pid) or _unreadable(pid)
        return files | _process(self._root, entry.pid, *(["status"] if is_user else []))


def _unreadable(pid: int) -> Files:
    """Record a process that a replay must not read either."""
    return {f"proc/{pid}/stat": b"", f"proc/{pid}/cgroup": b""}


def _process(root: Path, pid: int, *extra_names: str) -> Files:
    """Record `stat`, `cgroup` and those files of `more` that exist; nothing of a process that has ended meanwhile."""
    files = {}
    for name in ("stat", "cgroup", *extra_names):
        try:
            content = (root / str(pid) / name).read_bytes()
        except OSError:
            if name not in extra_names:
                return {}
            continue
        files[f"proc/{pid}/{name}"] = _BARE[name](content)
    return files


def _bare_stat(text: bytes) -> bytes:
    """Return PID, name, state, parent and start. The values between are 0, and the rest is cut off."""
    name, _, remainder = text.rpartition(b")")
    fields = remainder.split()
    if len(fields) < 20:
        return b""
    return b" ".join((name + b")", *fields[:2], *[b"0"] * 17, fields[19])) + b"\n"


_BARE: Mapping[str, Callable[[bytes], bytes]] = {
    "stat": _bare_stat,
    "cgroup": bytes,
    "status": lambda text: b"".join(re.findall(rb"^Uid:\s+[0-9]+", text, re.MULTILINE)[:1]),
    "cmdline": lambda text: b"".join(re.findall(rb"\Aslurmstepd: \[[0-9]+", text)),
}
"""What a capture keeps of each file."""


class RecordingIdentity:
    """Keeps the checkpoint, reduced to GPUs, the names below the log root, and the DRA files."""

    def __init__(
        self,
        checkpoints: tuple[Path, ...],
        log_root: Path,
        dra: tuple[Path, Path],
        is_gpu_resource: Callable[[str], bool],
        sharing_map: Path | None = None,
    ) -> None:
        """`sharing_map` is the directory with a scheduler's files about containers that share GPUs."""
        read_sharing = None if sharing_map is None else FractioningSource(sharing_map).read
        self._source = PodIdentitySource(
            CheckpointSource(checkpoints),
            PodLogsSource(log_root),
            DraSource(*dra),
            time.time,
            read_sharing=read_sharing,
        )
        self._checkpoints = checkpoints
        self._log_root = log_root
        self._is_gpu_resource = is_gpu_resource
        self.recorded: Recorded = {}
        """Also the files of DRA and of shares, which may be missing."""
        self._last: tuple[PodIdentity, Recorded] = PodIdentity(None, None), {}

    def read(self) -> SourceAnswer[PodIdentity]:
        """Read checkpoint and names again if they changed: the values of the source no longer have their form."""
        try:
            answer = self._source.read()
        except SourceError as error:
            self.recorded = {source: _why(source, error.complaints) for source in ("checkpoint", "pod_logs")}
            raise
        identity, (last_identity, last_recorded) = answer.value, self._last
        sharing = identity.sharing
        recorded: Recorded = {**last_recorded, "shares": sharing_files(sharing.links, sharing.shares)}
        if identity.checkpoint is None:
            recorded["checkpoint"] = _why("checkpoint", answer.complaints)
        elif identity.checkpoint is not last_identity.checkpoint:
            recorded["checkpoint"] = {contents.CHECKPOINT: self._cut()}
        if identity.logs is None:
            recorded["pod_logs"] = _why("pod_logs", answer.complaints)
        elif identity.logs is not last_identity.logs:
            recorded["pod_logs"] = {contents.LOG_TREE: contents.log_text(sorted(_names(self._log_root)))}
        if identity.dra is not last_identity.dra or "dra" not in recorded:
            recorded["dra"] = _dra_files(identity.dra)
        self._last = identity, recorded
        why = _complaint("gpu_fractioning_", answer.complaints)
        self.recorded = recorded | ({} if why is None else {"gpu_fractioning": why})
        return answer

    def _cut(self) -> bytes:
        for path in newest_first(self._checkpoints):
            try:
                return checkpoints.cut_checkpoint(path.read_bytes(), self._is_gpu_resource)
            except FileNotFoundError:
                continue
            except (OSError, ValueError):
                break  # it was readable a moment ago
        return checkpoints.cut_checkpoint(b'{"Data": {}}', self._is_gpu_resource)


def _dra_files(dra: DraState) -> Files:
    files = {} if dra.claims is None else {contents.DRA_STATE: checkpoints.dra_state_text(dra.claims)}
    if dra.prepared is not None:
        files[contents.DRA_CHECKPOINT] = checkpoints.dra_checkpoint_text(dra.prepared)
    return files


def _why(source: str, complaints: tuple[Complaint, ...]) -> Down:
    """Return the complaint of a source; a missing file is none."""
    return _complaint(source, complaints) or Down(f"{source}_missing")


def _complaint(source: str, complaints: tuple[Complaint, ...]) -> Down | None:
    reasons = [Down(*complaint) for complaint in complaints if complaint.reason.startswith(source)]
    return reasons[-1] if reasons else None


_SPEAKABLE = re.compile(r"(?!\.\.?\Z)[^\s/\0]+")
"""A kubelet's names have no blanks; a line of log.tree cannot contain one with blanks."""


def _names(root: Path) -> Iterator[LogEntry]:
    for folder in ("pods", "containers"):
        for entry in _entries(root / folder):
            path = f"var/log/{folder}/{entry.name}"
            if folder == "containers":
                yield from _link(entry, path)
            elif entry.is_dir(follow_symlinks=False):
                yield LogEntry("d", "755", path)
                below = _entries(Path(entry.path))
                yield from (
                    LogEntry("d", "755", f"{path}/{container.name}") for container in below if container.is_dir()
                )
        if (root / folder).is_dir():
            yield LogEntry("d", "755", f"var/log/{folder}")


def _link(entry: os.DirEntry[str], path: str) -> Iterator[LogEntry]:
    """A link to a log. Only the last three steps of its target matter."""
    try:
        steps = os.readlink(entry.path).split("/")[-3:]
    except OSError:
        return
    # A link may have a target that cannot be a name.
    if len(steps) == 3 and all(
        _SPEAKABLE.fullmatch(step) and step.isprintable() and contents.is_short(step) for step in steps
    ):
        yield LogEntry("l", "777", path, f"/var/log/pods/{'/'.join(steps)}")


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return [entry for entry in os.scandir(folder) if _SPEAKABLE.fullmatch(entry.name) and entry.name.isprintable()]
    except OSError:
        return []
