"""The law of energy: over any window, what containers were charged and what is unattributed is what the GPU used.

Increases are a scraper's, taken from the text of the page as decimals: the law holds to the last digit, also when pods
come and go, GPUs fail, drivers are loaded again, or the machine sleeps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal

from hypothesis import event, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gpumap.agent.exposition import Exposition
from gpumap.agent.metrics import native
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import ContainerName
from tests.examples import examples
from tests.nodes import GIB, Gpu, Pod, Process, TestNode

PAGE = Exposition(native(("accounting", "device"), process_metrics=False))
DEVICE = "gpumap_gpu_energy_joules_total"
UNATTRIBUTED = "gpumap_gpu_energy_unattributed_joules_total"
CONTAINER = "gpumap_container_energy_joules_total"
GAP = "gpumap_accounting_gap_seconds_total"
ALLOCATED = "gpumap_container_allocated_gpu_seconds_total"
SM = "gpumap_container_sm_seconds_total"
CHARGED = (
    ALLOCATED,
    SM,
    "gpumap_container_gpu_memory_byte_seconds_total",
    CONTAINER,
)
COUNTERS = frozenset({DEVICE, UNATTRIBUTED, GAP, *CHARGED})
Series = tuple[str, tuple[tuple[str, str], ...]]


def read_page(snapshot: Snapshot) -> dict[Series, Decimal]:
    """The counters of the page, each value as the text has it."""
    samples: dict[Series, Decimal] = {}
    for line in PAGE.render(snapshot).decode().splitlines():
        if line.partition("{")[0] not in COUNTERS:
            continue
        text = line.rpartition(" ")[2]
        (family,) = text_string_to_metric_families(line + "\n")
        (sample,) = family.samples
        samples[sample.name, tuple(sorted(sample.labels.items()))] = Decimal(text)
    return samples


@dataclass
class Scraper:
    """Adds up increases as Prometheus's increase() does; what is absent has none, and what is new has none yet."""

    last: dict[Series, Decimal] = field(default_factory=dict)
    total: dict[Series, Decimal] = field(default_factory=dict)
    now: dict[Series, Decimal] = field(default_factory=dict)
    """Only of the last page."""

    def scrape(self, page: dict[Series, Decimal]) -> None:
        self.now = {}
        for series, value in page.items():
            before = self.last.get(series, value)
            self.now[series] = value - before if value >= before else value
            self.total[series] = self.total.get(series, Decimal(0)) + self.now[series]
        self.last |= page

    def sum(self, name: str, uuid: Uuid, *, now: bool = False) -> Decimal:
        found = self.now if now else self.total
        own = (value for (other, labels), value in found.items() if other == name and uuid in dict(labels).values())
        return sum(own, Decimal(0))


@st.composite
def nodes(draw: st.DrawFn) -> TestNode:
    """One or two GPUs, shared in quarters or given whole, with processes of pods, of the host, and of gone pods."""
    gpus = [
        Gpu(
            index,
            mig=draw(st.sampled_from([None] * 11 + [[(1, 0, 3), (2, 0, 4)]])),
            has_samples=draw(st.sampled_from([True] * 11 + [False])),
            millijoules=draw(st.sampled_from([0, 1, 2, 999_999_999_999, None])),
        )
        for index in range(draw(st.integers(1, 2)))
    ]
    pods: list[Pod] = []
    for gpu in gpus:
        count = draw(st.integers(1, 4))
        pods += [_pod(gpu, n, draw(st.integers(1, 2)), shared=draw(st.booleans()) or n > 0) for n in range(count)]
    shared = [f"{gpu.uuid}::{n}" for gpu in gpus for n in range(8)]
    node = TestNode(gpus, pods, registered={"nvidia.com/gpu.shared": shared})
    for pid in range(100, 100 + draw(st.integers(1, 6))):
        leaf = draw(st.sampled_from([leaf for gpu in gpus for leaf in gpu.leaves]))
        node.processes.append(Process(pid, leaf, draw(st.sampled_from([*pods, None])), sm=draw(_SM)))
    return node


_SM = st.sampled_from([0.0, 0.0, 0.1, 1 / 3, 0.75, 1.0])


def _pod(gpu: Gpu, number: int, slots: int, *, shared: bool) -> Pod:
    if shared and gpu.mig is None:
        ids = [f"{gpu.uuid}::{2 * number + slot}" for slot in range(slots)]
        return Pod("ml", f"pod{gpu.index}-{number}", {"main": {"nvidia.com/gpu.shared": ids}})
    return Pod("ml", f"pod{gpu.index}-{number}", {"main": {"nvidia.com/gpu": [gpu.leaves[number % len(gpu.leaves)]]}})


def live_on(data: st.DataObject, node: TestNode, taken: list[Gpu]) -> float:
    """Change what a machine's life changes, and give the seconds until the next collection."""
    node.down = set(data.draw(st.sampled_from([[]] * 20 + [["nvml"], ["kubelet"], ["procfs"], ["pod_identity"]])))
    node.visible = data.draw(st.sampled_from([True] * 20 + [False]))
    node.asleep += data.draw(st.sampled_from([0.0] * 20 + [0.5, 4000.0]))
    for gpu in node.gpus:
        gpu.sampled_seconds = data.draw(st.sampled_from([None] * 4 + [0.0, 0.0, 5.0, 1.2]))
        gpu.utilization = data.draw(st.sampled_from([None, 0.0, 0.5]))
        gpu.fault = data.draw(st.sampled_from([None] * 24 + ["lost", "hung"]))
        if gpu.millijoules is not None:
            gpu.millijoules += data.draw(st.sampled_from([1_000_003, 4_321, 7, 1, 0]))
            gpu.millijoules = data.draw(st.sampled_from([gpu.millijoules] * 9 + [gpu.millijoules // 3]))
    if data.draw(st.sampled_from([False] * 19 + [True])) and node.gpus:
        taken.append(node.gpus.pop(data.draw(st.integers(0, len(node.gpus) - 1))))
    elif data.draw(st.booleans()) and taken:
        node.gpus.append(taken.pop())
    node.gpus.sort(key=lambda gpu: gpu.index)
    for pod in node.pods:
        pod.listed = data.draw(st.sampled_from([pod.listed] * 9 + [not pod.listed]))
        pod.generation += data.draw(st.sampled_from([0] * 9 + [1]))
    if data.draw(st.sampled_from([False, False, True])):
        _replace_process(data, node)
    for process in node.processes:
        process.sm, process.memory = data.draw(_SM), data.draw(st.sampled_from([None, 0, GIB]))
        process.left = data.draw(st.sampled_from([False] * 15 + [True]))
    return data.draw(st.sampled_from([5.0] * 12 + [0.25, 64.0, 66.0, 301.0]))


def _replace_process(data: st.DataObject, node: TestNode) -> None:
    """One process ends, or moves to another pod as a new one; a pod without any is not seen while it is not listed."""
    process = data.draw(st.sampled_from(node.processes))
    process.pid += 100
    process.pod = data.draw(st.sampled_from([*node.pods, None]))


@dataclass
class Truth:
    """What a GPU's time should be counted as, worked out from the node."""

    elapsed: float = 0.0
    gap: float = 0.0
    read: bool = False
    away: bool = False


@settings(max_examples=examples(400))
@given(nodes(), st.data())
def test_energy_is_conserved_over_every_window(node: TestNode, data: st.DataObject) -> None:
    """Containers' and unattributed energy add up to the device's at every page, and counters never go back."""
    scraper, taken = Scraper(), list[Gpu]()
    truths: dict[Uuid, Truth] = {}
    before: Snapshot | None = None
    for _ in range(data.draw(st.integers(3, 12))):
        asleep = node.asleep
        seconds = live_on(data, node, taken)
        snapshot = node.collect(seconds)
        page = read_page(snapshot)
        never_back(scraper.last, page)
        scraper.scrape(page)
        answer = seconds + node.asleep - asleep
        whole = seconds <= 65 and node.asleep - asleep <= 1
        charged = tell_time(node, snapshot, truths, answer, whole=whole)
        check_energy(scraper, node, taken)
        check_time(scraper, snapshot, before, truths, charged)
        before = snapshot


def never_back(before: dict[Series, Decimal], page: dict[Series, Decimal]) -> None:
    """gpumap's own counters go back only after they were gone, to begin at 0."""
    for series, value in page.items():
        if series[0] != DEVICE:
            assert value >= before.get(series, value) or value == 0, series


def check_energy(scraper: Scraper, node: TestNode, taken: list[Gpu]) -> None:
    """The law, from the first page to this one; so it holds between any two."""
    for gpu in (*node.gpus, *taken):
        shared = scraper.sum(CONTAINER, gpu.uuid)
        assert shared + scraper.sum(UNATTRIBUTED, gpu.uuid) == scraper.sum(DEVICE, gpu.uuid)
        if shared:
            event("shared out")


def tell_time(
    node: TestNode, snapshot: Snapshot, truths: dict[Uuid, Truth], seconds: float, *, whole: bool
) -> dict[Uuid, float]:
    """Count the time since the last collection, and give the GPUs to charge."""
    charged: dict[Uuid, float] = {}
    up = "nvml" not in node.down
    answer = {gpu.uuid: up and gpu.fault is None for gpu in node.gpus}
    for uuid, truth in truths.items():
        read = answer.get(uuid, False)
        if truth.away:
            truth.away = not read
        elif up and uuid not in answer and not snapshot.node.nameless_gpus:
            truth.away = True
        else:
            truth.elapsed += seconds
            if whole and truth.read and read:
                charged[uuid] = seconds
            else:
                truth.gap += seconds
        truth.read = read
    truths.update((uuid, Truth(read=True)) for uuid, read in answer.items() if read and uuid not in truths)
    return charged


def check_time(
    scraper: Scraper,
    snapshot: Snapshot,
    before: Snapshot | None,
    truths: dict[Uuid, Truth],
    charged: dict[Uuid, float],
) -> None:
    gpu_of = {leaf.uuid: leaf.gpu_uuid for leaf in snapshot.node.devices if leaf.gpu_uuid}
    held = {(row.name, row.uuid): row.allocated_gpus for row in before.containers} if before else {}
    for (name, labels), more in scraper.now.items():
        words = dict(labels)
        uuid = Uuid(words.get("uuid") or words["gpu_uuid"])
        gpu = gpu_of.get(uuid, uuid)
        if name in CHARGED and gpu not in charged:
            assert more == 0, "charged in a gap"
        if name == SM:
            total = scraper.total[SM, labels]
            assert float(total) <= truths[gpu].elapsed - truths[gpu].gap + 1e-6, (
                "more than a second of SM time a second"
            )
        if name == ALLOCATED and gpu in charged:
            share = held.get((ContainerName(words["namespace"], words["pod"], words["container"]), uuid)) or 0.0
            assert abs(float(more) - share * charged[gpu]) < 1e-6
    gaps = {one.uuid: one.gap_seconds for one in snapshot.node.gpu_accounts}
    assert gaps.keys() == {uuid for uuid, truth in truths.items() if not truth.away}
    assert all(abs(gap - truths[uuid].gap) < 1e-3 for uuid, gap in gaps.items()), "charged and gap are all of the time"
    for uuid, seconds in charged.items():
        leaves = [leaf for leaf, gpu in gpu_of.items() if gpu == uuid]
        assert sum(float(scraper.sum(ALLOCATED, leaf, now=True)) for leaf in leaves) <= seconds + 1e-6
