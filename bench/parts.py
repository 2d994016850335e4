"""P5 and P8: parts of a collection by themselves, in this process: rendering, and an unchanged List."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import grpc.aio
import prometheus_client
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bench.figures import Figure, mean, median, microseconds, noise
from bench.node import RESOURCE
from gpumap.agent.exposition import Exposition
from gpumap.agent.sources.kubelet import KubeletSource
from gpumap.lab.demo.kubelet import ALLOCATABLE, LIST
from gpumap.model.families import Family, Series
from gpumap.model.node import Node
from gpumap.model.observations import DeviceId, ListedContainer, ListedPod, Moment, ResourceDevices
from gpumap.model.snapshot import Snapshot
from tests.kubelet import FakeKubelet

ROUNDS = 25
FAMILIES, SERIES = 10, 200
PODS = 110
APART_SECONDS = 0.11
"""Between two readings: NVML compares samples of GPM that are more than 100 ms apart."""
EMPTY = Snapshot(Moment(0.0, 0.0), Node(timestamp=0.0, name="bench"))


def _in_turn(*calls: Callable[[], object], apart_seconds: float = 0.0) -> list[float]:
    """The median CPU time of each, in another order each time; the first rounds warm up."""
    found: list[list[float]] = [[] for _ in calls]
    places = list(enumerate(calls))
    order = random.Random(1)
    for _ in range(ROUNDS):
        time.sleep(apart_seconds)
        order.shuffle(places)  # what comes next finds another cache
        for number, call in places:
            started = time.process_time()
            call()
            found[number].append(time.process_time() - started)
    return [median(each[3:]) for each in found]


def rendering(_: frozenset[str]) -> Iterator[Figure]:
    """P5: each value is another one each time."""
    yield _rendering("ints", 10**9, 0.07)
    yield _rendering("floats", 0.123456789, 0.11)


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

    one, another, theirs = _in_turn(render, render, generate)
    seen = mean((one, another))
    each = " : ".join(f"{seconds / (FAMILIES * SERIES) * 1e6:.2f}" for seconds in (seen, theirs))
    what = f"rendering : prometheus_client, {kind}"
    return Figure("P5", what, seen / theirs, limit, f"{each} µs a series", noise=noise((one, another)))


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
    same = [_Answered({method: found[:1] for method, found in answers.items()}) for _ in range(2)]
    shuffled = [_Answered(answers) for _ in range(2)]
    again, *seen = _in_turn(
        lambda: _Answered(answers).read_now(loop),
        *[functools.partial(one.read_now, loop) for one in (*same, *shuffled)],
    )
    loop.close()
    for name, copies, limit in (("same bytes", seen[:2], 0.05), ("shuffled", seen[2:], 0.5)):
        absolute = f"{microseconds(mean(copies))} : {microseconds(again)}, {PODS} pods"
        what = f"unchanged List, {name} : decoding it again"
        yield Figure("P8", what, mean(copies) / again, limit, absolute, noise=noise(copies))


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
