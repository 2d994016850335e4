"""Values of a GPU that change slowly: how old they may be, and what makes the worker read them at once."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumap.agent.nvml_worker import wire
from gpumap.agent.nvml_worker.calls import NvmlCalls
from gpumap.agent.nvml_worker.library import RefusedError
from gpumap.agent.nvml_worker.slow_values import SlowValues
from gpumap.model.readings import GpuReading
from tests.examples import examples
from tests.standin import Code, Driver, Gpu, Xid
from tests.test_nvml_health import count_calls, healthy_gpu
from tests.worker import PATIENCE_SECONDS, Start, Worker

HOLD = 30.0
ECC = "nvmlDeviceGetMemoryErrorCounter"
LIMIT = "nvmlDeviceGetEnforcedPowerLimit"
FABRIC = "nvmlDeviceGetGpuFabricInfoV"
FIELDS = "nvmlDeviceGetFieldValues"
EVER = 3600.0
"""No test takes so long."""


@dataclass
class Gauge:
    """A GPU whose one slow value is read at any time of a clock."""

    now: float = 1000.0
    value: dict[str, Any] = field(default_factory=dict)
    refuses: bool = False
    asked_at: list[float] = field(default_factory=list)
    said: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.calls = NvmlCalls()
        self.slow = SlowValues(self.calls, lambda: self.now)

    def ask(self) -> dict[str, Any]:
        self.asked_at.append(self.now)
        if self.refuses:
            self.calls.take(RefusedError(ECC, Code.UNKNOWN), ECC)
        self.said.append(dict(self.value))
        return self.said[-1]

    def read(
        self, at: float, interval: float = 5.0, *, key: object = "", signs: object = 0, fault_near: bool = False
    ) -> bool:
        """Return whether the driver was asked."""
        self.now, count_before = at, len(self.asked_at)
        self.calls.begin()
        values = self.slow.read(
            self.ask, key=key, signs=signs, fault_near=fault_near, interval_seconds=interval, hold_seconds=HOLD
        )
        assert values is self.said[-1]
        return len(self.asked_at) > count_before


# --- how old ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "requests"),
    [(1.0, [0, 30, 60]), (5.0, [0, 30, 60]), (15.0, [0, 30, 60]), (20.0, [0, 20, 40, 60]), (60.0, [0, 60])],
)
def test_slow_values_are_read_every_thirty_seconds(interval: float, requests: list[float]) -> None:
    """Or at each reading, if the interval is too long for that."""
    gauge = Gauge()
    for number in range(int(60 / interval) + 1):
        gauge.read(1000 + interval * number, interval)
    assert [at - 1000 for at in gauge.asked_at] == requests


@settings(max_examples=examples(50))
@given(interval=st.floats(0.5, 100), late=st.lists(st.floats(0, 0.1), min_size=30, max_size=30), pushed=st.booleans())
def test_a_held_value_is_never_older_than_allowed(interval: float, late: list[float], pushed: bool) -> None:
    """Not until the next reading either, which may be a tenth of an interval late, or sooner if it is pushed."""
    gauge, at = Gauge(), 1000.0
    for number, part in enumerate(late):
        gauge.read(at, interval)
        at += interval * (0.01 if pushed and number % 3 else 1 + part)
        assert at - gauge.asked_at[-1] <= max(HOLD + 0.2 * interval, 1.1 * interval) + 1e-6


# --- what makes them be read at once ----------------------------------------------------------------------------------


def test_a_sign_of_a_fault_is_followed_by_readings_for_a_while() -> None:
    """The first signs are none. After others, each reading asks for thirty seconds: a count may follow its event."""
    gauge = Gauge()
    assert gauge.read(1000, signs=0)
    assert not gauge.read(1005, signs=0)
    assert all(gauge.read(1010 + 5 * number, signs=1) for number in range(6))
    assert not gauge.read(1040, signs=1)


def test_a_reading_with_a_refusal_is_not_held() -> None:
    """The refused value is asked for in the next reading."""
    gauge = Gauge(refuses=True)
    assert gauge.read(1000)
    gauge.refuses = False
    assert gauge.read(1005)
    assert not gauge.read(1010)


# --- the worker -------------------------------------------------------------------------------------------------------


def holding(start: Start, hold_seconds: float = EVER, **options: object) -> Worker:
    worker = start(groups=("health", "links", "card"), **options)
    worker.hold_seconds = hold_seconds
    return worker


def read_once(start: Start) -> tuple[Worker, Driver, Gpu]:
    """Return a worker that holds the slow values of a GPU, its driver and the GPU."""
    worker = holding(start)
    driver, gpu = node()
    worker.read_one(driver)
    return worker, driver, gpu


def node() -> tuple[Driver, Gpu]:
    gpu = healthy_gpu()
    gpu.fields |= {144: ("uint", 0), 145: ("uint", 0), 31: ("uint", 0), 230: ("uint", 0)}  # no fault
    return Driver(gpus=[gpu]), gpu


def change(gpu: Gpu) -> None:
    gpu.ecc[0, 1, 2] = 8
    gpu.fields[142] = ("uint", 4)
    gpu.enforced_power_limit_milliwatts = 300_000


def seen(reading: GpuReading) -> tuple[int, int, float | None]:
    return (reading.ecc_errors["corrected"]["dram"], reading.remapped_rows["correctable"], reading.power_limit_watts)


OLD, NEW = (7, 3, 400.0), (8, 4, 300.0)


def test_slow_values_cost_one_reading_and_others_each(start: Start, tmp_path: Path) -> None:
    """A held value is that of its reading. Temperature, power, clocks and processes are those of each reading."""
    calls = tmp_path / "calls"
    worker = holding(start, STANDIN_CALLS=str(calls))
    driver, gpu = node()
    assert seen(worker.read_one(driver)) == OLD
    change(gpu)
    gpu.temperature_celsius, gpu.power_milliwatts, gpu.performance_state = 90, 500_000, 5
    gpu.clocks_megahertz["sm"], gpu.clock_events, gpu.fan_percents = 100, 0, [50]
    gpu.fields[74] = ("ulonglong", 2_500_000_000)
    for _ in range(3):
        reading = worker.read_one(driver)
        assert seen(reading) == OLD
        assert (reading.temperatures_celsius["gpu"], reading.power_watts) == (90.0, 500.0)
        assert (reading.performance_state, reading.clocks_hertz["sm"]) == (5, 1e8)
        assert not any(reading.clock_events.values())
        assert reading.fan_speed_ratios["0"] == 0.5
        assert reading.clock_event_seconds["sw_power_cap"] == 2.5
    counted = count_calls(worker, driver, calls)
    assert (counted[ECC], counted[LIMIT], counted[FIELDS]) == (16, 1, 1 + 4)
    assert counted["nvmlDeviceGetClockInfo"] == 4 * 4


def test_a_change_is_seen_within_the_period(start: Start) -> None:
    """Without any sign of a fault, and also by readings that come before their time."""
    worker = holding(start, 1.2)  # of an interval of 1 s: held for 0.3 s
    driver, gpu = node()
    worker.read_one(driver)
    change(gpu)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while seen(worker.read_one(driver)) != NEW:
        assert time.monotonic() < deadline, "they are held for ever"


def test_an_xid_error_makes_them_be_read_at_once(start: Start) -> None:
    """By the reading after the event."""
    worker = holding(start, changed={"listener.LISTEN_SECONDS": 0.02})
    driver, gpu = node()
    worker.read_one(driver)
    change(gpu)
    assert seen(worker.read_one(driver)) == OLD
    driver.xids.append(Xid(0, 63))
    driver.write(worker.state)
    while not isinstance(message := worker.answer(), wire.XidMessage):
        assert message is not None
    assert seen(worker.read_one(driver)) == NEW


def test_a_recovery_action_makes_them_be_read_at_once(start: Start) -> None:
    """It is a value of each reading."""
    worker, driver, gpu = read_once(start)
    change(gpu)
    gpu.fields[230] = ("uint", 1)
    reading = worker.read_one(driver)
    assert (seen(reading), reading.recovery_action) == (NEW, "gpu_reset")


def test_a_lost_gpu_has_none_of_them(start: Start) -> None:
    """They are absent with its fault, and read again when it is readable."""
    worker, driver, gpu = read_once(start)
    driver.fail = {("nvmlDeviceGetMemoryInfo_v2", 0): Code.GPU_IS_LOST}
    lost = worker.read_one(driver)
    assert (lost.fault, lost.ecc_errors, lost.remapped_rows, lost.power_limit_watts) == ("lost", {}, {}, None)
    change(gpu)
    driver.fail = {}
    assert seen(worker.read_one(driver)) == NEW


def test_calls_for_each_gpu(start: Start, tmp_path: Path) -> None:
    """The calls of a reading in which slow values are held, and of one in which they are not."""
    calls = tmp_path / "calls"
    worker = start(groups=("health", "links", "gpm"), STANDIN_CALLS=str(calls))
    driver, gpu = node()
    gpu.fan_percents = None
    found: list[Counter[str]] = []
    for hold_seconds in (EVER, 0.0):
        worker.hold_seconds = hold_seconds
        counts = []
        for readings in (1, 11):
            for _ in range(readings):
                worker.read(driver)
            counts.append(count_calls(worker, driver, calls))
        found.append(counts[1] - counts[0])
    held, each = found
    more = each - held
    del more["nvmlEventSetWait_v2"]  # the listener waits beside the readings
    assert more == Counter({ECC: 10 * 2, LIMIT: 10, FIELDS: 10, FABRIC: 10})
