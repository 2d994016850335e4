"""MPS: clients are charged to their own pods, servers to no container, wherever the daemon runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumap.model.readings import Uuid
from tests import standin
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid, owners, use
from tests.standin import Driver, Sample
from tests.worker import measure

CARD, OTHER = gpu_uuid(0), gpu_uuid(1)
SERVER = "nvidia-cuda-mps-server"[:15]
MIB = 1 << 20


def replica(name: str, number: int) -> Pod:
    """A pod with a share of the card, as NVIDIA's plugin gives it where it shares by MPS."""
    return Pod("ml", name, {"main": {"nvidia.com/gpu": [f"{CARD}::{number}"]}})


DAEMON = Pod("nvidia-device-plugin", "mps-control-daemon-x", {"mps-control-daemon": {}})


def server(pid: int, leaf: Uuid = CARD, pod: Pod | None = DAEMON, memory: int = 30 * MIB) -> Process:
    return Process(pid, leaf, pod, "mps-control-daemon" if pod is DAEMON else "main", memory, comm=SERVER)


@pytest.mark.parametrize("daemon", [DAEMON, None], ids=["in a pod of its own", "on the host"])
def test_clients_are_charged_to_their_own_pods(daemon: Pod | None) -> None:
    """Each client's memory is its container's; the server's is `mps_server` in both layouts."""
    first, second, idle = replica("first", 0), replica("second", 1), replica("idle", 2)
    node = TestNode([Gpu(0), Gpu(1)], [first, second, idle, DAEMON])
    node.processes = [
        server(10, pod=daemon),
        server(10, OTHER, pod=daemon),
        Process(11, CARD, first, memory=2 * GIB, types="M+C"),
        Process(12, CARD, second, memory=3 * GIB, types="M+C"),
    ]
    for _ in range(2):
        snapshot = node.collect()
    assert [pod.use(snapshot, CARD).memory_bytes for pod in (first, second, idle)] == [2 * GIB, 3 * GIB, 0]
    split = owners(snapshot, CARD)
    assert (split["assigned"], split["mps_server"]) == (5 * GIB, 30 * MIB)
    assert split["unassigned"] == split["host"] == split["gone"] == 0
    waiting = owners(snapshot, OTHER)
    assert (waiting["host" if daemon is None else "unknown"], waiting["unassigned"]) == (30 * MIB, 0)
    assert use(snapshot, DAEMON.full("mps-control-daemon"), CARD) is None


def test_a_pod_that_runs_its_own_daemon_is_charged_for_its_server() -> None:
    """The server of a container that holds the device is that container's, as its clients are."""
    pod = replica("own", 0)
    node = TestNode([Gpu(0)], [pod], [server(10, pod=pod), Process(11, CARD, pod, types="M+C")])
    snapshot = node.collect()
    assert (pod.use(snapshot, CARD).memory_bytes, pod.use(snapshot, CARD).processes) == (GIB + 30 * MIB, 2)
    assert "mps_server" not in owners(snapshot, CARD)


def test_a_name_without_clients_makes_no_server() -> None:
    """A process that calls itself an MPS server stays in its container's account, and is not accused."""
    thief = Pod("ml", "thief", {"main": {}})
    node = TestNode([Gpu(0)], [thief, replica("other", 0)], [Process(10, CARD, thief, memory=7 * GIB, comm=SERVER)])
    for _ in range(3):
        snapshot = node.collect()
        assert thief.use(snapshot, CARD).memory_bytes == 7 * GIB
        split = owners(snapshot, CARD)
        assert (split["unknown"], split["unassigned"], split.get("mps_server")) == (7 * GIB, 0, None)


def test_the_time_of_a_server_is_unattributed() -> None:
    """Time of the server is no client's; a client without a row has none that is known, not 0."""
    silent, credited, idle = replica("silent", 0), replica("credited", 1), replica("idle", 2)
    node = TestNode([Gpu(0)], [silent, credited, idle, DAEMON])
    node.processes = [
        Process(10, CARD, DAEMON, "mps-control-daemon", 30 * MIB, sm=0.9, comm=SERVER),
        Process(11, CARD, silent, types="M+C"),
        Process(12, CARD, credited, types="M+C", sm=0.4),
    ]
    snapshot = node.collect()
    assert [pod.use(snapshot, CARD).sm_ratio for pod in (silent, credited, idle)] == [None, 0.4, 0.0]
    assert {process.pid: process.sm_ratio for process in snapshot.processes} == {10: 0.9, 11: None, 12: 0.4}


def test_a_client_that_calls_itself_a_server_is_a_client() -> None:
    """A name is whatever a process gives itself; but no server is in the list of clients."""
    thief = Pod("ml", "thief", {"main": {}})
    node = TestNode([Gpu(0)], [thief, replica("other", 0)])
    node.processes = [Process(10, CARD, thief, types="M+C", comm=SERVER)]
    for _ in range(2):
        snapshot = node.collect()
    assert owners(snapshot, CARD)["unassigned"] == GIB
    assert "mps_server" not in owners(snapshot, CARD)


async def test_clients_and_servers_in_the_lists_of_the_driver(tmp_path: Path) -> None:
    """A client is in two lists of the driver, a server in the compute list of every card."""
    client, daemon = replica("client", 0), DAEMON
    rows = [
        standin.Process(10, 30 * MIB),
        standin.Process(11, 2 * GIB, kind="mps"),
        standin.Process(11, 2 * GIB),
    ]
    cards = [
        standin.Gpu(CARD, memory_used_bytes=3 * GIB, processes=rows, samples=[Sample(10, sm=80)]),
        standin.Gpu(OTHER, memory_used_bytes=30 * MIB, processes=[standin.Process(10, 30 * MIB)]),
    ]
    driver = Driver(gpus=cards)
    node = TestNode([], [client, daemon], reading=await measure(driver, tmp_path))
    node.processes = [server(10), Process(11, CARD, client)]
    snapshot = node.collect()
    found = client.use(snapshot, CARD)
    assert (found.memory_bytes, found.sm_ratio, found.processes) == (2 * GIB, None, 1)
    assert {owner: size for owner, size in owners(snapshot, CARD).items() if size} == {
        "assigned": 2 * GIB,
        "mps_server": 30 * MIB,
        "unaccounted": GIB - 30 * MIB,
    }
    assert (owners(snapshot, OTHER)["unknown"], "mps_server" in owners(snapshot, OTHER)) == (30 * MIB, False)
