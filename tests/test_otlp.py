"""--otlp-endpoint: what is sent is what /metrics has, and no server that fails, hangs or refuses disturbs gpumap."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace

import pytest
from aiohttp import web
from msgspec import structs
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE, Metric, NumberDataPoint
from prometheus_client.parser import text_string_to_metric_families

from gpumap.agent.dialects import DIALECTS
from gpumap.agent.flags import GROUPS
from gpumap.agent.metrics import native, self_families
from gpumap.agent.otlp import OtlpExposition
from gpumap.agent.web.pages import Pages
from gpumap.agent.web.push import push
from gpumap.model.families import Family, Series
from gpumap.model.observations import ContainerName, Moment
from gpumap.model.snapshot import Snapshot
from tests.agent import PATIENCE_SECONDS, run_agent, until
from tests.command import run_command
from tests.snapshots import busy_node, empty_node, row

Sample = tuple[str, frozenset[tuple[str, str]], float]
PATH = "/v1/metrics"
EVERYTHING = (*native(GROUPS, process_metrics=True), *(one for each in DIALECTS.values() for one in each.families))
NODE = {"service.instance.id": "node-1", "k8s.node.name": "node-1", "host.name": "node-1"}


def decoded(body: bytes) -> ExportMetricsServiceRequest:
    return ExportMetricsServiceRequest.FromString(body)


def metrics_of(request: ExportMetricsServiceRequest) -> list[Metric]:
    (resource,) = request.resource_metrics
    (scope,) = resource.scope_metrics
    return list(scope.metrics)


def samples_of(request: ExportMetricsServiceRequest) -> Iterator[Sample]:
    """As Prometheus would write them."""
    for metric in metrics_of(request):
        numbers = [*metric.gauge.data_points, *metric.sum.data_points]
        for point in numbers:
            yield metric.name, labels_of(point), point.as_double
        for summary in metric.summary.data_points:
            labels = frozenset((one.key, one.value.string_value) for one in summary.attributes)
            yield f"{metric.name}_sum", labels, summary.sum
            yield f"{metric.name}_count", labels, summary.count


def labels_of(point: NumberDataPoint) -> frozenset[tuple[str, str]]:
    return frozenset((one.key, one.value.string_value) for one in point.attributes)


def samples_on(page: bytes) -> Iterator[Sample]:
    text = page.decode()
    names = set(re.findall(r"^\w+", text, re.MULTILINE))
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            # The parser adds _total to a counter that has it not.
            name = one.name if one.name in names else one.name.removesuffix("_total")
            if not one.name.startswith("process_"):
                yield name, frozenset(one.labels.items()), one.value


def pages_of(stale_after_seconds: float = 60.0, monotonic: Callable[[], float] = lambda: 10.0) -> Pages:
    return Pages(EVERYTHING, self_families("1", "3"), {}, stale_after_seconds, monotonic, otlp_version="1.2.3")


def odd_node() -> Snapshot:
    """A name that is not UTF-8."""
    node = busy_node(1, 1)
    strange = structs.replace(row("pod", node.leaves[0].uuid), name=ContainerName("team", "a\udcffb", "main"))
    return replace(node, containers=(*node.containers, strange))


@pytest.mark.parametrize("snapshot", [busy_node(4), busy_node(1, 0), empty_node(), odd_node()])
async def test_the_request_has_what_the_page_has(snapshot: Snapshot) -> None:
    """Each sample of /metrics once, with its name, labels and value, and the families' kinds and texts."""
    pages = pages_of()
    pages.publish(snapshot)
    try:
        body = await pages.page("otlp", gzipped=True)
        page = await pages.page("text", gzipped=False)
    finally:
        pages.close()
    assert body is not None
    assert page is not None
    request = decoded(gzip.decompress(body))
    found = list(samples_of(request))
    assert len(found) == len({one[:2] for one in found})
    assert set(found) == set(samples_on(page))
    (resource,) = request.resource_metrics
    named = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert named == {"service.name": "gpumap", "service.version": "1.2.3", **NODE}
    families = {one.name: one for one in (*EVERYTHING, *self_families("1", "3")) if isinstance(one, Family)}
    at = int(snapshot.at.wall * 1e9)
    for metric in metrics_of(request):
        if metric.name in families:
            family = families[metric.name]
            kind = {"gauge": "gauge", "counter": "sum", "summary": "summary"}[family.kind]
            assert (metric.WhichOneof("data"), metric.description) == (kind, family.help)
        numbers = [*metric.gauge.data_points, *metric.sum.data_points]
        times = {(one.time_unix_nano, one.start_time_unix_nano) for one in numbers}
        times |= {(one.time_unix_nano, one.start_time_unix_nano) for one in metric.summary.data_points}
        assert {time for time, _ in times} == {at}
        started = {start for _, start in times}
        assert started == ({0} if metric.HasField("gauge") else {at})
        if metric.HasField("sum"):
            assert metric.sum.is_monotonic
            assert metric.sum.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE


def test_units() -> None:
    """Each native family whose name ends in a unit has it in UCUM."""
    request = decoded(OtlpExposition(EVERYTHING, "1").render(busy_node(4)))
    units = {one.name: one.unit for one in metrics_of(request)}
    assert units["gpumap_device_memory_used_bytes"] == units["gpumap_gpu_nvlink_transmit_bytes_total"] == "By"
    assert units["gpumap_container_gpu_memory_byte_seconds_total"] == "By.s"
    assert units["gpumap_container_allocated_gpu_seconds_total"] == "s"
    assert (units["gpumap_gpu_power_watts"], units["gpumap_gpu_clock_hertz"]) == ("W", "Hz")
    assert (units["gpumap_gpu_temperature_celsius"], units["gpumap_gpu_energy_joules_total"]) == ("Cel", "J")
    assert (units["gpumap_container_sm_utilization_ratio"], units["gpumap_gpu_up"]) == ("1", "")


def test_the_start_of_a_counter() -> None:
    """The time of its first sample; a new one if it falls, if it was away, and if the clock went back."""
    values: list[tuple[str, float]] = []

    def read(_: Snapshot) -> Iterator[Series]:
        return (Series((name,), value) for name, value in values)

    exposition = OtlpExposition([Family("a_total", "counter", "A.", ("name",), read)], "1")

    def at(second: int, **now: float) -> dict[str, int]:
        values[:] = now.items()
        metrics = metrics_of(decoded(exposition.render(replace(empty_node(), at=Moment(0.0, float(second))))))
        points = [point for metric in metrics for point in metric.sum.data_points]
        return {dict(labels_of(one))["name"]: one.start_time_unix_nano // 10**9 for one in points}

    assert at(10, a=1e9) == {"a": 10}
    assert at(20, a=1e9, b=0) == {"a": 10, "b": 20}
    assert at(30, a=2e9, b=5) == {"a": 10, "b": 20}
    assert at(40, a=1, b=6) == {"a": 40, "b": 20}
    assert at(50, b=6) == {"b": 20}
    assert at(60, a=2, b=6) == {"a": 60, "b": 20}
    assert at(15, a=3, b=7) == {"a": 15, "b": 15}


# --- sending ----------------------------------------------------------------------------------------------------------


class Receiver:
    """A server for OTLP. `answer` makes its answers."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.answer: Callable[[web.Request], Awaitable[web.StreamResponse]] = self.accept

    async def accept(self, _: web.Request) -> web.StreamResponse:
        return web.Response(body=ExportMetricsServiceResponse().SerializeToString())

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((dict(request.headers), await request.read()))
        return await self.answer(request)

    async def received(self, count: int) -> None:
        async def ask() -> int:
            return len(self.requests)

        await until(ask, lambda found: found >= count, f"{count} requests do not come")


@contextlib.asynccontextmanager
async def receiver() -> AsyncIterator[Receiver]:
    found = Receiver()
    app = web.Application()
    app.router.add_post(PATH, found.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        found.url = f"http://{host}:{port}"
        yield found
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def pushing(
    pages: Pages, url: str, headers: dict[str, str] | None = None, timeout_seconds: float = PATIENCE_SECONDS
) -> AsyncIterator[asyncio.Task[None]]:
    """The pages, sent again and again."""
    task = asyncio.create_task(push(pages, f"{url}{PATH}", headers or {}, 0.02, timeout_seconds))
    try:
        yield task
        assert not task.done(), "it goes on, whatever the server does"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        pages.close()


def by_name(url: str) -> str:
    return url.replace("127.0.0.1", "localhost")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage().partition(" endpoint=")[0] for one in caplog.records if "otlp" in one.getMessage()]


async def logged(caplog: pytest.LogCaptureFixture, line: str) -> None:
    async def ask() -> list[str]:
        return lines(caplog)

    await until(ask, lambda found: line in found, f"{line} is not logged")


async def test_each_snapshot_is_sent_once(caplog: pytest.LogCaptureFixture) -> None:
    """With the headers that a server requires; the log has one line."""
    caplog.set_level(logging.INFO)
    pages = pages_of()
    async with receiver() as server, pushing(pages, by_name(server.url), {"Authorization": "Bearer x"}):
        await asyncio.sleep(0.1)
        assert server.requests == [], "there is no snapshot yet"
        pages.publish(busy_node(1))
        await server.received(1)
        await asyncio.sleep(0.2)
        assert len(server.requests) == 1, "it has not changed"
        pages.publish(busy_node(2))
        await server.received(2)
        headers, body = server.requests[0]
        await logged(caplog, "otlp works")
    assert headers["Content-Type"] == "application/x-protobuf"
    assert (headers["Content-Encoding"], headers["Authorization"]) == ("gzip", "Bearer x")
    assert headers["User-Agent"] == "gpumap"
    assert len(metrics_of(decoded(body))) > 50
    assert lines(caplog) == ["otlp works"]


async def test_stale_data_is_not_sent() -> None:
    """L6: also not what is known of sources then."""
    now = 10.0
    pages = pages_of(60.0, lambda: now)
    pages.publish(busy_node(1))
    now = 100.0
    async with receiver() as server, pushing(pages, server.url):
        await asyncio.sleep(0.2)
        assert server.requests == []
        pages.publish(replace(busy_node(1), at=Moment(now, 2e9)))
        await server.received(1)


def answering(**kwargs: object) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(**kwargs)  # type: ignore[arg-type] # of each its own

    return answer


REJECTED = ExportMetricsServiceResponse()
REJECTED.partial_success.rejected_data_points = 7
REJECTED.partial_success.error_message = "out of\norder 'x'"


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (answering(status=400), "otlp failed status=400"),
        (answering(status=503, headers={"Retry-After": "soon"}), "otlp failed status=503"),
        (answering(status=429, headers={"Retry-After": "0"}), "otlp failed status=429"),
        (answering(status=302, headers={"Location": "/"}), "otlp failed status=302"),
        (answering(body=REJECTED.SerializeToString()), "otlp rejected points=7 reason='out of order x'"),
    ],
)
async def test_a_server_that_refuses(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line, however often; newer data is sent after that, and one line says that it works again."""
    caplog.set_level(logging.INFO)
    pages = pages_of()
    async with receiver() as server, pushing(pages, server.url):
        server.answer = answer
        for count in range(1, 4):
            pages.publish(busy_node(1))
            await server.received(count)
        await logged(caplog, line)
        server.answer = server.accept
        pages.publish(busy_node(1))
        await logged(caplog, "otlp works")
    assert lines(caplog) == [line, "otlp works"]


@pytest.mark.parametrize("body", [b"ok", b'{"partialSuccess":{}}', b"\xff" * 100_000])
async def test_answers_of_other_kinds(body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """A server may answer 200 with something else: text, JSON, anything large."""
    caplog.set_level(logging.INFO)
    pages = pages_of()
    pages.publish(busy_node(1))
    async with receiver() as server:
        server.answer = answering(body=body)
        async with pushing(pages, server.url):
            await logged(caplog, "otlp works")


async def test_cookies_are_not_kept() -> None:
    """A server that sets another cookie each time fills no memory."""
    pages = pages_of()
    async with receiver() as server:
        server.answer = answering(headers={"Set-Cookie": "a=b"})
        async with pushing(pages, by_name(server.url)):
            for count in (1, 2):
                pages.publish(busy_node(1))
                await server.received(count)
    assert "Cookie" not in server.requests[1][0]


async def test_a_name_that_no_lookup_takes(caplog: pytest.LogCaptureFixture) -> None:
    """It ends a request and not gpumap."""
    pages = pages_of()
    pages.publish(busy_node(1))
    async with pushing(pages, "http://a..b"):
        await logged(
            caplog, "otlp failed reason='encoding with idna codec failed (UnicodeError: label empty or too long)'"
        )


async def test_retry_after(caplog: pytest.LogCaptureFixture) -> None:
    """The server is left alone for as long as it asks, and gets only the newest values after that."""
    caplog.set_level(logging.INFO)
    pages = pages_of()
    async with receiver() as server, pushing(pages, server.url):
        server.answer = answering(status=503, headers={"Retry-After": "2"})
        pages.publish(busy_node(1))
        await server.received(1)
        since = asyncio.get_running_loop().time()
        server.answer = server.accept
        pages.publish(busy_node(2))
        pages.publish(busy_node(3))
        await server.received(2)
        assert asyncio.get_running_loop().time() - since > 1.5
        await asyncio.sleep(0.1)
        assert len(server.requests) == 2, "nothing was queued"


async def test_a_server_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    """A request ends at its deadline, pages are served meanwhile, and the next request has the newest values."""
    caplog.set_level(logging.INFO)
    pages = pages_of()
    released = asyncio.Event()

    async def hang(_: web.Request) -> web.StreamResponse:
        await released.wait()
        return web.Response()

    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while not released.is_set():
            await response.write(b"x")
            await asyncio.sleep(0.05)
        return response

    async with receiver() as server, pushing(pages, server.url, timeout_seconds=0.3):
        for count, answer in enumerate((hang, trickle, hang), 1):
            server.answer = answer
            pages.publish(busy_node(count))
            await server.received(count)
            assert await pages.page("text", gzipped=False)
        await logged(caplog, "otlp failed reason='no answer in time'")
        released.set()
        server.answer = server.accept
        pages.publish(busy_node(1))
        await logged(caplog, "otlp works")


async def test_no_server(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing listens there, no such host: one line each."""
    caplog.set_level(logging.INFO)
    for url in ("http://127.0.0.1:1", "http://no.such.host.invalid:4318"):
        pages = pages_of()
        pages.publish(busy_node(1))
        async with pushing(pages, url):

            async def ask() -> list[str]:
                return lines(caplog)

            await until(ask, bool, "it is not logged")
        (line,) = lines(caplog)
        assert line.startswith("otlp failed reason='Cannot connect to host ")
        caplog.clear()


# --- as installed -----------------------------------------------------------------------------------------------------


async def test_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends after its first collection, serves while the server hangs, and ends at once."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20b, X-Team = ml ")
    released = asyncio.Event()

    async def hang(_: web.Request) -> web.StreamResponse:
        await released.wait()
        return web.Response()

    async with receiver() as server:
        server.answer = hang
        async with run_agent("demo", "--interval", "200ms", "--otlp-endpoint", f"{server.url}/") as agent:
            await server.received(1)
            await agent.later(2)
        released.set()
    headers, body = server.requests[0]
    assert (headers["api-key"], headers["X-Team"]) == ("a b", "ml")
    names = {one.name for one in metrics_of(decoded(body))}
    assert {"gpumap_gpu_up", "gpumap_build_info", "pod_and_gpu_map_info", "gpumap_source_duration_seconds"} <= names


@pytest.mark.parametrize(
    ("url", "headers", "says"),
    [
        ("collector:4318", "", "--otlp-endpoint: must be a URL such as http://collector:4318, without a query"),
        ("http://", "", "--otlp-endpoint: must be a URL"),
        ("http://a:0", "", "--otlp-endpoint: must be a URL"),
        ("http://a:99999", "", "--otlp-endpoint: must be a URL"),
        ("http://a..b", "", "--otlp-endpoint: must be a URL"),
        (f"http://{'a' * 64}.b", "", "--otlp-endpoint: must be a URL"),
        ("http://a/?token=secret", "", "--otlp-endpoint: must be a URL"),
        ("http://me:secret@a", "", "--otlp-endpoint: must not contain a user; set $OTEL_EXPORTER_OTLP_HEADERS"),
        ("http://a", "secret", "$OTEL_EXPORTER_OTLP_HEADERS: must be name=value,name=value"),
        ("http://a", "a b=secret", "$OTEL_EXPORTER_OTLP_HEADERS: must be name=value,name=value"),
        (
            "http://a",
            "content-Length=secret",
            "$OTEL_EXPORTER_OTLP_HEADERS: must not contain content-Length, which gpumap",
        ),
        ("http://a", "a=secret%0d%0ab: c", "$OTEL_EXPORTER_OTLP_HEADERS: must be name=value,name=value"),
    ],
)
def test_mistakes(url: str, headers: str, says: str) -> None:
    """Exit code 2 and one line that repeats no secret."""
    done = run_command("serve", "--otlp-endpoint", url, OTEL_EXPORTER_OTLP_HEADERS=headers)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"gpumap: {says}")
    assert done.stderr.count("\n") == 1
    assert "secret" not in done.stderr
