"""What the bench says of its measurements, and that the node that it measures is what it says."""

from pathlib import Path

import pytest

from bench import usage
from bench.figures import Figure, mean, missing, noise, table
from bench.node import MIG, BenchNode
from tests.processes import PlainProcesses


@pytest.mark.parametrize(
    ("figure", "mark"),
    [
        (Figure("P1", "a : b", 1.2, 1.2, ""), "✔"),
        (Figure("P1", "a : b", 1.21, 1.2, ""), "✘"),
        (Figure("P3", "a : b", 0.8, 0.8, "", at_least=True), "✔"),
        (Figure("P3", "a : b", 0.79, 0.8, "", at_least=True), "✘"),
        (Figure("G1", "a : b", 0.5, None, ""), "–"),
        (missing("P6", "a : b", 0.1), "–"),
    ],
)
def test_a_goal_is_reached_at_its_limit(figure: Figure, mark: str) -> None:
    """A figure without a goal, or that cannot be measured, is neither reached nor missed."""
    assert mark in figure.row
    assert figure.reached is (mark == "✔")


def test_the_noise_is_the_ratio_of_two_copies() -> None:
    """Whichever is the larger; beside the figure, which is of their mean, and what others took of the machine."""
    assert noise((2.0, 3.0)) == noise((3.0, 2.0)) == 1.5
    assert mean((2.0, 3.0)) == 2.5
    row = Figure("P15", "page", 25.0, 30.0, "80 kB", noise=noise((2.0, 3.0)), unit=" ms", others=0.256).row
    assert row == ("P15", "page", "25 ms", "1.5×", "≤ 30 ms", "✔", "80 kB", "26%")
    head, _, line = table([Figure("P1", "a : b", 1.0, 1.2, "", noise=1.01)]).splitlines()
    assert [cell.strip() for cell in head.split("|")[3:5]] == ["ratio", "noise"]
    assert [cell.strip() for cell in line.split("|")[3:5]] == ["1×", "1.01×"]


def test_others_are_measured_against_the_machine() -> None:
    """This process's own CPU time is part of what the kernel counts for all, both growing."""
    own, all_ = usage.own_cpu_seconds(), usage.machine_cpu_seconds()
    while usage.own_cpu_seconds() - own < 0.05:
        pass
    assert usage.machine_cpu_seconds() - all_ > 0.02  # counted in ticks of 10 ms


def test_each_pod_of_a_partitioned_node_has_a_mig_device(tmp_path: Path) -> None:
    """Its processes are those of its device's list; a kubelet's clean-up does not find their cgroups."""
    node = BenchNode(MIG._replace(gpus=2), tmp_path, tmp_path, PlainProcesses(tmp_path / "proc"))
    devices = [device for gpu in node.driver.gpus for device in gpu.instances if device is not None]
    assert len(devices) == 2 * 7
    assert sum(len(device.processes or ()) for device in devices) == 2 * MIG.processes_per_gpu
    paths = [file.read_text() for file in (tmp_path / "proc").glob("*/cgroup")]
    assert paths
    assert not any(":/kubepods" in path for path in paths)
