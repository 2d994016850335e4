"""DRA's local files in every format, what is wrong with them, and what they say of listed pods' UIDs."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumap.agent.join.pods import PodTable, PodUidState, tabulate
from gpumap.agent.sources.dra import DraSource, parse_prepared, parse_state
from gpumap.model.formatting import parse_quantity
from gpumap.model.observations import (
    Checkpoint,
    CheckpointEntry,
    ClaimDevice,
    ClaimPods,
    DeviceId,
    DraState,
    ListedContainer,
    ListedPod,
    LogTree,
    PodIdentity,
    PodLogs,
    PreparedDevice,
    ResourceDevices,
)
from gpumap.model.readings import Uuid
from gpumap.model.terms import PodName, PodUid
from tests import agent
from tests.machine import GIB, Node, gpu_uuid
from tests.processes import PlainProcesses

ONE, TWO, THREE = (PodUid(f"{digit * 8}-7f1c-4b5e-9d00-3a6b5c4d2e1f") for digit in "123")
CLAIM_UID = "067798be-454e-4be4-9047-1aa06aea63f7"
GPU = Uuid("GPU-b7e4a1c2-0000-4000-8000-00000000aa01")
MIG = Uuid("MIG-5a1c9f00-1111-5111-8111-00000000bb02")


# --- the kubelet's state ----------------------------------------------------------------------------------------------


def entry(claim: str = "train-gpus-x7k2p", *uids: PodUid) -> dict[str, object]:
    """A claim as kubelets since 1.31 write it."""
    device = {
        "PoolName": "worker-3",
        "DeviceName": "gpu-0",
        "RequestNames": ["gpu"],
        "CDIDeviceIDs": [f"k8s.gpu.nvidia.com/claim={CLAIM_UID}-gpu-0"],
    }
    return {
        "ClaimUID": CLAIM_UID,
        "ClaimName": claim,
        "Namespace": "ml",
        "PodUIDs": {uid: {} for uid in uids},
        "DriverState": {"gpu.nvidia.com": {"Devices": [device]}},
    }


def state(*entries: object, key: str = "Entries") -> bytes:
    """The file as kubelets since 1.32 write it: JSON in a string."""
    data = {"kind": "DRACheckpoint", "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1", key: entries}
    return json.dumps({"Data": json.dumps(data), "Checksum": 2361995144}).encode()


def old_state(*entries: object) -> bytes:
    """The file as kubelets until 1.31 wrote it; a list that is empty is left out."""
    document = {"version": "v1", **({"entries": entries} if entries else {}), "checksum": 113577689}
    return json.dumps(document).encode()


OLD_ENTRY = {
    "DriverName": "gpu.nvidia.com",
    "ClassName": "gpu.nvidia.com",
    "ClaimUID": CLAIM_UID,
    "ClaimName": "train-gpus-x7k2p",
    "Namespace": "ml",
    "PodUIDs": {ONE: {}},
    "ResourceHandles": [{"driverName": "gpu.nvidia.com", "data": '{"a": "b"}'}],
    "CDIDevices": {"gpu.nvidia.com": ["nvidia.com/gpu=0"]},
}
CLAIMS = (ClaimPods("ml", "train-gpus-x7k2p", (ONE,)),)


@pytest.mark.parametrize(
    "text",
    [
        state(entry("train-gpus-x7k2p", ONE)),
        state(entry("train-gpus-x7k2p", ONE), key="ClaimInfoStateList"),
        old_state(OLD_ENTRY),
        old_state({**OLD_ENTRY, "Unheard": {"of": 1}}),
        json.dumps({"Data": {"Entries": [entry("train-gpus-x7k2p", ONE)]}}).encode(),
        json.dumps({"ClaimInfoStateList": [entry("train-gpus-x7k2p", ONE)], "Checksum": 1}).encode(),
    ],
)
def test_every_format_of_the_kubelets_state(text: bytes) -> None:
    """A claim and its pods are found in each form that kubelets have written."""
    assert parse_state(text) == (CLAIMS, 0)


def test_entries_of_the_state_that_are_not_whole() -> None:
    """They cost only themselves, and are counted; pods of a claim that is there twice are put together."""
    nameless = {**entry("a", ONE), "ClaimName": ""}
    half = {**entry("a", ONE), "Namespace": "\ud800"}
    twice = (entry("shared", TWO, ONE), entry("shared", ONE, THREE))
    podless = {**entry("podless"), "PodUIDs": None}
    assert parse_state(state(7, nameless, half, *twice, podless)) == (
        (
            ClaimPods("ml", "podless", ()),
            ClaimPods("ml", "shared", (ONE, TWO, THREE)),
            ClaimPods("\ufffd", "a", (ONE,)),
        ),
        2,
    )


# --- the driver's checkpoint ------------------------------------------------------------------------------------------


def result(device: str = "gpu-0", **more: object) -> dict[str, object]:
    """A device that the scheduler gave to a claim, as in its status."""
    return {"request": "gpu", "driver": "gpu.nvidia.com", "pool": "worker-3", "device": device, **more}


def gpu(device: str = "gpu-0", uuid: str = GPU, **more: object) -> dict[str, object]:
    """A prepared GPU."""
    answer = {"Requests": ["gpu"], "PoolName": "worker-3", "DeviceName": device, "CDIDeviceIDs": ["nvidia.com/gpu=0"]}
    return {"gpu": {"info": {"uuid": uuid}, "device": {**answer, **more}}, "mig": None}


def claim(
    *devices: Mapping[str, object],
    results: Iterable[Mapping[str, object]] = (),
    name: str = "train-gpus-x7k2p",
    state: str = "PrepareCompleted",
) -> dict[str, object]:
    """A claim as version 2 of the driver's checkpoint has it."""
    return {
        "checkpointState": state,
        "status": {"allocation": {"devices": {"results": list(results)}}},
        "preparedDevices": [{"devices": list(devices), "configState": {"config": {"secret": "opaque"}}}],
        "name": name,
        "namespace": "ml",
    }


def driver_checkpoint(*claims: object, **others: object) -> bytes:
    """Version 2, as it is written beside version 1."""
    found = {f"{number}-{CLAIM_UID}": one for number, one in enumerate(claims)}
    versions = {"v1": {"preparedClaims": {}}, "v2": {"checksum": 1, "preparedClaims": found, "nodeBootID": "b"}}
    return json.dumps({"version": "v2", "checksum": 2, **versions, **others}).encode()


def device(
    name: str = "gpu-0",
    uuid: Uuid = GPU,
    *,
    of: str = "train-gpus-x7k2p",
    share_id: str = "",
    admin: bool = False,
    memory: int | None = None,
) -> PreparedDevice:
    """What is to be read of one."""
    return PreparedDevice("ml" if of else "", of, name, share_id, uuid, admin, memory)


MIG_DEVICE = {"Requests": ["mig"], "PoolName": "worker-3", "DeviceName": "gpu-1-mig-1g10gb-19-2", "CDIDeviceIDs": []}
CONCRETE = {"parentMinor": 1, "giId": 5, "ciId": 0, "migUUID": MIG, "parentUUID": GPU}


def test_gpus_and_mig_devices_have_their_uuids() -> None:
    """Version 2 ties names to uuids, of MIG devices by `concrete` or the older `info`, and names the claims."""
    mig = {"gpu": None, "mig": {"concrete": CONCRETE, "device": MIG_DEVICE}}
    older = {
        "mig": {"info": {"uuid": MIG, "parentUUID": GPU}, "device": {**MIG_DEVICE, "DeviceName": "gpu-1-mig-9-4-4"}}
    }
    found = parse_prepared(driver_checkpoint(claim(gpu(), mig, older), claim(gpu(), name="other")))
    assert found == (
        (
            device(of="other"),
            device(),
            device("gpu-1-mig-1g10gb-19-2", MIG),
            device("gpu-1-mig-9-4-4", MIG),
        ),
        0,
    )


def test_version_1_has_no_names_of_claims() -> None:
    """Drivers until v25.3 wrote only claims' UIDs, and only of those that are prepared."""
    body = {key: value for key, value in claim(gpu()).items() if key in ("status", "preparedDevices")}
    text = json.dumps({"checksum": 1, "v1": {"preparedClaims": {CLAIM_UID: body}}}).encode()
    assert parse_prepared(text) == ((device(of=""),), 0)
    listed = json.dumps({"v1": {"preparedClaims": {CLAIM_UID: [{"devices": [gpu()]}, None]}}}).encode()
    assert parse_prepared(listed) == ((device(of=""),), 0)
    assert parse_prepared(b'{"checksum":0,"v1":{}}') == ((), 0)


def test_the_newest_version_that_is_known_counts() -> None:
    """Version 3 writes its keys in lower case; of an unknown version the claims are read if they look the same."""
    lower = {"gpu": {"info": {"uuid": GPU}, "device": {"poolName": "worker-3", "deviceName": "gpu-7"}}}
    third = {"checksum": 1, "preparedClaims": {CLAIM_UID: claim(lower)}}
    assert parse_prepared(driver_checkpoint(claim(gpu()), v3=third)) == ((device("gpu-7"),), 0)
    assert parse_prepared(driver_checkpoint(claim(gpu()), v12=third)) == ((device("gpu-7"),), 0)
    assert parse_prepared(driver_checkpoint(claim(gpu()), v4={"claims": []})) == ((device(),), 0)
    assert parse_prepared(driver_checkpoint(claim(gpu()), v3={"checksum": 1})) == ((), 0)


@pytest.mark.parametrize("unfinished", ["PrepareStarted", ""])
def test_claims_that_are_not_prepared_to_the_end_are_left_out(unfinished: str) -> None:
    """What a driver has begun to prepare, no pod has yet."""
    assert parse_prepared(driver_checkpoint(claim(gpu(), state=unfinished))) == ((), 0)


def test_access_and_amounts_come_from_the_claims_own_status() -> None:
    """Admin access and consumed memory are the scheduler's words on this very device, and no other driver's."""
    results = [
        result("gpu-0", adminAccess=True),
        result("gpu-1", consumedCapacity={"memory": "10Gi"}),
        result("gpu-2", consumedCapacity={"gpu.nvidia.com/memory": "1e9"}),
        result("gpu-3", consumedCapacity={"memory": "ten"}),
        {**result("gpu-4", adminAccess=True), "driver": "other.example"},
    ]
    found, _ = parse_prepared(driver_checkpoint(claim(*(gpu(f"gpu-{n}") for n in range(5)), results=results)))
    assert found == (
        device("gpu-0", admin=True),
        device("gpu-1", memory=10 << 30),
        device("gpu-2", memory=10**9),
        device("gpu-3"),
        device("gpu-4"),
    )


def test_shares_of_a_device_are_distinguished() -> None:
    """With consumable capacity a claim may have two shares of a GPU: each has its id and its amount."""
    results = [
        result("gpu-0", shareID="6b0f", consumedCapacity={"memory": "4Gi"}),
        result("gpu-0", shareID="91c4", consumedCapacity={"memory": "6Gi"}),
    ]
    shares = (device(share_id="6b0f", memory=4 << 30), device(share_id="91c4", memory=6 << 30))
    answer = claim(gpu(ShareID="6b0f"), gpu(ShareID="91c4"), results=results)
    assert parse_prepared(driver_checkpoint(answer)) == (shares, 0)
    # Drivers that do not write a share's id have the device once.
    assert parse_prepared(driver_checkpoint(claim(gpu(), results=results))) == (shares, 0)


def test_devices_that_are_not_whole_are_counted() -> None:
    """They cost only themselves; what is passed through to a virtual machine is none of NVML's, and no fault."""
    vfio = {"gpu": None, "mig": None, "vfio": {"info": {"uuid": "GPU-x"}, "device": {"DeviceName": "gpu-vfio-0"}}}
    broken: list[dict[str, object]] = [
        {},
        {"gpu": {"info": {}, "device": {"DeviceName": "gpu-1"}}},
        {"gpu": {"info": {"uuid": GPU}}},
    ]
    assert parse_prepared(driver_checkpoint(claim(gpu(), vfio, *broken))) == ((device(),), 3)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("0", 0),
        ("10Gi", 10 << 30),
        ("1024Mi", 1 << 30),
        ("1e9", 10**9),
        ("1E9", 10**9),
        ("1E", 10**18),
        ("500M", 500_000_000),
        ("+1.5k", 1500),
        (".5Ki", 512),
        ("2.", 2),
        ("0.1Gi", 107374183),
        ("1500m", 2),
        ("1n", 1),
        ("123456789012345678", 123456789012345678),
        ("7.9999999999999999Ei", None),
    ],
)
def test_quantities_are_read_exactly(text: str, amount: int | None) -> None:
    """As Kubernetes writes them, without a floating point; a part of a byte is a byte."""
    assert parse_quantity(text) == amount if amount is not None else parse_quantity(text) > 7 << 60


@pytest.mark.parametrize(
    "text", ["", ".", "Gi", "10 Gi", "10gi", "10GB", "-1", "1e", "1e999", "1i", "٣", "8Ei", "1e60", "9" * 41, "1_0"]
)
def test_what_is_no_quantity_is_refused(text: str) -> None:
    """What is not one, is negative or does not fit in 63 bits raises, and quickly."""
    with pytest.raises(ValueError, match=r"quantity|63 bits"):
        parse_quantity(text)


# --- reading them -----------------------------------------------------------------------------------------------------


def test_unchanged_files_give_the_very_same_object(tmp_path: Path) -> None:
    """Also one that was written again with the same content; one that is gone is not served."""
    kubelets, drivers = tmp_path / "dra_manager_state", tmp_path / "checkpoint.json"
    kubelets.write_bytes(state(entry("train-gpus-x7k2p", ONE)))
    drivers.write_bytes(driver_checkpoint(claim(gpu())))
    source = DraSource(kubelets, drivers)
    first = source.read().value
    assert first == DraState(CLAIMS, (device(),))
    assert source.read().value is first
    (tmp_path / "new").write_bytes(state(entry("train-gpus-x7k2p", ONE)) + b"\n")
    (tmp_path / "new").rename(kubelets)
    assert source.read().value is first
    (tmp_path / "new").write_bytes(state(entry("train-gpus-x7k2p", ONE, TWO)))
    (tmp_path / "new").rename(kubelets)
    second = source.read().value
    assert second.claims == (ClaimPods("ml", "train-gpus-x7k2p", (ONE, TWO)),)
    assert second.prepared is first.prepared
    kubelets.unlink()
    assert source.read() == (DraState(None, (device(),)), ())


def test_file_that_was_mounted_by_itself_is_not_believed(tmp_path: Path) -> None:
    """Its writer has renamed another into its place: the old one, which has no name any more, is never served."""
    path = tmp_path / "dra_manager_state"
    path.write_bytes(state(entry("train-gpus-x7k2p", ONE)))
    with path.open() as held:
        mounted = Path(f"/proc/self/fd/{held.fileno()}")  # as a bind mount, it goes on showing this very file
        source = DraSource(mounted, mounted)
        assert source.read().value.claims == CLAIMS
        (tmp_path / "new").write_bytes(state())
        (tmp_path / "new").rename(path)
        answer = source.read()
    assert answer.value == DraState()
    assert [one.reason for one in answer.complaints] == ["dra_state_stale_mount", "dra_checkpoint_stale_mount"]


_WORDS = re.findall(
    r"\S+",
    """
    Data Entries entries version ClaimName Namespace PodUIDs v1 v2 preparedClaims checkpointState PrepareCompleted
    preparedDevices devices gpu mig info concrete uuid migUUID device DeviceName ShareID status allocation results
    shareID driver gpu.nvidia.com adminAccess consumedCapacity memory 10Gi
    """,
)
_TEXTS = st.sampled_from(_WORDS) | st.text(max_size=3)
_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXTS,
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(_TEXTS, parts, max_size=5),
    max_leaves=30,
)


@given(_ANYTHING, st.booleans())
def test_any_json_is_read_or_refused(value: object, is_nested: bool) -> None:
    """Whatever is in these files, reading them ends in values or in ValueError."""
    document: object = {"Data": json.dumps(value)} if is_nested else value
    claim_of_any = {"v2": {"preparedClaims": {"1": value if is_nested else claim(gpu(), results=[{"device": value}])}}}
    for parse, one in ((parse_state, document), (parse_prepared, document), (parse_prepared, claim_of_any)):
        with contextlib.suppress(ValueError):
            assert parse(json.dumps(one).encode()) is not None


# --- which UID a pod with claims has ----------------------------------------------------------------------------------


def pod(name: str, *claims: str, ids: Iterable[str] = (), namespace: str = "ml") -> ListedPod:
    """A listed pod with a container that has a GPU by each of the claims, and ids of a device plugin."""
    devices = tuple(ClaimDevice("gpu.nvidia.com", "worker-3", f"gpu-{one}", "", namespace, one) for one in claims)
    given = tuple(map(DeviceId, ids))
    resources = (ResourceDevices("nvidia.com/gpu", given),) if given else ()
    return ListedPod(namespace, name, (ListedContainer("main", resources, devices),))


def tree(name: str, uid: PodUid) -> LogTree:
    return LogTree(uid, "ml", name, ("main",))


def row(uid: PodUid, id_: str) -> CheckpointEntry:
    return CheckpointEntry(uid, "main", "nvidia.com/gpu", frozenset({DeviceId(id_)}))


def table(
    pods: Iterable[ListedPod],
    claims: Iterable[ClaimPods] | None,
    *,
    trees: Iterable[LogTree] | None = (),
    rows: Iterable[CheckpointEntry] | None = None,
    before: PodTable | None = None,
    last_names: Mapping[PodUid, PodName] | None = None,
) -> PodTable:
    """The join of a List with these files."""
    checkpoint = None if rows is None else Checkpoint(tuple(rows), ())
    logs = None if trees is None else PodLogs(tuple(trees), ())
    dra = DraState(None if claims is None else tuple(claims))
    return tabulate(tuple(pods), PodIdentity(checkpoint, logs, dra), before, last_names=last_names or {})


def uids(found: PodTable) -> dict[str, PodUid]:
    return {name.pod: uid for name, uid in found.uid_of.items()}


def test_claim_fixes_the_uid_of_its_pod() -> None:
    """With or without readable logs: the kubelet has written down which pod the claim is prepared for."""
    claims = [ClaimPods("ml", "a", (ONE,)), ClaimPods("ml", "b", (TWO,))]
    pods = [pod("one", "a"), pod("two", "b")]
    assert uids(table(pods, claims, trees=None, rows=())) == {"one": ONE, "two": TWO}
    assert uids(table(pods, claims, trees=[tree("one", ONE), tree("two", TWO)])) == {"one": ONE, "two": TWO}


def test_recreated_stateful_pod_with_another_claim() -> None:
    """Until the claim of the new pod is prepared, the predecessor's directory fixes nothing."""
    trees = [tree("web-0", ONE)]
    old = table([pod("web-0", "web-0-gpu-aaaaa")], [ClaimPods("ml", "web-0-gpu-aaaaa", (ONE,))], trees=trees)
    assert uids(old) == {"web-0": ONE}
    left = [ClaimPods("ml", "web-0-gpu-aaaaa", (ONE,))]
    between = table([pod("web-0", "web-0-gpu-bbbbb")], left, trees=trees, before=old)
    assert uids(between) == {}
    assert between.state(ONE, pods_current=True) is PodUidState.UNKNOWN
    claims = [*left, ClaimPods("ml", "web-0-gpu-bbbbb", (TWO,))]
    new = table([pod("web-0", "web-0-gpu-bbbbb")], claims, trees=[*trees, tree("web-0", TWO)], before=between)
    assert uids(new) == {"web-0": TWO}
    assert new.state(ONE, pods_current=True) is PodUidState.GONE


def test_recreated_stateful_pod_with_the_same_claim() -> None:
    """A claim that outlives its pods is prepared for one after the other; while it is for both, nothing is fixed."""
    listed, trees = [pod("web-0", "weights")], [tree("web-0", ONE), tree("web-0", TWO)]
    assert uids(table(listed, [ClaimPods("ml", "weights", (ONE,))], trees=trees[:1])) == {"web-0": ONE}
    assert uids(table(listed, [ClaimPods("ml", "weights", ())], trees=trees[:1])) == {}
    assert uids(table(listed, [ClaimPods("ml", "weights", (ONE, TWO))], trees=trees)) == {}
    assert uids(table(listed, [ClaimPods("ml", "weights", (TWO,))], trees=trees)) == {"web-0": TWO}


def test_pods_that_share_a_claim() -> None:
    """Their directories distinguish them; if these cannot be read, a claim of their own does, or nothing."""
    shared = ClaimPods("ml", "shared", (ONE, TWO))
    pods = [pod("one", "shared"), pod("two", "shared")]
    trees = [tree("one", ONE), tree("two", TWO)]
    assert uids(table(pods, [shared], trees=trees)) == {"one": ONE, "two": TWO}
    assert uids(table(pods, [shared], trees=None, rows=())) == {}
    own = [ClaimPods("ml", "own", (ONE,))]
    assert uids(table([pod("one", "shared", "own"), pods[1]], [shared, *own], trees=None, rows=())) == {"one": ONE}


def test_pod_that_joins_a_shared_claim_is_not_taken_for_another() -> None:
    """It is listed with the claim before it is written down: the only UID there is another pod's."""
    claims = [ClaimPods("ml", "shared", (ONE,))]
    pods = [pod("one", "shared"), pod("two", "shared")]
    assert uids(table(pods, claims, trees=[tree("one", ONE)])) == {"one": ONE}
    assert uids(table(pods, claims, trees=None, rows=())) == {}, "without directories either may be it"
    before = table(pods[:1], claims, trees=None, rows=())
    assert uids(table(pods, claims, trees=None, rows=(), before=before)) == {"one": ONE}


def test_every_claim_of_a_pod_must_agree() -> None:
    """And so must the checkpoint's rows, where a pod has ids of a device plugin too."""
    claims = [ClaimPods("ml", "a", (ONE, TWO)), ClaimPods("ml", "b", (TWO, THREE))]
    assert uids(table([pod("both", "a", "b")], claims, trees=None, rows=())) == {"both": TWO}
    mixed = pod("mixed", "a", ids=["GPU-1"])
    assert uids(table([mixed], claims, trees=None, rows=[row(ONE, "GPU-1"), row(THREE, "GPU-1")])) == {"mixed": ONE}
    assert uids(table([mixed], claims, trees=None, rows=[row(THREE, "GPU-1")])) == {}


def test_without_the_kubelets_state_directories_decide_as_before() -> None:
    """A pod with claims is then fixed as one without devices is: by the only directory of its name."""
    assert uids(table([pod("one", "a")], None, trees=[tree("one", ONE)])) == {"one": ONE}
    assert uids(table([pod("one", "a")], None, trees=[tree("one", ONE), tree("one", TWO)])) == {}
    assert uids(table([pod("one", "a")], None, trees=None, rows=())) == {}
    # A claim of a kubelet that does not name it is no clue either.
    assert uids(table([pod("one", "")], [ClaimPods("ml", "a", (TWO,))], trees=[tree("one", ONE)])) == {"one": ONE}


def test_a_claim_keeps_its_pod_while_the_list_may_be_short() -> None:
    """After a kubelet's restart no pod of the last List is called gone, with or without a claim."""
    claims = [ClaimPods("ml", "a", (ONE,))]
    static = ListedPod("kube-system", "etcd-worker-3", (ListedContainer("etcd"),))
    names = {ONE: PodName("ml", "one"), TWO: PodName("ml", "two")}
    found = table([static], claims, trees=None, rows=(), last_names=names)
    assert found.state(ONE, pods_current=True) is PodUidState.UNKNOWN
    assert found.state(TWO, pods_current=True) is PodUidState.UNKNOWN


def test_table_is_rebuilt_when_claims_change() -> None:
    """It knows the very reading that it was made of; what the driver wrote down does not matter to it."""
    claims = (ClaimPods("ml", "a", (ONE,)),)
    identity = PodIdentity(Checkpoint((), ()), None, DraState(claims))
    found = tabulate((pod("one", "a"),), identity, None)
    assert found.is_made_from(identity)
    assert found.is_made_from(PodIdentity(identity.checkpoint, None, DraState(claims, (device(),))))
    assert not found.is_made_from(PodIdentity(identity.checkpoint, None, DraState((ClaimPods("ml", "a", (TWO,)),))))
    assert not found.is_made_from(PodIdentity(None, None))


# --- all together -----------------------------------------------------------------------------------------------------


async def test_agent_finds_the_pod_and_the_device_of_a_claim(directory: Path, library: Path) -> None:
    """Without the logs: the kubelet's state ties the process to its pod, the driver's checkpoint the name to a GPU."""
    node = Node(directory / "n", library, PlainProcesses(directory / "n" / "proc"))
    trainer = node.admit("trainer", main=[])
    device = ClaimDevice("gpu.nvidia.com", "worker-3", "gpu-1", "", "ml", "train-gpus-x7k2p")
    node.kubelet.set_pods([ListedPod("ml", "trainer", (ListedContainer("main", (), (device,)),))])
    node.run(trainer.cgroup("main"), 2, 8 * GIB)
    node.run("/system.slice/monitor.service", 1, GIB)
    root = node.kubelet_root
    (root / "dra_manager_state").write_bytes(state(entry("train-gpus-x7k2p", trainer.uid)))
    (root / "plugins" / "gpu.nvidia.com").mkdir(parents=True)
    answer = driver_checkpoint(claim(gpu("gpu-1", gpu_uuid(2))))  # by its name it would be another
    (root / "plugins" / "gpu.nvidia.com" / "checkpoint.json").write_bytes(answer)
    async with node.kubelet, agent.serve(node, "--pod-log-root", str(directory / "none"), library=library) as running:
        page = await running.later(3)
        assert page.value("gpumap_pod_info", pod="trainer", uid=trainer.uid) == 1
        assert page.by("gpumap_container_gpu_memory_used_bytes", "uuid", pod="trainer") == {gpu_uuid(2): 8 * GIB}
        assert page.by("gpumap_allocation_info", "uuid", pod="trainer") == {gpu_uuid(2): 1}
        assert page.up("pod_identity")
