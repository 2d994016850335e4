"""A node, and what each filter selects of it: the same for WORDs of the commands and for the filter of the page."""

from __future__ import annotations

from msgspec import structs

from gpumap.agent.published import published
from gpumap.model.node import GpuXids, Node, Workload
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid, mig_uuid

CARD, LOST = gpu_uuid(0), gpu_uuid(2)
SLICE = mig_uuid(1, 1, 0)

TRAINER = "0 ml/trainer-3/main"
SIDECAR = "0 ml/trainer-3/logger"
SQUATTER = "0 research/greedy/main"
DOCKER = "0 docker/4f1c9e0b7a2d"
SMALL = "1/1/0 serving/small/main"
EMPTY = "1/12/0 "
HELD_LOST = "2 ml/gpu-burn/main"
EVERYTHING = {TRAINER, SIDECAR, SQUATTER, DOCKER, SMALL, EMPTY, HELD_LOST}

# Devices with their rows; a device without one by itself. Memory without a process is left out.
CASES: dict[str, set[str]] = {
    "": EVERYTHING,
    "gpu:0": {TRAINER, SIDECAR, SQUATTER, DOCKER},
    "GPU 0": {TRAINER, SIDECAR, SQUATTER, DOCKER},
    "gpu:1": {SMALL, EMPTY},
    "gpu:1/1/0": {SMALL},
    "gpu:1,2": {SMALL, EMPTY, HELD_LOST},
    "gpu:7": set(),
    "gpu:": set(),
    "ns:ml": {TRAINER, SIDECAR, HELD_LOST},
    "ns:ml gpu:0": {TRAINER, SIDECAR},
    "pod:greedy,small": {SQUATTER, SMALL},
    "pod:docker": {DOCKER},
    "container:logger": {SIDECAR},
    "owner:unassigned": {SQUATTER},
    "finding:squatter": {SQUATTER},
    "finding:squat": set(),
    "finding:fault": {HELD_LOST},
    "model:1g": {SMALL, EMPTY},
    "xid:79": {HELD_LOST},
    "XID 79": {HELD_LOST},
    "uuid:gpu-": {TRAINER, SIDECAR, SQUATTER, DOCKER, SMALL, EMPTY, HELD_LOST},
    "squatter": {SQUATTER},
    "ml/trainer": {TRAINER, SIDECAR},
    "Greedy": {SQUATTER},
    "jupyter": {SQUATTER},
    "4242": {SQUATTER},
    "424": set(),
    "3": {TRAINER, SIDECAR},
    "2": {HELD_LOST},
    "0": {TRAINER, SIDECAR, SQUATTER, DOCKER},
    "gpu-burn": {HELD_LOST},
    CARD.lower(): {TRAINER, SIDECAR, SQUATTER, DOCKER},
    "nobody": set(),
    "pods:greedy": set(),
}


def filter_node() -> Node:
    trainer = Pod("ml", "trainer-3", {"main": {"nvidia.com/gpu": [CARD]}, "logger": {"nvidia.com/gpu": [CARD]}})
    small = Pod("serving", "small", {"main": {"nvidia.com/mig-1g.10gb": [SLICE]}})
    burn = Pod("ml", "gpu-burn", {"main": {"nvidia.com/gpu": [LOST]}})
    greedy = Pod("research", "greedy", {"main": {}})
    node = TestNode(
        [Gpu(0), Gpu(1, mig=[(1, 0, 1), (12, 0, 1)]), Gpu(2, values={"row_remap_failure": True})],
        [trainer, small, burn, greedy],
        [
            Process(11, CARD, trainer, memory=GIB),
            Process(4242, CARD, greedy, memory=GIB, comm="jupyter"),
            Process(13, CARD, None, memory=GIB, work=Workload("docker", "4f1c9e0b7a2d")),
        ],
    )
    node.collect()
    xids = GpuXids(LOST, {79: 1}, 0.0, meanings={79: "GPU has fallen off the bus"})
    return structs.replace(published(node.collect()), xids=(xids,))
