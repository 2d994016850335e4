"""`gpumap demo --scenario sharing`: the pipeline makes of the tour what sharing.md says of each plugin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumap.lab.demo.scenario import Scenario, load_scenario
from tests.demo_process import demo, fetch

UNMATCHED = {
    ("gpushare/failed", "aliyun.com/gpu-mem", 30, "untrusted_id"),
    ("vfio/virt-launcher", "nvidia.com/GA102GL_A10", 1, "not_in_nvml"),
    ("vfio/virt-launcher-dra", "gpu.nvidia.com", 1, "not_in_nvml"),
}


@pytest.fixture(scope="module", name="document")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the demo says of the tour when it serves its first page."""
    folder = tmp_path_factory.mktemp("sharing") / "demo"
    folder.mkdir()
    with demo(folder, "--scenario", "sharing") as url:
        yield json.loads(fetch(f"{url}/api/v1/map")[0])


@pytest.fixture(scope="module", name="scenario")
def load_sharing() -> Scenario:
    return load_scenario(Path("sharing"))


def _held(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Pod, device and what it holds there."""
    for device in document["devices"]:
        for one in device["containers"]:
            if one["grant"]:
                yield f"{one['namespace']}/{one['pod']}", device, one["grant"]


def test_no_slot_is_lost(document: dict[str, Any], scenario: Scenario) -> None:
    """Every id and every claim of the scenario is a slot on a device, or unmatched for the reason that it should be."""
    answer: dict[tuple[str, str], int] = {}
    for pod, _, grant in _held(document):
        for resource, slots in grant["slots"].items():
            answer[pod, resource] = answer.get((pod, resource), 0) + slots
    unmatched = {
        (f"{one['namespace']}/{one['pod']}", one["resource"], one["slots"], one["reason"])
        for one in document["unmatched"]
    }
    assert unmatched == UNMATCHED
    answer |= {(pod, resource): count for pod, resource, count, _ in unmatched}
    given: dict[tuple[str, str], int] = {}
    for spec in scenario.pods:
        for container in spec.containers:
            pod = f"{spec.namespace}/{spec.name}"
            given |= {(pod, devices.resource): len(devices.ids) for devices in container.devices}
            given |= {(pod, claim.driver): 1 for claim in container.claims}
    assert answer == given


def test_every_mode_of_the_table_is_in_it(scenario: Scenario) -> None:
    """The tour has each resource of docs/explanation/sharing.md but for those that are names of the same."""
    page = (Path(__file__).parent.parent / "docs" / "explanation" / "sharing.md").read_text()
    resources = {line.split("|")[2].strip().strip("`") for line in page.splitlines() if "/captures/" in line}
    played = {devices.resource for pod in scenario.pods for one in pod.containers for devices in one.devices}
    played |= {claim.driver for pod in scenario.pods for one in pod.containers for claim in one.claims}
    missing = {resource.partition("`")[0] for resource in resources} - played
    assert missing <= {"nvidia.com/mig-1g.5gb", "volcano.sh/gpu-number"}
