"""The namespaces and cgroups of a live node: made by one process, and removed by it when the test ends in any way.

`python namespaces.py FOLDER` makes one cgroup per hierarchy, and starts PID 1 of new mount, PID, network, UTS, IPC and
cgroup namespaces. Both end when standard input ends, that is, when the test's process has ended. The end of PID 1 ends
every process of the node. Then the cgroups and what the node wrote are removed.

Three folders of the machine (/var/lib, /var/log, /run) get an overlay, so that folders can be made there which the
machine does not have. What a node writes lies in `FOLDER/node`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE_SECONDS = 60.0
CLONE_NEWCGROUP = 0x02000000
READY = "ready"
OVERLAID = ("/var/lib", "/var/log", "/run")
# Folders of the node: what the machine has there is hidden.
OWN = (
    *("/var/lib/kubelet", "/var/lib/containerd", "/var/lib/cni", "/var/log/pods", "/var/log/containers"),
    *("/run/containerd", "/run/netns"),
)
# What the kubelet would set for the whole machine. It finds these values set, in files that hide the true ones.
KERNEL = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
SYSTEM = "system.slice"  # the cgroup of kubelet and containerd, as on most nodes
NODE_NAME = "live-node"
NODE_ADDRESS = "192.0.2.1"


def main() -> None:
    folder = Path(sys.argv[1])
    if len(sys.argv) == 2:
        supervise(folder)
    else:
        run_init(folder, *sys.argv[2:])


# --- outside ---


def supervise(folder: Path) -> None:
    """Start PID 1 of the node, wait for its end, and remove what is left of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    name = f"gpumap-cluster-{secrets.token_hex(4)}"
    groups = [mount_point / name for _, _, mount_point in hierarchies()]
    try:
        for group in groups:
            make_group(group)
        unshare = ("unshare", "--mount", "--mount-proc", "--pid", "--fork", "--net", "--uts", "--ipc", "--kill-child")
        subprocess.run([*unshare, sys.executable, __file__, folder, name], check=False)
    finally:
        for group in groups:
            remove_group(group)
        shutil.rmtree(folder / "node", ignore_errors=True)


def hierarchies() -> list[tuple[str, str, Path]]:
    """Type, options and place of each cgroup hierarchy that is mounted."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split()
        if kind in ("cgroup", "cgroup2"):
            found.append((kind, options.removeprefix("rw,") if kind == "cgroup" else "", Path(left.split()[4])))
    return found


def make_group(group: Path) -> None:
    group.mkdir()
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (group / name).exists():  # empty in a new group of version 1, and no process can enter it
            (group / name).write_text((group.parent / name).read_text())


def enter_group(group: Path) -> None:
    (group / "cgroup.procs").write_text("0")


def remove_group(group: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while group.exists() and time.monotonic() < deadline:
        for folder, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):  # busy until its last process is quite gone
                os.rmdir(folder)
        time.sleep(0.02)


# --- inside ---


def run_init(folder: Path, group: str) -> None:
    """Be PID 1: enter the node's cgroups, mount what it needs, then wait for the end of standard input."""
    for _, _, mount_point in hierarchies():
        enter_group(mount_point / group)
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWCGROUP) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    mount_cgroups()
    mount_folders(folder / "node")
    # Volumes that a pod mounts spread to those who ask for it, as on any node; nothing spreads to the machine.
    mount("--make-rshared", "/")
    socket.sethostname(NODE_NAME)
    for words in (
        ("link", "set", "lo", "up"),
        ("link", "add", "node0", "type", "veth", "peer", "name", "node1"),
        ("address", "add", f"{NODE_ADDRESS}/32", "dev", "node0"),
        ("link", "set", "node0", "up"),
        # Nothing leaves the node, also what goes to the address of a pod that has ended.
        ("route", "add", "unreachable", "default"),
    ):
        subprocess.run(["ip", *words], check=True)
    signal.signal(signal.SIGCHLD, lambda *_: reap())
    reap()
    print(READY, flush=True)
    sys.stdin.read()


def reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)


def mount_cgroups() -> None:
    """Mount the hierarchies again: their root is now the node's own cgroup."""
    for kind, options, mount_point in hierarchies():
        subprocess.run(["umount", mount_point], check=True)
        mount("-t", kind, *(("-o", options) if options else ()), kind, mount_point)
        make_group(mount_point / SYSTEM)
        enter_group(mount_point / SYSTEM)


def mount_folders(store: Path) -> None:
    for place in OVERLAID:
        upper, work = made(store, place, "upper", "work")
        mount("-t", "overlay", "-o", f"lowerdir={place},upperdir={upper},workdir={work}", "overlay", place)
    for place in OWN:
        Path(place).mkdir(parents=True, exist_ok=True)
        mount("--bind", next(made(store, place, "own")), place)
    for name, value in KERNEL.items():
        file = next(made(store, "/proc", "sys")) / name.replace("/", "-")
        file.write_text(f"{value}\n")
        mount("--bind", file, Path("/proc/sys") / name)


def made(store: Path, place: str, *kinds: str) -> Iterator[Path]:
    for kind in kinds:
        folder = store / place.strip("/").replace("/", "-") / kind
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


if __name__ == "__main__":
    main()
