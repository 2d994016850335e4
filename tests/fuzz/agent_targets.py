"""What else comes to the agent: its configuration files, and the requests of HTTP clients."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import logging
import re
import socket
from collections.abc import Iterator
from typing import NamedTuple

from gpumap.agent.dialects import gpu_manager
from gpumap.agent.metrics import self_families
from gpumap.agent.web.app import application
from gpumap.agent.web.guard import Guard, _credentials
from gpumap.agent.web.pages import Pages
from gpumap.agent.web.port import open_port
from gpumap.agent.web.requests import accepts_gzip, has_already, is_foreign, prefers_openmetrics, quality
from gpumap.model.errors import UsageError
from tests.fuzz.changes import changed_files, edited, pack, unpack
from tests.fuzz.folders import folder, lay_out
from tests.fuzz.node_targets import FAMILIES
from tests.fuzz.target import target
from tests.snapshots import busy_node

# --- configuration ----------------------------------------------------------------------------------------------------

_WEB_CONFIG = """tls_server_config:
  cert_file: server.crt
  key_file: server.key
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: server.crt
  min_version: TLS12
basic_auth_users:
  alice: $2y$10$mDwo.lAisC94iLAyP81MCesa29IzH37oigHC/42V2pdJlUprsJPze
"""


def _web_config_examples() -> Iterator[bytes]:
    yield pack({"web.yml": _WEB_CONFIG.encode(), **_certificate()})
    yield pack({"web.yml": b"basic_auth_users: {}\n"})
    yield pack({"web.yml": b"a: &a [x, x]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]\n"})


@target(_web_config_examples, changed_files(lambda path: edited), UsageError, lines_per_byte=2000)
def read_web_config(data: bytes) -> object:
    """The files of --web-config: the YAML, a certificate and a key."""
    with folder() as place:
        lay_out(unpack(data), place)
        try:
            guard = Guard(place / "web.yml")
            guard.close()
            return guard.words()
        except UsageError as error:
            if not str(error).isprintable():
                raise AssertionError(repr(str(error))) from error
            raise


@functools.cache
def _certificate() -> dict[str, bytes]:
    from tests.certificates import make_certificate

    with folder() as place:
        make_certificate(place, "server")
        return {name: (place / name).read_bytes() for name in ("server.crt", "server.key")}


# --- HTTP -------------------------------------------------------------------------------------------------------------


@target(
    lambda: [
        b"text/plain;version=0.0.4;q=0.5,application/openmetrics-text;version=1.0.0;q=0.6\ngzip;q=0.5, identity",
        b'text/plain;q=x;version=""\nW/"1", "2"\n[::1]:80\nlocalhost:9401\nBasic YWxpY2U6c2VjcmV0\n127.0.0.1',
    ],
    edited,
)
def read_http_headers(data: bytes) -> object:
    """Values of the headers that gpumap reads, a line each. Raises nothing."""
    answers: list[object] = []
    for line in data.decode("latin-1").split("\n"):
        answers += [prefers_openmetrics(line), accepts_gzip(line), quality(line, "text/plain")]
        answers += [has_already(line, 'W/"1"'), is_foreign(line, "127.0.0.1"), is_foreign("localhost", line)]
        answers.append(_credentials(line))
    return answers


class _Server(NamedTuple):
    pages: object
    """Kept, because they end with their last reference."""
    loop: asyncio.AbstractEventLoop
    port: int
    errors: io.StringIO


@functools.cache
def _server() -> _Server:
    """Start the agent's pages on a port of this machine, once for a process."""
    loop = asyncio.new_event_loop()
    pages = Pages(FAMILIES, self_families("1", "3.11"), {"/metric": gpu_manager.FAMILIES}, 60.0, lambda: 10.0)
    listener = socket.create_server(("127.0.0.1", 0))
    errors = io.StringIO()
    handler = logging.StreamHandler(errors)
    handler.setLevel(logging.ERROR)
    pages.publish(busy_node(4, 2))
    served = open_port(application(pages), listener, patience_seconds=2.0)
    loop.run_until_complete(served.__aenter__())
    for name in ("gpumap", "aiohttp", "asyncio"):
        logging.getLogger(name).addHandler(handler)
    return _Server(served, loop, listener.getsockname()[1], errors)


_STATUS = re.compile(rb"HTTP/[01]\.[019] ([0-9]{3}) ")


def _request_examples() -> Iterator[bytes]:
    headers = "Host: localhost\r\nAccept: application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1\r\n"
    api = ("/api/v1/map", "/api/v1/map/schema.json", "/api/v1/history", "/api/v1/check?only=xid&node=a")
    for path in ("/", "/metrics", "/metric", "/healthz", "/readyz", "/page/style.css", "/nothing?a=%ff#b", *api):
        yield f"GET {path} HTTP/1.1\r\n{headers}Accept-Encoding: gzip\r\nConnection: close\r\n\r\n".encode()
    yield b'GET /api/v1/map HTTP/1.1\r\nHost: [::1]:9401\r\nIf-None-Match: W/"1", *\r\n\r\n'
    yield b"POST /metrics HTTP/1.1\r\nHost: 10.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    yield b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\nabc"
    yield b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"


@target(_request_examples, edited, slow=True)
def read_http_request(data: bytes) -> object:
    """The bytes of a client's connection. The answers have no status 500, nothing is logged as an error, and the next
    client gets its answer. Raises nothing."""
    server = _server()
    server.errors.truncate(0)
    answer = server.loop.run_until_complete(_exchange(server.port, data))
    assert answer == b"" or _STATUS.match(answer), answer[:200]
    for status in _STATUS.findall(answer):
        assert status != b"500", answer[:500]
    assert server.errors.getvalue() == ""
    healthy = server.loop.run_until_complete(_exchange(server.port, b"GET /healthz HTTP/1.0\r\n\r\n"))
    assert healthy.endswith(b"ok\n"), healthy[:200]
    return len(answer) > 0


async def _exchange(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(20.0):
            writer.write(data)
            with contextlib.suppress(OSError):
                writer.write_eof()
            received = b""
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(1 << 16):
                    received = (received + piece)[: 1 << 20]
            return received
    finally:
        writer.transport.abort()
