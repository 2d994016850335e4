"""What the NVML worker reports of a GPU's health and links, over the compiled stand-in."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpumap.agent.nvml_worker import health
from gpumap.lab.driver import GROUP_FIELDS as FIELDS_OF_GROUPS
from gpumap.model.readings import Fabric
from tests import standin
from tests.examples import examples
from tests.standin import Code, Driver, FieldValue, Gpu, MigInstance
from tests.worker import Start, Worker

A, B = (f"GPU-00000000-0000-0000-0000-00000000000{letter}" for letter in "ab")
MIG_A = "MIG-00000000-0000-0000-0000-00000000001a"
ALL_LINKS = 0xFFFFFFFF
FABRIC = "nvmlDeviceGetGpuFabricInfoV"
GROUP_FIELDS = "nvmlDeviceGetFieldValues"
EVENTS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetSupportedClocksEventReasons")
THROTTLING = ("nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetSupportedClocksThrottleReasons")
CALLS_OF_HEALTH = {
    "nvmlDeviceGetClockInfo",
    *EVENTS,
    "nvmlDeviceGetPerformanceState",
    "nvmlDeviceGetNumFans",
    "nvmlDeviceGetFanSpeed_v2",
    "nvmlDeviceGetMemoryErrorCounter",
}
CALLS_OF_THE_CARD = {
    "nvmlDeviceGetVbiosVersion": 1,
    "nvmlDeviceGetCudaComputeCapability": 1,
    "nvmlDeviceGetMaxClockInfo": 4,
    "nvmlDeviceGetPowerManagementDefaultLimit": 1,
    "nvmlDeviceGetPowerManagementLimitConstraints": 1,
    "nvmlDeviceGetComputeMode": 3,
    "nvmlDeviceGetPowerManagementLimit": 3,
}
"""In three readings."""
CALLS_OF_CODEC = {"nvmlDeviceGetEncoderUtilization", "nvmlDeviceGetDecoderUtilization"}


def healthy_gpu(uuid: str = A) -> Gpu:
    """A GPU that reports all of it."""
    return Gpu(
        uuid,
        mig_mode=False,
        clocks_megahertz={"graphics": 1410, "sm": 1411, "memory": 1593, "video": 1275},
        clock_events=0x44,
        clock_events_supported=0xE5,
        performance_state=0,
        compute_mode=3,
        fan_percents=[30, 105],
        fabric=(3, 0),
        vbios="96.00.A5.00.03",
        compute_capability=(9, 0),
        max_clocks_megahertz={"graphics": 1980, "sm": 1980, "memory": 2619},
        default_power_limit_milliwatts=700_000,
        power_limits_milliwatts=(200_000, 750_000),
        ecc={(0, 1, 2): 7, (1, 1, 7): 1 << 40, (0, 0, 2): 5},
        fields={
            74: ("ulonglong", 1_500_000_000),
            270: ("ulonglong", 250_000_000),
            142: ("uint", 3),
            143: ("uint", 1),
            144: ("uint", 1),
            145: ("uint", 0),
            29: ("ulonglong", 2),
            30: ("ulonglong", 0),
            230: ("uint", 4),
            3: ("ulonglong", 5),
            6: ("ulonglong", 1 << 40),
            31: ("uint", 1),
            94: ("uint", 12),
            (138, ALL_LINKS): ("ulonglong", 3),
            (139, ALL_LINKS): ("ulonglong", 4),
            (138, 0): ("ulonglong", 99),
            52: ("ulonglong", 5),
            59: ("ulonglong", 0),
            38: ("ulonglong", 1 << 40),
        },
    )


def count_calls(worker: Worker, driver: Driver, calls: Path) -> Counter[str]:
    """The calls since the last time, with those of a worker that cannot count the GPUs and shuts NVML down."""
    worker.refusal(Driver(gpus=driver.gpus, fail={("nvmlDeviceGetCount_v2", "*"): Code.UNKNOWN}))
    return standin.take_calls(calls)


# --- the groups -------------------------------------------------------------------------------------------------------


def test_health_is_reported_in_base_units(start: Start) -> None:
    """Hertz, seconds and ratios; counts as the driver has them; words for what are numbers in nvml.h."""
    reading = start(groups=("health",)).read_one(Driver(gpus=[healthy_gpu()]))
    assert reading.clocks_hertz == {"graphics": 1.41e9, "sm": 1.411e9, "memory": 1.593e9, "video": 1.275e9}
    assert reading.clock_events == {
        "gpu_idle": False,
        "sw_power_cap": True,
        "sw_thermal_slowdown": False,
        "hw_thermal_slowdown": True,
        "hw_power_brake_slowdown": False,
    }
    assert reading.clock_event_seconds == {"sw_power_cap": 1.5, "hw_thermal_slowdown": 0.25}
    assert (reading.performance_state, reading.fan_speed_ratios) == (0, {"0": 0.3, "1": 1.05})
    assert reading.ecc_errors == {"corrected": {"dram": 7}, "uncorrected": {"sram": 1 << 40}}
    assert reading.remapped_rows == {"correctable": 3, "uncorrectable": 1}
    assert (reading.row_remap_pending, reading.row_remap_failure) == (True, False)
    assert reading.retired_pages == {"single_bit_ecc": 2, "double_bit_ecc": 0}
    assert reading.recovery_action == "drain_and_reset"
    assert (reading.ecc_totals, reading.compute_mode, reading.vbios_version) == ({}, None, "")
    assert (reading.pcie_transmit_bytes, reading.nvlink_transmit_bytes, reading.refusals) == (None, None, {})


def test_links_are_reported_in_bytes(start: Start) -> None:
    """NVLink's are of KiB, summed over all links. PCIe's are of GPM, which this GPU lacks."""
    reading = start(groups=("links",)).read_one(Driver(gpus=[healthy_gpu()]))
    assert (reading.pcie_source, reading.pcie_transmit_bytes, reading.pcie_receive_bytes) == (None, None, None)
    assert (reading.nvlink_transmit_bytes, reading.nvlink_receive_bytes) == (3 << 10, 4 << 10)
    assert reading.nvlink_errors == {"replay": 5, "recovery": 0, "crc_flit": 1 << 40}
    assert reading.fabric == Fabric("completed", "success")
    assert reading.pcie_replays is None
    assert (reading.clocks_hertz, reading.recovery_action, reading.ecc_errors) == ({}, None, {})


@pytest.mark.parametrize(
    ("value", "fabric"),
    [
        (None, None),
        ((0, 0), None),
        ((1, 0), Fabric("not_started")),
        ((2, 999), Fabric("in_progress")),
        ((3, 0), Fabric("completed", "success")),
        ((3, 27), Fabric("completed", "not_ready")),
        ((9, 0), Fabric("code_9")),
    ],
)
def test_the_fabric_is_reported_by_names(start: Start, value: tuple[int, int] | None, fabric: Fabric | None) -> None:
    """A GPU without a fabric has none. The status has a meaning only after the registration (nvml.h)."""
    reading = start(groups=("links",)).read_one(Driver(gpus=[Gpu(A, fabric=value)]))
    assert (reading.fabric, reading.nvlink_errors, reading.refusals) == (fabric, {}, {})


def test_a_group_that_is_not_requested_costs_no_call(start: Start, tmp_path: Path) -> None:
    """Each group's calls are made in the readings that ask for it, also when the groups change; fields share two."""
    calls = tmp_path / "calls"
    worker = start(STANDIN_CALLS=str(calls))
    driver = Driver(gpus=[healthy_gpu()])
    optional = CALLS_OF_HEALTH | CALLS_OF_CODEC | CALLS_OF_THE_CARD.keys()
    for groups, expected in (
        ((), set()),
        (("links",), set()),
        (("codec",), CALLS_OF_CODEC),
        (("health", "links", "allocation"), CALLS_OF_HEALTH),
        (("card",), CALLS_OF_THE_CARD.keys()),
        ((), set()),
    ):
        worker.groups = groups
        worker.read(driver)
        counted = count_calls(worker, driver, calls)
        assert optional & counted.keys() == expected
        assert (FABRIC in counted) is ("links" in groups)
        slow = {"health", "links", "card"} & set(groups)  # their fields that may be held have a call of their own
        assert counted[GROUP_FIELDS] == (2 if slow else 1)
        assert any(call.startswith("nvmlGpm") for call in counted) is ("links" in groups)
        assert not any("PcieThroughput" in call for call in counted)


def test_health_of_a_partitioned_gpu_is_the_cards(start: Start) -> None:
    gpu = healthy_gpu()
    worker = start(groups=("health", "links", "card"))
    whole = worker.read_one(Driver(gpus=[gpu]))
    gpu.instances, gpu.mig_mode = [MigInstance(MIG_A)], True
    card = worker.read_one(Driver(gpus=[gpu]))
    assert card.partitioned
    names = [name for group in worker.groups for name in FIELDS_OF_GROUPS[group]]
    assert [getattr(card, name) for name in names] == [getattr(whole, name) for name in names]


# --- what a card is made for ------------------------------------------------------------------------------------------


def test_constants_of_a_card_are_reported(start: Start) -> None:
    """Firmware, architecture, highest clocks, compute mode, power limits and all errors; no other group's."""
    reading = start(groups=("card",)).read_one(Driver(gpus=[healthy_gpu()]))
    assert (reading.vbios_version, reading.compute_capability) == ("96.00.A5.00.03", "9.0")
    assert reading.max_clocks_hertz == {"graphics": 1.98e9, "sm": 1.98e9, "memory": 2.619e9}
    assert reading.power_limits_watts == {"requested": 400.0, "default": 700.0, "min": 200.0, "max": 750.0}
    assert reading.ecc_totals == {"corrected": {"volatile": 5}, "uncorrected": {"aggregate": 1 << 40}}
    assert (reading.retired_pages_pending, reading.compute_mode) == (True, "exclusive_process")
    assert reading.pcie_replays == 12
    assert (reading.clocks_hertz, reading.retired_pages, reading.nvlink_receive_bytes) == ({}, {}, None)


def test_constants_of_a_card_are_read_once(start: Start, tmp_path: Path) -> None:
    """Also what it does not support; what is set is asked each time, since somebody may set it."""
    calls = tmp_path / "calls"
    worker = start(groups=("card",), STANDIN_CALLS=str(calls))
    gpu = healthy_gpu()
    driver = Driver(gpus=[gpu])
    before = worker.read_one(driver)
    gpu.power_limit_milliwatts = 300_000
    for _ in range(2):
        after = worker.read_one(driver)
    counted = count_calls(worker, driver, calls)
    assert {call: counted[call] for call in CALLS_OF_THE_CARD} == CALLS_OF_THE_CARD
    assert after.vbios_version == before.vbios_version
    assert after.power_limits_watts["requested"] == 300.0


# --- field values -----------------------------------------------------------------------------------------------------


def test_a_refused_field_costs_itself(start: Start) -> None:
    """A field that fails is absent and reported with its code, and asked again; the others are reported."""
    gpu = healthy_gpu()
    gpu.fields[144] = ("error", Code.UNKNOWN)
    worker = start(groups=("health", "links"))
    for _ in range(2):
        reading = worker.read_one(Driver(gpus=[gpu]))
        assert (reading.row_remap_pending, reading.row_remap_failure) == (None, False)
        assert reading.refusals == {f"{GROUP_FIELDS}(144)": Code.UNKNOWN}
    gpu.fields[144] = ("uint", 1)
    assert worker.read_one(Driver(gpus=[gpu])).row_remap_pending is True


@pytest.mark.parametrize("value", [None, ("error", Code.INVALID_ARGUMENT), ("error", Code.ARGUMENT_VERSION_MISMATCH)])
def test_a_field_that_is_not_supported_is_not_called_again(start: Start, value: FieldValue | None) -> None:
    """Not until NVML is initialised again, or MIG is switched; drivers that do not know it say so in their way."""
    gpu = healthy_gpu()
    gpu.fields[230] = value
    worker = start(groups=("health",))
    reading = worker.read_one(Driver(gpus=[gpu]))
    assert (reading.recovery_action, reading.refusals, reading.remapped_rows["correctable"]) == (None, {}, 3)
    gpu.fields[230] = ("uint", 9)
    assert worker.read_one(Driver(gpus=[gpu])).recovery_action is None
    gpu.mig_mode = True
    assert worker.read_one(Driver(gpus=[gpu])).recovery_action == "code_9"


@pytest.mark.parametrize("kind", ["uint", "sint", "ushort"])
def test_traffic_in_narrow_counters_is_not_reported(start: Start, kind: str) -> None:
    """A count of bytes that wraps several times in an interval looks like one that does not."""
    gpu = healthy_gpu()
    gpu.fields |= {(139, ALL_LINKS): (kind, 10)}  # type: ignore[dict-item]
    reading = start(groups=("links",)).read_one(Driver(gpus=[gpu]))
    assert (reading.nvlink_transmit_bytes, reading.nvlink_receive_bytes) == (3 << 10, None)
    assert reading.refusals == {}


numbers = st.integers(0, (1 << 16) - 1)
said_fields = st.none() | st.one_of(
    st.tuples(st.sampled_from(["uint", "ulong", "ulonglong", "slonglong", "sint", "ushort"]), numbers),
    st.tuples(st.just("double"), st.sampled_from([0.0, 7.5, float("nan"), float("inf"), float("-inf")])),
    st.tuples(st.just("error"), st.sampled_from([2, 3, 4, 6, 13, 21, 25, 26, 999])),
)
FIELD_IDS = (82, 29, 30, 142, 143, 144, 145, 230, *(field.number for field in health.CLOCK_EVENT_FIELDS))


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=st.fixed_dictionaries(dict.fromkeys(FIELD_IDS, said_fields)), again=st.booleans())
def test_each_field_is_independent(
    hypothetical: tuple[Worker, Iterator[int]], said: dict[int | tuple[int, int], FieldValue | None], again: bool
) -> None:
    """Whatever type and value each field has: exactly the numbers are reported, and no refused field."""
    worker, places = hypothetical
    gpu = Gpu(A, memory_temperature_celsius=None, fields=said)
    driver = Driver(gpus=[gpu, Gpu(B)][: next(places)])  # another count of GPUs: what is not supported is asked again
    for _ in range(1 + again):
        reading = worker.read_one(driver)
        answer = {
            field
            for field, value in said.items()
            if value and value[0] != "error" and 0 <= value[1] < 1e9 and value != ("ushort", 0xFFFF)
        }
        reasons = {field.key for field in health.CLOCK_EVENT_FIELDS if field.number in answer}
        assert reading.clock_event_seconds.keys() == reasons
        assert len(reading.remapped_rows) == len({142, 143} & answer)
        assert len(reading.retired_pages) == len({29, 30} & answer)
        assert [reading.row_remap_pending is None, reading.row_remap_failure is None] == [
            144 not in answer,
            145 not in answer,
        ]
        assert ("memory" in reading.temperatures_celsius, reading.recovery_action is not None) == (
            82 in answer and bool(said[82] and 0 < said[82][1] <= 150),
            230 in answer,
        )
        refused = {f for f, v in said.items() if v and v[0] == "error" and v[1] in (4, 999)}
        assert reading.refusals.keys() == {f"{GROUP_FIELDS}({field})" for field in refused}


@pytest.fixture(name="hypothetical")
def start_for_hypothesis(start: Start) -> tuple[Worker, Iterator[int]]:
    """Start one worker for all examples, and how many GPUs each has."""
    return start(groups=("health",)), iter([1, 2] * 1000)


# --- clocks, fans, ECC ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("without", [(), EVENTS, THROTTLING, EVENTS[1:] + THROTTLING[1:]])
def test_clock_events_are_reported_under_either_name(start: Start, tmp_path: Path, without: tuple[str, ...]) -> None:
    """The functions were renamed with driver 535. If none reports which reasons exist, all that are known do."""
    calls = tmp_path / "calls"
    worker = start(without, groups=("health",), STANDIN_CALLS=str(calls))
    driver = Driver(gpus=[healthy_gpu()])
    for _ in range(3):
        events = worker.read_one(driver).clock_events
        assert [word for word, active in events.items() if active] == ["sw_power_cap", "hw_thermal_slowdown"]
        assert len(events) == (11 if set(EVENTS[1:] + THROTTLING[1:]) <= set(without) else 5)
    driver.gpus[0].clock_events = 0x1
    assert worker.read_one(driver).clock_events["gpu_idle"] is True
    counted = count_calls(worker, driver, calls)
    assert sum(counted[call] for call in (EVENTS[0], THROTTLING[0])) == 4
    assert sum(counted[call] for call in (EVENTS[1], THROTTLING[1])) <= 1


def test_reasons_that_are_refused_for_once_are_called_again(start: Start) -> None:
    """Until the driver reports which reasons the GPU knows, only those that are present are reported."""
    driver = Driver(gpus=[healthy_gpu()], fail={(EVENTS[1], 0): Code.UNKNOWN})
    worker = start(groups=("health",))
    assert worker.read_one(driver).clock_events == {"sw_power_cap": True, "hw_thermal_slowdown": True}
    driver.fail.clear()
    assert len(worker.read_one(driver).clock_events) == 5


@pytest.mark.parametrize(
    ("without", "expected"),
    [
        ((), {"0": 0.3, "1": 1.05}),
        (("nvmlDeviceGetNumFans",), {}),
        (("nvmlDeviceGetFanSpeed_v2",), {}),
    ],
)
def test_fans_are_reported_by_number(start: Start, without: tuple[str, ...], expected: dict[str, float]) -> None:
    reading = start(without, groups=("health",)).read_one(Driver(gpus=[healthy_gpu()]))
    assert (reading.fan_speed_ratios, reading.refusals) == (expected, {})


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetPowerUsage"])
def test_a_gpu_that_waits_for_a_reset_reports_its_recovery_action(start: Start, call: str) -> None:
    gpu = healthy_gpu()
    gpu.fields[230] = ("uint", 1)
    driver = Driver(gpus=[gpu], fail={(call, 0): Code.RESET_REQUIRED})
    worker = start(groups=("health",))
    reading = worker.read_one(driver)
    with_handle = call != "nvmlDeviceGetHandleByIndex_v2"
    assert (reading.fault, reading.recovery_action) == ("reset_required", "gpu_reset" if with_handle else None)
    gpu.fields[230] = ("double", float("nan"))
    assert worker.read_one(driver).recovery_action is None
    worker.groups = ()
    assert worker.read_one(driver).recovery_action is None


def test_a_lost_gpu_is_not_queried_for_its_recovery_action(start: Start, tmp_path: Path) -> None:
    """No call is made on a GPU after one said that it is lost: it might hang."""
    calls = tmp_path / "calls"
    driver = Driver(gpus=[healthy_gpu()], fail={("nvmlDeviceGetMinorNumber", 0): Code.GPU_IS_LOST})
    worker = start(groups=("health", "links", "gpm"), STANDIN_CALLS=str(calls))
    for _ in range(2):
        reading = worker.read_one(driver)
        assert (reading.fault, reading.recovery_action) == ("lost", None)
    assert count_calls(worker, driver, calls)[GROUP_FIELDS] == 0
