"""docs/explanation/sharing.md's table is true: of the code, and of a captured node for each row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpumap.agent._proto.podresources import v1_pb2
from gpumap.lab.capture import answers, contents
from gpumap.lab.capture import format as on_disk
from gpumap.model.names import ContainerName
from gpumap.model.observations import DeviceId
from gpumap.model.plugins import DRA, PLUGINS, Recognised, recognise, recognise_dra
from tests.golden import CAPTURES

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "sharing.md"
UUID = "b1028956-cfa2-0990-bf4a-5da9abb51763"
UNDOCUMENTED = {"unlisted", "nvidia-tegra", "nvidia-wsl-replicas"}
"""What no plugin makes, what is no GPU of NVML's, and what two rows together name."""


class Row(NamedTuple):
    sharing: str
    resource: str
    id: str
    told_by: str
    gpus: bool
    memory: bool
    capture: str


def _rows() -> Iterator[Row]:
    told_by = ""
    for line in PAGE.read_text().splitlines():
        if heading := re.fullmatch(r"## Sharing in which (.+) names the GPU", line):
            told_by = heading[1]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        linked = re.fullmatch(r"\[(.+)\]\(\.\./\.\./tests/captures/(.+)\)", cells[0])
        if linked:
            names = [cell.split("`")[1].replace("…", UUID) for cell in cells[1:3]]
            yield Row(linked[1], names[0], names[1], told_by, cells[3] == "✔", cells[4] == "✔", linked[2])


ROWS = list(_rows())
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.sharing)


def _recognise(resource: str, device_id: str) -> Recognised | None:
    return recognise_dra(resource, device_id) or recognise(resource, DeviceId(device_id))


def _form(device_id: str) -> str:
    """An id without its numbers, by which rows of one plugin differ."""
    return re.sub(r"\d+", "0", re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "u", device_id))


@each_row
def test_row_agrees_with_the_code(row: Row) -> None:
    found = _recognise(row.resource, row.id)
    assert found is not None
    assert row.told_by == found.plugin.trust.value


def test_every_plugin_has_a_row() -> None:
    answer = {found.plugin.name for row in ROWS if (found := _recognise(row.resource, row.id))}
    assert answer == {plugin.name for plugin in (*PLUGINS, DRA)} - UNDOCUMENTED


@cache
def _listed(capture: str) -> tuple[tuple[ContainerName, str, str], ...]:
    """Container, resource and id of everything in a capture's last List."""
    files = on_disk.load(CAPTURES / capture).frames[-1].files
    listed = v1_pb2.ListPodResourcesResponse.FromString(answers.answer(files, contents.LIST) or b"")
    found = []
    for pod in listed.pod_resources:
        for container in pod.containers:
            name = ContainerName(pod.namespace, pod.name, container.name)
            found += [(name, one.resource_name, id_) for one in container.devices for id_ in one.device_ids]
            for claim in container.dynamic_resources:
                found += [(name, one.driver_name, one.device_name) for one in claim.claim_resources]
    return tuple(found)


@cache
def _samples(capture: str) -> dict[str, set[ContainerName]]:
    """The containers that each family of a golden page has a sample of."""
    page = (CAPTURES / capture / on_disk.EXPECTED).read_text()
    found: dict[str, set[ContainerName]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            of = sample.labels
            if "container" in of:
                found.setdefault(sample.name, set()).add(ContainerName(of["namespace"], of["pod"], of["container"]))
    return found


@each_row
def test_row_agrees_with_its_capture(row: Row) -> None:
    """The capture has such ids; each of their containers is on a device or unmatched; grants are there, or are not."""
    containers = {
        name for name, resource, id_ in _listed(row.capture) if resource == row.resource and _form(id_) == _form(row.id)
    }
    assert containers
    samples = _samples(row.capture)
    assert containers <= samples.get("gpumap_allocation_slots", set()) | samples.get("gpumap_unmatched_slots", set())
    shown = (
        bool(containers & samples.get("gpumap_container_allocated_gpus", set())),
        bool(containers & samples.get("gpumap_container_allocated_gpu_memory_bytes", set())),
    )
    assert shown == (row.gpus, row.memory)
