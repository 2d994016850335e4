"""Send the metrics to an OTLP endpoint, once a minute, beside the port.

Nothing waits for it, and nothing is queued: a request that fails is dropped, and the next one has the newer values.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from gpumap.agent.executors import SerialExecutor
from gpumap.agent.web.pages import Pages
from gpumap.model.text import cut_off, printable

INTERVAL_SECONDS = 60.0
TIMEOUT_SECONDS = 10.0
PAUSE_SECONDS_MAX = 600.0
"""Longest pause that a server's `Retry-After` causes."""
_FIRST_SECONDS = 1.0
"""Time between two looks for the first snapshot."""
_RETRYABLE = (429, 502, 503, 504)
_ANSWER_BYTES_MAX = 1 << 16
_WORDS_MAX = 200
_HEADERS = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip", "User-Agent": "gpumap"}

log = logging.getLogger("gpumap")


async def push(
    pages: Pages,
    endpoint: str,
    headers: Mapping[str, str],
    interval_seconds: float = INTERVAL_SECONDS,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> None:
    """Send each interval for ever, if there is a newer snapshot that is not stale. Log each change of the outcome."""
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    resolver = _Resolver()
    connector = aiohttp.TCPConnector(resolver=resolver)
    no_cookies = aiohttp.DummyCookieJar()  # a server could fill the memory with them
    try:
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers={**_HEADERS, **headers}, cookie_jar=no_cookies
        ) as session:
            await _push(pages, session, endpoint, interval_seconds)
    finally:
        await resolver.close()


async def _push(pages: Pages, session: aiohttp.ClientSession, endpoint: str, interval_seconds: float) -> None:
    sent, outcome = "", None
    while True:
        version, pause_seconds = pages.version(), 0.0
        if version is not None and version != sent and not pages.stale:
            body = await pages.page("otlp", gzipped=True)
            now, pause_seconds = await _send(session, endpoint, body or b"")
            sent = version
            if now != outcome:
                log.log(logging.WARNING if now else logging.INFO, "otlp %s endpoint=%s", now or "works", endpoint)
                outcome = now
        wait = _FIRST_SECONDS if version is None else interval_seconds
        await asyncio.sleep(max(wait, pause_seconds))


class _Resolver(AbstractResolver):
    """Looks names up in its own daemon thread: asyncio would wait for a DNS server that hangs, at gpumap's end."""

    def __init__(self) -> None:
        self._thread = SerialExecutor("gpumap-dns")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._thread.run(lambda: socket.getaddrinfo(host, port, family, socket.SOCK_STREAM))
        return [
            ResolveResult(hostname=host, host=str(to[0]), port=port, family=kind, proto=protocol, flags=0)
            for kind, _, protocol, _, to in found
        ]

    async def close(self) -> None:
        self._thread.close()


async def _send(session: aiohttp.ClientSession, endpoint: str, body: bytes) -> tuple[str, float]:
    """Return what failed as words for the log, empty if nothing, and how long the server wants no request."""
    try:
        async with session.post(endpoint, data=body, allow_redirects=False) as response:
            answer = await _read(response)
            if response.status == 200:
                return _rejected(answer), 0.0
            pause = response.headers.get("Retry-After", "") if response.status in _RETRYABLE else ""
            seconds = float(pause) if pause.isascii() and pause.isdecimal() else 0.0
            return f"failed status={response.status}", min(seconds, PAUSE_SECONDS_MAX)
    except TimeoutError:
        return "failed reason='no answer in time'", 0.0
    except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: of names that no lookup takes
        words = printable(cut_off(str(error) or type(error).__name__, _WORDS_MAX)).replace("'", "")
        return f"failed reason='{words}'", 0.0


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Read the answer up to a limit."""
    answer = b""
    while len(answer) < _ANSWER_BYTES_MAX and (part := await response.content.read(_ANSWER_BYTES_MAX - len(answer))):
        answer += part
    return answer


def _rejected(answer: bytes) -> str:
    """Return what the server refused of a request that it accepted."""
    try:
        partial = ExportMetricsServiceResponse.FromString(answer).partial_success
    except DecodeError:
        return ""  # other servers answer with text or JSON
    if not partial.rejected_data_points:
        return ""
    words = printable(cut_off(partial.error_message, _WORDS_MAX)).replace("'", "")
    return f"rejected points={partial.rejected_data_points} reason='{words}'"
