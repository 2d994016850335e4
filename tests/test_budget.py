"""How many series a node costs: the contract's budget of the default set, with all that a GPU of today reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass

import pytest
from msgspec import structs

from gpumap.agent.flags import DEFAULT_GROUPS
from gpumap.agent.metrics import native, self_families
from gpumap.agent.metrics.allocation import CONTAINER_LABELS
from gpumap.model.families import Family
from gpumap.model.node import Device, Finding, Gpu, Node, OwnerUse, Process, SourceHealth, Unexplained
from gpumap.model.readings import GpuReading
from gpumap.model.snapshot import LazyRows, Snapshot
from gpumap.model.terms import Owner, Source
from tests.snapshots import busy_node, with_node
from tests.test_metrics import OF_GPUS

MOST = {"container": 16, "leaf": 29, "gpu": 62, "agent": 60, "pod": 1, "work": 3, "finding": 3, "judged": 10}
"""Written from the contract. XID errors by code are beyond it: they are as many as there are codes."""
MORE_IF_RESERVED = 3
BY_CODE = ("gpumap_container_xid_errors_total", "gpumap_gpu_xid_errors_by_code_total")
PROCESS_COLLECTOR_SERIES = 6
"""process_* of prometheus_client, on every page."""


def whole_node() -> Snapshot:
    """Sixteen Hopper GPUs, every second one partitioned, shared by ten each, with one resource offered on each leaf."""
    snapshot = busy_node()
    leaves = tuple(
        structs.replace(
            leaf,
            allocatable={"nvidia.com/gpu": 1},
            owners=(*leaf.owners, OwnerUse(Owner.MPS_SERVER, 1 << 20, 1)) if leaf.memory else leaf.owners,
        )
        for leaf in snapshot.node.devices
    )
    return with_node(snapshot, devices=leaves)


def bearer(family: Family, labels: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """What a series is a series of."""
    if family.labels[:1] == ("finding",):
        return ("finding", labels) if len(labels) > 1 else ("judged", ())
    if family.labels[:4] == CONTAINER_LABELS:
        return "container", labels[:4]
    if family.name.startswith(OF_GPUS):
        return "gpu", labels[:1]
    if family.labels == ("workload_kind", "workload", "uuid"):
        return "work", labels
    if family.labels[:1] == ("uuid",):
        return "leaf", labels[:1]
    if family.labels[:2] == ("namespace", "pod"):
        return "pod", (family.name, *labels)
    return "agent", ()


def count_series(snapshot: Snapshot) -> dict[str, Counter[tuple[str, ...]]]:
    """The series of each container on a leaf, each leaf, GPU, pod and work outside pods, and of the agent."""
    counts: dict[str, Counter[tuple[str, ...]]] = {kind: Counter() for kind in MOST}
    for family in (*native(DEFAULT_GROUPS, process_metrics=False), *self_families("1", "2")):
        for series in family.read(snapshot) if family.name not in BY_CODE else ():
            kind, one = bearer(family, series.labels)
            counts[kind][one] += 1
    counts["agent"][()] += PROCESS_COLLECTOR_SERIES
    return counts


CONTRADICTORY = {
    GpuReading: {"fault", "max_mig_devices", "instances", "retired_pages", "sampled_seconds", "refusals", "unsampled"},
    Gpu: {"fault", "idle_power_watts", "busy_without_work_seconds"},
    Process: {"work"},
    SourceHealth: {"reason", "detail"},
    Snapshot: {"expires", "complaints", "hidden", "lost_driver"},
    Node: {"interval_seconds", "collect", "stale", "finding_sums", "unjudged_sentences"},
    Device: {"processes", "others"},
    Finding: {"pids"},
    Unexplained: {"since", "memory_bytes", "pids", "unjudged"},
}
"""Fields that a healthy GPU of today, source or node, or a container's process, does not have with its other fields;
and those that only clients get."""
WITHOUT_SERIES = {"remedy", "remedies", "samples_from", "before_reset", "missing_gpus", "missing_gpus_reason"}


def values_of(value: object) -> Iterator[object]:
    """A value and all that it contains."""
    yield value
    if isinstance(value, (tuple, list, LazyRows)) and not hasattr(value, "_fields"):
        parts: Iterable[object] = value
    else:
        parts = (getattr(value, name) for name in names_of(value))
    for part in parts:
        yield from values_of(part)


def names_of(value: object) -> tuple[str, ...]:
    kind = type(value)
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind) if field.init)
    return tuple(getattr(kind, "__struct_fields__", getattr(kind, "_fields", ())))


def test_something_has_every_field() -> None:
    """Of each kind of row, one row of the node has all fields that can be absent: each series is counted on it."""
    unset: dict[type, set[str]] = {}
    for one in values_of(busy_node()):
        missing = {name for name in names_of(one) if getattr(one, name) in (None, (), "", {})}
        missing -= CONTRADICTORY.get(type(one), set()) | WITHOUT_SERIES
        unset[type(one)] = min(unset.get(type(one), missing), missing, key=len)
    assert {kind: missing for kind, missing in unset.items() if missing} == {}


@pytest.mark.parametrize("kind", MOST)
def test_the_number_of_series_is_within_the_budget(kind: str) -> None:
    """On a large and busy node with every value, the default set keeps to the contract's budget."""
    snapshot = whole_node()
    counts = count_series(snapshot)[kind]
    if kind == "leaf":
        (reserved,) = {row.uuid for row in snapshot.containers if row.reservation}
        counts[(reserved,)] -= MORE_IF_RESERVED
    assert max(counts.values()) <= MOST[kind], counts.most_common(1)


def test_all_that_there_is_was_counted() -> None:
    """Each container on a leaf, each leaf and each GPU has series, with or without a name; nothing else has."""
    snapshot = whole_node()
    counts = count_series(snapshot)
    assert len(counts["container"]) == len(snapshot.containers)
    assert len(counts["leaf"]) == len(snapshot.node.devices)
    assert len(counts["gpu"]) == len(snapshot.node.gpus) + bool(snapshot.node.nameless_gpus)


def test_a_source_that_fails_in_many_ways_costs_the_agent_little() -> None:
    """The agent's own series keep to the budget while each source has failed in three ways since the start."""
    snapshot = whole_node()
    reasons = {"hung": 1, "decode": 2, "deadline_exceeded": 3}
    sources = tuple(structs.replace(health, errors=reasons) for health in snapshot.node.sources)
    assert len(sources) == len(Source)
    assert count_series(with_node(snapshot, sources=sources))["agent"][()] <= MOST["agent"]
