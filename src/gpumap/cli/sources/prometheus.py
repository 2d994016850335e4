"""Asks a server that speaks Prometheus's HTTP API: Prometheus, Thanos, Mimir, VictoriaMetrics.

It uses only /api/v1/query, /query_range and /series, by POST. An incomplete answer is a failure. Every failure is a
FatalError with the server's URL, without its password, and the reason.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping, Sequence
from http.client import HTTPException
from typing import TypeVar

import msgspec
from yarl import URL

from gpumap.cli.credentials import Credentials
from gpumap.cli.sources.http_client import AnswerTooLargeError, HttpAnswer, ask, endpoint_of, no_answer
from gpumap.model.errors import FatalError
from gpumap.model.formatting import cut_off

T = TypeVar("T")

_ANSWER_BYTES_MAX = 128 << 20
_ANSWER_VALUES_MAX = 5_000_000
"""A cluster of 10 000 nodes needs less than half of both. Before it decodes, gpumap counts commas. The value
behind one takes at most 210 bytes of memory, so an answer takes about 1 GB at most."""
_REASON_CHARACTERS = 300
_AT_ONCE = 3
"""Requests at the same time: a server has other users."""
_TOO_LARGE = frozenset({408, 413, 422, 429, 500, 502, 503, 504})
"""Statuses of servers, and of proxies before them, for a query that was too large or took too long."""
_WHOLE = {"partial_response": "false", "nocache": "1"}
"""Thanos: fail if a store does not answer. VictoriaMetrics: evaluate at the requested times, not at those of its cache.
Other servers ignore these parameters."""

Point = tuple[float, str]
"""Unix seconds, and a value as the server wrote it."""


class QueryTooLargeError(FatalError):
    """The server could not answer, or not in time. It may answer a smaller query."""


class Row(msgspec.Struct, gc=False, rename={"labels": "metric", "points": "values"}):
    """A series of an answer: its labels, and its points by time."""

    labels: Mapping[str, str]
    points: Sequence[Point]


# --- what a server answers --------------------------------------------------------------------------------------------


class _Answer(msgspec.Struct, rename="camel"):
    status: str
    data: msgspec.Raw
    is_partial: bool | None = None
    warnings: list[str] | str | None = None


class _Result(msgspec.Struct, rename="camel"):
    result_type: str
    result: msgspec.Raw


class _VectorRow(msgspec.Struct, gc=False):
    metric: dict[str, str]
    value: Point


_VECTOR = msgspec.json.Decoder(list[_VectorRow])
_MATRIX = msgspec.json.Decoder(list[Row])
_SERIES = msgspec.json.Decoder(list[dict[str, str]])
_NOT_OF_ITS_KIND = (ValueError, RecursionError)
"""Errors of a part of an answer. Only its own decoder finds text that is not UTF-8, and deep nesting."""


class Prometheus:
    """A server to ask, at `address`, the part before /api/v1.

    `url` is the same without user, password and query: messages show it.
    """

    def __init__(self, address: URL, who: Credentials, timeout_seconds: float) -> None:
        self.url = str(address.with_user(None).with_query(None))
        self._address = address
        self._who = who
        self._timeout_seconds = timeout_seconds
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def instant(self, expression: str, moment: int | None = None) -> list[Row]:
        """Evaluate at one moment, or now."""
        parameters = {"query": expression} | ({} if moment is None else {"time": str(moment)})
        rows = self._rows(await self._ask("query", parameters), "vector", _VECTOR)
        return [Row(row.metric, [row.value]) for row in rows]

    async def range(self, expression: str, first_moment: int, last_moment: int, step_seconds: int) -> list[Row]:
        """Evaluate at each step from `first` to `last`, both included."""
        parameters = {
            "query": expression,
            "start": str(first_moment),
            "end": str(last_moment),
            "step": str(step_seconds),
        }
        return self._rows(await self._ask("query_range", parameters), "matrix", _MATRIX)

    async def series(self, selector: str, start: int, end: int) -> Sequence[Mapping[str, str]]:
        """Return the labels of the series that have samples in this time, and somewhat around it."""
        data = await self._ask("series", {"match[]": selector, "start": str(start), "end": str(end)})
        try:
            return _SERIES.decode(data)
        except _NOT_OF_ITS_KIND:
            raise self._nonsense("without a list of series") from None

    async def _ask(self, call: str, parameters: Mapping[str, str]) -> msgspec.Raw:
        path = f"{self._address.path.rstrip('/')}/api/v1/{call}"
        target = self._address.with_path(path, keep_query=True).raw_path_qs
        place, form = endpoint_of(self._address, self._who), {**parameters, **_WHOLE}
        try:
            async with self._slots, asyncio.timeout(self._timeout_seconds):
                answer = await ask(place, target, self._who.headers, self.url, form=form, bytes_max=_ANSWER_BYTES_MAX)
        except TimeoutError as error:
            raise QueryTooLargeError(f"{self.url} did not answer within {self._timeout_seconds:g} s") from error
        except AnswerTooLargeError as error:
            raise self._too_large(f"{_ANSWER_BYTES_MAX >> 20} MiB") from error
        except (OSError, HTTPException) as error:
            why = no_answer(error, https=self._address.scheme == "https")
            raise FatalError(f"{self.url} did not answer: {why}") from error
        if answer.status != 200:
            raise self._refusal(answer)
        if answer.body.count(b",") > _ANSWER_VALUES_MAX:
            raise self._too_large(f"{_ANSWER_VALUES_MAX // 1_000_000} million values")
        return self._data(answer.body)

    def _too_large(self, than: str) -> FatalError:
        return QueryTooLargeError(f"{self.url} answered with more than {than}. Select less, for example by --match")

    def _data(self, body: bytes) -> msgspec.Raw:
        try:
            answer = _answer(body)
        except (ValueError, RecursionError):
            page = " (an HTML page, perhaps a login)" if body.lstrip()[:1] == b"<" else ""
            raise self._nonsense(f"without JSON{page}") from None
        if answer is None or answer.status != "success":
            raise self._nonsense("with JSON of another API")
        if answer.is_partial:
            raise FatalError(f"{self.url} answered incompletely because some of its storage is not available")
        if warnings := answer.warnings:
            reason = "; ".join(warnings) if isinstance(warnings, list) else warnings
            raise FatalError(f"{self.url} answered with a warning: {cut_off(reason, _REASON_CHARACTERS)}")
        return answer.data

    def _rows(self, data: msgspec.Raw, kind: str, decoder: msgspec.json.Decoder[list[T]]) -> list[T]:
        try:
            result = msgspec.json.decode(data, type=_Result)
        except _NOT_OF_ITS_KIND:
            raise self._nonsense(f"without a {kind}") from None
        if result.result_type != kind or bytes(memoryview(result.result)[:1]) != b"[":
            raise self._nonsense(f"without a {kind}")
        try:
            return decoder.decode(result.result)
        except _NOT_OF_ITS_KIND:
            raise self._nonsense(f"with an invalid row of a {kind}") from None

    def _nonsense(self, mistake: str) -> FatalError:
        return FatalError(
            f"{self.url} answered {mistake}. Check that it is the URL of a Prometheus, Thanos, Mimir or VictoriaMetrics"
        )

    def _refusal(self, answer: HttpAnswer) -> FatalError:
        status = f"{answer.status} {answer.reason}"
        if 300 <= answer.status < 400:
            target = cut_off(answer.location or "nowhere", _REASON_CHARACTERS)
            return FatalError(f"{self.url} redirects to {target}. Use the URL without redirects")
        hints = {
            401: "set credentials, such as --header",
            403: "access denied",
            404: "check the path of the URL (for a gpumap agent use --url)",
        }
        server_reason = self._hide_secrets(_reason_in(answer.body))
        if server_reason.strip() == f"{answer.status}: {answer.reason}":  # what a gpumap says, which is no Prometheus
            server_reason = ""
        reason = server_reason or hints.get(answer.status, "")
        failure = QueryTooLargeError if answer.status in _TOO_LARGE else FatalError
        return failure(f"{self.url} answered {status}" + (f": {reason}" if reason else ""))

    def _hide_secrets(self, reason: str) -> str:
        """Hide credentials: some servers repeat what was sent to them."""
        sent = {word for value in self._who.headers.values() for word in value.split() if len(word) > 3}
        for word in sent - {"Bearer", "Basic"}:
            reason = reason.replace(word, "…")
        return reason


async def together(questions: Sequence[Awaitable[T]]) -> list[T]:
    """Return all answers. If one fails, cancel the others."""
    tasks = [asyncio.ensure_future(question) for question in questions]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _answer(body: bytes) -> _Answer | None:
    """Return a server's answer; None for other JSON. Raises ValueError for what is no JSON."""
    try:
        return msgspec.json.decode(body, type=_Answer)
    except msgspec.ValidationError:
        msgspec.json.decode(body, type=msgspec.Raw)
        return None


def _reason_in(body: bytes) -> str:
    """Return the reason in an API's answer, or the first words of a proxy's."""
    try:
        document = json.loads(body)
        return (
            cut_off(str(document["error"]), _REASON_CHARACTERS)
            if isinstance(document, dict) and "error" in document
            else ""
        )
    except (ValueError, RecursionError):
        text = body.decode(errors="replace").strip()
        return "" if text.startswith("<") else cut_off(text, _REASON_CHARACTERS)
