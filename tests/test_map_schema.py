"""map.schema.json, which gpumap serves and docs/ links to, says what /api/v1/map answers: no more, no less."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from msgspec import ValidationError

from gpumap.agent.join.source_health import untried
from gpumap.agent.node_map import node_map
from gpumap.model import remedies
from gpumap.model.map import VERSION, decode, encode
from gpumap.model.observations import Source
from gpumap.model.snapshot import GpuXids, Owner, Snapshot
from scripts.map_schema import map_schema
from tests.examples import examples
from tests.generated import nodes
from tests.nodes import Gpu, Pod, Process, TestNode, gpu_uuid
from tests.snapshots import busy_node, empty_node, gpu

Document = dict[str, Any]

SCHEMA = resources.files("gpumap.model").joinpath("map.schema.json").read_text(encoding="utf-8")
SCHEMA_OBJECT: dict[str, Any] = json.loads(SCHEMA)
ROOT = Path(__file__).resolve().parent.parent
LISTS_OF_WORDS = (
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
    "retired_pages",
)
"""Objects whose keys are data."""


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
    text = encode(made := node_map(snapshot, 5.0, ("device", "health"), stale))
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
    found: Document = json.loads(encode(node_map(snapshot, interval_seconds)))
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


def test_its_words_are_the_codes_words() -> None:
    """Owners and sources are those of the snapshot."""
    definitions = SCHEMA_OBJECT["$defs"]
    for entry in ("OwnerEntry", "UserEntry", "ProcessEntry"):
        assert definitions[entry]["properties"]["owner"]["enum"] == [owner.value for owner in Owner]
    source = definitions["SourceEntry"]["properties"]["source"]["enum"]
    assert sorted(source) == sorted(one.value for one in Source)


@pytest.mark.parametrize("snapshot", [busy_node(4, 3), busy_node(1, 0), empty_node()])
def test_made_nodes(snapshot: Snapshot) -> None:
    """A node with everything, an idle one and one whose sources have all failed give documents of the schema."""
    check(snapshot)


@settings(max_examples=examples(60))
@given(node=nodes())
def test_generated_nodes(node: TestNode) -> None:
    """So does whatever a node may be, also when its sources fail."""
    check(node.collect())
    check(node.collect())
    node.down.update(("kubelet", "nvml"))
    check(node.collect(seconds=100))


def test_every_field_is_filled_somewhere() -> None:
    """The schema names no field that gpumap never fills."""
    pod, holds = Pod("ml", "job", {"main": {}}), Pod("ml", "idle", {"main": {"nvidia.com/gpu": [gpu_uuid(0)]}})
    node = TestNode([Gpu(0)], [pod], [Process(10, gpu_uuid(0), pod)], down={"kubelet"})
    found = [check(busy_node(4, 3)), check(empty_node(), "no collection"), check(node.collect())]
    thief = TestNode([Gpu(0)], [holds])
    thief.collect()
    thief.pods, thief.processes = [holds, pod], [Process(10, gpu_uuid(0), pod)]
    thief.collect()
    found += [check(thief.collect())]
    xids = GpuXids(gpu(0).uuid, ((79, 1),), 0.0, last_at=((79, 1.8e9),))
    found += [check(replace(busy_node(1), gpus=(replace(gpu(0), ecc_uncorrected_at=1.8e9),), xids=(xids,)))]
    told = {path for one in found for path in leaves_of(one)}
    assert {".".join(path) for path in set(declared(SCHEMA_OBJECT)) - told} == set()


def test_remedies() -> None:
    """A remedy is told for what is wrong and has one, and for nothing else."""
    found = as_json(busy_node(4, 3))
    assert [row["remedy"] for row in found["unmatched"]] == [remedies.UNMATCHED["untrusted_id"]]
    assert {gpu["fault"]: gpu["remedy"] for gpu in found["gpus"]} == {None: None, "lost": remedies.FAULTS["lost"]}
    assert {source["remedy"] for source in found["sources"]} == {None}
    assert found["remedies"] == {}
    blind = as_json(TestNode(visible=False, down={"kubelet"}).collect())
    assert {source["source"]: source["remedy"] for source in blind["sources"] if source["remedy"]} == {
        "kubelet": remedies.SOURCES[Source.KUBELET]["socket_missing"]
    }
    assert blind["remedies"]["pid_visibility"] == remedies.CAPABILITIES["pid_visibility"]
    assert blind["pid_visibility_reason"] == "not in this test"


def test_a_gpus_health() -> None:
    """What a driver tells of a GPU stands with it; of one that is down what it needs, and what was counted of it."""
    well, _, _, lost = check(busy_node(4))["gpus"]
    assert well["clocks_hertz"]["sm"] == 1.98e9
    assert [reason for reason, active in well["clock_events"].items() if active] == ["sw_power_cap"]
    assert {"type": "uncorrected", "location": "sram", "errors": 0} in well["ecc_errors"]
    assert (well["row_remap_pending"], well["performance_state"]) == (False, 0)
    assert (well["pcie"]["receive_bytes"], well["nvlink"]["transmit_bytes"]) == (2_000_000_000, 3_000_000_000)
    assert (well["recovery_action"], well["remedies"]) == ({"action": "none", "remedy": None}, {})
    unknown = ("row_remap_pending", "row_remap_failure", "performance_state", "energy_joules")
    assert [lost[field] for field in unknown] == [None] * 4
    assert (lost["clock_events"], lost["ecc_errors"]) == ({}, [])
    assert lost["recovery_action"] == {
        "action": "gpu_reset",
        "remedy": remedies.RECOVERY["gpu_reset"].replace("<index>", "3"),
    }
    assert lost["remedies"] == {"xid_errors": remedies.HEALTH["xid_errors"]}
    assert lost["xids"] == {
        "counts": [{"xid": 31, "errors": 2, "last": 1.7e9}, {"xid": 79, "errors": 1, "last": 1.7e9}],
        "blind_seconds": 0.5,
    }
    assert lost["account"] == {"energy_unattributed_joules": 1000.25, "gap_seconds": 0.0}
    nothing = check(replace(busy_node(4), xids=(), gpu_accounts=()))["gpus"][0]
    assert (nothing["xids"], nothing["account"]) == (None, None)


def test_what_containers_were_charged_for() -> None:
    """Accounts and XID errors stand by themselves, with the container and the device: the container may be gone."""
    snapshot = busy_node(1)
    found = check(replace(snapshot, containers=(), pods=()))
    assert len(found["accounts"]) == len(snapshot.accounts)
    assert found["accounts"][0]["allocated_gpu_seconds"] == 3600.5
    assert found["container_xids"] == [
        {
            "namespace": "team",
            "pod": "pod-0-0",
            "container": "main",
            "uuid": snapshot.leaves[0].uuid,
            "xid": 31,
            "errors": 2,
        }
    ]


def test_what_the_engines_did() -> None:
    """A leaf's activity is the MIG device's, or the whole GPU's; null where the driver measures none."""
    found = check(busy_node(4))["devices"]
    told = {"sm_ratio": 0.5, "sm_occupancy_ratio": 0.25, "tensor_ratio": 0.125, "dram_ratio": 0.0625}
    told |= {
        "graphics_ratio": 0.75,
        "fp64_ratio": 0.0,
        "fp32_ratio": 0.375,
        "fp16_ratio": 0.03125,
        "video_ratio": 0.875,
    }
    assert [one["activity"] for one in found] == [told] * 8 + [None, None]


def test_who_holds_a_whole_partitioned_gpu_is_assigned_on_all_of_it() -> None:
    """Also on leaves where it has no process; who has one there and holds nothing is not."""
    gpu = Gpu(0, mig=[(1, 0, 3), (2, 0, 3)])
    whole, other = Pod("ml", "whole", {"main": {"nvidia.com/gpu": [str(gpu.uuid)]}}), Pod("ml", "other", {"main": {}})
    node = TestNode([gpu], [whole, other], [Process(10, gpu.leaves[0], whole), Process(11, gpu.leaves[1], other)])
    node.collect()
    devices = {one["uuid"]: one for one in check(node.collect())["devices"]}
    assert [[(user["pod"], user["owner"]) for user in devices[leaf]["users"]] for leaf in gpu.leaves] == [
        [("whole", "assigned")],
        [("other", "unassigned"), ("whole", "assigned")],
    ]


def test_the_interval_is_told_where_there_is_one() -> None:
    """A command that looks once has none."""
    assert as_json(busy_node(4, 3), 2.5)["interval_seconds"] == 2.5
    VALIDATOR.validate(json.loads(json.dumps(as_json(busy_node(4, 3)))))
    assert as_json(busy_node(4, 3))["interval_seconds"] is None


def test_what_is_asked_for_and_why_nothing_is_told() -> None:
    """The groups of --collect stand in their order; `stale` is a sentence, and null where the data is current."""
    found = check(busy_node(4, 3))
    assert (found["collect"], found["stale"]) == (["device", "health"], None)
    assert check(empty_node(), "no collection")["stale"] == "no collection"
    assert as_json(busy_node(4, 3))["collect"] is None


def test_known_reasons_have_a_remedy() -> None:
    """What is counted from the start, and every capability that a remedy is told for, is known to both sides."""
    for health in untried():
        assert health.errors.keys() <= remedies.SOURCES[health.source].keys()
    assert remedies.CAPABILITIES.keys() <= as_json(busy_node(4, 3))["capabilities"].keys()


def test_the_schema_is_that_of_the_declarations() -> None:
    """The committed schema is what `make docs` makes of gpumap.model.map; docs/ and the package have the same file."""
    assert map_schema() == SCHEMA
    assert (ROOT / "docs" / "reference" / "map.schema.json").read_text(encoding="utf-8") == SCHEMA


def test_an_agent_of_a_later_version_may_add_fields_and_owners() -> None:
    """Unknown fields are ignored; a word that this version does not know as an owner is kept."""
    found = as_json(busy_node(1))
    found["later"] = {"a": 1}
    found["devices"][0]["later"] = [1]
    found["devices"][0]["users"][0]["owner"] = "scheduled"
    read = decode(json.dumps(found).encode())
    assert read.devices[0].users[0].owner == "scheduled"
    assert (read.node, read.gpus) == (node_map(busy_node(1)).node, node_map(busy_node(1)).gpus)


@pytest.mark.parametrize("version", [0, 2])
def test_a_map_of_another_version_is_refused(version: int) -> None:
    """Whatever else it has."""
    with pytest.raises(ValidationError, match="version"):
        decode(json.dumps({**as_json(busy_node(1)), "version": version}).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [("devices", None), ("timestamp", "now"), ("gpus", [{}]), ("capabilities", {"gpm": 1}), ("sources", [1])],
)
def test_what_is_no_map_is_refused(field: str, value: object) -> None:
    """The error names the field that does not fit."""
    with pytest.raises(ValidationError, match=rf"`\$\.{field}"):
        decode(json.dumps({**as_json(busy_node(1)), field: value}).encode())


def test_names_that_are_no_utf_8_do_not_break_the_map() -> None:
    """A lone surrogate (a file name of other bytes) is escaped; the rest is as it was."""
    snapshot = busy_node(1)
    odd = replace(snapshot, node=replace(snapshot.node, name="gpu-\udcff"))
    assert b'"gpu-\\udcff"' in encode(node_map(odd))
    assert b'"gpu-\\udcff"' not in encode(node_map(snapshot))
