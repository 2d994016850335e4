"""Asks a running gpumap for its map, again and again.

One that fails is told as a FatalError in the place of its document, so that a watch can go on.
"""

from __future__ import annotations

import asyncio
import json
import zlib

import aiohttp
from yarl import URL

from gpumap.cli.credentials import Credentials
from gpumap.cli.http_errors import connection_error
from gpumap.cli.node_documents import Seen, Sights
from gpumap.cli.server_flags import NO_URL, without_password
from gpumap.model.document import VERSION, Document
from gpumap.model.errors import FatalError, UsageError

REQUEST_SECONDS = 10.0
REDIRECTS_MAX = 3
ANSWER_BYTES_MAX = 64 << 20
"""Unpacked. The largest node's map has less than a hundredth of it."""
_PIECE_BYTES = 1 << 16
_PARTS = frozenset({"devices", "gpus", "unmatched", "sources", "capabilities"})


async def from_agent(address: URL, interval_seconds: float, who: Credentials) -> Sights:
    """Ask a running gpumap again and again. Raises UsageError for what is no URL."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    # Unpacked here, a piece at a time: a small answer may unpack to one that fills the memory.
    headers = {"Accept-Encoding": "gzip", **who.headers}
    connector = aiohttp.TCPConnector(ssl=True if who.tls is None else who.tls)
    async with aiohttp.ClientSession(
        timeout=timeout, headers=headers, connector=connector, auto_decompress=False
    ) as session:
        while True:
            found: Seen | FatalError
            try:
                # What says who asks is for this address alone.
                redirects_max = 0 if any(who) else REDIRECTS_MAX
                found = Seen((await _ask(session, address, redirects_max, who.server_name),))
            except aiohttp.InvalidURL as error:
                raise UsageError(f"--url {address}: {NO_URL}") from error
            except FatalError as error:
                found = error
            yield found
            await asyncio.sleep(interval_seconds)


def map_address(url: str) -> URL:
    """Where an agent's map is. Raises UsageError."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--url {without_password(url)}: does not start with http:// or https://")
    try:
        given = URL(url)
    except ValueError:
        given = URL()
    if not given.host:
        raise UsageError(f"--url {without_password(url)}: {NO_URL}")
    return given.with_path(given.path.rstrip("/").removesuffix("/api/v1/map") + "/api/v1/map")


async def _ask(session: aiohttp.ClientSession, address: URL, redirects_max: int, server_name: str | None) -> Document:
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
    hints = {401: ": who is asking? see --user and --password-file", 403: ": it refuses; does it ask for --cert-file?"}
    if response.status in hints:
        return hints[response.status]
    return ": give the URL that answers itself" if 300 <= response.status < 400 else ""


def map_in(body: bytes, who: str) -> Document:
    """The map that was answered. Raises FatalError where it is none."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FatalError(f"{who} did not answer with JSON") from error
    if not isinstance(found, dict) or found.get("version") != VERSION or not found.keys() >= _PARTS:
        raise FatalError(f"{who} is no gpumap of this version")
    return found


async def body_of(response: aiohttp.ClientResponse, who: str) -> bytes:
    """What was answered, unpacked a piece at a time. Raises FatalError where it is more than a map can be, or cannot be
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
