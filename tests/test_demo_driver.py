"""The simulated driver speaks the NVML worker's lines, in process and as a program."""

import asyncio
import sys
import time
from asyncio.subprocess import PIPE
from pathlib import Path

from msgspec import structs

from gpumap.agent.nvml_worker import wire
from gpumap.lab.demo.driver import POLL_SECONDS, Driver
from gpumap.lab.demo.fake_worker import reading_for
from gpumap.lab.demo.scenario import parse_scenario
from gpumap.lab.demo.world import world

PATIENCE_SECONDS = 300.0
"""On a machine that is busy with other work."""
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
    asked = wire.Request(7, 5.0, last=(0,), groups=("links", "gpm"))
    driver, *gpus = map(wire.decode, Driver(scenario, lambda: 5.0).read(asked))
    assert isinstance(driver, wire.DriverMessage)
    assert (driver.read, driver.gpus, driver.busy) == (7, 3, ())
    readings = [reading_for(gpu, asked.groups) for gpu in world(scenario, 5.0).gpus]
    assert gpus == [wire.GpuMessage(7, readings[index]) for index in (1, 2, 0)]
    skipping = list(Driver(scenario, lambda: 5.0).read(wire.Request(8, 5.0, skip=(1, 2))))
    assert len(skipping) == 2


def test_a_gpu_tells_only_what_is_asked() -> None:
    """Of the groups that are asked each adds its fields; without any there are the basic ones, no activity either."""
    gpus = world(parse_scenario(TEXT), 15.0).gpus
    every = {"health", "links", "gpm", "codec", "card"}
    assert [reading_for(gpu, every) for gpu in gpus] == [*gpus]
    basic = [reading_for(gpu, ("device", "use")) for gpu in gpus]
    for one, full in zip(basic, gpus, strict=True):
        assert (one.clocks_hertz, one.recovery_action, one.pcie_receive_bytes, one.activity) == ((), None, None, None)
        assert (one.encoder_ratio, one.vbios_version, one.ecc_totals, one.pcie_replays) == (None, "", (), None)
        assert (one.uuid, one.energy_joules, one.processes) == (full.uuid, full.energy_joules, full.processes)
    assert gpus[1].instances[0].activity is not None
    assert basic[1].instances[0].activity is None
    links = reading_for(world(parse_scenario(TEXT), 25.0).gpus[0], ("links",))
    assert (links.pcie_source, links.activity, links.ecc_errors) == ("rates", None, ())
    assert links.pcie_receive_bytes is not None
    card = reading_for(gpus[1], ("card",))
    assert (card.compute_capability, card.pcie_replays, card.clocks_hertz) == ("9.0", 0, ())


def test_a_hung_gpu_answers_when_its_fault_is_over() -> None:
    """While it hangs it is busy with the first read, which it answers at last."""
    now = 12.0
    driver = Driver(parse_scenario(TEXT), lambda: now)
    assert len(list(driver.read(wire.Request(1, 5.0)))) == 3
    said, *others = map(wire.decode, driver.read(wire.Request(2, 5.0)))
    assert isinstance(said, wire.DriverMessage)
    assert (said.busy, len(others), driver.patience_seconds) == ((0,), 2, POLL_SECONDS)
    assert list(driver.unasked()) == []
    now = 20.5
    (late,) = map(wire.decode, driver.unasked())
    assert isinstance(late, wire.GpuMessage)
    assert (late.read, late.gpu.index, late.gpu.fault, driver.patience_seconds) == (1, 0, None, None)


XIDS = """
repeat: 1m
gpus:
  - {model: H100, memory: 80GiB, xids: [{at: 20s, code: 31}, {at: 50s, code: 79}]}
  - {model: H100, memory: 80GiB, mig: [1g.10gb, 3g.40gb], xids: [{at: 20s, code: 13, instance: 1}]}
"""
LISTENING = wire.Request(1, 5.0, skip=(0, 1), groups=("health",))


def test_xid_events_come_when_it_is_their_time() -> None:
    """They are told once, with their moment, also between two reads, and again in the next play."""
    scenario, now = parse_scenario(XIDS), 10.0
    driver = Driver(scenario, lambda: now, lambda: 1000.0 + now)
    first, second = scenario.gpus
    assert wire.decode(next(driver.read(LISTENING))) == wire.ListeningMessage(
        (wire.ListeningPeriod(first.uuid, 1010.0, 1010.0), wire.ListeningPeriod(second.uuid, 1010.0, 1010.0))
    )
    assert driver.patience_seconds == 10.0
    now = 21.5
    on_card, on_instance = (
        wire.XidMessage(first.uuid, 31, None, None, 1020.0),
        wire.XidMessage(second.uuid, 13, 2, 0, 1020.0),
    )
    assert [wire.decode(line) for line in driver.unasked()] == [on_card, on_instance]
    assert list(driver.unasked()) == []
    now = 85.0
    *told, heard, _ = map(wire.decode, driver.read(LISTENING))
    assert told == [
        wire.XidMessage(first.uuid, 79, None, None, 1050.0),
        structs.replace(on_card, at=1080.0),
        structs.replace(on_instance, at=1080.0),
    ]
    assert heard == wire.ListeningMessage(
        tuple(wire.ListeningPeriod(gpu.uuid, 1010.0, 1085.0) for gpu in scenario.gpus)
    )


def test_nobody_listens_where_nobody_asks_for_it() -> None:
    """Without the group `health` no event is told, nor what was listened to; what came meanwhile is lost."""
    now = 10.0
    driver = Driver(parse_scenario(XIDS), lambda: now, lambda: now)
    assert len(list(driver.read(structs.replace(LISTENING, groups=("gpm",))))) == 1
    assert driver.patience_seconds is None
    now = 30.0
    assert list(driver.unasked()) == []
    heard = wire.decode(next(driver.read(LISTENING)))
    assert isinstance(heard, wire.ListeningMessage)
    assert {(one.since, one.until) for one in heard.periods} == {(30.0, 30.0)}
    assert driver.patience_seconds == 20.0


def test_who_lets_go_of_the_driver_hears_nothing_and_has_no_activity() -> None:
    """With `release` no event is told, GPUs are listened to for no time, and GPM has no two samples."""
    now = 10.0
    driver = Driver(parse_scenario(XIDS), lambda: now, lambda: now)
    asked = wire.Request(1, 5.0, groups=("health", "links", "gpm"), release=True)
    assert len(list(driver.read(LISTENING))) == 2, "somebody listened before"
    deaf, _, first, second = map(wire.decode, driver.read(asked))
    assert isinstance(deaf, wire.ListeningMessage)
    assert [(one.since, one.until) for one in deaf.periods] == [(10.0, 10.0)] * 2
    assert isinstance(first, wire.GpuMessage)
    assert isinstance(second, wire.GpuMessage)
    assert (first.gpu.activity, *(mig.activity for mig in second.gpu.instances)) == (None, None, None)
    assert first.gpu.clocks_hertz
    assert first.gpu.pcie_receive_bytes is None
    now = 30.0
    assert (list(driver.unasked()), driver.patience_seconds) == ([], None)
    later, *rest = map(wire.decode, driver.read(asked))
    assert isinstance(later, wire.ListeningMessage)
    assert [(one.since, one.until) for one in later.periods] == [(30.0, 30.0)] * 2
    assert len(rest) == 3


async def test_the_program_tells_an_event_between_two_reads(tmp_path: Path) -> None:
    """Nobody has to ask: the line is written when the event comes."""
    path = tmp_path / "scenario.yaml"
    path.write_text("gpus: [{model: H100, memory: 80GiB, xids: [{at: 3s, code: 48}]}]")
    arguments = ["-m", "gpumap.lab.demo.driver", "--scenario", str(path), "--epoch", repr(time.time())]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(wire.encode(LISTENING))
    lines = [wire.decode(await asyncio.wait_for(process.stdout.readline(), PATIENCE_SECONDS)) for _ in range(3)]
    process.stdin.close()
    await asyncio.wait_for(process.wait(), PATIENCE_SECONDS)
    event = next(line for line in lines if isinstance(line, wire.XidMessage))
    assert event.code == 48
    assert abs(event.at - time.monotonic()) < PATIENCE_SECONDS


async def test_the_program_answers_until_stdin_ends(tmp_path: Path) -> None:
    """As a program it tells the world of its epoch, and exits with 0 when nobody asks any more."""
    path = tmp_path / "scenario.yaml"
    path.write_text(TEXT)
    epoch = time.time() - 12.0
    arguments = ["-m", "gpumap.lab.demo.driver", "--scenario", str(path), "--epoch", repr(epoch)]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(wire.encode(wire.Request(1, 5.0)) + wire.encode(wire.Request(2, 5.0)))
    answers = [wire.decode(await asyncio.wait_for(process.stdout.readline(), PATIENCE_SECONDS)) for _ in range(6)]
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), PATIENCE_SECONDS) == 0
    assert [getattr(answer, "read", None) for answer in answers] == [1, 1, 1, 2, 2, 2]
    lost = answers[2]
    assert isinstance(lost, wire.GpuMessage)
    assert (lost.gpu.index, lost.gpu.fault) == (2, "lost")


async def test_a_bad_scenario_is_one_line_and_exit_2(tmp_path: Path) -> None:
    """A mistake ends the program with its line on stderr and no traceback."""
    path = tmp_path / "scenario.yaml"
    path.write_text("gpus: 3")
    arguments = ["-m", "gpumap.lab.demo.driver", "--scenario", str(path), "--epoch", "0"]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    _, complaint = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
    assert process.returncode == 2
    assert complaint.decode() == f'gpumap.lab.demo.driver: {path}: gpus: expected a list, found "3"\n'
