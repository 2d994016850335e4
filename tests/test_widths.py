"""Tables and frames of nodes that are hard to show, on terminals of several widths."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpumap.cli.commands.doctor import doctor_table
from gpumap.cli.commands.map import map_table
from gpumap.cli.commands.top import top_table
from gpumap.cli.commands.top_screen import Live, frame
from gpumap.cli.commands.waste import waste_table
from gpumap.cli.rows import NodeMaps
from gpumap.cli.table import Shape
from gpumap.cli.terminal import Screen, cells
from gpumap.model.snapshot import Snapshot
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid
from tests.shown import maps

Table = Callable[[NodeMaps, Shape], str]


def long_names(pods: int = 16) -> Snapshot:
    """Names as generators of manifests make them: alike at both ends."""
    namespace = "team-recommendation-systems-production"
    names = [f"recommendation-trainer-transformer-xl-7f9c6d5b4f-{number:02}xkz" for number in range(pods)]
    every = [
        Pod(namespace, name, {"pytorch-distributed-worker": {"nvidia.com/gpu": [gpu_uuid(number)]}})
        for number, name in enumerate(names)
    ]
    node = TestNode([Gpu(number) for number in range(pods)], every)
    node.processes = [
        Process(100 + number, gpu_uuid(number), pod, memory=(number + 1) * GIB) for number, pod in enumerate(every)
    ]
    return node.watch()


def processes(found: NodeMaps, shape: Shape) -> str:
    return top_table(found, Shape(processes=True, wide=shape.wide, screen=shape.screen))


def doctor(found: NodeMaps, shape: Shape) -> str:
    return doctor_table(found.maps[0], shape)


def live(found: NodeMaps, shape: Shape) -> str:
    """The rows: the lines of the GPUs name their holders too."""
    lines = frame(found, Live(), shape, (), 24).lines
    return "\n".join(lines[next(place for place, line in enumerate(lines) if "  FINDING " in line) :])


def fits_the_terminal(found: NodeMaps) -> None:
    """Check that no table has a line that is wider than the terminal. Each table has a narrowest one."""
    for table, narrowest in ((map_table, 80), (top_table, 60), (processes, 72), (waste_table, 60), (doctor, 60)):
        for columns in (narrowest, 80, 200):
            shown = table(found, Shape(screen=Screen(columns=columns)))
            assert max(map(cells, shown.splitlines())) <= columns, shown


@pytest.mark.parametrize("table", [map_table, top_table, processes, waste_table, live])
@pytest.mark.parametrize("columns", [66, 80, 200])
def test_pods_can_be_distinguished(table: Table, columns: int) -> None:
    """Their long names are shortened where they are alike. What says less goes first: memory in percent, container."""
    shown, _, _ = table(maps(long_names(10)), Shape(screen=Screen(columns=columns))).partition("\n\nNot idle")
    for number in range(10):
        assert sum(f"{number}xkz" in line for line in shown.splitlines()) == 1, shown


def test_a_container_is_named_if_its_pod_has_two() -> None:
    """On the narrowest terminal too: the pod's name would not be enough."""
    names = ("trainer", "sidecar")
    pod = Pod("research-and-development", "transformer-0", {name: {"nvidia.com/gpu": [gpu_uuid(0)]} for name in names})
    node = TestNode([Gpu(0)], [pod])
    node.processes = [Process(1, gpu_uuid(0), pod, container="trainer", memory=GIB)]
    node.collect()
    shown = top_table(maps(node.collect()), Shape(screen=Screen(columns=60)))
    assert all(name in shown for name in names)


def test_a_map_of_80_columns_shows_pods_whole() -> None:
    """A user types the name of a pod. Lines of devices run over names; the namespace is shortened first."""
    names = {"research-and-development": "notebook-idle-0", "serving": "embedder-84d7c9-x2k4z"}
    pods = [
        Pod(namespace, pod, {"jupyter-notebook": {"nvidia.com/gpu": [gpu_uuid(number)]}})
        for number, (namespace, pod) in enumerate(names.items())
    ]
    node = TestNode([Gpu(number) for number in range(2)], pods)
    node.processes = [Process(1 + number, gpu_uuid(number), pod, memory=30 * GIB) for number, pod in enumerate(pods)]
    node.collect()
    found = maps(node.collect())
    lines = map_table(found, Shape(screen=Screen(columns=80))).splitlines()
    assert sum(any(pod in line for pod in names.values()) for line in lines if "free" not in line) == 2, lines
    total = next(line for line in lines if "30.1GiB/" in line)
    assert total.index("30.1GiB/") == lines[0].index("USED")
    assert "free 49.9GiB, granted to" in total
