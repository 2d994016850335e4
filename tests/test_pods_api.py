"""The kubelet's Pods API over a real gRPC server: what is read of pods, and that losing it costs nothing else."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpumap.agent._proto.pods import v1alpha1_pb2
from gpumap.agent.join.node_parts import device_health
from gpumap.agent.join.pods import PodTable, PodUidState, tabulate
from gpumap.agent.sources.checkpoint import CheckpointSource
from gpumap.agent.sources.dra import DraSource
from gpumap.agent.sources.identity import PodIdentitySource, PodLogsSource
from gpumap.agent.sources.pod_shares import SHARES_MAX
from gpumap.agent.sources.pods_api import PodsApiSource, decode_pod
from gpumap.lab.demo.kubelet import LIST_PODS, WATCH_PODS, Refuse
from gpumap.model.node import ReportedDeviceHealth
from gpumap.model.observations import (
    Checkpoint,
    CheckpointEntry,
    DeviceHealth,
    DeviceId,
    Failed,
    ListedContainer,
    ListedPod,
    LogTree,
    Moment,
    Observed,
    PodIdentity,
    PodLogs,
    ReportedContainer,
    ReportedPod,
    ResourceDevices,
    ScheduledShare,
    SourceAnswer,
    SourceError,
)
from gpumap.model.readings import Uuid
from gpumap.model.terms import PodName, PodUid
from tests import agent
from tests.kubelet import NOT_SYNCED, FakeKubelet, FakePodsApi
from tests.machine import GIB, Node, gpu_uuid
from tests.processes import PlainProcesses

SECRET = "hunter2-of-this-test"
UID = PodUid("2c48913c-b29f-11e7-9350-020968147796")
CID = "0537ac6c84027b804ba9fa205cc9043ef6bcbc8467dafa6b88b30aa7f4adf18e"
HEALTHY = DeviceHealth("nvidia.com/gpu", f"GPU-{UID}", "Healthy")


def sent(pod: ReportedPod) -> bytes:
    """A pod as a kubelet sends it: whole, with labels, annotations and an environment."""
    message = v1alpha1_pb2.Pod(
        metadata=v1alpha1_pb2.ObjectMeta(name=pod.pod, namespace=pod.namespace, uid=pod.pod_uid),
        status=v1alpha1_pb2.PodStatus(container_statuses=list(map(status, pod.containers))),
    )
    secret = field(1, SECRET.encode()) + field(2, SECRET.encode())
    metadata = field(1, field(11, secret) + field(12, secret))
    specification = field(2, field(2, field(1, b"main") + field(7, secret)))
    return message.SerializeToString() + metadata + specification


def field(number: int, content: bytes) -> bytes:
    """A field that gpumap's messages do not declare; its length is a varint of two bytes."""
    return bytes([number << 3 | 2, len(content) & 0x7F | 0x80, len(content) >> 7]) + content


def status(container: ReportedContainer) -> v1alpha1_pb2.ContainerStatus:
    resources = [
        v1alpha1_pb2.ResourceStatus(
            name=one.resource,
            resources=[v1alpha1_pb2.ResourceHealth(resource_id=one.device_id, health=one.health)],
        )
        for one in container.health
    ]
    id_ = f"containerd://{container.container_id}" if container.container_id else ""
    return v1alpha1_pb2.ContainerStatus(name=container.name, container_id=id_, allocated_resources_status=resources)


def reported(name: str = "train", uid: PodUid = UID, *containers: ReportedContainer) -> ReportedPod:
    return ReportedPod(uid, "ml", name, containers or (ReportedContainer("main", CID, (HEALTHY,)),))


POD, OTHER = reported(), reported("other", PodUid(UID.replace("2", "3")), ReportedContainer("main", ""))


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[FakePodsApi]:
    """A kubelet's Pods API with a pod."""
    async with FakePodsApi(tmp_path / "pods-api.sock") as running:
        running.set_pods([sent(POD)])
        yield running


@pytest.fixture
async def source(tmp_path: Path) -> AsyncIterator[PodsApiSource]:
    """A source at the same socket, not begun."""
    made = PodsApiSource(tmp_path / "pods-api.sock", agent.PATIENCE_SECONDS)
    yield made
    await made.close()


async def until(
    source: PodsApiSource, holds: Callable[[SourceAnswer[Any]], bool]
) -> SourceAnswer[tuple[ReportedPod, ...] | None]:
    """Return the first answer that holds."""

    async def read() -> SourceAnswer[tuple[ReportedPod, ...] | None]:
        return source.read()

    return await agent.until(read, holds, "it is not reported")


def reasons(answer: SourceAnswer[Any]) -> list[str]:
    return [complaint.reason for complaint in answer.complaints]


async def test_pods_are_followed(api: FakePodsApi, source: PodsApiSource) -> None:
    """From the start on there are pods; a new one, a new status and one's end are seen, whatever the event says."""
    await source.start()
    assert source.read() == SourceAnswer((POD,))
    api.set_pods([sent(OTHER), sent(POD)])
    assert await until(source, lambda answer: len(answer.value or ()) == 2) == SourceAnswer((POD, OTHER))
    started = reported("other", OTHER.pod_uid, ReportedContainer("main", "f" * 64))
    api.set_pods([sent(POD), sent(started)])
    assert await until(source, lambda answer: answer.value == (POD, started)) == SourceAnswer((POD, started))
    api.set_pods([sent(started)])
    await until(source, lambda answer: answer.value == (started,))


async def test_unchanged_pods_are_the_very_same_object(api: FakePodsApi, source: PodsApiSource) -> None:
    """So that nothing after it is done again."""
    await source.start()
    first = source.read()
    api.set_pods([sent(POD)])
    # It is read again, so the answer is a new object. Its value is not.
    assert (await until(source, lambda answer: answer is not first)).value is first.value


async def test_nothing_of_a_specification_is_kept(api: FakePodsApi, source: PodsApiSource) -> None:
    """Neither its bytes nor what is in labels; init and ephemeral containers are read as others are."""
    await source.start()
    assert SECRET.encode() in sent(POD)
    assert SECRET not in repr(vars(source))
    message = v1alpha1_pb2.Pod(
        metadata=v1alpha1_pb2.ObjectMeta(name="p", namespace="n", uid="u"),
        status=v1alpha1_pb2.PodStatus(
            init_container_statuses=[v1alpha1_pb2.ContainerStatus(name="init", container_id=f"cri-o://{CID}")],
            ephemeral_container_statuses=[v1alpha1_pb2.ContainerStatus(name="debugger")],
        ),
    )
    api.set_pods([message.SerializeToString(), v1alpha1_pb2.Pod().SerializeToString()])
    answer = await until(source, lambda answer: bool(answer.value) and answer.value[0].pod == "p")
    containers = (ReportedContainer("debugger", ""), ReportedContainer("init", CID))
    assert answer.value == (ReportedPod(PodUid("u"), "n", "p", containers),)


def noted(
    labels: dict[str, str],
    annotations: dict[str, str],
    *containers: str,
    name: str = "p",
    namespace: str = "n",
    uid: str = "u",
) -> bytes:
    """A pod of the Pods API with labels and annotations, as a kubelet sends it."""
    message = v1alpha1_pb2.Pod(
        metadata=v1alpha1_pb2.ObjectMeta(
            name=name,
            namespace=namespace,
            uid=uid,
            labels=[v1alpha1_pb2.Entry(key=key, value=value) for key, value in labels.items()],
            annotations=[v1alpha1_pb2.Entry(key=key, value=value) for key, value in annotations.items()],
        ),
        spec=v1alpha1_pb2.PodSpec(containers=[v1alpha1_pb2.Container(name=name) for name in containers]),
    )
    return message.SerializeToString()


def with_notes(labels: dict[str, str], annotations: dict[str, str], *containers: str) -> ReportedPod:
    return decode_pod(noted(labels, annotations, *containers))


def test_shares_that_a_scheduler_notes_at_a_pod() -> None:
    """Of the first container in the order of the specification, unless another one is named; of each group."""
    found = with_notes({"runai-gpu-group": "g", "app": "x"}, {"gpu-fraction": "0.5", "other": "1"}, "main", "a")
    assert (found.gpu_groups, found.shares) == (("g",), (ScheduledShare(PodUid("u"), "main", group="g", gpus=0.5),))
    groups = {"runai-gpu-group/g1": "g1", "runai-gpu-group/g2": "g2"}
    notes = {"gpu-memory": "4096", "gpu-fraction-container-name": "a", "gpu-fraction-num-devices": "2"}
    found = with_notes(groups, notes, "main", "a")
    assert found.shares == tuple(
        ScheduledShare(PodUid("u"), "a", group=group, memory_bytes=4 * GIB) for group in ("g1", "g2")
    )
    assert with_notes({}, {"gpu-fraction": "0.5"}, "main").shares == (), "it is not bound to a device"
    assert with_notes({"runai-gpu-group": "g"}, {}, "resource-reservation").shares == ()


@pytest.mark.parametrize(
    ("scheduler", "labels", "annotations", "may_share"),
    [
        ("default-scheduler", {"app": "x"}, {"kubernetes.io/config.source": "api"}, False),
        ("default-scheduler", {"kai.scheduler/queue": "q"}, {}, True),
        ("default-scheduler", {"runai/queue": "q"}, {}, True),
        ("default-scheduler", {"runai-gpu-group": "g"}, {}, True),
        ("default-scheduler", {}, {"gpu-fraction": "0.5"}, True),
        ("default-scheduler", {}, {"received-resource-type": "Fraction"}, True),
        ("default-scheduler", {}, {"run.ai/reserve_for_gpu_index": "GPU-1"}, True),
        ("default-scheduler", {}, {"nvidia.com/container.main.gpu-memory.limit": "1Gi"}, True),
        ("kai-scheduler", {}, {}, True),
        ("", {}, {}, True),
    ],
)
def test_signs_of_a_scheduler_that_shares_gpus(
    scheduler: str, labels: dict[str, str], annotations: dict[str, str], may_share: bool
) -> None:
    """Only a pod of Kubernetes' own scheduler, without a label or annotation of the other, has none."""
    message = v1alpha1_pb2.Pod.FromString(noted(labels, annotations, "main"))
    message.spec.scheduler_name = scheduler
    assert decode_pod(message.SerializeToString()).may_share is may_share


def test_shares_with_their_devices() -> None:
    """KAI-Scheduler 0.18: memory and devices by container. The limit counts before the request."""
    one, two = (f"GPU-{uuid}" for uuid in (UID, UID.replace("2", "3")))
    prefix = "nvidia.com/container.main."
    devices = {f"{prefix}gpus.devices": f"{one},k8s.device-plugin.nvidia.com/gpu={two}"}
    notes = {f"{prefix}gpu-memory.request": "2Gi", f"{prefix}gpu-memory.limit": "4Gi", **devices}
    found = with_notes({}, notes, "side", "main")
    assert found.shares == tuple(
        ScheduledShare(PodUid("u"), "main", uuid=Uuid(uuid), memory_bytes=4 * GIB) for uuid in (one, two)
    )
    requested = with_notes({}, {f"{prefix}gpu-memory.request": "512M", **devices})
    assert [share.memory_bytes for share in requested.shares] == [512_000_000] * 2
    for text, expected in (("1.5Gi", 3 * GIB // 2), ("0.5G", 500_000_000), ("1073741824", GIB)):
        requested = with_notes({}, {f"{prefix}gpu-memory.limit": text, **devices})
        assert [share.memory_bytes for share in requested.shares] == [expected] * 2
    assert with_notes({}, devices).shares == (), "without an amount nothing is granted"


@pytest.mark.parametrize(
    "value",
    ["", "NaN", "nan", "inf", "1e999", "-0.5", "2.0", "0", "0.0", "0,5", " 0.5", "½", "٠.٥", "0x1", "9" * 400, "."],
)
def test_hostile_amounts_are_none(value: str) -> None:
    """Whatever a user writes into an annotation, it is a share of a device or nothing."""
    assert with_notes({"runai-gpu-group": "g"}, {"gpu-fraction": value}, "main").shares == ()
    assert with_notes({"runai-gpu-group": "g"}, {"gpu-memory": f"-{value}"}, "main").shares == ()
    notes = {"nvidia.com/container.main.gpu-memory.limit": value or "-1Gi"}
    device = {"nvidia.com/container.main.gpus.devices": f"GPU-{UID}"}
    if not value.isascii() or not value.isdigit() or value == "0" or len(value) > 15:
        assert with_notes({}, {**notes, **device}, "main").shares == ()


def test_hostile_labels_and_devices() -> None:
    """A long group stays short, a device that is none counts as absent, and a string may not be UTF-8."""
    (group,) = with_notes({"runai-gpu-group": "g" * 100_000}, {}, "main").gpu_groups
    assert len(group) < 1000
    notes = {"nvidia.com/container.main.gpu-memory.limit": "1Gi", "nvidia.com/container.main.gpus.devices": "0,all,,"}
    assert with_notes({}, notes, "main").shares == ()
    entry = field(11, field(1, b"runai-gpu-group") + field(2, b"\xff"))
    assert decode_pod(field(1, entry)).gpu_groups == ("\\xff",)


def test_a_pod_has_no_more_shares_than_a_node_has_devices() -> None:
    """A user may write as many labels and devices as a pod can have."""
    labels = {f"runai-gpu-group/{number}": f"g{number}" for number in range(10_000)}
    found = with_notes(labels, {"gpu-fraction": "0.5"}, "main")
    assert len(found.gpu_groups) == len(found.shares) == SHARES_MAX
    devices = ",".join(f"GPU-{UID[:-4]}{number:04x}" for number in range(6_000))
    notes = {"nvidia.com/container.main.gpu-memory.limit": "1Gi", "nvidia.com/container.main.gpus.devices": devices}
    assert len(with_notes({}, notes).shares) == SHARES_MAX
    each = {key.replace("main", f"c{number}"): value for key, value in notes.items() for number in range(9)}
    assert len(with_notes({}, each).shares) == SHARES_MAX


async def test_events_that_a_kubelet_drops_are_made_up_for(api: FakePodsApi, tmp_path: Path) -> None:
    """Pods are listed again from time to time also when no event arrives."""
    source = PodsApiSource(tmp_path / "pods-api.sock", agent.PATIENCE_SECONDS, resync_seconds=0.05)
    try:
        await source.start()
        api.set_pods([sent(OTHER)], tell=False)
        await until(source, lambda answer: answer.value == (OTHER,))
    finally:
        await source.close()


async def test_stream_that_ends_takes_the_pods_with_it(api: FakePodsApi, source: PodsApiSource) -> None:
    """What is no longer followed is not served; it is asked for again until it is back."""
    await source.start()
    api.refuse(LIST_PODS, Refuse(grpc.StatusCode.UNAVAILABLE, "going away"))
    api.end_streams()
    answer = await until(source, lambda answer: answer.value is None)
    assert reasons(answer) in (["pods_api_stream_ended"], ["pods_api_unavailable"])
    api.refuse(LIST_PODS, None)
    assert await until(source, lambda answer: answer.value is not None) == SourceAnswer((POD,))


async def test_kubelet_that_restarts_is_followed_again(api: FakePodsApi, source: PodsApiSource) -> None:
    """While it is away, and until its API server has answered it, there is nothing, with a reason."""
    await source.start()
    await api.stop()
    await until(source, lambda answer: answer.value is None)
    for method in (LIST_PODS, WATCH_PODS):
        api.refuse(method, NOT_SYNCED)
    await api.start()
    await until(source, lambda answer: reasons(answer) == ["pods_api_failed_precondition"])
    for method in (LIST_PODS, WATCH_PODS):
        api.refuse(method, None)
    assert await until(source, lambda answer: answer.value is not None) == SourceAnswer((POD,))


async def test_no_socket_and_no_such_service(source: PodsApiSource, tmp_path: Path) -> None:
    """A socket without a server and a kubelet without the API have different reasons."""
    await source.start()
    assert (source.read().value, reasons(source.read())) == (None, ["pods_api_socket_missing"])
    async with FakeKubelet(tmp_path / "pods-api.sock"):
        assert (await until(source, lambda answer: reasons(answer) == ["pods_api_unimplemented"])).value is None


async def test_answer_that_is_no_pod(api: FakePodsApi, source: PodsApiSource) -> None:
    """Garbage is one reason, and over with its cause."""
    api.set_pods([b"\xff\xff"])
    await source.start()
    assert (source.read().value, reasons(source.read())) == (None, ["pods_api_decode"])
    api.set_pods([sent(POD)])
    await until(source, lambda answer: answer.value == (POD,))


# --- as a part of identity --------------------------------------------------------------------------------------------


def identity_below(root: Path, answer: SourceAnswer[tuple[ReportedPod, ...] | None]) -> PodIdentitySource:
    dra = DraSource(root / "none", root / "none")
    return PodIdentitySource(
        CheckpointSource((root / "checkpoint",)), PodLogsSource(root / "log"), dra, lambda: 0.0, lambda: answer
    )


def test_it_is_identity_enough(tmp_path: Path) -> None:
    """It has UIDs and names: without checkpoint and logs it answers; without it too, that is a failure."""
    answer = identity_below(tmp_path, SourceAnswer((POD,))).read()
    assert answer == SourceAnswer(PodIdentity(None, None, pods=(POD,)))
    with pytest.raises(SourceError) as caught:
        identity_below(tmp_path, SourceAnswer(None)).read()
    assert reasons(SourceAnswer(None, caught.value.complaints)) == ["checkpoint_missing", "pod_logs_missing"]


def test_its_failure_is_a_complaint_beside_the_files(tmp_path: Path) -> None:
    """It was asked for: that its socket is missing is a complaint, and costs nothing else."""
    (tmp_path / "checkpoint").write_text(json.dumps({"Data": {}}))
    (complaint,) = missing = (SourceError("pods_api_socket_missing", "no socket").complaints[0],)
    answer = identity_below(tmp_path, SourceAnswer(None, missing)).read()
    assert answer.complaints == (complaint,)
    assert answer.value.checkpoint is not None
    assert answer.value.pods is None


# --- which UID, name and container ------------------------------------------------------------------------------------

ONE, TWO, THREE = (PodUid(f"{digit * 8}-7f1c-4b5e-9d00-3a6b5c4d2e1f") for digit in "123")


def listed(name: str, *ids: str) -> ListedPod:
    resources = (ResourceDevices("nvidia.com/gpu", tuple(map(DeviceId, ids))),) if ids else ()
    return ListedPod("ml", name, (ListedContainer("main", resources),))


def table(
    pods: Iterable[ListedPod],
    found: Iterable[ReportedPod] | None,
    *,
    trees: Iterable[LogTree] | None = None,
    rows: Iterable[CheckpointEntry] | None = None,
    before: PodTable | None = None,
    last_names: Mapping[PodUid, PodName] | None = None,
) -> PodTable:
    identity = PodIdentity(
        None if rows is None else Checkpoint(tuple(rows), ()),
        None if trees is None else PodLogs(tuple(trees), ()),
        pods=None if found is None else tuple(found),
    )
    return tabulate(tuple(pods), identity, before, last_names=last_names or {})


def tree(name: str, uid: PodUid) -> LogTree:
    return LogTree(uid, "ml", name, ("main",))


def row(uid: PodUid, id_: str) -> CheckpointEntry:
    return CheckpointEntry(uid, "main", "nvidia.com/gpu", frozenset({DeviceId(id_)}))


def test_its_answer_on_a_uid_counts() -> None:
    """Where the files are silent; and a predecessor's directory beside the pod's own says nothing against it."""
    pods = [listed("one", "GPU-1"), listed("two")]
    found = [reported("one", ONE), reported("two", TWO)]
    fixed = {PodName("ml", "one"): ONE, PodName("ml", "two"): TWO}
    assert table(pods, found).uid_of == fixed
    assert table(pods, found, trees=[tree("other", THREE)]).uid_of == fixed
    trees = [tree("one", ONE), tree("one", THREE)]
    lingering = table(pods, found, trees=trees, rows=[row(ONE, "GPU-1"), row(THREE, "GPU-1")])
    assert lingering.uid_of == fixed
    assert lingering.state(THREE, pods_current=True) is PodUidState.GONE


@pytest.mark.parametrize(
    "files",
    [{"rows": [row(TWO, "GPU-1")]}, {"trees": [tree("one", TWO)]}, {"rows": [], "trees": [tree("one", TWO)]}],
    ids=["row", "directory", "no row"],
)
def test_its_late_answer_on_a_successor_does_not_count(files: dict[str, Any]) -> None:
    """While a recreated pod is reported with the UID of before, neither is fixed, and no pod is gone."""
    names = dict.fromkeys((ONE, TWO), PodName("ml", "one"))
    found = table([listed("one", "GPU-1")], [reported("one", ONE)], last_names=names, **files)
    assert found.uid_of == {}
    for uid in (ONE, TWO):
        assert found.state(uid, pods_current=True) is PodUidState.UNKNOWN


def test_of_two_uids_of_one_name_none_is_the_only_one() -> None:
    """If the Pods API has the one and a log directory the other, or the Pods API has both."""
    for uids, with_directory in (((ONE,), TWO), ((ONE, TWO), TWO)):
        found = table([], [reported("one", uid) for uid in uids], trees=[tree("one", with_directory)])
        assert not found.is_only(ONE)
        assert not found.is_only(TWO)


def test_the_uid_that_both_have_is_the_only_one() -> None:
    """A predecessor's log directory beside the pod's own is no second UID of a name that the Pods API reports once."""
    found = table([], [reported("one", ONE)], trees=[tree("one", ONE), tree("one", THREE)])
    assert found.is_only(ONE)
    assert not found.is_only(THREE)
    assert table([], [], trees=[tree("one", ONE)]).is_only(ONE), "the Pods API has no pod of this name"
    listed_now = table([listed("one", "GPU-1")], [reported("one", ONE)], rows=[row(ONE, "GPU-1"), row(THREE, "GPU-1")])
    assert listed_now.uid_of == {PodName("ml", "one"): ONE}
    assert listed_now.is_only(ONE), "the List has it"


def test_namesakes_are_distinguished_by_the_files() -> None:
    """An ending pod and its successor are reported under one name: the assigned devices show which is listed."""
    found = [reported("one", ONE), reported("one", TWO)]
    assert table([listed("one", "GPU-1")], found, rows=[row(TWO, "GPU-1")]).uid_of == {PodName("ml", "one"): TWO}
    assert table([listed("one", "GPU-1")], found).uid_of == {}
    assert not table([listed("one", "GPU-1")], found).is_only(ONE)


def test_pod_that_it_does_not_have_yet_is_found_in_the_files() -> None:
    """A pod may be listed a moment before it is reported."""
    found = table([listed("one", "GPU-1")], [reported("two", TWO)], rows=[row(ONE, "GPU-1")])
    assert found.uid_of == {PodName("ml", "one"): ONE}
    # But never under a UID that it has another name for.
    found = table([listed("one", "GPU-1")], [reported("two", TWO)], rows=[row(TWO, "GPU-1")])
    assert found.uid_of == {}


def test_it_names_containers_and_pods_that_are_not_listed() -> None:
    """By their ids, as links do; a pod without a directory is not gone while the kubelet has it."""
    uid = ONE
    pod = reported("one", uid, ReportedContainer("init", "a" * 64), ReportedContainer("main", CID))
    found = table([listed("one")], [pod, reported("away", TWO)], trees=[tree("one", uid)])
    assert [found.container(uid, id_, read_now=True) for id_ in ("a" * 64, CID)] == ["init", "main"]
    assert found.container(TWO, "a" * 64, read_now=False) == "", "it is another pod's"
    assert found.name(TWO) == PodName("ml", "away")
    assert found.is_only(TWO)
    assert found.state(uid, pods_current=True) is PodUidState.LIVE
    assert table([listed("one")], [pod], trees=[tree("two", TWO)]).state(uid, pods_current=True) is PodUidState.LIVE


def test_table_is_rebuilt_when_the_pods_api_changes() -> None:
    found = table([listed("one")], [POD])
    assert found.is_made_from(PodIdentity(None, None, pods=found.files.pods))
    assert not found.is_made_from(PodIdentity(None, None, pods=None))


def test_health_of_devices_that_are_gpus() -> None:
    """A GPU by its resource, or by the driver of a claim. Without the Pods API nothing is known."""
    claim = DeviceHealth("claim:gpus/one", "gpu.nvidia.com/worker-3/gpu-0", "Unknown")
    others = (
        DeviceHealth("claim:nics/one", "nic.example/worker-3/eth0", "Healthy"),
        DeviceHealth("vendor.example/nic", "gpu.nvidia.com/nic-0", "Healthy"),
    )
    pod = ReportedPod(UID, "ml", "one", (ReportedContainer("main", CID, (HEALTHY, claim, *others)),))
    read = Observed(PodIdentity(None, None, pods=(pod,)), Moment(1.0, 1.0), 0.0)
    found = [ReportedDeviceHealth("ml", "one", "main", *one) for one in (claim, HEALTHY)]
    assert device_health(read, "nvidia.com/gpu".__eq__) == tuple(sorted(found))
    for unread in (None, replace(read, value=PodIdentity(None, None)), Failed(read.at, 0.0, ())):
        assert device_health(unread, "nvidia.com/gpu".__eq__) is None


# --- all together -----------------------------------------------------------------------------------------------------


async def test_agent_with_the_pods_api_alone(directory: Path, library: Path) -> None:
    """Without checkpoint and logs a process finds its container. The map has the health of devices."""
    node = Node(directory / "n", library, PlainProcesses(directory / "n" / "proc"))
    trainer = node.admit("trainer", main=[gpu_uuid(1)])
    node.run(trainer.cgroup("main"), 1, 8 * GIB, sm_percent=70)
    node.run("/system.slice/monitor.service", 2, GIB)
    container = ReportedContainer(
        "main",
        trainer.containers["main"],
        (DeviceHealth("nvidia.com/gpu", gpu_uuid(1), "Unhealthy"),),
    )
    socket = node.kubelet_root / "pods-api" / "pods-api.sock"
    nowhere = ("--device-checkpoint", str(directory / "none"), "--pod-log-root", str(directory / "none"))
    async with FakePodsApi(socket) as api, node.kubelet:
        api.set_pods([sent(ReportedPod(trainer.uid, "ml", "trainer", (container,)))])
        async with agent.serve(
            node, *nowhere, "--pods-api-socket", str(socket), "--interval", "200ms", library=library
        ) as running:
            page = await running.later(3)
            assert page.up("pod_identity")
            assert page.by("gpumap_container_gpu_memory_used_bytes", "container") == {"main": 8 * GIB}
            assert page.value("gpumap_pod_info", pod="trainer", uid=trainer.uid) == 1
            answer = json.loads((await running.get("/api/v1/map")).text)["device_health"]
            assert [(one["pod"], one["container"], one["device_id"], one["health"]) for one in answer] == [
                ("trainer", "main", gpu_uuid(1), "Unhealthy"),
            ]
            assert page.by("gpumap_allocation_unhealthy_info", "device_id") == {gpu_uuid(1): 1}
            await api.stop()
            page = await running.until(lambda page: not page.up("pod_identity"), "its loss is not reported")
            assert page.by("gpumap_allocation_unhealthy_info", "device_id") == {}
            errors = page.by("gpumap_source_errors_total", "reason", source="pod_identity")
            assert any(reason.startswith("pods_api_") and count for reason, count in errors.items())
            assert json.loads((await running.get("/api/v1/map")).text)["device_health"] is None
