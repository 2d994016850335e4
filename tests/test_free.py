"""How much of each GPU a new pod could be given: `free_ratio` of the map, and why it is 0."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gpumap.agent.published import published
from gpumap.cli.table import Shape
from gpumap.model.observations import ClaimDevice, PreparedDevice
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid, mig_uuid
from tests.shown import map_table

CARD, SECOND = gpu_uuid(0), gpu_uuid(1)
WHOLE, SHARED = "nvidia.com/gpu", "nvidia.com/gpu.shared"
HALF_GIB = 512 << 20
REPLICAS = [f"{CARD}::{number}" for number in range(10)]
HOLDER = Pod("ml", "train", {"main": {WHOLE: [CARD]}})
IDLE_REPLICA = Pod("ml", "small", {"main": {SHARED: REPLICAS[:1]}})
STRANGER = Pod("ml", "greedy", {"main": {}})
CLAIM = ClaimDevice("gpu.nvidia.com", "node-a", "gpu-0", "", "ml", "c")
CLAIMING = Pod("ml", "claims", claims={"main": [CLAIM]})
LOST = Gpu(0, values={"row_remap_failure": True})
MONITOR = PreparedDevice("ml", "c", "gpu-0", "", CARD, True, None)


def node(*pods: Pod, processes: tuple[Process, ...] = (), gpus: tuple[Gpu, ...] = (), **values: object) -> TestNode:
    test_node = TestNode(
        [*(gpus or (Gpu(0),))],
        [*pods, Pod("kube-system", "proxy", {"main": {}})],
        [*processes],
        allocatable={WHOLE: [CARD]},
    )
    for name, value in values.items():
        setattr(test_node, name, value)
    return test_node


def process(memory: int | None, pod: Pod | None = None) -> Process:
    return Process(100, CARD, pod, memory=memory)


SHARED_IDS = {SHARED: REPLICAS}
CASES: dict[str, tuple[TestNode, float | None, str]] = {
    "nothing is there": (node(), 1.0, ""),
    "held": (node(HOLDER), 0.0, ""),
    "held; the kubelet does not report its offers": (node(HOLDER, allocatable=None), 0.0, ""),
    "the display of the host": (node(processes=(process(HALF_GIB),)), 1.0, ""),
    "docker with 70 GiB": (node(processes=(process(70 * GIB),)), 0.0, "host"),
    "a process without known memory": (node(processes=(process(None),)), None, ""),
    "a squatter with 1 MiB": (node(STRANGER, processes=(process(1 << 20, STRANGER),)), 0.0, "squatter"),
    "processes are invisible": (node(processes=(process(GIB),), visible=False), 0.0, "unknown"),
    "lost": (node(gpus=(LOST,)), 0.0, "fault"),
    "lost and held": (node(HOLDER, gpus=(LOST,)), 0.0, "fault"),
    "not offered": (node(gpus=(Gpu(0), Gpu(1)), allocatable={WHOLE: [SECOND]}), 0.0, "not_offered"),
    "DRA only": (
        node(CLAIMING, gpus=(Gpu(0), Gpu(1)), prepared=(replace(MONITOR, admin_access=False),), allocatable={}),
        0.0,
        "",
    ),
    "a claim with admin access": (node(CLAIMING, prepared=(MONITOR,), allocatable={}), 1.0, ""),
    "one idle replica of ten": (node(IDLE_REPLICA, allocatable=SHARED_IDS), 0.9, ""),
    "a replica; the kubelet does not report its offers": (node(IDLE_REPLICA, allocatable=None), None, ""),
    "a replica beside a squatter": (
        node(IDLE_REPLICA, STRANGER, processes=(process(GIB, STRANGER),), allocatable=SHARED_IDS),
        *(0.0, "squatter"),
    ),
    "a replica at work": (
        node(IDLE_REPLICA, processes=(process(70 * GIB, IDLE_REPLICA),), allocatable=SHARED_IDS),
        *(0.9, ""),
    ),
    "a replica beside docker": (
        node(IDLE_REPLICA, processes=(process(70 * GIB),), allocatable=SHARED_IDS),
        *(0.0, "host"),
    ),
    "the kubelet does not answer": (node(down={"kubelet"}), None, ""),
    "no kubelet": (node(has_kubelet=False), None, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_the_free_part_of_a_gpu(case: str) -> None:
    """It is free only if no container holds it, no large process is on it and nothing is wrong with it."""
    test_node, ratio, reason = CASES[case]
    devices = {device.uuid: device for device in test_node.watch(150.0).node.devices}
    assert (devices[CARD].free_ratio, devices[CARD].not_free_reason) == (ratio, reason)


def test_mig_devices_are_free_one_by_one() -> None:
    """A holder of one MIG device leaves the other free; a holder of the whole GPU leaves none."""
    small, other = mig_uuid(0, 1, 0), mig_uuid(0, 2, 0)
    card = Gpu(0, mig=[(1, 0, 3), (2, 0, 3)])
    holder = Pod("ml", "small", {"main": {"nvidia.com/mig-3g.40gb": [small]}})
    offers = {"nvidia.com/mig-3g.40gb": [small, other]}
    devices = node(holder, gpus=(card,), allocatable=offers).collect().node.devices
    assert {device.uuid: device.free_ratio for device in devices} == {small: 0.0, other: 1.0}
    whole = node(HOLDER, gpus=(card,)).collect().node.devices
    assert {device.uuid: device.free_ratio for device in whole} == {small: 0.0, other: 0.0, CARD: None}


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("nothing is there", "free, 79.9GiB"),
        ("held", "free 79.9GiB, granted to train"),
        ("one idle replica of ten", "9 of 10 slots free; free 79.9GiB"),
        ("a squatter with 1 MiB", "not held, squatter; free 79.9GiB"),
        ("docker with 70 GiB", "not held, used by host; free 9.9GiB"),
        ("a replica beside docker", "no slot free, used by host; free 9.9GiB, granted to small"),
        ("lost", "not held, fault; free 79.9GiB"),
        ("lost and held", "free 79.9GiB, granted to train"),
        ("a process without known memory", "-; free 79.9GiB"),
    ],
)
def test_the_map_shows_what_is_free_and_for_whom(case: str, text: str) -> None:
    test_node, _, _ = CASES[case]
    test_node.collect()
    lines = map_table(published(test_node.collect()), Shape()).splitlines()
    assert text in [part for line in lines for part in re.split(" {2,}", line)]
