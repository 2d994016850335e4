"""`gpumap demo --scenario sharing`: the pipeline makes of the tour what sharing.md says of each plugin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumap.lab.demo.scenario import Scenario, load_scenario
from tests.demo_process import demo, fetch

GIB = 1 << 30
CARD = 81559 << 20
SMALL, MIDDLE, LARGE = (profile * GIB * 97 // 100 >> 20 << 20 for profile in (10, 20, 40))
"""What the MIG devices of a scenario have: 97 % of their profile's name, in whole MiB."""
GRANTS = {
    # Pod: GPU, share of it, bytes.
    "time-slicing/one-slot": (0, 1 / 4, None),
    "time-slicing/two-slots": (0, 2 / 4, None),
    "mps/client-a": (1, 1 / 4, CARD // 4),
    "mps/client-b": (1, 1 / 4, CARD // 4),
    "mig/instance": (2, 1 / 7, SMALL),
    "mig/compute-a": (2, 1 / 7, LARGE),
    "mig/compute-b": (2, 2 / 7, LARGE),
    "gpushare/large": (3, 32 / 79, 32 * GIB),
    "gpushare/small": (3, 8 / 79, 8 * GIB),
    "hami/limited": (4, 0.3, 20000 << 20),
    "hami/dynamic-mig": (5, 2 / 7, MIDDLE),
    "vcuda/hundredths": (6, 0.4, 16 * GIB),
    "volcano/memory": (7, None, 24 * GIB),
    "volcano/vgpu": (8, 0.5, 30 * GIB),
    "aws/tenths": (9, 0.3, None),
    "gke/time-sharing": (10, 1 / 4, None),
    "dra/whole": (11, 1.0, CARD),
    "dra/mig": (12, 3 / 7, LARGE),
    "dra/shared-a": (13, 0.5, None),
    "dra/shared-b": (13, 0.5, None),
    "dra/share-a": (14, None, 20 * GIB),
    "dra/share-b": (14, None, 40 * GIB),
    "dra/monitor": (14, 0.0, None),
    "kai-resource-reservation/gpu-reservation-3f9d2c41a07be586": (15, None, None),
}
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


def test_grants_are_those_of_the_scenario(document: dict[str, Any]) -> None:
    """Each pod holds one device, on the GPU that its plugin gave it, with the share and the bytes of its slots."""
    held = list(_held(document))
    assert sorted(pod for pod, _, _ in held) == sorted(GRANTS)
    for pod, device, grant in held:
        gpu, share, memory = GRANTS[pod]
        assert device["index"] == gpu, pod
        assert grant["gpus"] == (None if share is None else pytest.approx(share)), pod
        assert grant["memory_bytes"] == memory, pod


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


def test_pods_of_a_scheduler_are_no_squatters_and_cost_nothing_twice(document: dict[str, Any]) -> None:
    """The pods on the reserved GPU are users, no squatters. The reservation is not idle, and is charged nothing: the
    bill has what it would have without this GPU."""
    (device,) = (device for device in document["devices"] if device["index"] == 15)
    users = {one["pod"]: (one["owner"], one["use"]["memory_bytes"]) for one in device["containers"]}
    reservation = "gpu-reservation-3f9d2c41a07be586"
    assert users == {
        "sharer-a": ("scheduled", 22 * GIB),
        "sharer-b": ("scheduled", 18 * GIB),
        reservation: ("assigned", 0),
    }
    assert [one["grant"]["reservation"] for one in device["containers"] if one["grant"]] == [True]
    assert not [one for one in document["findings"] if one["uuid"] == device["uuid"] or one["finding"] == "squatter"]
    charged = {
        f"{one['namespace']}/{one['pod']}" for one in document["accounts"] if one["allocated_gpu_seconds"] is not None
    }
    assert charged == {pod for pod, (_, share, _) in GRANTS.items() if share is not None}


def test_every_mode_of_the_table_is_in_it(scenario: Scenario) -> None:
    """The tour has each resource of docs/explanation/sharing.md but for those that are names of the same."""
    page = (Path(__file__).parent.parent / "docs" / "explanation" / "sharing.md").read_text()
    resources = {line.split("|")[2].strip().strip("`") for line in page.splitlines() if "/captures/" in line}
    played = {devices.resource for pod in scenario.pods for one in pod.containers for devices in one.devices}
    played |= {claim.driver for pod in scenario.pods for one in pod.containers for claim in one.claims}
    missing = {resource.partition("`")[0] for resource in resources} - played
    assert missing <= {"nvidia.com/mig-1g.5gb", "volcano.sh/gpu-number"}
