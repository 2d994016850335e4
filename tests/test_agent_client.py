"""What an agent answers becomes a typed map, or one line that says why it is none."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gpumap.agent.published import published
from gpumap.cli.agent_client import NoMapError, map_in
from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.painting import collected_long_ago
from gpumap.model.errors import FatalError
from gpumap.model.node import encode
from gpumap.model.terms import Owner
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
    odd = msgspec.structs.replace(FOUND, name="a\udc80b")
    assert map_in(encode(odd), "it") == odd


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"\xff\xfe\x00", b'{"version": 1', answered(timestamp=float("nan")), b'{"new": ' + b"[" * 100_000],
)
def test_what_is_no_json(body: bytes) -> None:
    """Cut off, binary, a page, or nested too deeply."""
    with pytest.raises(FatalError, match=r"^it did not answer with JSON$"):
        map_in(body, "it")


@pytest.mark.parametrize(
    "fields",
    [
        {"version": 2},
        {"version": "1"},
        {"version": 2, "devices": 5},
        {"devices": 5, "gpus": msgspec.UNSET},
    ],
)
def test_what_is_of_another_program_or_version(fields: dict[str, Any]) -> None:
    found = {**msgspec.to_builtins(FOUND), **fields}
    body = json.dumps({name: value for name, value in found.items() if value is not msgspec.UNSET}).encode()
    with pytest.raises(FatalError, match=r"^it is not a gpumap of this version$"):
        map_in(body, "it")


@pytest.mark.parametrize(
    "fields",
    [
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
    """Also numbers that cannot be added up: what is read can be shown."""
    with pytest.raises(NoMapError, match=r"^it: the response does not match the schema of /api/v1/map: .+"):
        map_in(answered(**fields), "it")


@pytest.mark.parametrize("moment", [0, -1e99, 1e99, 9.9e98])
def test_a_clock_that_is_far_off(moment: float) -> None:
    """Its age can be said, however long that is."""
    found = map_in(answered(timestamp=moment), "it")
    assert bool(collected_long_ago(NodeMaps((found,)), 1.8e9)) is (moment < 1.8e9)
