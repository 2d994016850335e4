"""What large answers of sources cost: a small multiple of their size, or one complaint."""

from __future__ import annotations

import base64
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest

from gpumap.agent._proto.deviceplugin.v1beta1_pb2 import ContainerAllocateResponse
from gpumap.agent._proto.podresources import v1_pb2
from gpumap.agent.sources import identity, messages
from gpumap.agent.sources.checkpoint import CheckpointSource
from gpumap.agent.sources.dra import DraSource
from gpumap.agent.sources.identity import PodLogsSource
from gpumap.agent.sources.json_files import COMMAS_MAX, FILE_BYTES_MAX
from gpumap.agent.sources.procfs import ProcfsSource
from gpumap.model.observations import SourceError

MANY = 12_000
CARDS = [f"GPU-{UUID(int=number)}" for number in range(16)]


def peak(call: Callable[[], object]) -> int:
    """The most memory that Python's objects had meanwhile."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def checkpoint(rows: object, registered: object = None) -> bytes:
    return json.dumps({"Data": {"PodDeviceEntries": rows, "RegisteredDevices": registered}, "Checksum": 1}).encode()


def row(number: int, ids: list[str], resource: str = "nvidia.com/gpu", environment: str = "") -> dict[str, object]:
    response = ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": ids[0].partition("::")[0], "A": environment})
    return {
        "PodUID": str(UUID(int=number)),
        "ContainerName": "main",
        "ResourceName": resource,
        "DeviceIDs": {"0": ids},
        "AllocResp": base64.b64encode(response.SerializeToString()).decode(),
    }


def rows_of_ended_pods() -> bytes:
    """16 GPUs in 64 slices each, as often as a node can have given them away."""
    rows = [row(number, [f"{CARDS[number % 16]}::{number // 16 % 64}"]) for number in range(MANY)]
    rows += [row(number, [f"rdma-{number}"], "rdma/hca") for number in range(1_000)]
    return checkpoint(rows, {"nvidia.com/gpu": [f"{card}::{number}" for card in CARDS for number in range(64)]})


LARGE = {
    "many rows": rows_of_ended_pods,
    "large answers": lambda: checkpoint([row(number, CARDS[:1], environment="x" * 400_000) for number in range(8)]),
    "many ids": lambda: checkpoint(
        [row(0, [f"{CARDS[0]}::{number}" for number in range(MANY)])],
        {"nvidia.com/gpu": [f"{CARDS[0]}::{number}" for number in range(4 * MANY)]},
    ),
    "unknown parts": lambda: checkpoint([{**row(0, CARDS[:1]), "New": [[]] * (10 * MANY)}]),
}


@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE)
def test_a_large_checkpoint_costs_a_small_multiple_of_its_size(tmp_path: Path, text: Callable[[], bytes]) -> None:
    """Rows of ended pods have the ids and answers of others; what gpumap does not need is skipped."""
    path = tmp_path / "checkpoint"
    path.write_bytes(text())
    source = CheckpointSource((path,))
    assert peak(source.read) < 5 * path.stat().st_size
    assert source.read().value.entries


def test_a_grown_state_of_dra_costs_a_small_multiple_of_its_size(tmp_path: Path) -> None:
    """kubernetes/kubernetes#141335: a claim's devices are repeated without an end."""
    device = {"PoolName": "node", "DeviceName": "gpu-0", "RequestNames": ["r"], "CDIDeviceIDs": [CARDS[0]]}
    claim = {
        "DriverState": {"gpu.nvidia.com": {"Devices": [device] * MANY}},
        "ClaimName": "claim",
        "Namespace": "ml",
        "PodUIDs": {"u": {}},
    }
    path = tmp_path / "state"
    path.write_text(json.dumps({"Data": json.dumps({"Entries": [claim]})}))
    source = DraSource(path, tmp_path / "none")
    assert peak(source.read) < 4 * path.stat().st_size
    assert [one.claim for one in source.read().value.claims or ()] == ["claim"]


@pytest.mark.parametrize(
    ("begin", "part", "why"),
    [
        (
            b'{"Data":{"PodDeviceEntries":[]},"a":"',
            b"x" * 64,
            "larger than 24 MiB ({size} bytes)",
        ),
        (b'{"Data":{"PodDeviceEntries":[', b"{},", "more than 524288 values in {size} bytes"),
        (b'{"Data":{"RegisteredDevices":{"a":[', b'"",', "more than 524288 values in {size} bytes"),
    ],
)
def test_a_checkpoint_of_more_than_a_node_has_is_one_complaint(
    tmp_path: Path, begin: bytes, part: bytes, why: str
) -> None:
    """It is not parsed: values of two bytes take 60 in memory."""
    path = tmp_path / "checkpoint"
    size = FILE_BYTES_MAX if len(part) > 3 else COMMAS_MAX * len(part)
    path.write_bytes(begin + part * (size // len(part) + 1) + b"[]]}}")

    def read() -> None:
        with pytest.raises(SourceError) as caught:
            CheckpointSource((path,)).read()
        assert [tuple(one) for one in caught.value.complaints] == [
            ("checkpoint_unreadable", f"{path}: {why}".format(size=path.stat().st_size))
        ]

    assert peak(read) < path.stat().st_size + 1_000_000


def test_more_directories_than_a_node_has_are_one_complaint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 took 200 MB, and a third of a core for ever. Too many links cost only the links."""
    monkeypatch.setattr(identity, "ENTRIES_MAX", 20)
    (tmp_path / "containers").mkdir()
    (tmp_path / "pods" / "ml_pod_uid").mkdir(parents=True)
    for number in range(21):
        (tmp_path / "containers" / str(number)).touch()
    source = PodLogsSource(tmp_path)
    answer = source.read(0.0)
    assert [tree.pod for tree in answer.value.trees] == ["pod"]
    why = "21 entries; gpumap reads at most 20"
    assert [tuple(one) for one in answer.complaints] == [("pod_logs_unreadable", f"{tmp_path}/containers: {why}")]
    for number in range(20):
        (tmp_path / "pods" / f"ml_pod-{number}_uid-{number}").mkdir()
    with pytest.raises(SourceError) as caught:
        source.read(0.0)
    assert [tuple(one) for one in caught.value.complaints] == [("pod_logs_unreadable", f"{tmp_path}/pods: {why}")]


def test_a_cgroup_file_of_a_megabyte_costs_its_process_alone(tmp_path: Path) -> None:
    """The kernel writes no such file. It took seconds to look for pods in it."""
    proc = tmp_path / "proc"
    for pid, cgroup in (
        ("9", "0::/" + "kubepods" * 130_000),
        ("10", f"0::/kubepods/pod{UUID(int=1)}"),
        ("11", "0::/x"),
    ):
        (proc / pid).mkdir(parents=True)
        (proc / pid / "cgroup").write_text(cgroup + "\n")
        (proc / pid / "stat").write_text(f"{pid} (x) S{' 1' * 30}")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "cgroup").write_text("0::/system.slice/gpumap.service\n")
    answer = ProcfsSource(proc, tmp_path / "own").read([9, 10, 11], None)
    assert [entry.pid for entry in answer.value.entries] == [10, 11]
    assert answer.value.unreadable == (9,)
    (complaint,) = answer.complaints
    assert complaint.reason == "unreadable"
    assert "larger than 64 KiB" in complaint.detail


LONG = 10_000_000


def test_bytes_that_are_not_utf8_cost_a_small_multiple() -> None:
    """Each of them would take four characters."""
    pod = v1_pb2.PodResources(namespace="ml", name="@" * LONG).SerializeToString().replace(b"@", b"\xff")
    assert peak(lambda: messages.decode(v1_pb2.PodResources, pod)) < 5 * LONG
