"""Asks a server that speaks Prometheus's HTTP API: Prometheus, Thanos, Mimir, VictoriaMetrics.

Only /api/v1/query, /query_range and /series, by POST. An answer that is not whole is a failure: every failure is a
FatalError with the server's URL, without its password, and the reason.
"""

from __future__ import annotations

import asyncio
import json
import math
import ssl
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import aiohttp
from yarl import URL

from gpumap.cli.http_errors import connection_error
from gpumap.model.errors import FatalError
from gpumap.model.text import cut_off

T = TypeVar("T")

ANSWER_BYTES_MAX = 256 << 20
_PIECE_BYTES = 1 << 16
_SAID_CHARACTERS = 300
_AT_ONCE = 3
"""Requests at the same time: a server has other users."""
_TOO_MUCH = frozenset({408, 413, 422, 429, 500, 502, 503, 504})
"""What servers and the proxies before them answer where a question was too large, or took too long."""
_WHOLE = {"partial_response": "false", "nocache": "1"}
"""Thanos: fail where a store does not answer. VictoriaMetrics: evaluate at the moments that were asked for, and not at
those of its cache. Who does not know a parameter does not mind it."""

_DICTS, _LISTS, _STRINGS = frozenset({dict}), frozenset({list}), frozenset({str})
_NUMBERS = frozenset({int, float})

Point = tuple[float, str]
"""Unix seconds, and a value as it was written."""


@dataclass(frozen=True, slots=True)
class Server:
    """Which server is asked, and as whom. `url` is what stands before /api/v1, without user and password: they are in
    `headers`, as every way to say who asks is. `tls` is None where the system's certificates are trusted."""

    url: str
    headers: Mapping[str, str] = field(repr=False)
    tls: ssl.SSLContext | None
    timeout_seconds: float
    server_name: str | None = None
    """In its certificate, where that is not the name in `url`."""


class QueryTooLargeError(FatalError):
    """The server could not do it, or not in time; it may be able to do less."""


class Row(NamedTuple):
    """A series of an answer: its labels, and (Unix seconds, value as it was written), by time."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, str]]


class Prometheus:
    """A server to ask. `url` is shown in messages: without user and password."""

    def __init__(
        self, session: aiohttp.ClientSession, address: URL, timeout_seconds: float, server_name: str | None
    ) -> None:
        self.url = str(address.with_user(None).with_query(None))
        self._session = session
        self._address = address
        self._timeout_seconds = timeout_seconds
        self._server_name = server_name
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def instant(self, expression: str, moment: int | None = None) -> list[Row]:
        """Evaluate at one moment, or now."""
        return [Row(labels, [point]) for labels, point in await self.vector(expression, moment)]

    async def vector(self, expression: str, moment: int | None = None) -> list[tuple[Mapping[str, str], Point]]:
        """The same without a list for each row: of large answers."""
        asked = {"query": expression} | ({} if moment is None else {"time": str(moment)})
        found = self._result(await self._ask("query", asked), "vector")
        try:
            metrics, points = [one["metric"] for one in found], [one["value"] for one in found]
            if _all_labels(metrics) and _all_points(points):
                return list(zip(metrics, points, strict=True))
        except (KeyError, TypeError):
            pass
        raise self._nonsense("a row that is none of a vector")

    async def range(self, expression: str, first: int, last: int, step_seconds: int) -> list[Row]:
        """Evaluate at each step from `first` to `last`, both included."""
        asked = {"query": expression, "start": str(first), "end": str(last), "step": str(step_seconds)}
        return self._rows(await self._ask("query_range", asked))

    async def series(self, selector: str, start: int, end: int) -> list[Mapping[str, str]]:
        """The labels of the series that have samples in this time, and somewhat around it."""
        found = await self._ask("series", {"match[]": selector, "start": str(start), "end": str(end)})
        if not isinstance(found, list) or not _all_labels(found):
            raise self._nonsense("what is no list of series")
        return found

    async def _ask(self, call: str, asked: Mapping[str, str]) -> Any:
        address = self._address.with_path(f"{self._address.path.rstrip('/')}/api/v1/{call}", keep_query=True)
        try:
            async with (
                self._room,
                self._session.post(
                    address, data={**asked, **_WHOLE}, allow_redirects=False, server_hostname=self._server_name
                ) as got,
            ):
                body = await self._body(got)
                if got.status != 200:
                    raise self._refusal(got, body)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._silence(error) from error
        return self._data(body)

    async def _body(self, got: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for piece in got.content.iter_chunked(_PIECE_BYTES):
            body += piece
            if len(body) > ANSWER_BYTES_MAX:
                raise QueryTooLargeError(f"{self.url} answered with more than {ANSWER_BYTES_MAX >> 20} MiB")
        return bytes(body)

    def _data(self, body: bytes) -> Any:
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            page = " (a page of HTML: a login?)" if body.lstrip()[:1] == b"<" else ""
            raise self._nonsense(f"what is no JSON{page}") from None
        if not isinstance(found, dict) or found.get("status") != "success" or "data" not in found:
            raise self._nonsense("JSON that is not of Prometheus's API")
        if found.get("isPartial"):
            raise FatalError(f"{self.url} answered in part: some of its storage is away, and nothing is shown of that")
        if warnings := found.get("warnings"):
            said = "; ".join(map(str, warnings)) if isinstance(warnings, list) else str(warnings)
            raise FatalError(f"{self.url} answered, but warns: {cut_off(said, _SAID_CHARACTERS)}")
        return found["data"]

    def _rows(self, data: Any) -> list[Row]:
        rows = []
        for one in self._result(data, "matrix"):
            points = one.get("values") if isinstance(one, dict) and _all_labels([one.get("metric")]) else None
            if not isinstance(points, list) or not _all_points(points):
                raise self._nonsense("a row that is none of a matrix")
            rows.append(Row(one["metric"], [(float(moment), value) for moment, value in points]))
        return rows

    def _result(self, data: Any, kind: str) -> list[Any]:
        if not isinstance(data, dict) or data.get("resultType") != kind or not isinstance(data.get("result"), list):
            raise self._nonsense(f"what is no {kind}")
        found: list[Any] = data["result"]
        return found

    def _nonsense(self, what: str) -> FatalError:
        return FatalError(
            f"{self.url} answered {what}: is it the URL of a Prometheus, Thanos, Mimir or VictoriaMetrics?"
        )

    def _refusal(self, got: aiohttp.ClientResponse, body: bytes) -> FatalError:
        if 300 <= got.status < 400:
            target = got.headers.get("Location", "nowhere")
            return FatalError(
                f"{self.url} redirects to {cut_off(target, _SAID_CHARACTERS)}: give the URL that answers itself"
            )
        hints = {401: "who is asking? see --header", 403: "it refuses", 404: "is a path missing in the URL?"}
        said = self._without_secrets(_said(body)) or hints.get(got.status, "")
        failure = QueryTooLargeError if got.status in _TOO_MUCH else FatalError
        return failure(f"{self.url} answered {got.status} {got.reason}" + (f": {said}" if said else ""))

    def _without_secrets(self, said: str) -> str:
        """Some servers say back what was sent to them."""
        sent = {word for value in self._session.headers.values() for word in value.split() if len(word) > 3}
        for word in sent - {"Bearer", "Basic"}:
            said = said.replace(word, "…")
        return said

    def _silence(self, error: Exception) -> FatalError:
        if isinstance(error, TimeoutError):
            return QueryTooLargeError(f"{self.url} did not answer within {self._timeout_seconds:g} s")
        return FatalError(
            f"{self.url} did not answer: {connection_error(error, https=self._address.scheme == 'https')}"
        )


@asynccontextmanager
async def connect(server: Server) -> AsyncGenerator[Prometheus, None]:
    """A server to ask, until the block ends."""
    timeout = aiohttp.ClientTimeout(total=server.timeout_seconds)
    connector = aiohttp.TCPConnector(ssl=True if server.tls is None else server.tls)
    async with aiohttp.ClientSession(timeout=timeout, headers=server.headers, connector=connector) as session:
        yield Prometheus(session, URL(server.url), server.timeout_seconds, server.server_name)


async def together(questions: Sequence[Awaitable[T]]) -> list[T]:
    """All answers; where one fails, the other questions are let go."""
    tasks = [asyncio.ensure_future(one) for one in questions]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _said(body: bytes) -> str:
    """The reason that an API's answer gives, or the first words of a proxy's."""
    try:
        found = json.loads(body)
        return cut_off(str(found["error"]), _SAID_CHARACTERS) if isinstance(found, dict) and "error" in found else ""
    except (ValueError, RecursionError):
        text = body.decode(errors="replace").strip()
        return "" if text.startswith("<") else cut_off(text, _SAID_CHARACTERS)


def _all_labels(found: Sequence[Any]) -> bool:
    """Whether each is a series' labels. All at once, as there may be a million."""
    return set(map(type, found)) <= _DICTS and set(map(type, chain.from_iterable(map(dict.values, found)))) <= _STRINGS


def _all_points(found: Sequence[Any]) -> bool:
    """Whether each is a moment and a value as it was written."""
    if not found:
        return True
    if set(map(type, found)) != _LISTS or set(map(len, found)) != {2}:
        return False
    moments, values = zip(*found, strict=True)
    return (
        set(map(type, values)) == _STRINGS
        and set(map(type, moments)) <= _NUMBERS
        and all(map(math.isfinite, {*moments}))
    )
