"""One question over HTTP, on a connection of its own.

aiohttp's client takes longer to import than most commands run. So the event loop carries the bytes, and the standard
library reads the answer.
"""

from __future__ import annotations

import asyncio
import functools
import io
import os
import re
import ssl
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from http.client import BadStatusLine, HTTPException, HTTPResponse, IncompleteRead, RemoteDisconnected
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlencode

from gpumap import __version__
from gpumap.cli.rows import NodeMaps, NodeMapStream
from gpumap.model.errors import FatalError
from gpumap.model.formatting import cut_off

if TYPE_CHECKING:
    from socket import socket

    from yarl import URL

    from gpumap.cli.credentials import Credentials

ANSWER_BYTES_MAX = 16 << 20
"""Unpacked. The largest node's map has less than a twentieth of it."""
_REASON_CHARACTERS = 200
_PIECE_BYTES = 1 << 16
_HAPPY_EYEBALLS_SECONDS = 0.25
_ERRNO = re.compile(r"\[Errno (\d+)\]")
_default_tls = functools.cache(ssl.create_default_context)


class Endpoint(NamedTuple):
    """Where to connect: to a host, with TLS if there is `tls`, or to a Unix `socket`.

    `server_name` is the name in the certificate, if it is not the host.
    """

    host: str
    port: int = 80
    tls: ssl.SSLContext | None = None
    server_name: str | None = None
    socket: str | None = None

    @property
    def header(self) -> str:
        """The header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def endpoint_of(url: URL, who: Credentials) -> Endpoint:
    """Return where to connect for a URL, with these certificates."""
    tls = (who.tls or _default_tls()) if url.scheme == "https" else None
    return Endpoint(url.raw_host or "", url.port or 0, tls, who.server_name)


class HttpAnswer(NamedTuple):
    """`location` is where a redirect leads."""

    status: int
    reason: str
    location: str
    body: bytes


class AnswerTooLargeError(FatalError):
    """The answer has more bytes than its reader takes."""


async def ask(
    place: Endpoint,
    target: str,
    headers: Mapping[str, str],
    who: str,
    *,
    form: Mapping[str, str] | None = None,
    bytes_max: int = ANSWER_BYTES_MAX,
) -> HttpAnswer:
    """Get a path, or post a form to it.

    Raises AnswerTooLargeError, FatalError for an answer that cannot be unpacked, and what `no_answer` explains.
    """
    async with _connected(place) as (reader, writer):
        writer.write(_request(place, target, headers, form))
        received = bytearray()
        while piece := await reader.read(_PIECE_BYTES):
            received += piece
            _refuse_large(len(received), who, bytes_max)
    return _read_answer(bytes(received), who, bytes_max)


@asynccontextmanager
async def _connected(place: Endpoint) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    if place.socket is not None:
        reader, writer = await asyncio.open_unix_connection(place.socket)
    else:
        reader, writer = await asyncio.open_connection(
            place.host,
            place.port,
            ssl=place.tls,
            server_hostname=(place.server_name or place.host) if place.tls else None,
            happy_eyeballs_delay=_HAPPY_EYEBALLS_SECONDS,
        )
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def _request(place: Endpoint, target: str, headers: Mapping[str, str], form: Mapping[str, str] | None) -> bytes:
    body = b"" if form is None else urlencode(form).encode()
    ours = {
        "Host": place.header,
        "User-Agent": f"gpumap/{__version__}",
        "Accept": "application/json",
        "Accept-Encoding": "gzip",
        "Connection": "close",
    }
    if form is not None:
        ours |= {"Content-Type": "application/x-www-form-urlencoded", "Content-Length": str(len(body))}
    names = {name.lower() for name in headers}
    sent = {name: value for name, value in ours.items() if name.lower() not in names} | dict(headers)
    lines = [f"{name}: {value}" for name, value in sent.items()]
    method = "GET" if form is None else "POST"
    return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode() + body


class _Received:
    """The bytes of an answer, as HTTPResponse wants them."""

    def __init__(self, received: bytes) -> None:
        self._received = received

    def makefile(self, _: str) -> io.BytesIO:
        return io.BytesIO(self._received)


def _read_answer(received: bytes, who: str, bytes_max: int) -> HttpAnswer:
    """Read an answer. Raises HTTPException, and FatalError if it cannot be unpacked."""
    as_socket: socket = _Received(received)  # type: ignore[assignment]
    response = HTTPResponse(as_socket, method="GET")
    response.begin()
    length = response.getheader("Content-Length", "0")
    if not length.isdecimal():
        raise HTTPException(f"Content-Length: {length}")
    try:
        body = response.read()
    except OverflowError as error:  # a chunk, or the whole, of more bytes than a machine can count
        raise HTTPException("the length of a part is too large") from error
    if response.getheader("Content-Encoding", "identity").lower() != "identity":
        body = _unpacked(body, who, bytes_max)
    return HttpAnswer(response.status, response.reason, response.getheader("Location", ""), body)


def _unpacked(packed: bytes, who: str, bytes_max: int) -> bytes:
    """Unpack gzip. A small answer may unpack to one that fills the memory."""
    try:
        body = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(packed, bytes_max + 1)
    except zlib.error as error:
        raise FatalError(f"{who} did not answer with JSON") from error
    _refuse_large(len(body), who, bytes_max)
    return body


def _refuse_large(length: int, who: str, bytes_max: int) -> None:
    if length > bytes_max:
        raise AnswerTooLargeError(f"{who} answered with more than {bytes_max >> 20} MiB, which is too much for a map")


def no_answer(error: OSError | HTTPException, *, https: bool = False) -> str:
    """Return one clause on why `ask` got no answer, of an https:// URL or another."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error}"
    # A server may end the handshake because of the client's certificate.
    asks = isinstance(error, ssl.SSLError) and "CERTIFICATE" in (error.reason or "")
    if isinstance(error, ConnectionResetError | BrokenPipeError | RemoteDisconnected) or asks:
        why = "it may require a client certificate, or not trust this one" if https else "try https://"
        return f"it closed the connection; {why}"
    if isinstance(error, ssl.SSLError):
        return "it does not support TLS like this machine; try http://"
    if isinstance(error, OSError):
        # Of several addresses of a name, asyncio joins what went wrong.
        numbers = _ERRNO.findall(str(error)) if error.errno is None else [error.errno]
        number = int(numbers[0]) if numbers else 0
        return os.strerror(number).lower() if number > 0 else error.strerror or str(error)
    if isinstance(error, IncompleteRead):
        return "its answer is incomplete"
    if isinstance(error, BadStatusLine):
        return "it does not support HTTP; try https://"
    return f"its answer is not valid HTTP: {cut_off(str(error), _REASON_CHARACTERS)}"


async def ask_repeatedly(ask_once: Callable[[], Awaitable[NodeMaps]], interval_seconds: float) -> NodeMapStream:
    """Ask again and again."""
    while True:
        answer: NodeMaps | FatalError
        try:
            answer = await ask_once()
        except FatalError as error:
            answer = error
        yield answer
        await asyncio.sleep(interval_seconds)
