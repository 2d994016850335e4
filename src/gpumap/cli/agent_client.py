"""Asks a running gpumap for its map, again and again.

This is the edge of the commands: the bytes of an answer become a typed map here, or a FatalError with one line.
"""

from __future__ import annotations

import asyncio
import re
import zlib

import aiohttp
import msgspec
from yarl import URL

from gpumap.cli.credentials import Credentials
from gpumap.cli.http_errors import connection_error
from gpumap.cli.node_maps import NodeMaps, NodeMapStream
from gpumap.cli.server_flags import NO_URL, is_host, without_password
from gpumap.model.errors import FatalError, UsageError
from gpumap.model.map import VERSION, NodeMap, decode

REQUEST_SECONDS = 10.0
REDIRECTS_MAX = 3
ANSWER_BYTES_MAX = 16 << 20
"""Unpacked. The largest node's map has less than a twentieth of it."""
_PIECE_BYTES = 1 << 16
_HUGE_NUMBER = re.compile(rb"(\d{300}|\d[eE]\+?\d{3,})\s*[,}\]]")
"""More than 1e99, or so many digits: sums and ratios of such numbers would overflow. None of gpumap's is so large."""
_HUGE_TEXT = re.compile(rb'"(?:[^"\\]|\\.){4096}', re.DOTALL)
"""A name of Kubernetes has at most 253 characters. A table gives each row the width of its longest name."""


class NoMapError(FatalError):
    """The answer has the version and the parts of a map, and does not fit the schema."""


class _Outline(msgspec.Struct):
    """What tells a gpumap's answer from other JSON."""

    version: int
    devices: msgspec.Raw
    gpus: msgspec.Raw
    unmatched: msgspec.Raw
    sources: msgspec.Raw
    capabilities: msgspec.Raw


async def from_agent(address: URL, interval_seconds: float, who: Credentials) -> NodeMapStream:
    """Ask a running gpumap again and again. Raises UsageError for what is no URL."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    # Unpacked by `body_of`, a piece at a time: a small answer may unpack to one that fills the memory.
    headers = {"Accept-Encoding": "gzip", **who.headers}
    connector = aiohttp.TCPConnector(ssl=True if who.tls is None else who.tls)
    async with aiohttp.ClientSession(
        timeout=timeout, headers=headers, connector=connector, auto_decompress=False
    ) as session:
        while True:
            answer: NodeMaps | FatalError
            try:
                # Credentials are for this address only.
                redirects_max = 0 if any(who) else REDIRECTS_MAX
                answer = NodeMaps((await _ask(session, address, redirects_max, who.server_name),))
            except aiohttp.InvalidURL as error:
                raise UsageError(f"--url {address}: {NO_URL}") from error
            except FatalError as error:
                answer = error
            yield answer
            await asyncio.sleep(interval_seconds)


def map_address(url: str) -> URL:
    """Return the URL of an agent's map. Raises UsageError."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--url {without_password(url)}: does not start with http:// or https://")
    try:
        given = URL(url)
    except ValueError:
        given = URL()
    if not is_host(given.host):
        raise UsageError(f"--url {without_password(url)}: {NO_URL}")
    if given.query_string or given.fragment:
        shown = without_password(url).partition("?")[0].partition("#")[0]
        raise UsageError(f"--url {shown}: must end with the path; gpumap takes no query (?…) and no fragment (#…)")
    path = given.path.rstrip("/").removesuffix("/api/v1/map").removesuffix("/metrics")  # as it stands in other tools
    return given.with_path(f"{path}/api/v1/map")


async def _ask(session: aiohttp.ClientSession, address: URL, redirects_max: int, server_name: str | None) -> NodeMap:
    request = session.get(
        address, allow_redirects=redirects_max > 0, max_redirects=redirects_max + 1, server_hostname=server_name
    )
    try:
        async with request as response:
            if response.status != 200:
                raise FatalError(f"{address} answered {response.status} {response.reason}{_hint(response)}")
            return map_in(await body_of(response, str(address)), str(address))
    except aiohttp.TooManyRedirects as error:
        raise FatalError(f"{address} redirects too often") from error
    except aiohttp.RedirectClientError as error:
        raise FatalError(f"{address} redirects to what is no http:// or https:// address") from error
    except aiohttp.InvalidURL:
        raise
    except TimeoutError as error:
        raise FatalError(f"{address} did not answer: no answer within {REQUEST_SECONDS:g} s") from error
    except aiohttp.ClientError as error:
        raise FatalError(
            f"{address} did not answer: {connection_error(error, https=address.scheme == 'https')}"
        ) from error
    except ValueError as error:
        raise FatalError(f"{address} did not answer with JSON") from error


def _hint(response: aiohttp.ClientResponse) -> str:
    hints = {
        401: ": who is asking? see --user and --password-file",
        403: ": it refuses; does it ask for --cert-file?",
        404: ": is it the URL of a gpumap agent? --prometheus asks a Prometheus",
    }
    if response.status in hints:
        return hints[response.status]
    return ": give the URL that answers itself" if 300 <= response.status < 400 else ""


def map_in(body: bytes, who: str) -> NodeMap:
    """Read the map that was answered. Raises NoMapError, or FatalError if this is not an answer of this version."""
    try:
        if _HUGE_NUMBER.search(body):
            raise msgspec.ValidationError("a number is too large")
        if _HUGE_TEXT.search(body):
            raise msgspec.ValidationError("a text is longer than 4096 bytes")
        return decode(body)
    except msgspec.ValidationError as error:
        if not _has_outline(body, who):
            raise FatalError(f"{who} is no gpumap of this version") from error
        raise NoMapError(f"{who}: the response does not match the schema of /api/v1/map: {error}") from error
    except (ValueError, RecursionError) as error:
        raise FatalError(f"{who} did not answer with JSON") from error


def _has_outline(body: bytes, who: str) -> bool:
    try:
        return msgspec.json.decode(body, type=_Outline).version == VERSION
    except msgspec.ValidationError:
        return False
    except (ValueError, RecursionError) as error:
        raise FatalError(f"{who} did not answer with JSON") from error


async def body_of(response: aiohttp.ClientResponse, who: str) -> bytes:
    """Return the answer, unpacked a piece at a time. Raises FatalError if it is too large for a map, or cannot be
    unpacked."""
    packed = response.headers.get("Content-Encoding", "identity").lower() != "identity"
    unpack = zlib.decompressobj(zlib.MAX_WBITS | 16) if packed else None
    body = bytearray()
    async for piece in response.content.iter_chunked(_PIECE_BYTES):
        try:
            body += unpack.decompress(piece, ANSWER_BYTES_MAX + 1 - len(body)) if unpack else piece
        except zlib.error as error:
            raise FatalError(f"{who} did not answer with JSON") from error
        if len(body) > ANSWER_BYTES_MAX:
            raise FatalError(f"{who} answered with more than {ANSWER_BYTES_MAX >> 20} MiB, which is no map")
    return bytes(body)
