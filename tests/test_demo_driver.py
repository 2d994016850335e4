"""The simulated driver speaks the NVML worker's lines, in process and as a program."""

import asyncio
import sys
import time
from asyncio.subprocess import PIPE
from pathlib import Path

from gpumap.demo.driver import Driver
from gpumap.demo.scenario import parse_scenario
from gpumap.demo.world import world
from gpumap.nvml_worker import wire

TEXT = """
gpus:
  - {model: H100, memory: 80GiB, faults: [{kind: hung, from: 10s, until: 20s}]}
  - {model: H100, memory: 80GiB, mig: [1g.10gb]}
  - {model: H100, memory: 80GiB, faults: [{kind: lost, until: 4m}]}
pods:
  - name: a
    containers:
      - {name: c, gpus: [0], processes: [{memory: 2GiB, sm: 40%}]}
"""


def test_a_read_is_answered_by_the_driver_and_each_gpu() -> None:
    """First the driver, then each GPU but those to skip, those that come last at the end."""
    scenario = parse_scenario(TEXT)
    driver, *gpus = map(wire.decode, Driver(scenario, lambda: 5.0).read(wire.Request(7, 5.0, last=(0,))))
    assert isinstance(driver, wire.DriverSaid)
    assert (driver.read, driver.gpus, driver.busy) == (7, 3, ())
    readings = world(scenario, 5.0).gpus
    assert gpus == [wire.GpuSaid(7, readings[index]) for index in (1, 2, 0)]
    skipping = list(Driver(scenario, lambda: 5.0).read(wire.Request(8, 5.0, skip=(1, 2))))
    assert len(skipping) == 2


def test_a_hung_gpu_answers_when_its_fault_is_over() -> None:
    """While it hangs it is busy with the first read, which it answers at last."""
    now = 12.0
    driver = Driver(parse_scenario(TEXT), lambda: now)
    assert len(list(driver.read(wire.Request(1, 5.0)))) == 3
    said, *others = map(wire.decode, driver.read(wire.Request(2, 5.0)))
    assert isinstance(said, wire.DriverSaid)
    assert (said.busy, len(others), driver.waiting) == ((0,), 2, True)
    assert list(driver.late()) == []
    now = 20.5
    (late,) = map(wire.decode, driver.late())
    assert isinstance(late, wire.GpuSaid)
    assert (late.read, late.gpu.index, late.gpu.fault, driver.waiting) == (1, 0, None, False)


async def test_the_program_answers_until_stdin_ends(tmp_path: Path) -> None:
    """As a program it tells the world of its epoch, and exits with 0 when nobody asks any more."""
    path = tmp_path / "scenario.yaml"
    path.write_text(TEXT)
    epoch = time.time() - 12.0
    arguments = ["-m", "gpumap.demo.driver", "--scenario", str(path), "--epoch", repr(epoch)]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(wire.encode_request(wire.Request(1, 5.0)) + wire.encode_request(wire.Request(2, 5.0)))
    answers = [wire.decode(await asyncio.wait_for(process.stdout.readline(), 10)) for _ in range(6)]
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), 10) == 0
    assert [getattr(answer, "read", None) for answer in answers] == [1, 1, 1, 2, 2, 2]
    lost = answers[2]
    assert isinstance(lost, wire.GpuSaid)
    assert (lost.gpu.index, lost.gpu.fault) == (2, "lost")


async def test_a_bad_scenario_is_one_line_and_exit_2(tmp_path: Path) -> None:
    """A mistake ends the program with its line on stderr and no traceback."""
    path = tmp_path / "scenario.yaml"
    path.write_text("gpus: 3")
    arguments = ["-m", "gpumap.demo.driver", "--scenario", str(path), "--epoch", "0"]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    _, complaint = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 2
    assert complaint.decode() == f'gpumap.demo.driver: {path}: gpus: expected a list, found "3"\n'
