"""The GPU processes of a test's node: files of a plain tree, real ones in cgroups of their own, or this machine's."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Protocol

from gpumap.lab.demo import texts

PATIENCE_SECONDS = 60.0


class Processes(Protocol):
    """Where the GPU processes of a node are: `root` is what `--proc` names."""

    root: Path

    def start(self, cgroup: str) -> int: ...
    def start_child(self, cgroup: str, parent_cgroup: str) -> int: ...
    def end(self, pid: int) -> None: ...
    def close(self) -> None: ...


class PlainProcesses:
    """Processes that are only files: PID/cgroup, PID/stat and PID/comm below `root`, and no `self`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._pid = 4_000_000
        root.mkdir(parents=True, exist_ok=True)

    def start(self, cgroup: str) -> int:
        self._pid += 1
        self.write(self._pid, texts.cgroup_text("v1-cgroupfs", cgroup))
        return self._pid

    def start_child(self, cgroup: str, parent_cgroup: str) -> int:
        """Start a process with a parent in another cgroup, as docker in a privileged pod does."""
        parent = self.start(parent_cgroup)
        self._pid += 1
        self.write(self._pid, texts.cgroup_text("v1-cgroupfs", cgroup), parent)
        return self._pid

    def write(self, pid: int, cgroup_text: str, parent: int = 1) -> None:
        folder = self.root / f"new-{pid}"
        folder.mkdir()
        (folder / "cgroup").write_text(cgroup_text)
        (folder / "stat").write_text(texts.stat_text(pid, "python3", 4711).replace(" S 1 ", f" S {parent} "))
        (folder / "comm").write_text("python3\n")
        folder.rename(self.root / str(pid))

    def end(self, pid: int) -> None:
        shutil.rmtree(self.root / str(pid))

    def close(self) -> None:
        shutil.rmtree(self.root)


class NoCgroupsError(Exception):
    """This machine does not let us make cgroups; the message says why."""


class RealProcesses:
    """Real processes (`sleep`) in cgroups of their own, made in every hierarchy that lets us. All of it is undone."""

    def __init__(self) -> None:
        self.root = Path("/proc")
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._children: list[int] = []  # pidfds of processes of which another one is the parent
        self._made: list[Path] = []
        mounts = Path("/sys/fs/cgroup")
        found = [mounts] if (mounts / "cgroup.procs").exists() else [mounts / "pids", mounts / "unified"]
        self._hierarchies = [hierarchy for hierarchy in found if _lets_us_make_cgroups(hierarchy)]
        if not self._hierarchies:
            raise NoCgroupsError("cgroups cannot be made here: it takes root, and a writable /sys/fs/cgroup")

    def start(self, cgroup: str) -> int:
        process = subprocess.Popen(["sleep", "300"])
        self._running[process.pid] = process
        self.move(process.pid, cgroup)
        return process.pid

    def start_child(self, cgroup: str, parent_cgroup: str) -> int:
        parent = subprocess.Popen(["sh", "-c", "sleep 300 & echo $!; wait"], stdout=subprocess.PIPE)
        self._running[parent.pid] = parent
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        self._children.append(os.pidfd_open(child))
        self.move(parent.pid, parent_cgroup)
        self.move(child, cgroup)
        return child

    def move(self, pid: int, cgroup: str) -> None:
        for hierarchy in self._hierarchies:
            folder = hierarchy
            for step in cgroup.strip("/").split("/"):
                folder = folder / step
                with contextlib.suppress(FileExistsError):
                    folder.mkdir()
                    self._made.append(folder)
            (folder / "cgroup.procs").write_text(str(pid))

    def entering(self, cgroup: str) -> list[str]:
        """What to write before a command to run it in a cgroup."""
        self.end(self.start(cgroup))
        files = " ".join(f"{hierarchy}{cgroup}/cgroup.procs" for hierarchy in self._hierarchies)
        return ["sh", "-c", f'for file in {files}; do echo $$ > "$file"; done; exec "$@"', "sh"]

    def end(self, pid: int) -> None:
        process = self._running.pop(pid)
        if process.stdout is not None:
            process.stdout.close()
        process.kill()
        process.wait()

    def close(self) -> None:
        for pidfd in self._children:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        for pid in list(self._running):
            self.end(pid)
        deadline = time.monotonic() + PATIENCE_SECONDS
        for folder in reversed(self._made):
            while folder.exists() and time.monotonic() < deadline:
                with contextlib.suppress(OSError):  # busy until its last process is quite gone
                    folder.rmdir()
                if folder.name in ("kubepods", "besteffort"):
                    break  # another test run may have pods in it


class HostProcesses:
    """The processes that this machine has. None is started."""

    root = Path("/proc")

    def start(self, cgroup: str) -> int:
        raise NotImplementedError

    def start_child(self, cgroup: str, parent_cgroup: str) -> int:
        raise NotImplementedError

    def end(self, pid: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def _lets_us_make_cgroups(hierarchy: Path) -> bool:
    probe = hierarchy / f"gpumap-test-{secrets.token_hex(4)}"
    try:
        probe.mkdir()
        with subprocess.Popen(["sleep", "10"]) as process:
            try:
                (probe / "cgroup.procs").write_text(str(process.pid))
            finally:
                process.kill()
        probe.rmdir()
    except OSError:
        with contextlib.suppress(OSError):
            probe.rmdir()
        return False
    return True
