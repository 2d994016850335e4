"""The simulated node's files and socket look as those of the real captures."""

import asyncio
import errno
import json
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import grpc.aio

from gpumap.agent._proto.podresources import v1_pb2
from gpumap.lab.demo.kubelet import LIST
from gpumap.lab.demo.scenario import default_scenario, parse_scenario
from tests.agent import PATIENCE_SECONDS
from tests.demo_node import demo_node

UID = r"([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32})"
SHORT = """
cgroups: {style}
gpus: [{{model: H100, memory: 80GiB}}, {{model: H100, memory: 80GiB}}]
kubelet: {{away: [{{from: 20s, until: 22s, static_pods_for: 0s}}]}}
pods:
  - {{name: steady, containers: [{{name: c, gpus: [0], processes: [{{memory: 1GiB}}]}}]}}
  - {{name: calm, qos: guaranteed, static: true, containers: [{{name: c}}]}}
  - {{name: job, from: 10s, containers: [{{name: c, gpus: [1]}}]}}
"""


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def refuses(path: Path) -> bool:
    """Whether a socket is there, and no server behind it."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == errno.ECONNREFUSED


async def test_its_files_look_like_a_real_nodes(directory: Path) -> None:
    """Log directories, links, /proc and checkpoint have the shapes of the captures."""
    log_root, kubelet = directory / "var/log", directory / "kubelet"
    async with demo_node(default_scenario(), directory, epoch=time.time() - 5):
        trees = sorted(path.name for path in (log_root / "pods").iterdir())
        assert all(re.fullmatch(rf"[a-z0-9.-]+_[a-z0-9.-]+_{UID}", name) for name in trees)
        links = list((log_root / "containers").iterdir())
        assert links
        for link in links:
            assert re.fullmatch(r"[a-z0-9.-]+_[a-z0-9.-]+_[a-z0-9.-]+-[0-9a-f]{64}\.log", link.name)
            target = os.readlink(link)
            assert target.startswith("/var/log/pods/")
            assert (log_root / target.removeprefix("/var/log/")).is_file()
        for folder in (directory / "proc").iterdir():
            fields = (folder / "stat").read_text().split()
            assert fields[0] == folder.name
            assert len(fields) == 52
            assert int(fields[21]) > 0
        checkpoint = kubelet / "device-plugins" / "kubelet_internal_checkpoint"
        document = json.loads(checkpoint.read_text())
        assert list(document) == ["Data", "Checksum"]
        assert set(document["Data"]["PodDeviceEntries"][0]) == {
            *("PodUID", "ContainerName", "ResourceName", "DeviceIDs", "AllocResp")
        }
        assert checkpoint.stat().st_mode & 0o777 == 0o600
        uids = {name.rpartition("_")[2] for name in trees}
        assert {row["PodUID"] for row in document["Data"]["PodDeviceEntries"]} < uids


async def test_its_kubelet_serves_and_restarts(directory: Path) -> None:
    """The socket answers; during the restart it refuses; afterwards there is another one."""
    now = 19.0
    async with demo_node(parse_scenario(SHORT.format(style="v2-systemd")), directory, lambda: now, 0.0):
        path = directory / "kubelet/kubelet.sock"
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(LIST)
            answer = v1_pb2.ListPodResourcesResponse.FromString(await call(b"", timeout=PATIENCE_SECONDS))
            assert {pod.name for pod in answer.pod_resources} == {"steady", "job", "calm-demo-node"}
        before = path.stat()
        now = 20.5
        await until(lambda: refuses(path))
        now = 22.5
        await until(lambda: not refuses(path))
        after = path.stat()
        assert (after.st_ino, after.st_ctime_ns) != (before.st_ino, before.st_ctime_ns)
