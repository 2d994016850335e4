"""What an agent answers becomes a typed map, or one line that says why it is none."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gpumap.agent.published import published
from gpumap.cli.agent_client import map_in
from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.painting import collected_long_ago
from gpumap.model.errors import FatalError
from gpumap.model.names import Owner
from gpumap.model.node import OtherUse, encode
from tests.snapshots import busy_node

FOUND = published(busy_node())


def answered(**fields: object) -> bytes:
    """The map with other fields."""
    return json.dumps({**msgspec.to_builtins(FOUND), **fields}).encode()


def test_the_map_that_an_agent_sends() -> None:
    assert map_in(encode(FOUND), "it") == FOUND


def test_a_newer_agents_map() -> None:
    """Fields that this version does not know are ignored; a new owner is unknown."""
    device = msgspec.to_builtins(FOUND.devices[0])
    device |= {"new": [1], "owners": [{"owner": "borrowed", "memory_bytes": 5, "processes": 1, "new": None}]}
    found = map_in(answered(devices=[device], new={"a": 1}), "it")
    assert [one.owner for one in found.devices[0].owners] == [Owner.UNKNOWN]


def test_names_that_are_no_utf_8() -> None:
    odd = replace(FOUND, name="a\udc80b")
    assert map_in(encode(odd), "it") == odd


@pytest.mark.parametrize("text", ["1e100,", "train-1e100", "sha-4c7e123]", "9" * 300 + "}", '\\"' * 2040, "n" * 16384])
def test_a_tenants_text(text: str) -> None:
    """A name is only a name, whatever number it contains and however many of its characters are escaped."""
    (device, *_), (gpu, *_) = FOUND.devices, FOUND.gpus
    process = replace(device.processes[0], comm=text, pod=text)
    other = OtherUse(text, text, text, Owner.HOST, 1, pids=tuple(range(10_000, 20_000)))
    busy = replace(device, processes=(process,), others=(other,), allocatable={text: 1})
    found = replace(FOUND, devices=(busy,), gpus=(replace(gpu, remedies={text: text}),))
    assert map_in(encode(found), "it") == found


@pytest.mark.parametrize("place", ["comm", "pid", "memory_bytes", "sm_ratio", "name of a resource"])
def test_a_huge_value(place: str) -> None:
    """One line says so, wherever the value is: a text of a megabyte fits no table, and a sum of 1e300 may overflow."""
    device = msgspec.to_builtins(FOUND.devices[0])
    if place == "name of a resource":
        device["allocatable"] = {"n" * (1 << 20): 1}
    else:
        huge = {"comm": "n" * (1 << 20), "pid": 10**300, "memory_bytes": 10**100, "sm_ratio": 1e300}
        device["processes"] = [{**device["processes"][0], place: huge[place]}]
    with pytest.raises(FatalError, match=r"^it did not answer with a map of this version of gpumap: .{,100}$"):
        map_in(answered(devices=[device]), "it")


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"\xff\xfe\x00", b'{"version": 1', answered(timestamp=float("nan"))],
)
def test_what_is_no_json(body: bytes) -> None:
    """Cut off, binary, or a page."""
    with pytest.raises(FatalError, match=r"^it did not answer with JSON$"):
        map_in(body, "it")


@pytest.mark.parametrize(
    "fields",
    [
        {"version": 2},
        {"version": "1"},
        {"devices": 5},
        {"devices": [1]},
        {"devices": [{}]},
        {"devices": None},
        {"name": 5},
        {"timestamp": 10**400},
        {"timestamp": 1e300},
        {"timestamp": "now"},
        {"accounts": [{"new": 10**400}]},
    ],
)
def test_what_does_not_fit_the_schema(fields: dict[str, Any]) -> None:
    """Also a map of another version, and numbers that are too large to add up: what is read can be shown."""
    with pytest.raises(FatalError, match=r"^it did not answer with a map of this version of gpumap: .+"):
        map_in(answered(**fields), "it")


@pytest.mark.parametrize("moment", [0, -1e99, 1e99, 9.9e98])
def test_a_clock_that_is_far_off(moment: float) -> None:
    """Its age can be said, however long that is."""
    found = map_in(answered(timestamp=moment), "it")
    assert bool(collected_long_ago(NodeMaps((found,)), 1.8e9)) is (moment < 1.8e9)
