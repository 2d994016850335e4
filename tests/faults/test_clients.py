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


def row(fault: str, inject: Inject, *log: str) -> Fault:
    return Fault(PART, fault, inject, AS_BEFORE, UP, log)


TOO_MANY = "too many connections, closing the one that was idle longest max=256"
FAULTS = (
    row("100 connections send nothing", holding(100, b"")),
    row("100 connections send half a request", holding(100, GET[:-3])),
    row("100 connections ask for the page and do not read it", holding(100, GET, receive_buffer=2048)),
    row("a scrape is reset before its answer, again and again", aborting),
    row("100 requests in one packet, none of them read", holding(1, GET * 100)),
    row("1,000 connections that send nothing", holding(1000, b""), TOO_MANY),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
async def test_clients(fault: Fault, sites: Sites) -> None:
    """While it lasts, another client gets every page, and nothing in it differs."""
    async with sites.borrow(fault.start) as site:
        await suffer(fault, site)
