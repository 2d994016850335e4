"""GPM in the NVML worker, over the compiled stand-in: how busy a device's parts were from one reading to the next."""

import time
from collections import Counter
from pathlib import Path

import pytest

from gpumap.model.readings import Activity, GpuReading
from tests import standin
from tests.standin import Code, Driver, Gpm, Gpu, MigInstance, Placement
from tests.worker import Start, Worker

A, B = (f"GPU-00000000-0000-0000-0000-00000000000{letter}" for letter in "ab")
MIG_A, MIG_B, MIG_C = (f"MIG-00000000-0000-0000-0000-00000000001{letter}" for letter in "abc")
GPM = ("gpm",)
FUNCTIONS = sorted(name for name in standin.FUNCTIONS if name.startswith("nvmlGpm"))


def read_after(worker: Worker, driver: Driver) -> GpuReading:
    """A reading with samples far enough apart from those of the one before."""
    time.sleep(0.11)
    return worker.read_one(driver)


def count_calls(worker: Worker, driver: Driver, calls: Path) -> Counter[str]:
    """The calls so far, with those of a worker that cannot count the GPUs and shuts NVML down."""
    worker.refusal(Driver(gpus=driver.gpus, fail={("nvmlDeviceGetCount_v2", "*"): Code.UNKNOWN}))
    return standin.read_calls(calls)


def activities(reading: GpuReading) -> list[Activity | None]:
    return [instance.activity for instance in reading.instances]


# --- whole GPUs -------------------------------------------------------------------------------------------------------


def test_activity_is_that_between_two_readings(start: Start) -> None:
    """The first reading has no sample to compare with, and reports none; each later one reports ratios."""
    gpu = Gpu(A, gpm=Gpm(sm=50.0, occupancy=25.0, tensor=12.5, dram=100.0))
    worker = start(groups=GPM)
    driver = Driver(gpus=[gpu])
    assert worker.read_one(driver).activity is None
    assert read_after(worker, driver).activity == Activity(0.5, 0.25, 0.125, 1.0)
    gpu.gpm = Gpm()
    assert read_after(worker, driver).activity == Activity(0.0, 0.0, 0.0, 0.0)


def test_the_engine_and_the_pipes_are_reported_if_they_are_measured(start: Start) -> None:
    """Each metric has its own answer: one that the driver does not know, as code or by silence, costs no other."""
    gpm = Gpm(sm=50.0, occupancy=25.0, graphics=75.0, fp64=0.0, fp32=37.5, fp16=Code.INVALID_ARGUMENT)
    instance = MigInstance(MIG_A, gpm=Gpm(tensor=None, fp32=Code.NOT_SUPPORTED, fp16=12.5))
    worker = start(groups=GPM)
    driver = Driver(gpus=[Gpu(A, gpm=gpm), Gpu(B, gpm=Gpm(), instances=[instance])])
    worker.read(driver)
    time.sleep(0.11)
    gpus = worker.read(driver).gpus
    assert gpus[0].activity == Activity(0.5, 0.25, 0.0, 0.0, 0.75, 0.0, 0.375, None)
    assert activities(gpus[1]) == [Activity(0.0, 0.0, None, 0.0, None, None, None, 0.125)]
    assert [gpu.refusals for gpu in gpus.values()] == [{}, {}]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -0.5, 1e9, Code.NO_DATA, Code.NOT_SUPPORTED])
def test_a_metric_that_is_no_share_is_absent(start: Start, value: float | Code | None) -> None:
    """What the driver does not report, or what is no percentage, costs that metric, without complaint."""
    worker = start(groups=GPM)
    driver = Driver(gpus=[Gpu(A, gpm=Gpm(sm=value, occupancy=10.0, tensor=100.4, dram=value))])
    worker.read_one(driver)
    reading = read_after(worker, driver)
    assert reading.activity == Activity(None, 0.1, 1.0, None)
    assert reading.refusals == {}


def test_readings_in_quick_succession_keep_the_last_activity(start: Start) -> None:
    """Samples less than 100 ms apart cannot be compared: the last interval's activity remains, until they can."""
    worker = start(groups=GPM)
    driver = Driver(gpus=[Gpu(A, gpm=Gpm(sm=10.0))])
    worker.read_one(driver)
    assert read_after(worker, driver).activity is not None
    for _ in range(20):
        reading = worker.read_one(driver)
        assert (reading.activity, reading.refusals) == (Activity(0.1, 0.0, 0.0, 0.0), {})


NVDEC_0, NVDEC_6, NVJPG_1, NVOFA_0, NVOFA_1, NVENC_2 = 30, 36, 41, 50, 51, 168


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("busiest", [NVDEC_0, NVDEC_6, NVJPG_1, NVOFA_0, NVOFA_1, NVENC_2])
def test_the_busiest_video_engine_is_reported(start: Start, busiest: int, *, strict: bool) -> None:
    """On GPUs and MIG devices."""
    every = dict.fromkeys(("graphics", "fp64", "fp32", "fp16"), 0.0)
    newer = (NVOFA_1, *range(166, 170))
    known = (20, 21, *range(30, 38), *range(40, 48), 50, *(newer if busiest in newer else ())) if strict else (20, 50)
    more: dict[int, float | Code] = {**dict.fromkeys(known, 5.0), busiest: 60.0}
    gpm = Gpm(sm=50.0, more=more, strict=strict, **every)
    instances: list[MigInstance | None] = [MigInstance(MIG_A, gpm=gpm), MigInstance(MIG_B, gi=2, gpm=Gpm())]
    worker = start(groups=GPM)
    driver = Driver(gpus=[Gpu(A, gpm=gpm), Gpu(B, gpm=Gpm(), instances=instances)])
    worker.read(driver)
    for _ in range(2):
        time.sleep(0.11)
        gpus = worker.read(driver).gpus
        measured = [gpus[0].activity, *activities(gpus[1])]
        assert [one and (one.sm_ratio, one.video_ratio) for one in measured] == [(0.5, 0.6), (0.5, 0.6), (0.0, None)]
        assert [gpu.refusals for gpu in gpus.values()] == [{}, {}]


@pytest.mark.parametrize("missing", [name for name in FUNCTIONS if name != "nvmlGpmSampleFree"])
def test_a_driver_without_gpm_reports_the_rest(start: Start, missing: str) -> None:
    """Whichever function its library lacks: no activity of what would need it, without complaint."""
    worker = start((missing,), groups=GPM)
    instance = MigInstance(MIG_A, gpm=Gpm(sm=20.0))
    driver = Driver(gpus=[Gpu(A, gpm=Gpm(sm=10.0)), Gpu(B, gpm=Gpm(), instances=[instance])])
    worker.read(driver)
    time.sleep(0.11)
    gpus = worker.read(driver).gpus
    assert (gpus[0].activity is None) == (missing != "nvmlGpmMigSampleGet")
    assert (activities(gpus[1]) == [None]) == (missing != "nvmlGpmSampleGet")
    assert [(gpu.refusals, gpu.power_watts) for gpu in gpus.values()] == [({}, 60.0)] * 2


def test_a_sample_that_is_refused_for_once_costs_one_reading(start: Start) -> None:
    """The refusal is reported; the next reading compares with the sample from before."""
    worker = start(groups=GPM)
    driver = Driver(gpus=[Gpu(A, gpm=Gpm(sm=10.0))])
    worker.read_one(driver)
    driver.fail["nvmlGpmSampleGet", 0] = Code.UNKNOWN
    reading = read_after(worker, driver)
    assert (reading.activity, reading.refusals) == (None, {"nvmlGpmSampleGet": Code.UNKNOWN})
    driver.fail.clear()
    assert worker.read_one(driver).activity == Activity(0.1, 0.0, 0.0, 0.0)


# --- PCIe ----------------------------------------------------------------------------------------------------------

TX_RATE, RX_RATE, TX_TOTAL, RX_TOTAL = 20, 21, 255, 256
LINKS = ("links",)


def test_pcie_rates_are_added_up(start: Start) -> None:
    """A MiB a second, for as long as the samples are apart: by the clock of this test, no less and no more."""
    worker = start(groups=LINKS)
    driver = Driver(gpus=[Gpu(A, gpm=Gpm(more={TX_RATE: 1.0, RX_RATE: 1024.0}))])
    began = time.monotonic()
    assert worker.read_one(driver).pcie_transmit_bytes is None
    begun = time.monotonic()
    reading = read_after(worker, driver)
    time.sleep(0.11)
    ends = time.monotonic()
    reading = worker.read_one(driver)
    ended = time.monotonic()
    assert (reading.pcie_source, reading.activity, reading.refusals) == ("rates", None, {})
    assert reading.pcie_transmit_bytes is not None
    assert reading.pcie_receive_bytes is not None
    assert ends - begun <= reading.pcie_transmit_bytes / (1 << 20) <= ended - began
    assert reading.pcie_receive_bytes == pytest.approx(1024 * reading.pcie_transmit_bytes, rel=1e-4)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -1.0, 1e300, Code.NO_DATA, Code.NOT_SUPPORTED])
def test_an_impossible_rate_is_not_in_the_sum(start: Start, value: float | Code | None) -> None:
    """The counter is absent for that reading, and goes on from where it was."""
    gpm = Gpm(more={TX_RATE: 1.0, RX_RATE: 0.0})
    worker = start(groups=LINKS)
    driver = Driver(gpus=[Gpu(A, gpm=gpm)])
    began = time.monotonic()
    worker.read_one(driver)
    before = read_after(worker, driver).pcie_transmit_bytes
    gpm.more = {RX_RATE: 0.0} if value is None else {TX_RATE: value, RX_RATE: 0.0}
    odd = read_after(worker, driver)
    assert (odd.pcie_source, odd.pcie_transmit_bytes, odd.pcie_receive_bytes) == (None, None, None)
    gpm.more = {TX_RATE: 1.0, RX_RATE: 0.0}
    after = read_after(worker, driver).pcie_transmit_bytes
    assert before is not None
    assert after is not None
    assert before < after <= (time.monotonic() - began) * (1 << 20)


@pytest.mark.parametrize("strict", [False, True])
def test_the_drivers_totals_are_as_it_counts(start: Start, *, strict: bool) -> None:
    """To the byte; a driver that does not know them may refuse the metrics or the whole call, without complaint."""
    every = dict.fromkeys(("graphics", "fp64", "fp32", "fp16"), 0.0)
    rates: dict[int, float | Code] = {TX_RATE: 1.0, RX_RATE: 1.0}
    old = Gpu(A, gpm=Gpm(more=rates, strict=strict, **every))
    new = Gpu(B, gpm=Gpm(more=rates | {TX_TOTAL: 1 << 50, RX_TOTAL: 7}, strict=strict, **every))
    worker = start(groups=("gpm", "links"))
    driver = Driver(gpus=[old, new])
    worker.read(driver)
    time.sleep(0.11)
    gpus = worker.read(driver).gpus
    assert [gpu.pcie_source for gpu in gpus.values()] == ["rates", "totals"]
    assert (gpus[1].pcie_transmit_bytes, gpus[1].pcie_receive_bytes) == (1 << 50, 7)
    assert [(gpu.refusals, gpu.activity is None) for gpu in gpus.values()] == [({}, False)] * 2


# --- MIG devices ------------------------------------------------------------------------------------------------------


def test_a_mig_device_reports_the_activity_of_its_gpu_instance(start: Start) -> None:
    """Each from its own samples; none where several compute instances share what is measured."""
    instances = [
        MigInstance(MIG_A, gi=1, gpm=Gpm(sm=10.0)),
        MigInstance(MIG_B, gi=2, ci=0, gpm=Gpm(sm=20.0)),
        None,
        MigInstance(MIG_C, gi=2, ci=1, gpm=Gpm(sm=20.0)),
    ]
    worker = start(groups=GPM)
    gpu = Gpu(A, gpm=Gpm(sm=90.0), instances=instances)
    driver = Driver(gpus=[gpu])
    assert activities(worker.read_one(driver)) == [None, None, None]
    for _ in range(2):
        reading = read_after(worker, driver)
        assert activities(reading) == [Activity(0.1, 0.0, 0.0, 0.0), None, None]
        assert (reading.activity, reading.refusals) == (None, {})
    gpu.instances[3] = None  # then the other has the GPU instance for itself
    read_after(worker, driver)
    read_after(worker, driver)
    assert activities(read_after(worker, driver)) == [Activity(0.1, 0.0, 0.0, 0.0), Activity(0.2, 0.0, 0.0, 0.0)]


@pytest.mark.parametrize(
    "successor",
    [
        MigInstance(MIG_A, name="NVIDIA H100 80GB HBM3 MIG 2g.20gb", gpm=Gpm(sm=70.0)),
        MigInstance(MIG_A, placement=Placement(start=4), gpm=Gpm(sm=70.0)),
        MigInstance(MIG_B, gpm=Gpm(sm=70.0)),
    ],
)
def test_samples_of_two_mig_devices_are_not_compared(start: Start, successor: MigInstance) -> None:
    """One that takes another's place, of its id or even its uuid, begins again."""
    gpu = Gpu(A, gpm=Gpm(), instances=[MigInstance(MIG_A, placement=Placement(), gpm=Gpm(sm=10.0))])
    worker = start(groups=GPM)
    driver = Driver(gpus=[gpu])
    worker.read_one(driver)
    assert activities(read_after(worker, driver)) == [Activity(0.1, 0.0, 0.0, 0.0)]
    gpu.instances = [successor]
    assert activities(read_after(worker, driver)) == [None]
    assert activities(read_after(worker, driver)) == [Activity(0.7, 0.0, 0.0, 0.0)]


def test_a_sample_of_a_device_that_goes_is_no_ones(start: Start) -> None:
    """Where a GPU is partitioned again between a sample and the next question, nothing of it is reported or kept."""
    before = Gpu(A, gpm=Gpm(), instances=[MigInstance(MIG_A, gpm=Gpm(sm=10.0))])
    after = Driver(gpus=[Gpu(A, gpm=Gpm(), instances=[MigInstance(MIG_B, gpm=Gpm(sm=20.0))])])
    worker = start(groups=GPM)
    worker.read_one(Driver(gpus=[before]))
    time.sleep(0.11)
    worker.read_one(Driver(gpus=[before], then=(("nvmlGpmMigSampleGet", 0), after)))
    assert activities(read_after(worker, after)) == [None]
    reading = read_after(worker, after)
    assert (activities(reading), reading.refusals) == ([Activity(0.2, 0.0, 0.0, 0.0)], {})


# --- samples are memory -----------------------------------------------------------------------------------------------


def test_every_sample_is_freed(start: Start, tmp_path: Path) -> None:
    """At each shutdown there were as many frees as allocations: after MIG changes, losses, and without the group."""
    calls = tmp_path / "calls"
    worker = start(groups=GPM, STANDIN_CALLS=str(calls))
    gpu = Gpu(A, gpm=Gpm(), mig_mode=False)
    driver = Driver(gpus=[gpu, Gpu(B, gpm=Gpm())])
    allocated = 0
    for _ in range(2):
        for instances in ([], [MigInstance(MIG_A, gi=1, gpm=Gpm()), MigInstance(MIG_B, gi=2, gpm=Gpm())], [], None):
            gpu.instances = [*instances] if instances is not None else [MigInstance(MIG_B, gi=3, gpm=Gpm())]
            gpu.mig_mode = bool(gpu.instances)
            worker.read(driver)
            read_after(worker, driver)
        driver.fail["nvmlDeviceGetPowerUsage", 0] = Code.GPU_IS_LOST
        assert worker.read(driver).gpus[0].fault == "lost"
        driver.fail.clear()
        worker.read(driver)
        counted = count_calls(worker, driver, calls)
        assert counted["nvmlGpmSampleAlloc"] == counted["nvmlGpmSampleFree"] > allocated
        allocated = counted["nvmlGpmSampleAlloc"]


def test_without_the_group_nothing_is_kept(start: Start, tmp_path: Path) -> None:
    """In the reading that does not ask for it the samples go; asked again, it begins again."""
    calls = tmp_path / "calls"
    worker = start(groups=GPM, STANDIN_CALLS=str(calls))
    driver = Driver(gpus=[Gpu(A, gpm=Gpm(sm=10.0))])
    worker.read_one(driver)
    worker.groups = ()
    assert read_after(worker, driver).activity is None
    worker.groups = GPM
    assert read_after(worker, driver).activity is None
    assert read_after(worker, driver).activity == Activity(0.1, 0.0, 0.0, 0.0)
    counted = count_calls(worker, driver, calls)
    assert (counted["nvmlGpmSampleAlloc"], counted["nvmlGpmSampleFree"], counted["nvmlGpmSampleGet"]) == (3, 3, 3)
