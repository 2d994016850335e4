"""Clients of the port: none of them takes a page from another one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from tests.faults.matrix import Fault, suffer
from tests.faults.site import Inject, Site, Sites, injects

pytestmark = pytest.mark.asyncio(loop_scope="module")
PART = "Clients"
AS_BEFORE = (
    "gpumap_allocation_info unchanged",
    "gpumap_container_gpu_memory_used_bytes unchanged",
    "gpumap_container_unassigned_use unchanged",
    "/healthz 200",
    "/readyz 200",
)
UP = ("gpumap_source_up 1",)
GET = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def address(site: Site) -> tuple[str, int]:
    url = urlsplit(site.agent.url)
    return str(url.hostname), int(url.port or 0)


def connect(site: Site) -> socket.socket:
    return socket.create_connection(address(site), timeout=60)


@injects
async def holding(site: Site, count: int, sent: bytes, *, receive_buffer: int | None = None) -> AsyncIterator[None]:
    """So many connections, each of which sends this and reads nothing."""

    def start() -> list[socket.socket]:
        opened = []
        for _ in range(count):
            one = socket.socket()
            if receive_buffer is not None:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            one.connect(address(site))
            with contextlib.suppress(OSError):
                one.sendall(sent)
            opened.append(one)
        return opened

    opened = await asyncio.to_thread(start)
    yield
    for one in opened:
        one.close()


@injects
async def answered(site: Site, sent: bytes, begins: bytes, never: bytes = b"root:") -> AsyncIterator[None]:
    """A request and the begin of its answer; empty: the connection ends without one."""

    def ask() -> bytes:
        answer = b""
        with connect(site) as one:
            # The agent may answer and close before it has read everything.
            with contextlib.suppress(OSError):
                one.sendall(sent)
                one.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                while part := one.recv(1 << 16):
                    answer += part
        return answer

    for _ in range(3):
        answer = await asyncio.to_thread(ask)
        assert answer.startswith(begins), answer[:200]
        assert bool(answer) == bool(begins), answer[:200]
        assert never not in answer
    yield


@contextlib.asynccontextmanager
async def aborting(site: Site) -> AsyncIterator[None]:
    """A scrape that its client resets before the answer, over and over."""
    ended = threading.Event()

    def abort() -> None:
        while not ended.wait(0.005):
            with connect(site) as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.sendall(GET)

    client = threading.Thread(target=abort)
    client.start()
    try:
        yield
    finally:
        ended.set()
        client.join()


def request(head: str, more: bytes = b"") -> bytes:
    return head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + more


def row(fault: str, inject: Inject, *log: str) -> Fault:
    return Fault(PART, fault, inject, AS_BEFORE, UP, log)


TOO_MANY = "too many connections, closing the one that was idle longest address=127.0.0.1 max=128"
FAULTS = (
    row("100 connections send nothing", holding(100, b"")),
    row("100 connections send half a request", holding(100, GET[:-3])),
    row("100 connections ask for the page and do not read it", holding(100, GET, receive_buffer=2048)),
    row("a scrape is reset before its answer, again and again", aborting),
    row("100 requests in one packet: the connection ends", answered(GET * 100, b"")),
    row(
        "a header of 1 MiB: 400",
        answered(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (1 << 20) + b"\r\n\r\n", b"HTTP/1.0 400"),
    ),
    row("a request line of 1 MiB: 400", answered(b"GET /" + b"x" * (1 << 20) + b" HTTP/1.1\r\n\r\n", b"HTTP/1.0 400")),
    row("2 KiB of noise: 400", answered(bytes(range(256)) * 8 + b"\r\n\r\n", b"HTTP/1.0 400")),
    row(
        "a TLS handshake at the plain port: 400",
        answered(bytes.fromhex("16030100c8010000c40303") + b"a" * 99 + b"\r\n", b"HTTP/1.0 400"),
    ),
    row("HTTP/2's preface: 400", answered(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"HTTP/1.0 400")),
    row(
        "POST of 1 MiB: 405",
        answered(
            request("POST /metrics HTTP/1.1\nHost: 127.0.0.1\nContent-Length: 1048576", b"x" * (1 << 20)),
            b"HTTP/1.1 405",
        ),
    ),
    row(
        "a path out of the tree (/../../etc/passwd): 404",
        answered(request("GET /../../../../etc/passwd HTTP/1.1\nHost: 127.0.0.1"), b"HTTP/1.1 404"),
    ),
    row(
        "an encoded path out of the page's files: 404",
        answered(request("GET /page/..%2f..%2f..%2f..%2fetc%2fpasswd HTTP/1.1\nHost: 127.0.0.1"), b"HTTP/1.1 404"),
    ),
    row(
        "a foreign host name at loopback: 421",
        answered(request("GET /metrics HTTP/1.1\nHost: evil.example"), b"HTTP/1.1 421"),
    ),
    row(
        "two lengths of one body: 400",
        answered(
            request("GET /metrics HTTP/1.1\nHost: 127.0.0.1\nContent-Length: 4\nContent-Length: 9", b"xxxx"),
            b"HTTP/1.0 400",
        ),
    ),
    row("1,000 connections of one address", holding(1000, b""), TOO_MANY),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
async def test_clients(fault: Fault, sites: Sites) -> None:
    """While it lasts, another client gets every page, and nothing in it differs."""
    async with sites.borrow(fault.start) as site:
        await suffer(fault, site)
