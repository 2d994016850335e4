"""P5, P7 and P8: parts of a collection by themselves, in this process: rendering, the sweep, an unchanged List."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import grpc.aio
import prometheus_client
import pynvml
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bench import loop_sweeper
from bench.figures import Figure, median, microseconds
from bench.node import LARGE, RESOURCE, SMALL, Shape, node
from gpumap.agent.exposition import Exposition
from gpumap.agent.nvml_worker.library import Library
from gpumap.agent.nvml_worker.reading import GpuReader, HandleGeneration
from gpumap.agent.sources.kubelet import KubeletSource
from gpumap.lab.demo.kubelet import ALLOCATABLE, LIST, FakeKubelet
from gpumap.model.families import Family, Series
from gpumap.model.observations import DeviceId, ListedContainer, ListedPod, Moment, ResourceDevices
from gpumap.model.snapshot import Node, Snapshot

ROUNDS = 25
FAMILIES, SERIES = 10, 200
PODS = 110
EMPTY = Snapshot(Moment(0.0, 0.0), Node("bench", ""), (), (), ())


def _in_turn(*calls: Callable[[], object]) -> list[float]:
    """The median CPU time of each; the first rounds warm up."""
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for number, call in enumerate(calls):
            started = time.process_time()
            call()
            found[number].append(time.process_time() - started)
    return [median(each[3:]) for each in found]


def rendering(_: frozenset[str]) -> Iterator[Figure]:
    """P5: each value is another one each time."""
    yield _rendering("ints", 10**9, 0.05)
    yield _rendering("floats", 0.123456789, 0.07)


def _rendering(kind: str, first: float, limit: float) -> Figure:
    values = [first]
    families = [_family(number, values) for number in range(FAMILIES)]
    page, registry = Exposition(families), prometheus_client.CollectorRegistry()
    registry.register(_AsMetrics(families))

    def render() -> None:
        values[0] += 1
        page.render(EMPTY)

    def generate() -> None:
        values[0] += 1
        prometheus_client.generate_latest(registry)

    seen, theirs = _in_turn(render, generate)
    each = " : ".join(f"{seconds / (FAMILIES * SERIES) * 1e6:.2f}" for seconds in (seen, theirs))
    return Figure("P5", f"rendering : prometheus_client, {kind}", seen / theirs, limit, f"{each} µs a series")


def _family(number: int, values: list[float]) -> Family:
    labels = [("ml", f"train-{series}-abcde", "main", f"GPU-{series:032d}") for series in range(SERIES)]

    def read(_: Snapshot) -> list[Series]:
        return [Series(of_series, values[0]) for of_series in labels]

    return Family(f"bench_{number}_bytes", "gauge", "Of the bench.", ("namespace", "pod", "container", "uuid"), read)


class _AsMetrics(Collector):
    """The same families, as prometheus_client has them of values that are collected elsewhere."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = GaugeMetricFamily(family.name, family.help, labels=family.labels)
            for series in family.read(EMPTY):
                metric.add_metric(series.labels, series.value)
            yield metric


def sweep(_: frozenset[str]) -> Iterator[Figure]:
    """P7: calls and values, in one thread."""
    for shape in (SMALL, LARGE):
        with node(shape, plain=True) as made:
            os.environ.update(made.environment)
            seen, theirs, hundred = _sweeps(shape, str(made.library))
        absolute = f"{microseconds(seen)} : {microseconds(theirs)}; {hundred * 1e4:.1f} µs a call that does nothing"
        yield Figure("P7", f"sweep : the same reads through pynvml, {shape}", seen / theirs, 0.2, absolute)


def _sweeps(shape: Shape, path: str) -> list[float]:
    library = Library(path)
    library.open()
    pynvml.nvmlInit()
    readers = [GpuReader(library, index) for index in range(shape.gpus)]
    epoch = HandleGeneration(1, shape.gpus)
    try:
        return _in_turn(
            lambda: [reader.read(epoch, 1.0) for reader in readers],
            loop_sweeper.sweep,
            lambda: [library.count() for _ in range(100)],
        )
    finally:
        pynvml.nvmlShutdown()
        library.close()


class _Answered(KubeletSource):
    """The kubelet's source with the answers at hand: what it does with one, without the call."""

    def __init__(self, answers: Mapping[str, Sequence[bytes]]) -> None:
        super().__init__(Path("/none"))
        self._answers = answers
        self._reads = 0

    def read_now(self, loop: asyncio.AbstractEventLoop) -> None:
        self._reads += 1
        loop.run_until_complete(self.read(5.0))

    async def _connect(self) -> None:
        pass

    async def _call(self, method: str, *_: object) -> bytes:
        answers = self._answers[method]
        return answers[self._reads % len(answers)]


def unchanged_list(_: frozenset[str]) -> Iterator[Figure]:
    """P8."""
    loop = asyncio.new_event_loop()
    answers = loop.run_until_complete(_answers())
    same = _Answered({method: found[:1] for method, found in answers.items()})
    shuffled = _Answered(answers)
    again, seen_same, seen_shuffled = _in_turn(
        lambda: _Answered(answers).read_now(loop),
        lambda: same.read_now(loop),
        lambda: shuffled.read_now(loop),
    )
    loop.close()
    for name, seen, limit in (("same bytes", seen_same, 0.05), ("shuffled", seen_shuffled, 0.5)):
        absolute = f"{microseconds(seen)} : {microseconds(again)}, {PODS} pods"
        yield Figure("P8", f"unchanged List, {name} : decoding it again", seen / again, limit, absolute)


async def _answers() -> dict[str, list[bytes]]:
    """Some answers of one content, each in another order."""
    ids = [DeviceId(f"GPU-00000000-0000-0000-0000-{number:012d}") for number in range(PODS)]
    kubelet = FakeKubelet(Path("/none"))
    kubelet.set_allocatable([ResourceDevices(RESOURCE, tuple(ids))])
    kubelet.set_pods(
        [
            ListedPod("ml", f"train-{number}", (_container("main", id_), _container("sidecar")))
            for number, id_ in enumerate(ids)
        ]
    )
    no_context = cast("grpc.aio.ServicerContext[bytes, bytes]", None)  # only a refusal would show it
    return {method: [await kubelet.answer(method, b"", no_context) for _ in range(8)] for method in (LIST, ALLOCATABLE)}


def _container(name: str, *ids: DeviceId) -> ListedContainer:
    return ListedContainer(name, (ResourceDevices(RESOURCE, ids),) if ids else ())
