"""The endpoints over real sockets: negotiation, compression, readiness, staleness, and clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import jsonschema
import pytest
from msgspec import structs

from gpumap.agent.dialects.small import POD_GPU_MAP, node_family
from gpumap.agent.flags import DEFAULT_GROUPS
from gpumap.agent.metrics import native, self_families
from gpumap.agent.web.app import application
from gpumap.agent.web.pages import Pages
from gpumap.agent.web.port import MAX_CONNECTIONS, PATIENCE_SECONDS, open_port
from gpumap.agent.web.requests import is_foreign
from gpumap.model.node import SourceHealth
from gpumap.model.observations import Moment
from gpumap.model.readings import DeviceMemory, Uuid
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import Source
from tests.agent import run_agent, until
from tests.demo_process import GPUMAP
from tests.dialect_pages import card, holder, node, used
from tests.memory_group import memory_group
from tests.snapshots import busy_node, with_node

STALE_AFTER_SECONDS = 60.0
UUID = Uuid("GPU-00000000-0000-0000-0000-000000000001")
WEIRD = 'a\\b"c\nd'
"""What has to be escaped in a label."""

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PROMETHEUS_2_42 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
PROMETHEUS_3_PROTOBUF = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6," + PROMETHEUS_3
)
PROMETHEUS_TEXT_ONLY = "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"


def snapshot(at: float = 0.0, containers: int = 2) -> Snapshot:
    """One GPU held by some containers, of which the first has a name that must be escaped."""
    pods = [WEIRD, *(f"pod-{number}" for number in range(1, containers))]
    holders = [holder(("ml", pod, "main"), UUID, used(1024, 0.25)) for pod in pods]
    moment = Moment(at, 1_700_000_000.0 + at)
    sources = tuple(
        SourceHealth(source.value, up=True, last_success=moment.wall, attempts=3, errors={"rate_limited": 2})
        for source in Source
    )
    made = node("7-node.example", [card(0, UUID, "NVIDIA A100")], holders)
    devices = (structs.replace(*made.node.devices, memory=DeviceMemory(80 << 30, 3 << 30, 77 << 30)),)
    made = with_node(made, devices=devices, sources=sources, timestamp=moment.wall)
    return replace(made, at=moment, answered=dict.fromkeys(Source, at), collections=(("interval", 3),))


@dataclass
class Site:
    """The application as it is served, with a clock of its own."""

    pages: Pages
    session: aiohttp.ClientSession
    url: str
    port: int
    seconds: float = 0.0

    async def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
        """Status, content type, and text, uncompressed."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.request(method, self.url + path, headers=named) as response:
            body = await response.read()
            if response.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            return response.status, response.headers.get("Content-Type", ""), body.decode()


@contextlib.asynccontextmanager
async def serving(
    *,
    nodes: bool = True,
    patience_seconds: float = PATIENCE_SECONDS,
    max_connections: int = MAX_CONNECTIONS,
) -> AsyncIterator[Site]:
    families = (*native(DEFAULT_GROUPS, process_metrics=True), *POD_GPU_MAP)
    pages = Pages(
        families,
        self_families("1.2.3", "3.11"),
        {"/metrics/nodes": (node_family("7-node.example"),)} if nodes else {},
        STALE_AFTER_SECONDS,
        lambda: site.seconds,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with aiohttp.ClientSession(auto_decompress=False, skip_auto_headers=["Accept-Encoding"]) as session:
            site = Site(pages, session, f"http://127.0.0.1:{port}", port)
            served = open_port(
                application(pages),
                listener,
                patience_seconds=patience_seconds,
                max_connections=max_connections,
            )
            try:
                async with served:
                    yield site
            finally:
                pages.close()


@pytest.fixture(name="site")
async def start_site() -> AsyncIterator[Site]:
    """A site with a snapshot."""
    async with serving() as site:
        site.pages.publish(snapshot())
        yield site


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        pytest.param(PROMETHEUS_2_42, OPENMETRICS, id="Prometheus 2.42"),
        pytest.param(PROMETHEUS_3, OPENMETRICS, id="Prometheus 3"),
        pytest.param(PROMETHEUS_3_PROTOBUF, OPENMETRICS, id="Prometheus 3 with protobuf"),
        pytest.param(PROMETHEUS_TEXT_ONLY, TEXT, id="Prometheus 3, text protocols only"),
        pytest.param("*/*", TEXT, id="curl"),
        pytest.param("text/html,application/xhtml+xml,*/*;q=0.8", TEXT, id="a browser"),
        pytest.param("application/openmetrics-text", OPENMETRICS, id="any OpenMetrics"),
        pytest.param('application/openmetrics-text; version="1.0.0"', OPENMETRICS, id="quoted version"),
        pytest.param("Application/OpenMetrics-Text;VERSION=1.0.0", OPENMETRICS, id="capitals"),
        pytest.param("application/openmetrics-text;version=0.0.1", TEXT, id="OpenMetrics 0.0.1 only"),
        pytest.param("application/openmetrics-text;version=2.0.0", TEXT, id="OpenMetrics 2 only"),
        pytest.param(
            "application/openmetrics-text;version=2.0.0;q=0.9,text/plain;q=0.5", TEXT, id="OpenMetrics 2 with a weight"
        ),
        pytest.param("application/openmetrics-text;version=1.0.0;q=0.2,text/plain;q=0.3", TEXT, id="text is dearer"),
        pytest.param(
            "text/plain;q=0.3,application/openmetrics-text;version=1.0.0;q=0.4", OPENMETRICS, id="OM is dearer"
        ),
        pytest.param("application/openmetrics-text;version=1.0.0;q=0", TEXT, id="OpenMetrics refused"),
        pytest.param("application/openmetrics-text;version=1.0.0;q=high", TEXT, id="no number"),
        pytest.param(",;,=;q", TEXT, id="nonsense"),
    ],
)
async def test_the_client_chooses_the_format(site: Site, accept: str, content_type: str) -> None:
    """OpenMetrics 1.0 for who wants it at least as much as text, else text; each ends as its format does."""
    status, found, text = await site.get("/metrics", Accept=accept)
    assert (status, found) == (200, content_type)
    assert text.endswith("# EOF\n") == (content_type == OPENMETRICS)


@pytest.mark.parametrize(
    ("accepted", "gzipped"),
    [
        ("gzip", True),
        ("gzip, deflate, br", True),
        ("deflate, GZIP;q=0.5", True),
        ("gzip;q=0", False),
        ("gzip;q=0.0, identity", False),
        ("identity", False),
        ("br", False),
        ("", False),
    ],
)
async def test_pages_are_compressed_on_request(site: Site, accepted: str, gzipped: bool) -> None:
    """gzip where it is accepted, and the same page either way; caches are reported that it varies."""
    async with site.session.get(f"{site.url}/metrics", headers={"Accept-Encoding": accepted}) as response:
        body = await response.read()
        assert (response.headers.get("Content-Encoding") == "gzip") == gzipped
        assert response.headers["Vary"] == "Accept, Accept-Encoding"
        assert int(response.headers["Content-Length"]) == len(body)
    text = (gzip.decompress(body) if gzipped else body).decode()
    assert _without_process(text) == _without_process((await site.get("/metrics"))[2])


def _without_process(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("process_")]


async def test_the_map_is_json(site: Site) -> None:
    status, content_type, text = await site.get("/api/v1/map")
    assert (status, content_type) == (200, "application/json")
    document = json.loads(text)
    assert document["version"] == 1
    assert {holder["pod"] for holder in document["devices"][0]["containers"]} == {WEIRD, "pod-1"}


async def test_pages_of_dialects_that_are_off_are_not_there() -> None:
    """/metrics/nodes is 404 without its dialect, and so is /metric. The answer lists the paths that exist."""
    async with serving(nodes=False) as site:
        site.pages.publish(snapshot())
        for path in ("/metrics/nodes", "/metric"):
            status, _, text = await site.get(path)
            assert (status, path in text.splitlines()) == (404, False)
            assert {"/", "/metrics", "/api/v1/map", "/api/v1/check", "/readyz"} < set(text.splitlines())
            assert "/page/" not in text


@pytest.mark.parametrize("path", ["/metrics", "/metrics/nodes", "/api/v1/map", "/healthz", "/readyz", "/"])
async def test_head_is_answered(site: Site, path: str) -> None:
    status, content_type, _ = await site.get(path)
    assert await site.get(path, "HEAD") == (status, content_type, "")
    assert status == 200
    assert (await site.get(path, "POST"))[0] == 405


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"junk\r\n\r\n", 400),
        (bytes(range(256)) * 8 + b"\r\n\r\n", 400),
        (bytes.fromhex("16030100c8010000c40303") + b"a" * 99 + b"\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET /" + b"x" * (1 << 20) + b" HTTP/1.0\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nX: " + b"x" * (1 << 20) + b"\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nno header\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nContent-Length: 4\r\nContent-Length: 9\r\n\r\nxxxx", 400),
        (b"GET /none HTTP/1.0\r\n\r\n", 404),
        (b"OPTIONS * HTTP/1.0\r\n\r\n", 404),
        (b"GET /../../../../etc/passwd HTTP/1.0\r\n\r\n", 404),
        (b"GET /page/..%2f..%2f..%2f..%2fetc%2fpasswd HTTP/1.0\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.0\r\nContent-Length: 1048576\r\n\r\n" + b"x" * (1 << 20), 405),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nExpect: junk\r\nConnection: close\r\n\r\n", 417),
        (b"GET / HTTP/1.0\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET /readyz HTTP/1.0\r\n\r\n", 500),
        (b"GET /healthz HTTP/1.0\r\n\r\n", 200),
    ],
    ids=lambda value: None if isinstance(value, int) else value[:24],
)
async def test_no_answer_names_software(site: Site, sent: bytes, status: int) -> None:
    """A peer that looks for old versions finds none, and no words of the libraries."""
    site.pages.why_late = lambda: str(1 // 0)
    site.seconds = STALE_AFTER_SECONDS + 1
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(sent)
    answer = b""
    with contextlib.suppress(ConnectionError):  # gpumap may answer and close before it has read everything
        while part := await reader.read(1 << 16):
            answer += part
    writer.close()
    assert re.match(rb"HTTP/1\.[01] %d " % status, answer)
    assert not re.search(rb"(?i)server:|python|aiohttp|\bb['\"]|division", answer)


async def test_the_page_needs_nothing_from_elsewhere(site: Site) -> None:
    """/ and every file that it names come from here, by relative addresses, under a policy that allows nothing else."""
    _, _, text = await site.get("/")
    named = re.findall(r'(?:src|href)="([^"#]+)"', text)
    assert {"page/main.js", "page/style.css"} <= set(named)
    assert not [name for name in named if name.startswith("/") or ":" in name]
    scripts = [name for name in named if name.endswith(".js")]
    assert scripts
    for path in ("/", *(f"/{name}" for name in named)):
        async with site.session.get(site.url + path) as response:
            assert response.status == 200, path
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            if path == "/":
                policy = response.headers["Content-Security-Policy"]
                assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';")
                assert "unsafe" not in policy
                assert all(f"{name} 'none'" in policy for name in ("base-uri", "form-action", "frame-ancestors"))
                assert response.headers["Referrer-Policy"] == "no-referrer"
            if path.endswith((".js", ".css")):
                assert not re.search(
                    rb"innerHTML|insertAdjacentHTML|document\.write|https?://(?!www\.w3\.org)", await response.read()
                )


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/api/v1/map", "/api/v1/history"])
async def test_what_one_has_is_not_sent_again(site: Site, path: str) -> None:
    """With the version it has a client gets 304 and nothing, compressed or not; with another, or none, all of it."""
    async with site.session.get(site.url + path) as response:
        etag, body = response.headers["ETag"], await response.read()
    for encoding in ("gzip", "identity"):
        for named in (etag, f'"other", {etag.removeprefix("W/")}', "*"):
            headers = {"If-None-Match": named, "Accept-Encoding": encoding}
            async with site.session.get(site.url + path, headers=headers) as response:
                assert (response.status, await response.read()) == (304, b"")
                assert response.headers["ETag"] == etag
    async with site.session.get(site.url + path, headers={"If-None-Match": '"other"'}) as response:
        assert (response.status, await response.read()) == (200, body)


async def test_each_snapshot_is_a_version(site: Site) -> None:
    """A new snapshot, and one that got too old, are new versions; another process never names one alike."""

    async def version(of: Site) -> str:
        async with of.session.get(f"{of.url}/api/v1/map") as response:
            return response.headers["ETag"]

    found = [await version(site)]
    site.pages.publish(snapshot())
    found.append(await version(site))
    site.seconds = STALE_AFTER_SECONDS + 1
    found += [await version(site), await version(site)]
    async with serving() as other:
        other.pages.publish(snapshot())
        found.append(await version(other))
    assert len(set(found)) == 4
    assert found[2] == found[3]


async def test_the_schema_is_served(site: Site) -> None:
    """/api/v1/map/schema.json is the schema of the docs, and the map follows it."""
    status, content_type, text = await site.get("/api/v1/map/schema.json")
    assert (status, content_type) == (200, "application/schema+json")
    assert text == (Path(__file__).parent.parent / "docs" / "reference" / "map.schema.json").read_text()
    jsonschema.validate(json.loads((await site.get("/api/v1/map"))[2]), json.loads(text))


async def test_the_history_is_json(site: Site) -> None:
    """/api/v1/history has a curve for each device and each container on one."""
    status, content_type, text = await site.get("/api/v1/history")
    assert (status, content_type) == (200, "application/json")
    found = {(one["uuid"], one["pod"]): one["memory_mib"] for one in json.loads(text)["series"]}
    assert found == {(UUID, None): [3072], (UUID, WEIRD): [1024], (UUID, "pod-1"): [1024]}


async def test_before_the_first_collection() -> None:
    """There is nothing to serve yet: 503 everywhere but on /healthz, which only says that the process lives."""
    async with serving() as site:
        for path in ("/metrics", "/metrics/nodes", "/api/v1/map", "/api/v1/history", "/readyz"):
            status, _, text = await site.get(path)
            assert status == 503
            assert "the first collection is not finished" in text
        assert (await site.get("/healthz"))[0] == 200
        assert (await site.get("/"))[0] == 200
        site.pages.publish(snapshot())
        assert (await site.get("/metrics"))[0] == 200
        assert (await site.get("/readyz"))[0] == 200


async def test_readiness(site: Site) -> None:
    """Ready while the kubelet or NVML has answered lately; else 503 with what each said."""

    def publish(kubelet: float | None, nvml: float | None) -> None:
        sources = (Source.KUBELET, Source.NVML, Source.PROCFS, Source.POD_IDENTITY)
        refused = tuple(SourceHealth(one.value, reason="refused", detail=f"by {one.value}") for one in sources)
        at = dict(zip(sources, (kubelet, nvml, site.seconds, site.seconds), strict=True))
        answered = {source.value: seconds for source, seconds in at.items() if seconds is not None}
        site.pages.publish(replace(with_node(snapshot(site.seconds), sources=refused), answered=answered))

    site.seconds = 1000.0
    publish(kubelet=None, nvml=None)
    status, _, text = await site.get("/readyz")
    assert status == 503
    assert text == "not ready: kubelet: refused by kubelet; nvml: refused by nvml\n"
    assert (await site.get("/healthz"))[0] == 200
    for kubelet, nvml in ((990.0, None), (None, 990.0), (900.0, 990.0)):
        publish(kubelet, nvml)
        assert (await site.get("/readyz"))[0] == 200


async def test_readiness_is_lost_without_new_snapshots(site: Site) -> None:
    """Then sources that had answered are not blamed: it says for how long nothing was collected, and why if known."""
    site.pages.why_late = lambda: "somebody asked for it"
    site.seconds = STALE_AFTER_SECONDS
    assert (await site.get("/readyz"))[0] == 200
    site.seconds += 7.0
    seconds = f"{STALE_AFTER_SECONDS + 7:.0f}"
    status, _, text = await site.get("/readyz")
    assert (status, text) == (503, f"not ready: no collection for {seconds} s: somebody asked for it\n")
    site.pages.why_late = str
    assert "collections are late, fail or hang" in (await site.get("/readyz"))[2]
    failed = SourceHealth(Source.KUBELET.value, up=False, reason="refused", detail="by kubelet")
    well = SourceHealth(Source.NVML.value, up=True)
    site.pages.publish(replace(with_node(snapshot(), sources=(failed, well)), answered={Source.NVML: 0.0}))
    assert (await site.get("/readyz"))[2].endswith("; kubelet: refused by kubelet\n")


async def test_a_stale_snapshot_is_not_served(site: Site) -> None:
    """Past --stale-after the page has only what gpumap says of itself; the map is empty, and says why."""
    site.pages.publish(replace(busy_node(2), at=Moment(0.0, 0.0)))
    site.seconds = STALE_AFTER_SECONDS
    current = (await site.get("/metrics"))[2]
    for name in ("container_gpu_memory_used_bytes", "xid_blind_seconds_total", "accounting_gap_seconds_total"):
        assert f"gpumap_{name}{{" in current
    assert json.loads((await site.get("/api/v1/map"))[2])["stale"] is None
    site.seconds += 0.001
    for accept in ("*/*", PROMETHEUS_3):
        status, _, text = await site.get("/metrics", Accept=accept)
        assert status == 200
        names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
        assert not [
            name
            for name in names
            if name.startswith(("gpumap_container", "gpumap_device", "gpumap_gpu", "gpumap_acc", "gpumap_xid", "pod_"))
        ]
        assert {"gpumap_source_up", "gpumap_snapshot_timestamp_seconds", "gpumap_build_info"} <= names
        assert "process_cpu_seconds_total" in names
    document = json.loads((await site.get("/api/v1/map"))[2])
    assert (document["devices"], document["gpus"], document["unmatched"]) == ([], [], [])
    assert (document["accounts"], document["container_xids"], document["device_health"]) == ([], [], None)
    assert document["sources"]
    assert document["stale"].startswith(f"no collection for more than {STALE_AFTER_SECONDS:g} s: ")
    assert (await site.get("/metrics/nodes"))[0] == 200
    site.pages.publish(snapshot(site.seconds))
    assert "gpumap_container_gpu_memory_used_bytes{" in (await site.get("/metrics"))[2]


HEAD = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
BAD_CLIENTS = {
    "says nothing": b"",
    "half a header": b"GET /metrics HTTP/1.1\r\nHost",
    "half a body": b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n12",
    "does not take a page": HEAD,
    "does not take many pages": HEAD * 8,
    "asks no more": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": bytes.fromhex("16030100a5010000a10303"),
}


async def test_no_client_stays_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    """Who asks nothing, does not finish, or does not take what it asked for is let go, while others are answered."""
    async with serving(patience_seconds=0.5) as site:
        site.pages.publish(snapshot(containers=8000))
        with contextlib.ExitStack() as stack:
            clients = {}
            for kind, message in [*BAD_CLIENTS.items()] * 6:
                client = stack.enter_context(socket.socket())
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", site.port))
                client.sendall(message)
                clients[client.getsockname()] = kind
            assert (await site.get("/healthz"))[0] == 200
            assert len((await site.get("/metrics"))[2]) > 4 << 20

            async def left() -> set[str]:
                return {clients[peer] for peer in accepted(site.port) & clients.keys()}

            await until(left, lambda found: not found, "these are still connected")
            assert (await site.get("/healthz"))[0] == 200
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def accepted(port: int) -> set[tuple[str, int]]:
    """The peers of this process's open connections on a port."""
    return {one.getpeername() for one in connections(port)}


def connections(port: int) -> Iterator[socket.socket]:
    """This process's open connections on a port, each as a second descriptor that is closed afterwards."""
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(path.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as one:
                    if one.family == socket.AF_INET and one.getsockname()[1] == port:
                        one.getpeername()  # raises for the listener
                        yield one


LIMIT_BYTES = 256 << 20
"""The chart's `resources.limits.memory`."""


async def test_clients_that_do_not_read_fit_into_a_pods_memory() -> None:
    """All places are taken by clients that ask again and again and never read: the chart's limit is not reached."""
    loop = asyncio.get_running_loop()
    with memory_group() as group, contextlib.ExitStack() as stack:
        async with run_agent("demo", parent=group.parent) as agent:
            await agent.page()
            clients = [stack.enter_context(socket.socket()) for _ in range(MAX_CONNECTIONS)]
            for number, client in enumerate(clients):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 19)  # so that much is in flight at once
                client.setblocking(False)
                client.bind((f"127.0.0.{2 + number % 4}", 0))
                await loop.sock_connect(client, ("127.0.0.1", int(agent.url.rpartition(":")[2])))
            most = 0
            for _ in range(60):
                for client, asks_often in zip(clients, itertools.cycle((False, True))):
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        client.send(HEAD * (400 if asks_often else 1))
                await asyncio.sleep(0.05)
                most = max(most, group.held_bytes())
            assert (await agent.get("/healthz")).status == 200
    assert most < LIMIT_BYTES


async def test_idle_clients_leave_files_for_a_scraper() -> None:
    """The places follow the limit of open files: at the least one that gpumap accepts, 80 idle clients take none."""
    async with asyncio.timeout(60), run_agent("demo", program=("prlimit", "--nofile=64:64", str(GPUMAP))) as agent:
        address = "127.0.0.1", int(agent.url.rpartition(":")[2])
        with contextlib.ExitStack() as stack:
            for _ in range(80):
                stack.enter_context(socket.create_connection(address))
            for _ in range(5):
                async with aiohttp.ClientSession() as session, session.get(f"{agent.url}/healthz") as response:
                    assert response.status == 200
        assert "cannot accept connections" not in agent.log


@pytest.mark.parametrize(
    ("requests", "answers"),
    [
        pytest.param(b"GET /metrics HTTP/1.0\r\n\r\n", 1, id="nc -N"),
        pytest.param(HEAD, 1, id="keep-alive"),
        pytest.param(b"GET /metrics HT", 0, id="half a request"),
        pytest.param(b"", 0, id="nothing"),
    ],
)
async def test_a_client_that_has_finished_asking_is_answered(requests: bytes, answers: int) -> None:
    """A client may shut its side down after its requests. It gets each whole page, then the connection ends."""
    async with serving(patience_seconds=600) as site, asyncio.timeout(60):
        site.pages.publish(snapshot(containers=8000 if answers else 1))
        size = len((await site.get("/metrics"))[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port, limit=1 << 12)
        writer.write(requests)
        writer.write_eof()
        found = await reader.read()
        writer.close()
        assert found.count(b"HTTP/1.") - found.count(b" 400 ") == answers
        assert len(found) >= answers * 0.99 * size


async def test_a_client_that_has_gone_leaves_no_connection() -> None:
    """The end of a connection on which nothing is asked, also after an answer, is its end here."""
    async with serving(patience_seconds=600) as site, asyncio.timeout(60):
        site.pages.publish(snapshot())
        for requests in (b"", HEAD):
            reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
            writer.write(requests)
            if requests:
                await reader.readuntil(b"\r\n\r\n")
            writer.close()

        async def left() -> set[tuple[str, int]]:
            return accepted(site.port)

        await until(left, lambda found: not found, "these are still connected")


async def test_a_trickle_is_no_progress() -> None:
    """A header that comes byte by byte must be whole in time as well: each byte is no new beginning."""
    async with serving(patience_seconds=0.5) as site, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"G")
                await writer.drain()
                await asyncio.sleep(0.05)
        writer.close()
        assert (await site.get("/healthz"))[0] == 200


async def test_a_trickle_takes_no_place_from_a_scraper() -> None:
    """Clients that send a part of a request, and a byte now and then, are not busier than one that waits for a page."""
    async with serving(max_connections=4, patience_seconds=600) as site, asyncio.timeout(60):
        site.pages.publish(snapshot(containers=2000))
        size = len((await site.get("/metrics"))[2])
        await site.session.close()
        with contextlib.ExitStack() as stack:

            def connect(number: int) -> socket.socket:
                source = f"127.0.0.{2 + number}", 0
                return stack.enter_context(socket.create_connection(("127.0.0.1", site.port), source_address=source))

            slow = [connect(number) for number in range(3)]
            scraper = socket.socket()
            scraper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # so that most of the page is on its way
            scraper.connect(("127.0.0.1", site.port))
            reader, writer = await asyncio.open_connection(sock=scraper, limit=1 << 12)
            writer.write(HEAD)
            await reader.readuntil(b"\r\n\r\n")
            for part in (b"GET / HTTP/1.1\r\n", b"X: a", b"b"):
                for client in slow:
                    client.send(part)
                await asyncio.sleep(0.05)
            connect(3)
            assert len(await reader.readexactly(size)) == size
            writer.close()


async def test_the_map_is_made_once_however_often_the_gpus_are_checked() -> None:
    """A map of many pods takes long, in the thread that renders scrapes."""

    class Counted(tuple[str, ...]):
        made = 0

        def __iter__(self) -> Iterator[str]:
            Counted.made += 1
            return super().__iter__()

    pages = Pages((), (), {}, STALE_AFTER_SECONDS, lambda: 0.0, collect=Counted(("use",)))
    try:
        for number in range(3):
            pages.publish(snapshot())
            for only in ((), ("xid",), ("down",)) * 3:
                assert await pages.check(only, "") is not None
            assert Counted.made == number + 1
    finally:
        pages.close()


async def test_there_is_a_bound_on_clients(caplog: pytest.LogCaptureFixture) -> None:
    """When all places are taken the idlest client makes room, which is said once; who comes and who asks is served."""
    caplog.set_level(logging.WARNING, "gpumap.agent.web.port")
    async with serving(max_connections=8) as site, asyncio.timeout(20):
        site.pages.publish(snapshot())
        with contextlib.ExitStack() as stack:

            def connect(number: int) -> socket.socket:
                source = f"127.0.0.{2 + number}", 0
                return stack.enter_context(socket.create_connection(("127.0.0.1", site.port), source_address=source))

            idle = [connect(number) for number in range(8)]
            assert (await site.get("/healthz"))[0] == 200  # this client keeps its place: it asks again and again
            for number in range(30):
                connect(number)
                assert (await site.get("/metrics"))[0] == 200
            for client in idle:
                client.settimeout(10)
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.to_thread(client.recv, 1) == b"", "the idlest was kept"
    assert [record.getMessage() for record in caplog.records if record.name == "gpumap.agent.web.port"] == [
        "too many connections, closing the one that was idle longest max=8"
    ]


@pytest.mark.parametrize(
    "host",
    [
        "localhost:9401",
        "LocalHost.",
        "gpumap.localhost",
        "127.0.0.1:9401",
        "[::1]:9401",
        "10.1.2.3",
        socket.gethostname(),
    ],
)
async def test_a_port_that_is_forwarded_serves_its_own_names(site: Site, host: str) -> None:
    """`kubectl port-forward`, a tunnel, a proxy beside gpumap and a local Prometheus send one of these."""
    assert (await site.get("/metrics", Host=host))[0] == 200


@pytest.mark.parametrize(
    ("arrived_at", "host", "foreign"),
    [
        ("127.0.0.1", "evil.example:9401", True),
        ("127.0.1.1", "evil.example", True),
        ("::1", "evil.example", True),
        ("::ffff:127.0.0.1", "evil.example", True),
        ("::ffff:127.0.0.1", "localhost", False),
        ("127.0.0.1", "localhost.evil.example", True),
        ("127.0.0.1", "127.0.0.1.evil.example", True),
        ("127.0.0.1", "evillocalhost", True),
        ("127.0.0.1", "[::ffff:127.0.0.1]:9401", False),
        ("10.1.2.3", "gpumap.monitoring.svc:9401", False),
        ("::ffff:10.1.2.3", "node-1.example:9401", False),
        ("fe80::1%eth0", "node-1.example", False),
        ("2001:db8::1", "gpus.example", False),
    ],
)
def test_names_are_checked_at_loopback_addresses_only(arrived_at: str, host: str, foreign: bool) -> None:
    """At the pod's or node's own address any name is right: of a Service, a node, an Ingress."""
    assert is_foreign(host, arrived_at) == foreign


async def test_a_large_page_is_whole(site: Site) -> None:
    """A page of several megabytes comes as it is, in one piece or compressed; HEAD has its length."""
    site.pages.publish(snapshot(containers=8000))
    text = (await site.get("/metrics"))[2]
    assert _without_process((await site.get("/metrics", Accept_Encoding="gzip"))[2]) == _without_process(text)
    async with site.session.head(f"{site.url}/metrics") as response:
        assert abs(int(response.headers["Content-Length"]) - len(text)) < 200
        assert await response.read() == b""
