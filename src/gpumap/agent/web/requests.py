"""Reads a request's headers: format, compression, known version (RFC 9110 §8.8.3, §12.5), and the name of the host.

gpumap refuses the pages to a web site in the browser of a developer who runs `kubectl port-forward` (DNS rebinding).
The name of such a site resolves to 127.0.0.1 at its second request. The browser then lets the site's scripts read the
page, because the name is the same. But the request arrives at a loopback address and has the site's name as its `Host`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from functools import lru_cache

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPENMETRICS_VERSION = "1.0.0"

_FOREIGN_HOST = (
    "on a loopback address, gpumap requires a Host header with localhost, this machine's name or an IP address;"
    " a proxy must send one of them\n"
)
_REMEMBERED_HEADERS = 128
"""There are few clients, and each sends the same at each scrape."""
_REMEMBERED_ADDRESSES = 16
"""Addresses of this machine, and of hosts in requests to a loopback address. Parsing one takes up to 30 µs."""


@lru_cache(_REMEMBERED_HEADERS)
def prefers_openmetrics(accept: str) -> bool:
    """Return whether a client prefers OpenMetrics 1.0 to the text format."""
    openmetrics = quality(accept, "application/openmetrics-text")
    return openmetrics > 0 and openmetrics >= quality(accept, "text/plain")


@lru_cache(_REMEMBERED_HEADERS)
def accepts_gzip(accept_encoding: str) -> bool:
    return quality(accept_encoding, "gzip") > 0


def has_already(if_none_match: str, etag: str) -> bool:
    """Return whether an If-None-Match header names this version. Weak tags compare by the text in the quotes."""
    if not if_none_match:
        return False
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return etag.removeprefix("W/") in tags or tags == ["*"]


def quality(header: str, token: str) -> float:
    """Return the weight of a token in an Accept or Accept-Encoding header; 0 if it is not named."""
    best = 0.0
    for choice in header.split(","):
        name, *parameters = (word.strip() for word in choice.split(";"))
        if name.lower() != token:
            continue
        pairs = (parameter.partition("=") for parameter in parameters)
        values = {key.strip().lower(): value.strip() for key, _, value in pairs}
        version = values.get("version", OPENMETRICS_VERSION).strip('"')
        if token.endswith("openmetrics-text") and version != OPENMETRICS_VERSION:
            continue
        with contextlib.suppress(ValueError):
            best = max(best, float(values.get("q", "1")))
    return best


@web.middleware
async def refuse_foreign_hosts(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer 421 if the request has a name that is not of this machine. TLS needs no such check: it has names."""
    host = request.headers.get("Host")  # a browser always sends one
    own_address = (request.get_extra_info("sockname") or ("",))[0]
    if host is None or request.secure or not is_foreign(host, own_address):
        return await handler(request)
    return web.Response(status=421, text=_FOREIGN_HOST, headers={"Cache-Control": "no-store"})


def is_foreign(host: str, own_address: str) -> bool:
    """Return whether this `Host` cannot be a name of the loopback address at which the request arrived."""
    if not _is_loopback(own_address):
        return False
    bare = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = bare.removesuffix(".").lower()
    if name in ("localhost", socket.gethostname().lower()) or name.endswith(".localhost"):
        return False
    return _parse_address(name) is None


@lru_cache(_REMEMBERED_ADDRESSES)
def _is_loopback(text: str) -> bool:
    address = _parse_address(text)
    # The form of IPv4 on a socket for both.
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address is not None and address.is_loopback


@lru_cache(_REMEMBERED_ADDRESSES)
def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
