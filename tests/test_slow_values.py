"""Values of a GPU that change slowly: how old they may be, and what makes the worker read them at once."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from gpumap.agent.nvml_worker import wire
from gpumap.model.readings import GpuReading
from tests.standin import Code, Driver, Gpu, Xid
from tests.test_nvml_health import count_calls, healthy_gpu
from tests.worker import PATIENCE_SECONDS, Start, Worker

ECC = "nvmlDeviceGetMemoryErrorCounter"
LIMIT = "nvmlDeviceGetEnforcedPowerLimit"
FABRIC = "nvmlDeviceGetGpuFabricInfoV"
FIELDS = "nvmlDeviceGetFieldValues"
EVER = 3600.0
"""No test takes so long."""


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
