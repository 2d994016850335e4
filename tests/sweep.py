"""A sweep over the stand-in's calls: each function refused with each code for so many collections.

A node whose truth does not change is collected twice: by readings of a worker whose calls are refused for a while, and
by its undisturbed reading. Each series of the disturbed page must be equal, absent, or, a counter, not larger than it
truly is and never smaller than it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from gpumap.agent.dialects import DIALECTS
from gpumap.agent.flags import ALL_DIALECTS
from gpumap.agent.metrics import GROUPS, native, self_families
from gpumap.agent.sources.nvml import NvmlSource
from gpumap.model.families import NumberedFamilies
from gpumap.model.observations import NvmlReading, SourceAnswer, SourceError
from gpumap.model.readings import CARD, Uuid
from gpumap.model.snapshot import Snapshot
from tests import standin
from tests.nodes import GIB, Pod, Process, TestNode
from tests.worker import worker_command

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
    source = NvmlSource(command, (*GROUPS, CARD))
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
