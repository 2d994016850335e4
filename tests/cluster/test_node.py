"""The live node itself: pods run and outlast restarts of the kubelet and of containerd, and nothing is left of it."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumap.agent.sources.kubelet import KubeletSource
from gpumap.model.observations import ListedPod
from tests.cluster import namespaces
from tests.cluster.node import (
    NODE_NAME,
    POD_RESOURCES_SOCKET,
    LiveNode,
    RunningContainer,
    busybox_pod,
)
from tests.deploy.image import needs_root
from tests.prometheus import eventually

pytestmark = pytest.mark.cluster
DEVICES = {"node0", "node1", "pods0"}
"""Network devices of the node (namespaces.py, node.py). Others of the machine may come and go meanwhile."""


@pytest.fixture(name="pod")
def run_pod(live_node: LiveNode) -> Iterator[list[RunningContainer]]:
    """A pod of two containers, and its end. Each has another UID: see `LiveNode.apply`."""
    manifest = busybox_pod("two", {"name": "first"}, {"name": "second"})
    manifest["metadata"]["annotations"] = {"nonce": f"n{secrets.token_hex(4)}"}  # "05668177" would be a number
    live_node.apply(manifest)
    # A kubelet that was restarted may start a container twice, and end one of them.
    eventually(lambda: len(live_node.wait_running("two")) == 2)
    yield live_node.wait_running("two")
    live_node.delete("two")
    live_node.wait_gone("two")


def listed_pods(node: LiveNode) -> dict[str, ListedPod]:
    """What gpumap's own source reads from the kubelet."""

    async def read() -> dict[str, ListedPod]:
        source = KubeletSource(node.path(POD_RESOURCES_SOCKET))
        try:
            return {pod.name: pod for pod in (await source.read(5.0)).value.pods}
        finally:
            await source.close()

    return asyncio.run(read())


def test_gpumap_reads_a_pod_of_the_kubelet(live_node: LiveNode, pod: list[RunningContainer]) -> None:
    """PodResources lists a static pod with its containers, under its name with the node's at the end."""
    listed = (listed_pods(live_node))[f"two-{NODE_NAME}"]
    assert [container.name for container in listed.containers] == ["first", "second"] == [one.name for one in pod]


def test_a_process_is_in_the_cgroup_of_its_pod(live_node: LiveNode, pod: list[RunningContainer]) -> None:
    """A process's cgroup names pod and container as on a node of its own: from the root on."""
    for one in pod:
        lines = live_node.run("cat", f"/proc/{one.pid}/cgroup").splitlines()
        cgroups = {line.split(":", 2)[2] for line in lines}
        assert cgroups == {f"/kubepods/besteffort/pod{one.pod_uid}/{one.id}"}
        assert live_node.path(f"/var/log/pods/default_two-{NODE_NAME}_{one.pod_uid}/{one.name}").is_dir()
        assert one.pid in live_node.processes(one)


@pytest.mark.parametrize("restart", [LiveNode.restart_kubelet, LiveNode.restart_containerd])
def test_a_pod_outlasts_a_restart(live_node: LiveNode, pod: list[RunningContainer], restart: object) -> None:
    """Neither the kubelet's restart nor containerd's ends a container."""
    assert callable(restart)
    restart(live_node)
    # A kubelet that ends within the start of a container may start another one beside it.
    assert set(pod) <= set(live_node.containers())
    # A kubelet that has just started lists no static pod at first.
    eventually(lambda: f"two-{NODE_NAME}" in listed_pods(live_node))


def test_a_killed_container_starts_again(live_node: LiveNode, pod: list[RunningContainer]) -> None:
    """After its process was killed, the kubelet starts the container again, in the same pod."""
    killed, second = pod

    def are_right() -> bool:
        # containerd may list the killed container beside the new one for a moment.
        running = live_node.wait_running("two")
        return len(running) == len(pod) and killed not in running and second in running

    live_node.signal(killed.pid)
    eventually(are_right)
    assert {one.pod_uid for one in live_node.wait_running("two")} == {killed.pod_uid}


def test_a_command_runs_in_a_container(live_node: LiveNode, pod: list[RunningContainer]) -> None:
    assert live_node.exec(pod[0], "/bin/hostname") == f"two-{NODE_NAME}\n"


@pytest.mark.parametrize("end", ["leaves", "killed", "interrupted"])
def test_nothing_is_left(tmp_path: Path, end: str) -> None:
    """However the test's process ends, the node's processes, mounts, cgroups and files end."""
    needs_root()
    folder = tmp_path
    ending = {"leaves": "", "killed": "os.kill(os.getpid(), 9)", "interrupted": "os.kill(os.getpid(), 2)"}[end]
    # In a background job, SIGINT is ignored, also by the processes that it starts.
    program = f"""
import os, signal
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.cluster.node import LiveNode, busybox_pod
with LiveNode(Path({str(folder)!r})) as node:
    node.apply(busybox_pod("one"))
    node.wait_running("one")
    print(Path("/proc", str(node.init), "cgroup").read_text().splitlines()[0].split("/")[1], flush=True)
    {ending}
"""
    root = Path(__file__).resolve().parents[2]
    before = machine_settings()
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == {"leaves": 0, "killed": -signal.SIGKILL, "interrupted": -signal.SIGINT}[end], done.stderr
    group = done.stdout.strip()
    assert group.startswith("gpumap-cluster-")

    def gone() -> bool:
        groups = [place / group for _, _, place in namespaces.hierarchies()]
        return not any(map(Path.exists, groups)) and not (folder / "node").exists()

    eventually(gone, about=lambda: list(folder.iterdir()))
    assert str(folder) not in Path("/proc/mounts").read_text()
    assert machine_settings() == before
    assert {path.name for path in folder.iterdir()} == {"kubelet.log", "containerd.log", "namespaces.log"}


def machine_settings() -> tuple[dict[str, str], set[str], bool]:
    """What the node would change on this machine: kernel settings, network devices, the kubelet's folder."""
    kernel = {name: Path("/proc/sys", name).read_text() for name in namespaces.KERNEL}
    return kernel, {name for _, name in socket.if_nameindex()} & DEVICES, Path("/var/lib/kubelet").exists()
