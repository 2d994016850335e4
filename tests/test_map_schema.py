"""map.schema.json, which gpumap serves and docs/ links to, says exactly what /api/v1/map answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import given, settings
from msgspec import structs

from gpumap.agent.join.memory import untried
from gpumap.agent.published import published
from gpumap.model import remedies
from gpumap.model.names import Owner, Source
from gpumap.model.node import VERSION, GpuXids, MissingGpus, decode, encode
from gpumap.model.snapshot import Snapshot
from scripts.map_schema import map_schema
from tests.examples import examples
from tests.generated import nodes
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid
from tests.snapshots import busy_node, empty_node, gpu, instances, leaf, with_node

Document = dict[str, Any]

SCHEMA = resources.files("gpumap.model").joinpath("map.schema.json").read_text(encoding="utf-8")
SCHEMA_OBJECT: dict[str, Any] = json.loads(SCHEMA)
ROOT = Path(__file__).resolve().parent.parent
LISTS_OF_WORDS = (
    "judged",
    "errors",
    "finding_sums",
    "capabilities",
    "remedies",
    "temperatures_celsius",
    "clocks_hertz",
    "clock_events",
    "clock_event_seconds",
    "fan_speed_ratios",
    "remapped_rows",
    "nvlink_errors",
    "retired_pages",
    "refusals",
    "slots",
    "allocatable",
    "counts",
    "last_at",
    "since",
    "meanings",
    "ecc_errors",
    "ecc_totals",
    "power_limits_watts",
    "max_clocks_hertz",
)
"""Objects with keys that are data."""


def closed(schema: Any) -> Any:
    """The schema without room for fields that it does not name."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    shut = {key: closed(part) for key, part in schema.items()}
    if "properties" in schema and schema.get("type") == "object":
        shut["additionalProperties"] = False
    return shut


VALIDATOR = jsonschema.Draft202012Validator(closed(SCHEMA_OBJECT))


def check(snapshot: Snapshot, stale: str = "") -> Document:
    """A snapshot's map as a client gets it; fails unless the schema allows exactly that."""
    text = encode(made := published(snapshot, 5.0, ("device", "health"), stale))
    assert decode(text) == made
    found: Document = json.loads(text)
    VALIDATOR.validate(found)
    return found


def leaves_of(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of everything in a document that is not null."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves_of(part, path if path[-1:] and path[-1] in LISTS_OF_WORDS else (*path, key))
    elif isinstance(value, list):
        for part in value:
            yield from leaves_of(part, path)
    elif value is not None:
        yield path


def declared(schema: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all fields that the schema names."""
    if "$ref" in schema:
        schema = SCHEMA_OBJECT["$defs"][schema["$ref"].rpartition("/")[2]]
    for choice in schema.get("anyOf", ()):
        if choice != {"type": "null"}:
            yield from declared(choice, path)
    if "items" in schema:
        yield from declared(schema["items"], path)
    elif "properties" in schema:
        for name, part in schema["properties"].items():
            yield from declared(part, (*path, name))
    elif "anyOf" not in schema:
        yield path


def as_json(snapshot: Snapshot, interval_seconds: float | None = None) -> Document:
    """The map as plain JSON values."""
    found: Document = json.loads(encode(published(snapshot, interval_seconds)))
    return found


def test_the_schema_is_a_schema() -> None:
    """It is valid JSON Schema, of this version, and every field of it is explained."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA_OBJECT)
    assert SCHEMA_OBJECT["properties"]["version"]["enum"] == [VERSION]

    def unexplained(schema: Any, name: str) -> Iterator[str]:
        if "description" not in schema:
            yield name
        for key, part in schema.get("properties", {}).items():
            yield from unexplained(part, f"{name}.{key}")

    definitions = {**SCHEMA_OBJECT["$defs"], "map": SCHEMA_OBJECT}
    assert [found for name, part in definitions.items() for found in unexplained(part, name)] == []


def test_the_schema_has_the_terms_of_the_code() -> None:
    definitions = SCHEMA_OBJECT["$defs"]
    assert definitions["Owner"]["enum"] == sorted(owner.value for owner in Owner)
    source = definitions["SourceHealth"]["properties"]["source"]["enum"]
    assert sorted(source) == sorted(one.value for one in Source)


@settings(max_examples=examples(60))
@given(node=nodes())
def test_generated_nodes(node: TestNode) -> None:
    """So does whatever a node may be, also when its sources fail."""
    check(node.collect())
    check(node.collect())
    node.down.update(("kubelet", "nvml"))
    check(node.collect(seconds=100))


def test_every_field_is_filled_somewhere() -> None:
    pod, holds = Pod("ml", "job", {"main": {}}), Pod("ml", "idle", {"main": {"nvidia.com/gpu": [gpu_uuid(0)]}})
    node = TestNode([Gpu(0)], [pod], [Process(10, gpu_uuid(0), pod)], down={"kubelet"})
    found = [check(busy_node(4, 3)), check(empty_node(), "no collection"), check(node.collect())]
    thief = TestNode([Gpu(0)], [holds])
    thief.collect()
    thief.pods, thief.processes = [holds, pod], [Process(10, gpu_uuid(0), pod)]
    thief.collect()
    left = Pod("ml", "left", {"main": {}}, listed=False)
    thief.processes.append(Process(11, gpu_uuid(0), left))
    found += [check(thief.collect())]
    xids = GpuXids(gpu(0).uuid, {79: 1}, 0.0, None, {79: 1.8e9}, {79: "off the bus"}, before_reset=(79,))
    well = gpu(0).reading
    assert well is not None
    refusing = structs.replace(well, refusals={"nvmlDeviceGetFanSpeed_v2": 3}, mig_unknown=True, sampled_seconds=5.0)
    ill = structs.replace(gpu(0), ecc_uncorrected_at=1.8e9, reading=refusing)
    hidden = structs.replace(instances(ill)[0], denied=True)
    found += [check(with_node(busy_node(1), gpus=(ill,), devices=(leaf(ill, hidden.uuid, hidden),), xids=(xids,)))]
    whole = TestNode([Gpu(0, mig=[(1, 0, 3)])], [holds])
    found += [check(whole.collect())]
    stalled = structs.replace(gpu(0), idle_power_watts=60.0, busy_without_work_seconds=700.0)
    found += [check(with_node(busy_node(1), gpus=(stalled,)))]
    leaking = TestNode([Gpu(0, overhead=GIB)], processes=[Process(10, gpu_uuid(0), None, left=True)])
    found += [check(leaking.collect()), check(leaking.watch(660.0))]
    missing = MissingGpus(1, ("0000:3b:00.0",), 1.8e9)
    found += [check(with_node(busy_node(1), gpus=(stalled,), missing_gpus=missing))]
    answer = {path for one in found for path in leaves_of(one)}
    assert {".".join(path) for path in set(declared(SCHEMA_OBJECT)) - answer} == set()


def test_remedies() -> None:
    """A remedy is given for what is wrong and has one, and for nothing else."""
    node = TestNode([Gpu(0), Gpu(1)], [Pod("ml", "job", {"main": {"nvidia.com/gpu": [gpu_uuid(7)]}})])
    node.collect()
    node.gpus[1].fault = "lost"
    found = as_json(node.collect())
    assert [row["remedy"] for row in found["unmatched"]] == [remedies.UNMATCHED["not_in_nvml"]]
    assert [gpu["remedies"] for gpu in found["gpus"]] == [{}, {"fault": remedies.FAULTS["lost"]}]
    assert {source["remedy"] for source in found["sources"]} == {None}
    blind = as_json(TestNode(visible=False, down={"kubelet"}).collect())
    assert {source["source"]: source["remedy"] for source in blind["sources"] if source["remedy"]} == {
        "kubelet": remedies.SOURCES[Source.KUBELET]["socket_missing"]
    }
    assert blind["remedies"]["pid_visibility"] == remedies.CAPABILITIES["pid_visibility"]
    assert blind["pid_visibility_reason"] == "not in this test"


def test_the_identity_of_a_gpu_is_present_once() -> None:
    """Its identity is not repeated in its reading, and the rows of the driver are in the devices only."""
    found = check(busy_node(4))
    for one in found["gpus"]:
        assert not (one["reading"] or {}).keys() & {"uuid", "model", "pci_bus_id", "samples", "processes", "instances"}
    assert not any((one["mig"] or {}).keys() & {"memory", "processes", "activity"} for one in found["devices"])


def test_the_holder_of_a_partitioned_gpu_is_assigned_on_all_leaves() -> None:
    """Also on leaves where it has no process; who has one there and holds nothing is not."""
    gpu = Gpu(0, mig=[(1, 0, 3), (2, 0, 3)])
    whole, other = Pod("ml", "whole", {"main": {"nvidia.com/gpu": [str(gpu.uuid)]}}), Pod("ml", "other", {"main": {}})
    node = TestNode([gpu], [whole, other], [Process(10, gpu.leaves[0], whole), Process(11, gpu.leaves[1], other)])
    node.collect()
    devices = {one["uuid"]: one for one in check(node.collect())["devices"]}
    assert [[(one["pod"], one["owner"]) for one in devices[leaf]["containers"]] for leaf in gpu.leaves] == [
        [("whole", "assigned")],
        [("other", "unassigned"), ("whole", "assigned")],
    ]


def test_the_interval_is_reported_if_it_exists() -> None:
    assert as_json(busy_node(4, 3), 2.5)["interval_seconds"] == 2.5
    VALIDATOR.validate(json.loads(json.dumps(as_json(busy_node(4, 3)))))
    assert as_json(busy_node(4, 3))["interval_seconds"] is None


def test_groups_and_the_reason_of_staleness() -> None:
    """The groups of --collect are in their order; `stale` is a sentence, and null where the data is current."""
    found = check(busy_node(4, 3))
    assert (found["collect"], found["stale"]) == (["device", "health"], None)
    assert check(empty_node(), "no collection")["stale"] == "no collection"
    assert as_json(busy_node(4, 3))["collect"] is None


def test_known_reasons_have_a_remedy() -> None:
    """What is counted from the start, and every capability that a remedy is reported for, is known to both sides."""
    for health in untried():
        assert health.errors.keys() <= remedies.SOURCES[Source(health.source)].keys()
    assert remedies.CAPABILITIES.keys() <= as_json(busy_node(4, 3))["capabilities"].keys()


def test_the_schema_is_that_of_the_declarations() -> None:
    """The committed schema is what `make docs` makes of gpumap.model.node; docs/ and the package have the same file."""
    assert map_schema() == SCHEMA
    assert (ROOT / "docs" / "reference" / "map.schema.json").read_text(encoding="utf-8") == SCHEMA
