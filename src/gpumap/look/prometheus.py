"""Asks a server that speaks Prometheus's HTTP API: Prometheus, Thanos, Mimir, VictoriaMetrics.

Only /api/v1/query, /query_range and /series, by POST. An answer that is not whole is a failure: every failure is a
FatalError with the server's URL, without its password, and the reason.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
from yarl import URL

from gpumap.errors import FatalError, UsageError
from gpumap.look.silence import why_silent

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
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)


_STRINGS = frozenset({str})
_NUMBERS = frozenset({int, float})

Point = tuple[float, str]
"""Unix seconds, and a value as it was written."""


class TooMuchError(FatalError):
    """The server could not do it, or not in time; it may be able to do less."""


class Row(NamedTuple):
    """A series of an answer: its labels, and (Unix seconds, value as it was written), by time."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, str]]


class Prometheus:
    """A server to ask. `url` is shown in messages: without user and password."""

    def __init__(self, session: aiohttp.ClientSession, address: URL, timeout_seconds: float) -> None:
        self.url = str(address.with_user(None).with_query(None))
        self._session = session
        self._address = address
        self._timeout_seconds = timeout_seconds
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def instant(self, expression: str, moment: int | None = None) -> list[Row]:
        """Evaluate at one moment, or now."""
        return [Row(labels, [point]) for labels, point in await self.vector(expression, moment)]

    async def vector(self, expression: str, moment: int | None = None) -> list[tuple[Mapping[str, str], Point]]:
        """The same without a list for each row: of large answers."""
        asked = {"query": expression} | ({} if moment is None else {"time": str(moment)})
        found = self._result(await self._ask("query", asked), "vector")
        try:
            rows: list[tuple[Mapping[str, str], Point]] = [(one["metric"], one["value"]) for one in found]
            if all(_are_labels(labels) and _is_point(point) for labels, point in rows):
                return rows
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
        if not isinstance(found, list) or not all(map(_are_labels, found)):
            raise self._nonsense("what is no list of series")
        return found

    async def _ask(self, call: str, asked: Mapping[str, str]) -> Any:
        address = self._address.with_path(f"{self._address.path.rstrip('/')}/api/v1/{call}", keep_query=True)
        try:
            async with self._room, self._session.post(address, data={**asked, **_WHOLE}, allow_redirects=False) as got:
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
                raise TooMuchError(f"{self.url} answered with more than {ANSWER_BYTES_MAX >> 20} MiB")
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
            raise FatalError(f"{self.url} answered, but warns: {_short(said)}")
        return found["data"]

    def _rows(self, data: Any) -> list[Row]:
        rows = []
        for one in self._result(data, "matrix"):
            points = one.get("values") if isinstance(one, dict) and _are_labels(one.get("metric")) else None
            if not isinstance(points, list) or not all(map(_is_point, points)):
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
            return FatalError(f"{self.url} redirects to {_short(target)}: give the URL that answers itself")
        hints = {401: "who is asking? see --header", 403: "it refuses", 404: "is a path missing in the URL?"}
        said = _said(body) or hints.get(got.status, "")
        failure = TooMuchError if got.status in _TOO_MUCH else FatalError
        return failure(f"{self.url} answered {got.status} {got.reason}" + (f": {said}" if said else ""))

    def _silence(self, error: Exception) -> FatalError:
        if isinstance(error, TimeoutError):
            return TooMuchError(f"{self.url} did not answer within {self._timeout_seconds:g} s")
        return FatalError(f"{self.url} did not answer: {why_silent(error)}")


@asynccontextmanager
async def connect(
    url: str, headers: Mapping[str, str], timeout_seconds: float, tls: ssl.SSLContext | None = None
) -> AsyncGenerator[Prometheus, None]:
    """A server to ask, until the block ends. Raises UsageError for what is no URL. Without `tls` the system's
    certificates are trusted."""
    address = address_of(url)
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    connector = aiohttp.TCPConnector(ssl=True if tls is None else tls)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector) as session:
        yield Prometheus(session, address, timeout_seconds)


def address_of(url: str) -> URL:
    """The URL below which /api/v1 is. Raises UsageError."""
    shown = re.sub("//[^/@]*@", "//", url)
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--prometheus {shown}: does not start with http:// or https://")
    try:
        given = URL(url)
        known = bool(given.host) and given.port is not None
    except ValueError:
        known = False
    if not known:
        raise UsageError(f"--prometheus {shown}: is not a URL")
    path = re.sub(r"(/api/v1(/query)?)?/*$", "", given.path)
    return given.with_path(path, keep_query=True)


def credentials_of(url: str) -> tuple[str, str] | None:
    """User and password of a URL that has them."""
    given = URL(url)
    return None if given.user is None and given.password is None else (given.user or "", given.password or "")


def headers_of(given: Sequence[str]) -> dict[str, str]:
    """Read `Name: value`, each once. Raises UsageError, which does not repeat the value: it may be a secret."""
    headers: dict[str, str] = {}
    for text in given:
        name, colon, value = text.partition(":")
        if not colon or not _HEADER_NAME.fullmatch(name) or not value.strip() or not value.strip().isprintable():
            raise UsageError('--header: is not of the form "Name: value"')
        if name.lower() in map(str.lower, headers):
            raise UsageError(f"--header: {name} is given twice")
        headers[name] = value.strip()
    return headers


def _said(body: bytes) -> str:
    """The reason that an API's answer gives, or the first words of a proxy's."""
    try:
        found = json.loads(body)
        return _short(str(found["error"])) if isinstance(found, dict) and "error" in found else ""
    except (ValueError, RecursionError):
        text = body.decode(errors="replace").strip()
        return "" if text.startswith("<") else _short(text)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SAID_CHARACTERS else f"{text[:_SAID_CHARACTERS]}…"


def _are_labels(found: object) -> bool:
    return type(found) is dict and _STRINGS.issuperset(map(type, found.values()))


def _is_point(found: object) -> bool:
    if type(found) is not list or len(found) != 2 or type(found[1]) is not str:
        return False
    moment = found[0]
    return type(moment) in _NUMBERS and math.isfinite(moment)
