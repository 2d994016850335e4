"""The mapping files of KAI-Scheduler's NvFractions: what is read of them, what is not, and what gpumap makes of it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumap.agent.sources import fractioning
from gpumap.agent.sources.fractioning import FractioningSource
from gpumap.model.observations import ContainerLink, ScheduledShare
from gpumap.model.readings import Uuid
from gpumap.model.terms import ContainerName, Owner, PodUid
from tests import agent
from tests.examples import examples
from tests.machine import Node
from tests.machine import gpu_uuid as driver_uuid
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid, hex_of, owners, row
from tests.privileges import open_folder
from tests.processes import PlainProcesses

UID = PodUid("0b5a3a0e-7d5f-4f4c-9a0e-5f3f5a1c2d3e")
ID = hex_of("container")
RECORD = {
    "schemaVersion": 1,
    "pod": "trainer",
    "namespace": "ml",
    "podUID": UID,
    "gpuDevices": [{"index": 0, "minorNumber": 3, "uuid": ""}],
    "requestedMemoryMiB": 4096,
}
SHARE = ScheduledShare(UID, container_id=ID, minor=3, memory_bytes=4 * GIB)


def put(folder: Path, record: object = RECORD, container_id: str = ID) -> Path:
    """Write a file as fractiond does it: under another name, then a rename."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{container_id}.tmp"
    temporary.write_bytes(record if isinstance(record, bytes) else json.dumps(record).encode())
    path = folder / f"{container_id}.json"
    temporary.rename(path)
    return path


def reasons(source: FractioningSource) -> list[str]:
    return [one.reason.removeprefix("gpu_fractioning_") for one in source.read().complaints]


# --- the source -------------------------------------------------------------------------------------------------------


def test_a_file_names_the_pod_of_a_container_and_its_share(tmp_path: Path) -> None:
    """Pod, UID, card and MiB; the container has no name. The answer is the same object while nothing changed."""
    put(tmp_path)
    source = FractioningSource(tmp_path)
    found, complaints = source.read()
    assert complaints == ()
    assert found.links == (ContainerLink(ID, UID, ContainerName("ml", "trainer", "")),)
    assert found.shares == (SHARE,)
    assert source.read().value is found
    put(tmp_path)
    assert source.read().value is found, "a file that is written again with the same content changes nothing"
    put(tmp_path, {**RECORD, "requestedMemoryMiB": 1024})
    assert source.read().value.shares[0].memory_bytes == GIB
    (tmp_path / f"{ID}.json").unlink()
    assert source.read().value.links == ()


@pytest.mark.parametrize(
    ("change", "shares"),
    [
        ({"gpuDevices": [{"index": 0, "uuid": f"{gpu_uuid(2)}"}]}, [(None, gpu_uuid(2), 4 * GIB)]),
        ({"gpuDevices": [{"index": 0, "minorNumber": 1, "uuid": f"{gpu_uuid(2)}"}]}, [(None, gpu_uuid(2), 4 * GIB)]),
        ({"gpuDevices": [{"index": 0, "minorNumber": 1, "uuid": "no uuid"}]}, []),
        ({"gpuDevices": [{"index": 1, "uuid": ""}]}, []),
        ({"gpuDevices": []}, []),
        ({"gpuDevices": None}, []),
        ({"gpuDevices": [{"minorNumber": 0}, {"minorNumber": 1}]}, [(0, None, None), (1, None, None)]),
        ({"requestedMemoryMiB": 0}, [(3, None, None)]),
        ({"requestedMemoryMiB": None}, [(3, None, None)]),
        ({"later": {"key": [1]}}, [(3, None, 4 * GIB)]),
        ({"schemaVersion": None, "requestedMemoryMiB": None, "RequestedMemoryMB": 2048}, [(3, None, 2 * GIB)]),
        ({"schemaVersion": None, "RequestedMemoryMB": 2048, "gpuDevices": [{"index": 5}]}, [(5, None, 2 * GIB)]),
    ],
)
def test_forms_of_a_file(
    tmp_path: Path, change: dict[str, object], shares: list[tuple[int | None, Uuid | None, int | None]]
) -> None:
    """A uuid counts before a minor. The amount of several cards and a card without a name are unknown."""
    put(tmp_path, {**RECORD, **change})
    found, complaints = FractioningSource(tmp_path).read()
    assert complaints == ()
    assert len(found.links) == 1
    assert [(one.minor, one.uuid, one.memory_bytes) for one in found.shares] == shares


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"\xff" * 20,
        b"[" * 30_000,
        json.dumps({**RECORD, "schemaVersion": 2}).encode(),
        json.dumps({**RECORD, "schemaVersion": "1"}).encode(),
        json.dumps({**RECORD, "podUID": ""}).encode(),
        json.dumps({**RECORD, "pod": 7}).encode(),
        json.dumps({**RECORD, "requestedMemoryMiB": -1}).encode(),
        json.dumps({**RECORD, "requestedMemoryMiB": 1 << 40}).encode(),
        json.dumps({**RECORD, "requestedMemoryMiB": 0.5}).encode(),
        json.dumps({**RECORD, "gpuDevices": [{"minorNumber": -1}]}).encode(),
        json.dumps({**RECORD, "gpuDevices": [7]}).encode(),
    ],
)
def test_a_damaged_file_affects_only_itself(tmp_path: Path, text: bytes) -> None:
    put(tmp_path)
    put(tmp_path, text, hex_of("damaged"))
    source = FractioningSource(tmp_path)
    assert reasons(source) == ["corrupt"]
    assert source.read().value.shares == (SHARE,)
    put(tmp_path, text, hex_of("damaged too"))
    (complaint,) = source.read().complaints
    assert "and 1 more file" in complaint.detail


def test_what_is_no_plain_file_is_not_opened(tmp_path: Path) -> None:
    """A link, a pipe, a directory and a file that is too large are complaints; other names are none."""
    put(tmp_path)
    put(tmp_path / "elsewhere", RECORD, hex_of("target"))
    (tmp_path / f"{hex_of('link')}.json").symlink_to(tmp_path / "elsewhere" / f"{hex_of('target')}.json")
    os.mkfifo(tmp_path / f"{hex_of('pipe')}.json")
    (tmp_path / f"{hex_of('folder')}.json").mkdir()
    with (tmp_path / f"{hex_of('huge')}.json").open("wb") as file:
        file.truncate(fractioning.FILE_BYTES_MAX + 1)
    (tmp_path / ".tmp-1234").write_text("{")
    (tmp_path / "README.json").write_text("{")
    source = FractioningSource(tmp_path)
    found, complaints = source.read()
    assert [one.reason for one in complaints] == ["gpu_fractioning_unreadable"]
    assert "and 3 more files" in complaints[0].detail
    assert found.shares == (SHARE,)
    opened = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        source.read()
    assert len(os.listdir("/proc/self/fd")) < opened + 5, "a read leaves a descriptor"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=examples(200))
@given(st.dictionaries(st.sampled_from([*RECORD, "RequestedMemoryMB"]), _JSON))
def test_no_content_raises(changes: dict[str, object]) -> None:
    """Any values under the known keys are shares, nothing, or a complaint."""
    with open_folder() as folder:
        put(folder, {**RECORD, **changes})
        found, complaints = FractioningSource(folder).read()
        assert len(found.links) + len(complaints) == 1


# --- the snapshot -----------------------------------------------------------------------------------------------------

CARD = gpu_uuid(0)


def noted(pod: Pod, container: str = "main", minor: int = 0, gib: int = 20) -> tuple[ContainerLink, ScheduledShare]:
    id_ = pod.container_id(container)
    name = ContainerName(pod.namespace, pod.name, "")
    return ContainerLink(id_, pod.uid, name), ScheduledShare(
        pod.uid, container_id=id_, minor=minor, memory_bytes=gib * GIB
    )


def node_with(*notes: tuple[ContainerLink, ScheduledShare], pods: list[Pod]) -> TestNode:
    node = TestNode([Gpu(0), Gpu(1)], pods)
    node.noted, node.shares = tuple(link for link, _ in notes), tuple(share for _, share in notes)
    return node


@pytest.mark.parametrize("has_logs", [True, False])
def test_sharers_have_their_card_and_their_memory(has_logs: bool) -> None:
    """A busy and an idle one; without log directories only the files give the pods their UIDs."""
    busy, idle = Pod("ml", "busy", {"main": {}}), Pod("ml", "idle", {"main": {}, "side": {}})
    node = node_with(noted(busy), noted(idle, gib=40), pods=[busy, idle])
    node.processes = [Process(10, CARD, busy, memory=30 * GIB)]
    node.logs_readable = has_logs
    snapshot = node.collect()
    assert owners(snapshot, CARD)["scheduled"] == 30 * GIB
    found = busy.row(snapshot, CARD)
    assert (found.allocated_gpus, found.allocated_memory_bytes, found.owner) == (0.25, 20 * GIB, Owner.SCHEDULED)
    of_idle = row(snapshot, idle.full(), CARD)
    if has_logs:
        assert of_idle is not None
        assert of_idle.use is not None
        assert (of_idle.allocated_memory_bytes, of_idle.use.memory_bytes) == (40 * GIB, 0)
    else:
        assert of_idle is None, "no file names the container of a pod with two"


def test_a_pods_other_cards_are_not_shared() -> None:
    """A file names one card. A process on another one is a squatter's."""
    pod = Pod("ml", "busy", {"main": {}})
    owner = Pod("ml", "owner", {"main": {"nvidia.com/gpu": [str(gpu_uuid(1))]}})
    node = node_with(noted(pod), pods=[pod, owner])
    node.processes = [Process(10, gpu_uuid(1), pod)]
    node.collect()
    assert owners(node.collect(), gpu_uuid(1))["unassigned"] == GIB


def test_files_of_pods_that_ended_give_nothing() -> None:
    """An old daemon leaves files: the pod is not listed, or has another UID by now."""
    ended, before = Pod("ml", "ended", {"main": {}}, listed=False), Pod("ml", "again", {"main": {}}, listed=False)
    again = Pod("ml", "again", {"main": {}}, generation=1)
    ended.has_tree = ended.has_links = before.has_tree = before.has_links = False
    node = node_with(noted(ended), noted(before), pods=[ended, before, again])
    node.allocatable = {"nvidia.com/gpu": [str(CARD)]}
    node.processes = [Process(10, CARD, before), Process(11, CARD, ended), Process(12, CARD, again)]
    node.collect()
    snapshot = node.collect()
    assert not any(one.holds for one in snapshot.containers)
    split = owners(snapshot, CARD)
    assert (split["gone"], split["unassigned"], split["unknown"]) == (GIB, GIB, GIB)


def test_the_full_id_of_a_file_hides_no_name() -> None:
    """A log link with a cut id names the container; the file has the whole id without the name."""
    pod = Pod("ml", "p" * 200, {"main": {}, "side": {}})
    node = node_with(noted(pod, "side"), pods=[pod])
    identity = node._identity()
    assert identity.logs is not None
    cut = tuple(ContainerLink(link.container_id[:20], link.pod_uid, link.name) for link in identity.logs.links)
    node._identity = lambda: replace(identity, logs=replace(identity.logs, links=cut))  # type: ignore
    node.processes = [Process(10, CARD, pod, "side")]
    assert [one.name.container for one in node.collect().containers] == ["side"]


def test_a_file_that_cannot_be_read_accuses_no_pod() -> None:
    """It may be that of the pod. A leaf without a holder may have one."""
    pod = Pod("ml", "busy", {"main": {}})
    node = node_with(pods=[pod])
    node.allocatable = {"nvidia.com/gpu": [str(CARD)]}
    node.processes = [Process(10, CARD, pod)]
    node.collect()
    assert owners(node.collect(), CARD)["unassigned"] == GIB
    node.scheduler_files_complete = False
    snapshot = node.collect()
    assert (owners(snapshot, CARD)["unassigned"], owners(snapshot, CARD)["unknown"]) == (0, GIB)
    assert snapshot.node.devices[0].holders is None


async def test_agent_with_mapping_files(directory: Path, library: Path) -> None:
    """The whole service: the sharer holds its GPU. A damaged file is counted, and then no pod is accused."""
    node = Node(directory / "n", library, PlainProcesses(directory / "n" / "proc"))
    sharer = node.admit("sharer", main=[])
    node.run(sharer.cgroup("main"), 1, 8 * GIB, sm_percent=70)
    folder = directory / "map"
    record = {**RECORD, "pod": "sharer", "podUID": sharer.uid, "gpuDevices": [{"uuid": str(driver_uuid(1))}]}
    put(folder, record, sharer.containers["main"])
    flags = ("--gpu-fractioning-map", str(folder), "--interval", "200ms")
    async with node.kubelet, agent.serve(node, *flags, library=library) as running:
        page = await running.later(3)
        assert page.by("gpumap_container_allocated_gpu_memory_bytes", "pod") == {"sharer": 4 * GIB}
        assert page.by("gpumap_allocation_info", "pod") == {"sharer": 1}
        assert page.by("gpumap_allocation_slots", "pod") == {}
        used = page.by("gpumap_device_memory_used_by_owner_bytes", "owner", uuid=driver_uuid(1))
        assert used["scheduled"] == 8 * GIB
        put(folder, b"{", hex_of("damaged"))
        page = await running.later(3)
        assert page.by("gpumap_source_errors_total", "reason", source="pod_identity")["gpu_fractioning_corrupt"] > 0
        assert page.up("pod_identity")
        assert page.by("gpumap_container_unassigned_use", "pod") == {}
        assert page.by("gpumap_container_allocated_gpu_memory_bytes", "pod") == {"sharer": 4 * GIB}
