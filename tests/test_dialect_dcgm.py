"""The dialects dcgm and dcgm49: dcgm-exporter's names, labels and units; a device's value, or each container's own."""

from collections import defaultdict
from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpumap.agent.dialects.dcgm import BEFORE_4_9, SINCE_4_9
from gpumap.agent.dialects.dcgm_entities import Entity, entities, gpu_entities
from gpumap.agent.exposition import Exposition
from gpumap.model.families import Family
from gpumap.model.node import ContainerXids, GpuXids, OwnerUse, SourceHealth
from gpumap.model.node import Process as ProcessRow
from gpumap.model.readings import DeviceMemory
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import Owner, Source
from tests.dcgm_exporter import RENAMED, Renamed
from tests.dcgm_nodes import (
    CARD,
    P1,
    P2,
    PARTITIONED,
    SHARED,
    TRAINER,
    card,
    holder,
    instance,
    leaf,
    node,
    process,
    processes_of,
    sample_node,
    use,
)
from tests.dialect_pages import GIB, MIB
from tests.examples import examples
from tests.generated import nodes
from tests.nodes import Process, TestNode
from tests.snapshots import busy_node, with_node

PODS = ("container", "namespace", "pod")
PROFILING = {
    "PROF_GR_ENGINE_ACTIVE": 0.75,
    "PROF_SM_ACTIVE": 0.5,
    "PROF_SM_OCCUPANCY": 0.25,
    "PROF_PIPE_TENSOR_ACTIVE": 0.125,
    "PROF_DRAM_ACTIVE": 0.0625,
    "PROF_PIPE_FP64_ACTIVE": 0.0,
    "PROF_PIPE_FP32_ACTIVE": 0.375,
    "PROF_PIPE_FP16_ACTIVE": 0.03125,
}
"""What GPM measured of the cards of these tests."""

Rows = dict[tuple[str, ...], float]


def page(snapshot: Snapshot, *, openmetrics: bool = False) -> str:
    return Exposition(BEFORE_4_9, openmetrics=openmetrics).render(snapshot).decode()


def rows(snapshot: Snapshot, field: str, *labels: str) -> Rows:
    """The values of a field by these labels; a label that is not there is ""."""
    found: Rows = {}
    for family in parse_text(page(snapshot)):
        for sample in family.samples:
            if sample.name.removesuffix("_total") == f"DCGM_FI_{field}":  # the parser adds it to a counter
                key = tuple(sample.labels.get(label, "") for label in labels)
                assert key not in found
                found[key] = sample.value
    return found


@pytest.mark.parametrize("field", PROFILING)
def test_activity_is_the_devices_and_names_its_only_container(field: str) -> None:
    """Each of GPM's metrics under its own name; no value of a shared GPU or GPU instance is on a pod."""
    value, entity = PROFILING[field], ("UUID", "GPU_I_ID", "GPU_I_PROFILE", "pod")
    assert rows(sample_node(), field, *entity) == {
        (CARD, "", "", "job-0"): value,
        (SHARED, "", "", ""): value,
        (PARTITIONED, "3", "1g.10gb", "job-0"): value,
        (PARTITIONED, "5", "2g.20gb", ""): value,
    }
    on = card(partitioned=True)
    leaves = (leaf(on, instance=(made := instance(3))),)
    shared = node(holder(P1, made.uuid), holder(P2, made.uuid), gpus=(on,), leaves=leaves)
    assert rows(shared, field, "GPU_I_ID", *PODS) == {("3", "", "", ""): value}


@pytest.mark.parametrize(
    "other",
    [
        process(P1, Owner.UNKNOWN),
        process(None, Owner.UNKNOWN, "another-pods"),
        process(None, Owner.UNKNOWN),
        process(TRAINER, Owner.UNKNOWN, "that-of-its-predecessor"),
        process(P1),
    ],
    ids=["another pod's", "of a UID without a name", "of nobody knows whom", "a namesake's", "an init container's"],
)
def test_a_process_that_may_be_anothers_ends_the_exclusive_hold(other: ProcessRow) -> None:
    """The card's memory is the holder's only while every process there is known to be its own."""
    owners = processes_of(Owner.ASSIGNED), processes_of(other.owner)
    snapshot = node(holder(TRAINER, of=use(GIB, 0.5)), leaves=(leaf(card(), *owners),), processes=(process(TRAINER),))
    assert rows(snapshot, "DEV_FB_USED", "pod") == {("job-0",): 1024 if other.owner is Owner.UNKNOWN else 4096}
    beside = replace(snapshot, processes=(process(TRAINER), other))
    assert rows(beside, "DEV_FB_USED", "pod") == {("job-0",): 1024}
    assert rows(beside, "DEV_GPU_UTIL", "pod") == {("job-0",): 50}
    assert rows(beside, "DEV_POWER_USAGE", "pod") == {("",): 507.409}


def test_no_container_is_alone_while_processes_are_unknown() -> None:
    """/proc that could not be read this time, a driver that lists no processes: no value jumps to the holder."""
    blind = node(holder(TRAINER), leaves=(leaf(card(), processes_of(Owner.UNKNOWN)),), visible=False)
    for last_success, answer in ((None, {("job-0",): 4096}), (1.0, {})):
        failed = with_node(blind, sources=(SourceHealth(Source.PROCFS.value, last_success=last_success),))
        assert rows(failed, "DEV_FB_USED", "pod") == answer
    unlisted = node(holder(TRAINER), leaves=(leaf(card(), OwnerUse(Owner.UNACCOUNTED, 4 * GIB, None)),))
    assert rows(unlisted, "DEV_FB_USED", "pod") == {}
    assert rows(unlisted, "DEV_GPU_TEMP", "pod") == {("",): 61}


def test_a_claim_that_looks_on_owns_nothing() -> None:
    """Admin access makes no container an owner, and leaves the owner its card; what it uses is its own."""
    idle, busy = (holder(P1, of=use(memory, 0.1, processes), gpus=0.0) for memory, processes in ((0, 0), (GIB, 1)))
    assert rows(node(idle), "DEV_FB_USED", "pod") == {("",): 4096}
    assert rows(node(idle, holder(TRAINER)), "DEV_FB_USED", "pod") == {("job-0",): 4096}
    assert rows(node(busy), "DEV_FB_USED", "pod") == {("p1",): 1024}
    beside = node(busy, holder(TRAINER, of=use(2 * GIB)))
    assert rows(beside, "DEV_FB_USED", "pod") == {("job-0",): 2048, ("p1",): 1024}
    assert rows(beside, "DEV_GPU_TEMP", "pod") == {("",): 61}


@pytest.mark.parametrize(
    ("xids", "answer"),
    [
        ((), {}),
        ((GpuXids(CARD, {}, 0.0),), {("0",): 0}),
        ((GpuXids(CARD, {31: 2, 79: 1}, 0.0, 31),), {("31",): 31}),
        ((GpuXids(CARD, {31: 2, 79: 1}, 0.0, None),), {}),
    ],
    ids=["nobody listens", "none was heard", "the last one", "which was last is not known"],
)
def test_xid_errors_are_the_last_one(xids: tuple[GpuXids, ...], answer: Rows) -> None:
    """0 says that gpumap listened and received none; what cannot be known is absent."""
    assert rows(with_node(node(), xids=xids), "DEV_XID_ERRORS", "err_code") == answer


@pytest.mark.parametrize(
    ("hit", "pod"),
    [
        ((), ""),
        ((ContainerXids(*P1, CARD, 79, 1),), "p1"),
        ((ContainerXids(*TRAINER, CARD, 31, 1),), ""),
        ((ContainerXids(*TRAINER, SHARED, 79, 1),), ""),
        ((ContainerXids(*P1, CARD, 79, 1), ContainerXids(*P2, CARD, 79, 1)), ""),
    ],
    ids=["before anybody came", "who is gone", "another code", "another card", "two"],
)
def test_an_xid_error_is_of_the_containers_that_it_hit(hit: tuple[ContainerXids, ...], pod: str) -> None:
    """The container that holds the card now may be newer than the error. If there are several, no label names one."""
    xids = (GpuXids(CARD, {31: 2, 79: 1}, 0.0, 79),)
    snapshot = with_node(node(holder(TRAINER)), xids=xids, container_xids=hit)
    assert rows(snapshot, "DEV_XID_ERRORS", "err_code", "pod") == {("79", pod): 79}
    assert rows(node(holder(TRAINER)), "DEV_XID_ERRORS", "err_code", "pod") == {("0", "job-0"): 0}


def test_compute_instances_of_one_gpu_instance_are_one() -> None:
    """dcgm-exporter's labels do not distinguish them: their memory is there once, under the GPU instance's profile."""
    on = card(partitioned=True)
    parts = instance(2, 0, "1c.3g.40gb"), instance(2, 1, "2c.3g.40gb")
    memory = DeviceMemory(40 * GIB, 8 * GIB, 32 * GIB, 0)
    leaves = tuple(leaf(on, instance=structs.replace(one, activity=None), memory=memory) for one in parts)
    labels = "GPU_I_ID", "GPU_I_PROFILE", "pod"
    one_holds_both = node(holder(P1, parts[0].uuid), holder(P1, parts[1].uuid), gpus=(on,), leaves=leaves)
    assert rows(one_holds_both, "DEV_FB_USED", *labels) == {("2", "3g.40gb", "p1"): 8192}
    one_holds_one = node(holder(P1, parts[0].uuid, use(GIB), memory=40 * GIB), gpus=(on,), leaves=leaves)
    assert rows(one_holds_one, "DEV_FB_USED", *labels) == {("2", "3g.40gb", "p1"): 1024}
    assert rows(one_holds_one, "DEV_FB_FREE", *labels) == {("2", "3g.40gb", ""): 32768}
    each_holds_one = node(
        holder(P1, parts[0].uuid, use(GIB)), holder(P2, parts[1].uuid, use(3 * GIB)), gpus=(on,), leaves=leaves
    )
    assert rows(each_holds_one, "DEV_FB_USED", *labels) == {("2", "3g.40gb", "p1"): 1024, ("2", "3g.40gb", "p2"): 3072}
    assert rows(each_holds_one, "DEV_FB_TOTAL", *labels) == {("2", "3g.40gb", ""): 40960}
    partly_known = node(
        holder(P1, parts[0].uuid, use(GIB)),
        holder(P1, parts[1].uuid),
        holder(P2, parts[1].uuid, use(0)),
        gpus=(on,),
        leaves=leaves,
    )
    assert rows(partly_known, "DEV_FB_USED", *labels) == {("2", "3g.40gb", "p2"): 0}


def test_the_holder_of_a_partitioned_gpu_has_its_instances() -> None:
    """Its name is on the card and on each instance, as long as no other container is on them."""
    on = card(partitioned=True)
    made = instance(1), instance(2)
    leaves = tuple(leaf(on, instance=one, memory=DeviceMemory(GIB, GIB, 0, 0)) for one in made)
    alone = node(holder(TRAINER), gpus=(on,), leaves=leaves)
    assert rows(alone, "DEV_GPU_TEMP", "GPU_I_ID", "pod") == {("", "job-0"): 61}
    assert rows(alone, "DEV_FB_USED", "GPU_I_ID", "pod") == {("1", "job-0"): 1024, ("2", "job-0"): 1024}
    beside = node(holder(TRAINER), holder(P1, made[0].uuid, use(MIB)), gpus=(on,), leaves=leaves)
    assert rows(beside, "DEV_GPU_TEMP", "GPU_I_ID", "pod") == {("", ""): 61}
    assert rows(beside, "DEV_FB_USED", "GPU_I_ID", "pod") == {("1", "p1"): 1, ("2", "job-0"): 1024}


@settings(max_examples=examples(150))
@given(nodes())
def test_a_device_or_its_containers_and_never_both(truth: TestNode) -> None:
    """FB_USED of a GPU or GPU instance is one row of the device, or one a container that adds up to no more than it."""
    snapshot = truth.collect()
    by_entity: dict[tuple[str, ...], Rows] = defaultdict(dict)
    for key, value in rows(snapshot, "DEV_FB_USED", "UUID", "GPU_I_ID", *PODS).items():
        by_entity[key[:2]][key[2:]] = value
    total = rows(snapshot, "DEV_FB_TOTAL", "UUID", "GPU_I_ID")
    free = rows(snapshot, "DEV_FB_FREE", "UUID", "GPU_I_ID")
    for entity, answer in by_entity.items():
        if ("", "", "") in answer:
            assert len(answer) == 1
        if len(answer) > 1 and free[entity]:  # a generated device may be over-full, as if processes shared memory
            assert sum(answer.values()) <= total[entity] - free[entity]


@st.composite
def lived_through(draw: st.DrawFn) -> TestNode:
    """A node with a leftover of a pod's predecessor. Its kubelet or its files of identity may be away for a while."""
    node = draw(nodes())
    named = [pod for pod in node.pods if pod.listed]
    for pid, pod in enumerate(draw(st.lists(st.sampled_from(named), max_size=2)) if named else [], 700):
        old = replace(pod, generation=pod.generation - pid, listed=False, in_checkpoint=False, has_tree=False)
        node.pods.append(old)
        leaves = [leaf for gpu in node.gpus for leaf in gpu.leaves]
        if leaves:
            node.processes.append(Process(pid, draw(st.sampled_from(leaves)), old, next(iter(old.ids)), memory=2 * GIB))
    return node


def all_by_entity(snapshot: Snapshot, field: str) -> dict[tuple[str, str], Rows]:
    found: dict[tuple[str, str], Rows] = defaultdict(dict)
    for (uuid, number, *name), value in rows(
        snapshot, field, "UUID", "GPU_I_ID", "namespace", "pod", "container"
    ).items():
        found[uuid, number][tuple(name)] = value
    return found


def check_credit(truth: TestNode, snapshot: Snapshot) -> None:
    """Each row of FB_USED with a pod, and each device that somebody has to himself, against what truly runs."""
    used = all_by_entity(snapshot, "DEV_FB_USED")
    for entity in entities(snapshot):
        on_it = {leaf.uuid for leaf in entity.leaves}
        running = [process for process in truth.processes if process.leaf in on_it]
        number = "" if entity.gpu_instance_id is None else str(entity.gpu_instance_id)
        for name, value in used[entity.gpu.uuid, number].items():
            if name == ("", "", ""):
                continue
            assert entity.memory is not None
            assert value <= entity.memory.used_bytes >> 20
            own = [row.use for row in snapshot.containers if row.name == name and row.uuid in on_it]
            others = [one for one in running if not _is_of(one, name)]
            if entity.sole is None or others:
                assert value == sum(one.memory_bytes or 0 for one in own if one is not None) >> 20
    for device in (*gpu_entities(snapshot), *entities(snapshot)):
        check_sole(truth, snapshot, device)


def check_sole(truth: TestNode, snapshot: Snapshot, entity: Entity) -> None:
    if entity.sole is None:
        return
    on_it = {leaf.uuid for leaf in entity.leaves}
    assert [one for one in truth.processes if one.leaf in on_it and not _is_of(one, entity.sole)] == []
    owners = [row for row in snapshot.containers if row.holds and row.uuid in {*on_it, entity.gpu.uuid}]
    assert {row.name for row in owners if row.allocated_gpus != 0 and not row.reservation} == {entity.sole}


def _is_of(process: Process, name: tuple[str, ...]) -> bool:
    pod = process.pod
    return pod is not None and pod.listed and pod.full(process.container) == name


@settings(max_examples=examples(300))
@given(lived_through(), st.data())
def test_no_container_is_credited_with_the_use_of_another(truth: TestNode, data: st.DataObject) -> None:
    """A container named on a device's values is truly the only one there; others have their own bytes, to the MiB."""
    for _ in range(4):
        truth.down = set(data.draw(st.lists(st.sampled_from(["kubelet", "pod_identity"]), max_size=1)))
        truth.checkpoint_readable, truth.logs_readable = data.draw(
            st.sampled_from([(True, True)] * 3 + [(True, False), (False, True)])
        )
        check_credit(truth, truth.collect())


# --- since dcgm-exporter 4.9 (dcgm49) ---------------------------------------------------------------------------------


DRIVER_LABEL = {"DCGM_FI_DRIVER_VERSION": "DCGM_FI_SYSTEM_DRIVER_VERSION"}
BYTES = {name for name, (_, factor) in RENAMED.items() if factor == MIB}
"""Before 4.9 whole MiB, rounded down."""
NOT_RENAMED = {
    *(f"DCGM_FI_DEV_ECC_{bits}_{since}_TOTAL" for bits in ("SBE", "DBE") for since in ("VOL", "AGG")),
    *(
        f"DCGM_FI_DEV_{reason}_VIOLATION"
        for reason in ("POWER", "THERMAL", "SYNC_BOOST", "BOARD_LIMIT", "LOW_UTIL", "RELIABILITY")
    ),
}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(families: tuple[Family, ...], snapshot: Snapshot) -> Samples:
    """Every sample, by the name of its family and its labels."""
    text = Exposition(families).render(snapshot).decode()
    names = {family.name.removesuffix("_total"): family.name for family in families}
    return {
        (names[family.name], frozenset(sample.labels.items())): sample.value
        for family in parse_text(text)
        for sample in family.samples
    }


def check(snapshot: Snapshot) -> None:
    before, since = read(BEFORE_4_9, snapshot), read(SINCE_4_9, snapshot)
    assert len(before) == len(since)
    for (name, labels), value in before.items():
        renamed, factor = RENAMED.get(name, Renamed(name))
        key = renamed, frozenset((DRIVER_LABEL.get(label, label), of) for label, of in labels)
        found = since[key]
        if name in BYTES:
            assert found // MIB == value
        else:
            assert found == pytest.approx(float(Decimal(value) * factor), rel=1e-9, abs=1e-7)


def test_the_sample_node_has_the_same_rows() -> None:
    check(sample_node())
    check(busy_node(gpus=4, sharing=3))


@settings(max_examples=examples(100))
@given(nodes())
def test_every_node_has_the_same_rows(truth: TestNode) -> None:
    """One value has one meaning, under either name: the same owners, and the value in the other unit."""
    check(truth.collect())


def test_every_field_has_its_name_since_4_9() -> None:
    """As in the table of what NVIDIA renamed; types are the same. What is not in the table keeps its name."""
    for before, since in zip(BEFORE_4_9, SINCE_4_9, strict=True):
        assert (before.name in RENAMED) is not (before.name in NOT_RENAMED)
        assert since.name == RENAMED.get(before.name, Renamed(before.name)).name
        assert since.kind == before.kind
        assert [DRIVER_LABEL.get(label, label) for label in before.labels] == list(since.labels)
