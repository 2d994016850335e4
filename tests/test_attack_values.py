"""Attacks on values: what gpumap says while something is refused, missing or odd, against what is true."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from msgspec import structs

from gpumap.agent.dialects import DIALECTS
from gpumap.agent.flags import ALL_DIALECTS
from gpumap.agent.metrics import GROUPS, native, self_families
from gpumap.agent.published import published
from gpumap.agent.sources.nvml import NvmlSource
from gpumap.cli.table import Shape
from gpumap.model.families import NumberedFamilies
from gpumap.model.observations import NvmlReading, SourceAnswer, SourceError
from gpumap.model.readings import CARD as CARD_GROUP
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot
from tests import standin
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid
from tests.promtool import assert_answers
from tests.shown import waste_values
from tests.standin import Code, Driver
from tests.test_positive_evidence import LivingPod
from tests.test_sm_seconds import SampledGpu
from tests.worker import measure, worker_command

MIB = 1 << 20
SHARED, GRAPHICS, PARTED, HOPPER, MPS = (Uuid(f"GPU-00000000-0000-0000-0000-00000000000{n}") for n in range(5))
SLICES = tuple(Uuid(f"MIG-00000000-0000-0000-0000-00000000000{n}") for n in range(3))

LATER = "gpumap_container_last_active_timestamp_seconds", "gpumap_finding_since_timestamp_seconds"
"""It may have worked; a finding may have been interrupted."""
JUDGED = "gpumap_finding_judged"
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
FAMILIES = (
    *native(tuple(GROUPS), process_metrics=True),
    *self_families("1", "3.11"),
    *(family for name in ALL_DIALECTS for family in DIALECTS[name].families),
)
IGNORED = (
    "gpumap_finding_unjudged",
    "gpumap_source_",
    "gpumap_collections",
    "process_",
    "gpumap_snapshot",
    "gpumap_nvml_stuck",
    "gpumap_capability",
    "gpumap_gpu_last_success",
    "gpumap_accounting_gap_seconds_total",
    "gpumap_xid_blind_seconds_total",
    "gpumap_gpu_up",
    "gpumap_gpu_fault_info",
    "gpumap_gpu_energy_unattributed_joules_total",
    "DCGM_FI_DEV_XID",
    "nvidia_smi_failed_scrapes",
    "nvidia_smi_last_collect",
    "nvidia_smi_command_exit_code",
    "nvidia_smi_compute_apps_last",
)
QUICK = {"calls.SOON_SECONDS": 0.05, "calls.RETRY_SECONDS": 0.1, "gpm.APART_SECONDS": 0.0}


def _card() -> standin.Gpu:
    """A card that answers every question."""
    fields: dict[int | tuple[int, int], standin.FieldValue | None] = {}
    fields |= dict.fromkeys((74, 75, 76, 77, 78, 79, 80, 81, 269, 270, 271), ("ulonglong", 7000000000))
    fields |= dict.fromkeys((29, 30, 142, 143), ("uint", 2))
    fields |= dict.fromkeys((144, 145), ("uint", 0))
    fields[94] = ("uint", 4)
    fields |= dict.fromkeys((138, 139), ("ulonglong", 1 << 40))
    fields |= dict.fromkeys(((138, 0xFFFFFFFF), (139, 0xFFFFFFFF)), ("ulonglong", 1 << 30))
    return standin.Gpu(
        SHARED,
        clocks_megahertz={"graphics": 1200, "sm": 1410, "memory": 1593, "video": 1000},
        max_clocks_megahertz={"graphics": 1410, "sm": 1410, "memory": 1593, "video": 1290},
        clock_events=1,
        clock_events_supported=511,
        performance_state=0,
        fan_percents=[30, 35],
        ecc={(kind, 1, place): 3 + kind for kind in (0, 1) for place in (0, 1, 2)},
        vbios="92.00",
        compute_capability=(8, 0),
        compute_mode=0,
        default_power_limit_milliwatts=400_000,
        power_limits_milliwatts=(100_000, 400_000),
        utilization_gpu=60,
        utilization_memory=30,
        encoder_utilization=5,
        decoder_utilization=6,
        fields=fields,
    )


def swept_node() -> tuple[TestNode, standin.Driver]:
    """A node with a card of each kind, each in use, and what its driver says."""
    process, sample = standin.Process, standin.Sample
    gpus = [
        replace(
            _card(),
            uuid=SHARED,
            memory_used_bytes=5 * GIB,
            processes=[process(1, 2 * GIB), process(2, GIB)],
            samples=[sample(1, 40, 20, 3, 4), sample(2, 20, 10)],
        ),
        replace(
            _card(),
            uuid=GRAPHICS,
            name="NVIDIA L40",
            memory_used_bytes=4 * GIB,
            processes=[process(3, 3 * GIB, "graphics")],
            samples=[sample(3, 50, 20)],
        ),
        replace(
            _card(),
            uuid=PARTED,
            memory_used_bytes=9 * GIB,
            processes=[],
            samples=None,
            gpm=standin.Gpm(10, 10, 10, 10),
            instances=[
                standin.MigInstance(
                    SLICES[0],
                    3,
                    0,
                    memory_used_bytes=GIB,
                    processes=[process(4, GIB // 2)],
                    gpm=standin.Gpm(30, 20, 10, 5),
                    placement=standin.Placement(19, 0, 1),
                ),
                standin.MigInstance(
                    SLICES[1],
                    4,
                    0,
                    memory_used_bytes=2 * GIB,
                    processes=[process(5, GIB)],
                    gpm=standin.Gpm(40, 20, 10, 5),
                    placement=standin.Placement(19, 1, 1),
                ),
                None,
                standin.MigInstance(
                    SLICES[2],
                    5,
                    0,
                    memory_used_bytes=2 * GIB,
                    processes=[],
                    gpm=standin.Gpm(0, 0, 0, 0),
                    placement=standin.Placement(19, 2, 1),
                ),
            ],
        ),
        replace(
            _card(),
            uuid=HOPPER,
            name="NVIDIA H100 80GB HBM3",
            memory_used_bytes=9 * GIB,
            processes=[process(6, 8 * GIB)],
            samples=[sample(6, 60, 30)],
            gpm=standin.Gpm(60, 30, 20, 40),
        ),
        replace(
            _card(),
            uuid=MPS,
            memory_used_bytes=7 * GIB,
            processes=[process(7, 2 * GIB, "mps"), process(8, 3 * GIB, "mps"), process(9, 30 * MIB)],
            samples=[sample(7, 20, 10), sample(8, 30, 10)],
        ),
    ]
    w, r = "nvidia.com/gpu", "nvidia.com/gpu.shared"
    pods = [
        Pod("ml", "share-a", {"main": {r: [f"{SHARED}::0"]}}),
        Pod("ml", "share-b", {"main": {r: [f"{SHARED}::1"]}}),
        Pod("ml", "render", {"main": {w: [GRAPHICS]}}),
        Pod("ml", "slice-a", {"main": {"nvidia.com/mig-1g.10gb": [SLICES[0]]}}),
        Pod("ml", "slice-b", {"main": {"nvidia.com/mig-1g.10gb": [SLICES[1]]}}),
        Pod("ml", "slice-idle", {"main": {"nvidia.com/mig-1g.10gb": [SLICES[2]]}}),
        Pod("ml", "hopper", {"main": {w: [HOPPER]}}),
        Pod("ml", "mps-a", {"main": {r: [f"{MPS}::0"]}}),
        Pod("ml", "mps-b", {"main": {r: [f"{MPS}::1"]}}),
    ]
    on = (SHARED, SHARED, GRAPHICS, SLICES[0], SLICES[1], HOPPER, MPS, MPS)
    who = (pods[0], pods[1], pods[2], pods[3], pods[4], pods[6], pods[7], pods[8])
    processes = [Process(pid, leaf, pod) for pid, (leaf, pod) in enumerate(zip(on, who, strict=True), start=1)]
    processes.append(Process(9, MPS, None, comm="nvidia-cuda-mps"))
    allocatable: dict[str, list[str]] = {
        w: [GRAPHICS, HOPPER],
        r: [f"{card}::{n}" for card in (SHARED, MPS) for n in range(4)],
        "nvidia.com/mig-1g.10gb": [*SLICES],
    }
    node = TestNode(pods=pods, processes=processes, allocatable=allocatable)
    node.rules = replace(node.rules, idle_after_seconds=1e9, grace_seconds=5.0)  # a refusal restarts these times
    return node, standin.Driver(gpus=gpus, gpm_apart_milliseconds=0)


def series(snapshot: Snapshot) -> Series:
    found: Series = {}
    for family in FAMILIES:
        for one in family.families(snapshot) if isinstance(family, NumberedFamilies) else (family,):
            for row in one.read(snapshot):
                key = one.name + row.suffix, frozenset(zip(one.labels, row.labels, strict=True))
                assert key not in found, f"{key} exists twice"
                found[key] = row.value
    return found


def is_counter(name: str) -> bool:
    return name.endswith("_total")


def _may_differ(name: str, labels: dict[str, str], *, nvml_down: bool) -> bool:
    """What documents say of values that are not known: the remainder of L1, the owner `unknown`, a card's value without
    its pod in the dialects `dcgm`, and what only the kubelet reports while NVML is down."""
    if labels.get("owner") in ("unaccounted", "unknown"):
        return True
    if name.startswith("DCGM_FI_") and not labels.get("container", labels.get("Container")):
        return True
    if labels.get("finding") == "fault":  # of a GPU of which a call is refused
        return True
    if labels.get("AllocateMode") == "":  # of the dialect arms: how it is held is not known
        return True
    return nvml_down and name.startswith(("DCGM_CUSTOM_CONTAINER_", "POD_GPU_MAP_INFO_", "pod_and_gpu_map_info"))


@dataclass
class Sweep:
    """Two nodes of one truth: `node` is disturbed, `twin` is not."""

    source: NvmlSource
    state: Path
    node: TestNode
    driver: standin.Driver
    twin: TestNode
    truth: NvmlReading
    steps: int = 0
    errors: list[str] = field(default_factory=list)
    last: Series = field(default_factory=dict)
    snapshot: Snapshot | None = None

    async def _read(self) -> SourceAnswer[NvmlReading] | SourceError:
        try:
            return await self.source.read(0.1, 60.0)
        except SourceError as error:
            return error

    def _settled(self, reading: NvmlReading) -> NvmlReading:
        """As if it had been read five seconds after the last."""
        gpus = tuple(
            structs.replace(gpu, sampled_seconds=None if gpu.sampled_seconds is None else 5.0) for gpu in reading.gpus
        )
        return replace(reading, gpus=gpus, xids=(), listening=())

    async def collect(self) -> list[str]:
        """One more collection of both; what the disturbed page says that is not true."""
        self.steps += 1
        for gpu in self.driver.gpus:
            gpu.energy_millijoules = 1_000_000 + 300_000 * self.steps
        self.driver.write(self.state)
        answer = await self._read()
        joules = 1000 + 300 * self.steps
        gpus = tuple(structs.replace(gpu, energy_joules=float(joules)) for gpu in self.truth.gpus)
        self.twin.reading = replace(self.truth, gpus=gpus)
        true = series(self.twin.collect())
        if isinstance(answer, SourceError):
            self.node.down.add("nvml")
        else:
            self.node.down.discard("nvml")
            self.node.reading = self._settled(answer.value)
        self.snapshot = self.node.collect()
        found = series(self.snapshot)
        lies = list(self._compare(true, found))
        self.last = found
        return lies

    def _compare(self, true: Series, found: Series) -> Iterator[str]:
        for key, value in sorted(found.items(), key=lambda one: (one[0][0], sorted(one[0][1]))):
            name, labels = key
            if name.startswith(IGNORED):
                continue
            who = f"{name}{sorted(labels)}"
            if is_counter(name):
                before = self.last.get(key)
                if before is not None and value < before - 1e-6:
                    yield f"FELL {who} {before} -> {value}"
            if _may_differ(name, dict(labels), nvml_down="nvml" in self.node.down):
                continue
            if key not in true:
                yield f"EXTRA {who} {value}"
            elif (name in LATER and value > true[key]) or (name == JUDGED and value <= true[key]):
                continue
            elif value != true[key] and not (is_counter(name) and value <= true[key] + 1e-6):
                yield f"WRONG {who} {value}, truly {true[key]}"

    def missing(self) -> list[str]:
        true = series(self.twin.collect(0.0))
        answer = series(self.node.collect(0.0))
        return sorted(
            f"{name}{sorted(labels)}" for name, labels in true.keys() - answer.keys() if not name.startswith(IGNORED)
        )


@asynccontextmanager
async def sweeping(tmp_path: Path, library: Path, changed: dict[str, object] | None = None) -> AsyncIterator[Sweep]:
    node, driver = swept_node()
    twin, _ = swept_node()
    state = tmp_path / "state"
    driver.write(state)
    command = ["env", f"STANDIN_STATE={state}", *worker_command(library, QUICK if changed is None else changed)]
    source = NvmlSource(command, (*GROUPS, CARD_GROUP))
    try:
        await source.read(0.1, 60.0)
        truth = (await source.read(0.1, 60.0)).value
        sweep = Sweep(source, state, node, driver, twin, truth)
        sweep.truth = sweep._settled(truth)
        for _ in range(3):
            lies = await sweep.collect()
        assert lies == [], lies
        yield sweep
    finally:
        await source.close()


async def refuse(sweep: Sweep, call: str, target: standin.Target, code: int, collections: int) -> dict[str, list[str]]:
    """What is not true while a call is refused for so many collections, and after it."""
    sweep.driver.fail = {(call, target): code}
    during = [lie for _ in range(collections) for lie in await sweep.collect()]
    sweep.driver.fail = {}
    after: list[str] = []
    for _ in range(12):
        lies = await sweep.collect()
        after += lies
        gone = sweep.missing()
        if not lies and not gone:
            break
        await asyncio.sleep(0.03)
    return {
        "during": list(dict.fromkeys(during)),
        "after": list(dict.fromkeys(after)),
        "stays wrong": lies,
        "gone for good": gone,
    }


# --- the attacks ------------------------------------------------------------------------------------------------------


CARD = gpu_uuid(0)


@pytest.fixture(name="sweep")
async def make_sweep(tmp_path: Path, library: Path) -> AsyncIterator[Sweep]:
    async with sweeping(tmp_path, library) as sweep:
        yield sweep


def rows(found: Series, name: str, **labels: str) -> list[float]:
    return [value for (of, row), value in found.items() if of == name and labels.items() <= dict(row).items()]


async def refused(sweep: Sweep, call: str, code: int, target: standin.Target = "*", collections: int = 1) -> list[str]:
    sweep.driver.fail = {(call, target): code}
    lies: list[str] = []
    for _ in range(collections):
        lies += await sweep.collect()
    return lies


ONCE = [Code.UNKNOWN, Code.NOT_SUPPORTED, Code.NOT_FOUND, Code.NO_PERMISSION]


# --- process lists ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ONCE)
@pytest.mark.parametrize(
    ("call", "pod", "card"),
    [
        ("nvmlDeviceGetGraphicsRunningProcesses_v3", "render", GRAPHICS),
        ("nvmlDeviceGetMPSComputeRunningProcesses_v3", "mps-a", MPS),
    ],
)
async def test_a_list_that_is_refused_leaves_no_zero(sweep: Sweep, call: str, pod: str, card: str, code: int) -> None:
    """Graphics or MPS processes cannot be listed for one collection: who runs nothing else is not idle for that."""
    before = sweep.last
    await refused(sweep, call, code)
    for name in ("gpumap_container_gpu_memory_used_bytes", "gpumap_container_gpu_processes"):
        assert rows(sweep.last, name, pod=pod) in ([], rows(before, name, pod=pod))
    owners = rows(sweep.last, "gpumap_device_memory_used_by_owner_bytes", uuid=card, owner="assigned")
    assert owners in ([], rows(before, "gpumap_device_memory_used_by_owner_bytes", uuid=card, owner="assigned"))


def held(name: str = "batch") -> Pod:
    return Pod("ml", name, {"main": {"nvidia.com/gpu": [CARD]}})


def kinds(snapshot: Snapshot, shape: Shape | None = None) -> dict[str, str]:
    return {row["finding"]: row["why"] for row in waste_values(published(snapshot), shape or Shape())["findings"]}


def test_a_busy_gpu_that_lists_nothing_is_no_idle_one() -> None:
    """NVML lists no process and has no sample, while 70 GiB are used and a kernel runs 90 % of the time."""
    pod = held()
    node = TestNode([Gpu(0, utilization=0.9, overhead=70 * GIB)], [pod])
    for _ in range(118):
        assert not kinds(node.collect())


async def test_a_busy_gpu_without_samples_is_no_idle_one(sweep: Sweep) -> None:
    """ "Not found" is how an idle GPU answers for samples; this one says that it is busy 60 % of the time."""
    await refused(sweep, "nvmlDeviceGetProcessUtilization", Code.NOT_FOUND)
    assert rows(sweep.last, "gpumap_gpu_utilization_ratio", gpu_uuid=HOPPER) == [0.6]
    assert rows(sweep.last, "gpumap_container_sm_utilization_ratio", pod="hopper") != [0.0]


# --- MIG --------------------------------------------------------------------------------------------------------------

MIG_CALLS = [
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetComputeInstanceId",
    "nvmlDeviceGetUUID",
]


@pytest.mark.parametrize("call", MIG_CALLS)
async def test_a_mig_device_that_is_not_reported_once_is_not_gone(sweep: Sweep, call: str) -> None:
    """A MIG device of which one call is refused in one collection keeps its holder."""
    by_gpu = {"nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex"}
    target = "2" if call in by_gpu else "2.mig"
    lies = await refused(sweep, call, Code.UNKNOWN, target)
    assert rows(sweep.last, "gpumap_unmatched_slots") == []
    assert rows(sweep.last, "gpumap_gpu_without_device_info") == []
    assert len(rows(sweep.last, "gpumap_allocation_info", uuid=SLICES[0])) == 1, lies


async def test_time_in_which_mig_devices_are_not_reported_is_charged_or_a_gap(sweep: Sweep) -> None:
    """A second of a GPU is either charged or counted as a gap (docs/explanation/accounting.md)."""

    def seconds() -> float:
        charged = rows(sweep.last, "gpumap_container_allocated_gpu_seconds_total", uuid=SLICES[0])
        return 7 * sum(charged) + sum(rows(sweep.last, "gpumap_accounting_gap_seconds_total", gpu_uuid=PARTED))

    before = seconds()
    await refused(sweep, "nvmlDeviceGetMaxMigDeviceCount", Code.UNKNOWN, "2", collections=10)
    assert seconds() - before >= 45.0


@pytest.mark.parametrize("code", [Code.UNKNOWN, Code.NO_PERMISSION])
async def test_a_gpu_without_a_reported_mode_stays_partitioned(sweep: Sweep, code: int) -> None:
    """A worker begins again while a partitioned GPU does not report its mode: it was partitioned a moment ago."""
    await sweep.source.close()
    await refused(sweep, "nvmlDeviceGetMigMode", code, 2, collections=3)
    assert rows(sweep.last, "gpumap_device_holders", uuid=PARTED) == [], "held through its MIG devices"
    assert rows(sweep.last, "gpumap_unmatched_slots") == []
    assert rows(sweep.last, "gpumap_container_gpu_memory_used_bytes", uuid=PARTED) == []


# --- other calls ------------------------------------------------------------------------------------------------------


async def test_memory_is_of_one_kind(sweep: Sweep) -> None:
    """The newer call is refused for a moment: the older one counts what the driver reserves, and is another value."""
    before = rows(sweep.last, "gpumap_device_memory_used_bytes", uuid=SHARED)
    await refused(sweep, "nvmlDeviceGetMemoryInfo_v2", Code.NOT_SUPPORTED)
    assert rows(sweep.last, "gpumap_device_memory_used_bytes", uuid=SHARED) in ([], before)


@pytest.mark.parametrize(
    ("call", "label"),
    [("nvmlDeviceGetName", "model"), ("nvmlDeviceGetMinorNumber", "minor"), ("nvmlDeviceGetPciInfo_v3", "pci_bus_id")],
)
async def test_what_a_gpu_was_called_is_remembered(sweep: Sweep, call: str, label: str) -> None:
    """A GPU is asked again what it is, and one answer is refused: its series keep their labels."""

    def labels() -> set[str]:
        return {dict(row)[label] for name, row in sweep.last if name == "gpumap_device_info"}

    before = labels()
    await sweep.source.close()
    await refused(sweep, call, Code.UNKNOWN)
    assert labels() == before


async def test_dcgm_memory_is_the_devices(sweep: Sweep) -> None:
    """A MIG device that does not report its memory has none in the dialect, rather than only its processes'."""
    before = rows(sweep.last, "DCGM_FI_DEV_FB_USED", pod="slice-a")
    await refused(sweep, "nvmlDeviceGetMemoryInfo_v2", Code.UNKNOWN)
    assert rows(sweep.last, "DCGM_FI_DEV_FB_USED", pod="slice-a") in ([], before)


async def test_utilization_is_no_more_than_all(tmp_path: Path) -> None:
    """A ratio is 0-1: a value outside of it is no ratio."""
    driver = Driver(gpus=[standin.Gpu(CARD, utilization_gpu=255, utilization_memory=4294967295)])
    gpu = (await measure(driver, tmp_path)).gpus[0]
    assert gpu.utilization_ratio is None or gpu.utilization_ratio <= 1
    assert gpu.memory_controller_busy_ratio is None or gpu.memory_controller_busy_ratio <= 1


@pytest.mark.parametrize(
    ("celsius", "memory_celsius", "milliwatts", "plausible"),
    [
        (2000, 2000, 4_000_000_000, False),
        (151, 151, 5_000_001, False),
        (-51, 151, 5_000_001, False),
        (150, 150, 5_000_000, True),
        (-50, 1, 0, True),
    ],
)
async def test_value_that_no_sensor_has_is_absent(
    tmp_path: Path, celsius: int, memory_celsius: int, milliwatts: int, plausible: bool
) -> None:
    """Temperatures from -50 to 150 °C and power up to 5 kW are passed on, power limits too."""
    said = standin.Gpu(
        CARD,
        temperature_celsius=celsius,
        memory_temperature_celsius=memory_celsius,
        power_milliwatts=milliwatts,
        enforced_power_limit_milliwatts=milliwatts,
        power_limit_milliwatts=milliwatts,
        power_limits_milliwatts=(milliwatts, milliwatts),
    )
    gpu = (await measure(Driver(gpus=[said]), tmp_path)).gpus[0]
    assert gpu.temperatures_celsius == ({"gpu": float(celsius), "memory": float(memory_celsius)} if plausible else {})
    watts = milliwatts / 1000 if plausible else None
    assert (gpu.power_watts, gpu.power_limit_watts) == (watts, watts)


# --- rows and values that cannot be ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        standin.Sample(1, sm=40, mem=20, enc=150),
        standin.Sample(1, sm=101, mem=20),
        standin.Sample(1, sm=40, mem=20, timestamp_us=4_000_000_000_000_000),
    ],
    ids=["more than all of the encoders", "more than all SMs", "of the future"],
)
async def test_a_sample_that_is_not_taken_is_no_zero(sweep: Sweep, row: standin.Sample) -> None:
    """If a process's only row is dropped for an impossible number, its SM time is unknown, not 0."""
    card = sweep.driver.gpus[0]
    assert card.samples is not None
    card.samples = [row, *card.samples[1:]]
    lies = await sweep.collect()
    assert rows(sweep.last, "gpumap_container_sm_utilization_ratio", pod="share-a") != [0.0]
    assert not [lie for lie in lies if "gpumap_container_energy_joules_total" in lie], lies


EVERYTHING, ALL_BITS = (1 << 64) - 1, (1 << 32) - 1


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ((138, 0xFFFFFFFF), ("ulonglong", EVERYTHING), "gpumap_gpu_nvlink_transmit_bytes_total"),
        ((139, 0xFFFFFFFF), ("slonglong", -1), "gpumap_gpu_nvlink_receive_bytes_total"),
        (74, ("ulonglong", EVERYTHING), "gpumap_gpu_clock_event_seconds_total"),
        (142, ("slonglong", -1), "gpumap_gpu_remapped_rows"),
        (144, ("uint", ALL_BITS), "gpumap_gpu_row_remap_pending"),
        (82, ("uint", ALL_BITS), "gpumap_gpu_temperature_celsius"),
    ],
)
async def test_not_available_is_no_number(
    sweep: Sweep, field: int | tuple[int, int], value: standin.FieldValue, name: str
) -> None:
    """NVML's words for "not available" (-1 of each type) in a value that it calls a success."""
    sweep.driver.gpus[0].fields[field] = value
    lies = await sweep.collect()
    sweep.driver.gpus[0].fields[field] = world_field(field)
    lies += await sweep.collect()
    assert not [lie for lie in lies if f" {name}[" in lie], lies


def world_field(field: int | tuple[int, int]) -> standin.FieldValue | None:
    return None if field == 82 else swept_node()[1].gpus[0].fields[field]


async def test_a_process_has_no_more_memory_than_the_card(sweep: Sweep) -> None:
    """A row of garbage says 500 GiB on a card of 80: no container uses it, has ever used it, or is billed for it."""
    card = sweep.driver.gpus[0]
    before = card.processes
    card.processes = [standin.Process(1, 500 * GIB), standin.Process(2, GIB)]
    lies = await sweep.collect()
    card.processes = before
    lies += await sweep.collect()
    assert not [lie for lie in lies if "gpumap_container_gpu_memory" in lie], lies


def test_a_list_that_lacks_pods_does_not_free_a_device_in_a_dialect() -> None:
    """The kubelet has only its static pods, one of which holds a GPU: the other GPU is of unknown holders."""
    static = LivingPod("kube-system", "infer", {"main": {"nvidia.com/gpu": [CARD]}}, static=True)
    job = LivingPod("ml", "job", {"main": {"nvidia.com/gpu": [gpu_uuid(1)]}})
    node = TestNode([Gpu(0), Gpu(1)], [static, job], [Process(1, gpu_uuid(1), job)])
    node.collect()
    job.listed = False
    found = series(node.collect())
    assert rows(found, "gpumap_device_holders", uuid=gpu_uuid(1)) == []
    assert rows(found, "DCGM_CUSTOM_DEV_FB_ALLOCATED", UUID=gpu_uuid(1)) == []
    assert rows(found, "DCGM_CUSTOM_ALLOCATE_MODE") == []


async def test_replicas_that_are_held_are_replicas(sweep: Sweep) -> None:
    """The kubelet offers one of four replicas, the others being unhealthy: two of four are no halves."""
    before = rows(sweep.last, "gpumap_container_allocated_gpus", pod="share-a")
    assert sweep.node.allocatable is not None
    sweep.node.allocatable = {**sweep.node.allocatable, "nvidia.com/gpu.shared": [f"{SHARED}::0"]}
    await sweep.collect()
    assert rows(sweep.last, "gpumap_container_allocated_gpus", pod="share-a") in ([], before)


async def test_a_reason_that_the_gpu_may_not_know_is_not_0(sweep: Sweep) -> None:
    """A new worker is refused which reasons the GPU reports: whether one of them is absent now is unknown."""
    for gpu in sweep.driver.gpus:
        gpu.clock_events_supported = 1
    await sweep.source.close()
    await refused(sweep, "nvmlDeviceGetSupportedClocksEventReasons", Code.UNKNOWN)
    assert rows(sweep.last, "gpumap_gpu_clock_event", reason="hw_thermal_slowdown", gpu_uuid=SHARED) == []


# --- idleness ---------------------------------------------------------------------------------------------------------


def without_samples(node: TestNode) -> None:
    """SM time is refused for ten minutes."""
    node.gpus[0].has_samples = False
    for _ in range(120):
        node.collect()
    node.gpus[0].has_samples = True


def without_nvml(node: TestNode) -> None:
    """NVML does not answer for nearly five minutes."""
    node.down.add("nvml")
    for _ in range(58):
        node.collect()
    node.down.clear()
    node.rules = replace(node.rules, idle_after_seconds=60.0)


def asleep(node: TestNode) -> None:
    """The machine is suspended for an hour."""
    node.asleep += 3600


def stepped(node: TestNode) -> None:
    """The wall clock is set an hour forward, as when NTP starts after a boot."""
    node.wall_step = 3600.0


@pytest.mark.parametrize("unknown_time", [without_samples, without_nvml, asleep, stepped])
def test_time_without_known_use_is_no_idle_time(unknown_time: Callable[[TestNode], None]) -> None:
    """A container computed just before, and waits between two kernels after it."""
    node = TestNode([Gpu(0)], [pod := held("train")], [Process(1, CARD, pod, sm=0.9)])
    for _ in range(3):
        node.collect()
    node.processes[0].sm = 0.0
    unknown_time(node)
    found = kinds(node.collect())
    assert "idle" not in found, found


# --- sums -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [30.0, 60.0])
def test_sm_seconds_of_a_long_interval_are_those_that_samples_cover(interval: float) -> None:
    """The driver keeps 72 samples, here of 12 s: what was before them is not known to have been the same."""
    gpu = SampledGpu(lambda at: at % interval >= interval - 10, interval=interval)
    assert gpu.sm_seconds([interval * number for number in range(1, 6)]) <= 4 * 13


# --- the sweep --------------------------------------------------------------------------------------------------------

CODES = (1, 2, 3, 4, 6, 7, 10, 13, 15, 16, 21, 25, 28, 999)


SAYS_THAT_THERE_IS_NONE = {
    "nvmlDeviceGetMigDeviceHandleByIndex": (2, 6),
    "nvmlDeviceGetUUID": (2, 6),
    "nvmlDeviceGetProcessUtilization": (6,),
}
"""Calls with codes that are answers: the slot has no MIG device (go-nvlib), and the GPU is idle (nvml-wrapper#56)."""


async def test_sweep_has_activity_however_fast_it_reads(sweep: Sweep) -> None:
    """A reading that follows the last one at once has GPM's values. Each series is there on a fast machine, too."""
    for _ in range(3):
        answer = await sweep.source.read(0.1, 60.0)
    activities = [gpu.activity for gpu in answer.value.gpus if gpu.uuid == HOPPER]
    assert [activity.dram_ratio for activity in activities if activity] == [0.4]


@pytest.mark.e2e
@pytest.mark.parametrize("code", CODES)
async def test_no_refusal_makes_a_value_lie(sweep: Sweep, code: int) -> None:
    """Each call, refused for one collection: each series is equal, absent, or a counter that is not smaller."""
    lies = {
        call: found
        for call in sorted(standin.FUNCTIONS)
        if code not in SAYS_THAT_THERE_IS_NONE.get(call, ())
        if any((found := await refuse(sweep, call, "*", code, 1)).values())
    }
    assert lies == {}


# --- recording rules --------------------------------------------------------------------------------------------------

RULES_FOLDER = Path(__file__).parent.parent / "rules"
UTILIZATION = "namespace_pod:gpumap_container_sm_seconds_per_allocated_gpu:ratio_rate2m"
IDLE_SECONDS = "cluster_namespace:gpumap_container_idle_gpu_seconds:rate5m"


@pytest.mark.parametrize(
    ("rules", "record", "at", "truth"),
    [("autoscaling", UTILIZATION, "4m30s", 0.9), ("fleet", IDLE_SECONDS, "5m", 0.1)],
)
def test_rules_take_no_unknown_sm_time_for_idleness(
    tmp_path: Path, rules: str, record: str, at: str, truth: float
) -> None:
    """A pod computes 0.9 of the time."""
    target = 'job="gpumap",instance="a",node="n"'
    own = f'{{{target},namespace="ml",pod="p",container="main",uuid="GPU-1"}}'
    before, unknown, after = 12, 5, 8  # scrapes, one in 15 s
    counted = [13.5 * number for number in range(before)]
    counted += [counted[-1] + 13.5] * (unknown + 1)
    counted += [counted[-1] + 13.5 * number for number in range(1, after)]
    answer = ["0.9"] * before + ["stale"] + ["_"] * (unknown - 1) + ["0.9"] * after
    steady = before + unknown + after
    values: dict[str, Sequence[object]] = {
        f"gpumap_container_sm_seconds_total{own}": counted,
        f"gpumap_container_sm_utilization_ratio{own}": answer,
        f"gpumap_container_allocated_gpu_seconds_total{own}": [15 * number for number in range(steady)],
        f"gpumap_container_allocated_gpus{own}": [1] * steady,
        f"gpumap_allocation_info{own}": [1] * steady,
        f"gpumap_container_gpu_processes{own}": [1] * steady,
        f'gpumap_accounting_gap_seconds_total{{{target},gpu_uuid="GPU-1"}}': [0] * steady,
    }
    series = {name: " ".join(map(str, row)) for name, row in values.items()}
    # Absent, or not farther from the truth than a rate over two or five minutes may be.
    wrong = f"abs({record} - {truth}) > 0.1", at, dict[str, float]()
    assert_answers(tmp_path, series, wrong, rules=[RULES_FOLDER / f"{rules}.yaml"], interval="15s")


async def test_an_id_by_minor_number_stays_on_its_gpu(sweep: Sweep) -> None:
    """GKE's ids are names of device nodes. NVML refuses the minor number of a known GPU to a new worker once."""
    pod = Pod("ml", "gke", {"main": {"nvidia.com/gpu": ["nvidia3"]}})
    for node in (sweep.node, sweep.twin):
        node.pods.append(pod)
    await sweep.collect()
    assert rows(sweep.last, "gpumap_allocation_info", pod="gke", uuid=HOPPER) == [1]
    await sweep.source.close()
    await refused(sweep, "nvmlDeviceGetMinorNumber", Code.UNKNOWN)
    assert rows(sweep.last, "gpumap_unmatched_slots", pod="gke") == []


async def test_a_gpu_with_the_uuid_of_another_is_counted(sweep: Sweep) -> None:
    """Two GPUs answer with one uuid: one of them is not measured, and is listed as a GPU without a device."""
    sweep.driver.gpus[3].uuid = SHARED
    await sweep.collect()
    await sweep.collect()
    gpus = len(rows(sweep.last, "gpumap_gpu_up")) + len(rows(sweep.last, "gpumap_gpu_without_device_info"))
    assert gpus == len(sweep.driver.gpus)
