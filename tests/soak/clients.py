"""Clients that ask an agent all the time, well and badly."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine

from tests.soak.watch import Watched

Client = Callable[[Watched, int], Coroutine[None, None, None]]
PAUSE_SECONDS = 1.0
ANSWER_SECONDS = 30.0
PATHS = (
    "/metrics",
    "/api/v1/map",
    "/api/v1/history",
    "/",
    "/healthz",
    "/readyz",
    "/api/v1/map/schema.json",
    "/nothing",
)
HEADERS = (
    "Accept: application/openmetrics-text;version=1.0.0",
    "Accept-Encoding: gzip",
    "Accept: application/openmetrics-text\r\nAccept-Encoding: gzip",
    "If-None-Match: *",
    "Connection: close",
)


def _request(agent: Watched, path: str, header: str) -> bytes:
    known = "".join(f"{name}: {value}\r\n" for name, value in agent.authorization.items())
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{known}{header}\r\n\r\n".encode()


async def _connect(agent: Watched) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    tls = None if agent.door is None else agent.door.tls
    return await asyncio.open_connection("127.0.0.1", agent.port, ssl=tls, limit=1 << 14)


async def _keep_alive(agent: Watched, number: int) -> None:
    """Many requests over one connection, of every page in every form; each answer is read to its end."""
    reader, writer = await _connect(agent)
    with contextlib.closing(writer):
        for path in PATHS:
            header = HEADERS[number % 4]
            writer.write(_request(agent, path, header))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if b"content-length: " in head:
                await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))


async def _slow(agent: Watched, number: int) -> None:
    """A reader that takes its time."""
    reader, writer = await _connect(agent)
    with contextlib.closing(writer):
        writer.write(_request(agent, "/metrics", "Connection: close"))
        for _ in range(20):
            await reader.read(512)
            await asyncio.sleep(0.1)


async def _aborting(agent: Watched, number: int) -> None:
    """A client that goes away in the middle of its request, or of the answer."""
    reader, writer = await _connect(agent)
    with contextlib.closing(writer):
        writer.write(_request(agent, "/api/v1/history", "Accept: */*")[: 20 if number % 2 else 999])
        if number % 2 == 0:
            await reader.read(100)
        writer.transport.abort()


async def _many(agent: Watched, number: int) -> None:
    """Thirty clients at once."""
    await asyncio.gather(*(_keep_alive(agent, number + one) for one in range(30)), return_exceptions=True)


CLIENTS: dict[str, Client] = {"keep-alive": _keep_alive, "slow": _slow, "aborting": _aborting, "many": _many}


async def ask(agent: Watched, asked: Counter[str]) -> None:
    """Send one client after another, for ever. While the agent is away they are refused, which is no fault."""
    for number in itertools.count():
        for name, client in CLIENTS.items():
            if name == "many" and number % 10:
                continue
            with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError, TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    await client(agent, number)
                asked[name] += 1
        await asyncio.sleep(PAUSE_SECONDS)
