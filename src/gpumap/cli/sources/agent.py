"""Asks a running gpumap for its map, again and again.

This is the edge of the commands: the bytes of an answer become a typed map here, or a FatalError with one line. A
command asks one agent, once every few seconds. aiohttp takes longer to import than such a request takes, so the event
loop carries the bytes and the standard library reads the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import io
import os
import re
import ssl
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http.client import BadStatusLine, HTTPException, HTTPResponse, IncompleteRead, RemoteDisconnected
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from yarl import URL

from gpumap import __version__
from gpumap.cli.credentials import Credentials, address_of, credentials_of, hide_password, is_host
from gpumap.cli.rows import NodeMaps, NodeMapStream
from gpumap.model.errors import FatalError, UsageError
from gpumap.model.formatting import cut_off
from gpumap.model.node import Node, decode
from gpumap.model.terms import NUMBER_MAX

if TYPE_CHECKING:
    from socket import socket


REQUEST_SECONDS = 10.0
REDIRECTS_MAX = 3
_REASON_CHARACTERS = 200
_REDIRECTS = (301, 302, 303, 307, 308)
_TEXT_CHARACTERS_MAX = 1 << 16
"""A table gives each row the width of its longest name. An agent cuts names after 4096 bytes, before it escapes them
(agent/sources/messages.py)."""
_default_tls = functools.cache(ssl.create_default_context)


def maps_of_agent(args: argparse.Namespace, interval_seconds: float) -> NodeMapStream:
    """Ask the agent of --url again and again. Raises UsageError."""
    address = map_address(args.url)
    who = credentials_of(args, os.environ, "--url", address)
    return ask_agent(address.with_user(None), interval_seconds, who)


async def ask_agent(address: URL, interval_seconds: float, who: Credentials) -> NodeMapStream:
    """Ask a running gpumap again and again."""
    while True:
        answer: NodeMaps | FatalError
        try:
            answer = NodeMaps((await _ask(address, who),))
        except FatalError as error:
            answer = error
        yield answer
        await asyncio.sleep(interval_seconds)


def map_address(url: str) -> URL:
    """Return the URL of an agent's map. Raises UsageError."""
    map_url = address_of("--url", url)
    if map_url.query_string or map_url.fragment:
        plain_url = hide_password(url).partition("?")[0].partition("#")[0]
        raise UsageError(f"--url {plain_url}: must end with the path; a query (?…) or a fragment (#…) is not supported")
    path = map_url.path.rstrip("/").removesuffix("/api/v1/map").removesuffix("/metrics")  # as in other tools
    return map_url.with_path(f"{path}/api/v1/map")


async def _ask(address: URL, who: Credentials) -> Node:
    """Ask once. Raises FatalError with the reason."""
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            answer = await _follow_redirects(address, who)
    except TimeoutError as error:
        raise FatalError(f"{address} did not answer: no answer within {REQUEST_SECONDS:g} s") from error
    except (OSError, HTTPException) as error:
        why = no_answer(error, https=address.scheme == "https")
        raise FatalError(f"{address} did not answer: {why}") from error
    if answer.status != 200:
        raise FatalError(f"{address} answered {answer.status} {answer.reason}{_hint(answer.status)}")
    return map_in(answer.body, str(address))


async def _follow_redirects(address: URL, who: Credentials) -> Answer:
    """Ask; follow redirects, unless the request has credentials: they are for this address only."""
    url = address
    for _ in range(REDIRECTS_MAX + 1):
        tls = (who.tls or _default_tls()) if url.scheme == "https" else None
        endpoint = Endpoint(url.raw_host or "", url.port or 0, tls, who.server_name)
        answer = await get(endpoint, url.raw_path_qs, who.headers, str(address))
        if answer.status not in _REDIRECTS or not answer.location or any(who):
            return answer
        try:
            url = url.join(URL(answer.location))
        except ValueError:
            url = URL()
        if url.scheme not in ("http", "https") or not is_host(url.raw_host):
            raise FatalError(f"{address} redirects to an address without http:// or https://")
    raise FatalError(f"{address} redirects too often")


def _hint(status: int) -> str:
    hints = {
        401: ". Set --user and --password-file",
        403: ". It refuses the request and may require --cert-file",
        404: ". Check that it is the URL of a gpumap agent (for a Prometheus use --prometheus)",
    }
    if status in hints:
        return hints[status]
    return ". Use the URL without redirects" if 300 <= status < 400 else ""


def map_in(body: bytes, who: str) -> Node:
    """Read the map that was answered. Raises FatalError if it is none of this version."""
    try:
        node = decode(body)
        _refuse_huge(node)
        return node
    except msgspec.ValidationError as error:
        why = cut_off(str(error), _REASON_CHARACTERS)
        raise FatalError(f"{who} did not answer with a map of this version of gpumap: {why}") from error
    except (ValueError, RecursionError) as error:
        raise FatalError(f"{who} did not answer with JSON") from error


def _refuse_huge(node: Node) -> None:
    """Raise ValidationError for a text that no table has room for, or a number that overflows in a sum."""
    values: list[object] = [msgspec.to_builtins(node)]
    while values:
        value = values.pop()
        if isinstance(value, str):
            if len(value) > _TEXT_CHARACTERS_MAX:
                raise msgspec.ValidationError(f"a text is longer than {_TEXT_CHARACTERS_MAX} characters")
        elif isinstance(value, dict):
            values += value
            values += value.values()
        elif isinstance(value, list | tuple):
            values += value
        elif isinstance(value, int | float) and abs(value) > NUMBER_MAX:
            raise msgspec.ValidationError("a number is too large")


# --- one page over HTTP, on a connection of its own -------------------------------------------------------------------


ANSWER_BYTES_MAX = 16 << 20
"""Unpacked. The largest node's map has less than a twentieth of it."""
_PIECE_BYTES = 1 << 16
_HAPPY_EYEBALLS_SECONDS = 0.25
_ERRNO = re.compile(r"\[Errno (\d+)\]")


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


class Answer(NamedTuple):
    """`location` is where a redirect leads."""

    status: int
    reason: str
    location: str
    body: bytes


async def get(place: Endpoint, target: str, headers: Mapping[str, str], who: str) -> Answer:
    """Ask for a path. Raises FatalError for an answer that is too large or cannot be unpacked, and what `no_answer`
    explains."""
    async with _connected(place) as (reader, writer):
        writer.write(_request(place, target, headers))
        received = bytearray()
        while piece := await reader.read(_PIECE_BYTES):
            received += piece
            _refuse_large(len(received), who)
    return _read_answer(bytes(received), who)


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


def _request(place: Endpoint, target: str, headers: Mapping[str, str]) -> bytes:
    ours = {
        "Host": place.header,
        "User-Agent": f"gpumap/{__version__}",
        "Accept": "application/json",
        "Accept-Encoding": "gzip",
        "Connection": "close",
    }
    names = {name.lower() for name in headers}
    sent = {name: value for name, value in ours.items() if name.lower() not in names} | dict(headers)
    lines = [f"{name}: {value}" for name, value in sent.items()]
    return "\r\n".join([f"GET {target} HTTP/1.1", *lines, "", ""]).encode()


class _Received:
    """The bytes of an answer, as HTTPResponse wants them."""

    def __init__(self, received: bytes) -> None:
        self._received = received

    def makefile(self, _: str) -> io.BytesIO:
        return io.BytesIO(self._received)


def _read_answer(received: bytes, who: str) -> Answer:
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
        body = _unpacked(body, who)
    return Answer(response.status, response.reason, response.getheader("Location", ""), body)


def _unpacked(packed: bytes, who: str) -> bytes:
    """Unpack gzip. A small answer may unpack to one that fills the memory."""
    try:
        body = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(packed, ANSWER_BYTES_MAX + 1)
    except zlib.error as error:
        raise FatalError(f"{who} did not answer with JSON") from error
    _refuse_large(len(body), who)
    return body


def _refuse_large(length: int, who: str) -> None:
    if length > ANSWER_BYTES_MAX:
        raise FatalError(f"{who} answered with more than {ANSWER_BYTES_MAX >> 20} MiB, which is too much for a map")


def no_answer(error: OSError | HTTPException, *, https: bool = False) -> str:
    """Return one clause on why `get` got no answer, of an https:// URL or another."""
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
