"""The frames of a scenario, and what the simulated driver makes of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpumap.agent.nvml_worker import wire
from gpumap.lab.capture import contents
from gpumap.lab.demo.frames import frame
from gpumap.lab.demo.scenario import Scenario, parse_scenario
from gpumap.lab.demo.world import world
from gpumap.lab.driver import Player, reading_for
from gpumap.model.observations import NvmlReading
from gpumap.model.readings import Listening, XidError

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


@pytest.fixture(name="show")
def make_show(directory: Path) -> Callable[[float], None]:
    """Leaves the reading at a time of the play for the driver."""

    def show(seconds: float) -> None:
        files = frame(parse_scenario(TEXT), seconds, seconds).files
        (directory / contents.NVML).write_bytes(files[contents.NVML])

    return show


def test_a_gpu_reports_only_the_requested_groups() -> None:
    """Of the groups that are asked each adds its fields; without any there are the basic ones, no activity either."""
    gpus = world(parse_scenario(TEXT), 15.0).gpus
    every = {"health", "links", "gpm", "codec", "card"}
    assert [reading_for(gpu, every) for gpu in gpus] == [*gpus]
    basic = [reading_for(gpu, ("device", "use")) for gpu in gpus]
    for one, full in zip(basic, gpus, strict=True):
        assert (one.clocks_hertz, one.recovery_action, one.pcie_receive_bytes, one.activity) == ({}, None, None, None)
        assert (one.encoder_ratio, one.vbios_version, one.ecc_totals, one.pcie_replays) == (None, "", {}, None)
        assert (one.uuid, one.energy_joules, one.processes) == (full.uuid, full.energy_joules, full.processes)
    assert gpus[1].instances[0].activity is not None
    assert basic[1].instances[0].activity is None
    links = reading_for(world(parse_scenario(TEXT), 25.0).gpus[0], ("links",))
    assert (links.pcie_source, links.activity, links.ecc_errors) == ("rates", None, {})
    assert links.pcie_receive_bytes is not None
    card = reading_for(gpus[1], ("card",))
    assert (card.compute_capability, card.pcie_replays, card.clocks_hertz) == ("9.0", 0, {})


def test_a_hung_gpu_answers_when_its_fault_is_over(directory: Path, show: Callable[[float], None]) -> None:
    """While it hangs it is busy with the first read, which it answers at last. In a capture it says that it hangs."""
    show(12.0)
    driver = Player(directory, hangs=True)
    assert len(list(driver.read(wire.Request(1, 5.0)))) == 3
    message, *others = map(wire.decode, driver.read(wire.Request(2, 5.0)))
    assert isinstance(message, wire.DriverMessage)
    assert (message.busy, len(others)) == ((0,), 2)
    assert list(driver.unasked()) == []
    show(20.5)
    (late,) = map(wire.decode, driver.unasked())
    assert isinstance(late, wire.GpuMessage)
    assert (late.read, late.gpu.index, late.gpu.fault) == (1, 0, None)
    assert list(driver.unasked()) == []
    show(12.0)
    assert len(list(Player(directory).read(wire.Request(3, 5.0)))) == 4


XIDS = """
repeat: 1m
gpus:
  - {model: H100, memory: 80GiB, xids: [{at: 20s, code: 31}, {at: 50s, code: 79}]}
  - {model: H100, memory: 80GiB, mig: [1g.10gb, 3g.40gb], xids: [{at: 20s, code: 13, instance: 1}]}
"""


def reading(scenario: Scenario, before: float, seconds: float) -> NvmlReading:
    found = contents.reading(frame(scenario, before, seconds).files)
    assert isinstance(found, NvmlReading)
    return found


def test_xid_events_are_in_the_first_frame_after_their_time() -> None:
    """Each once, with its age, and again in the next play."""
    scenario = parse_scenario(XIDS)
    first, second = (gpu.uuid for gpu in scenario.gpus)
    assert reading(scenario, 10.0, 20.0 - 1e-6).xids == ()
    found = reading(scenario, 10.0, 21.5)
    assert found.xids == (XidError(first, 31, None, None, 1.5), XidError(second, 13, 2, 0, 1.5))
    assert found.listening == (Listening(first, 21.5, 0.0), Listening(second, 21.5, 0.0))
    assert reading(scenario, 21.5, 30.0).xids == ()
    again = [(xid.code, xid.age_seconds) for xid in reading(scenario, 30.0, 85.0).xids]
    assert again == [(79, 35.0), (31, 5.0), (13, 5.0)]
