"""Refuses pages to a web site in the browser of a developer who runs `kubectl port-forward` (DNS rebinding).

The name of such a site resolves to 127.0.0.1 at its second request. The browser then lets the site's scripts read the
page, because the name is the same. But the request arrives at a loopback address and has the site's name as its
`Host`.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable
from functools import lru_cache

from aiohttp import web

_REFUSAL = (
    "on a loopback address, gpumap requires a Host header with localhost, this machine's name or an IP address;"
    " a proxy must send one of them\n"
)

_REMEMBERED = 16
"""Addresses of this machine, and of hosts in requests to a loopback address. Parsing one takes up to 30 µs."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def refuse_foreign_hosts(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer 421 if the request has a name that is not of this machine. TLS needs no such check: it has names."""
    host = request.headers.get("Host")  # a browser always sends one
    arrived_at = (request.get_extra_info("sockname") or ("",))[0]
    if host is None or request.secure or not is_foreign(host, arrived_at):
        return await handler(request)
    return web.Response(status=421, text=_REFUSAL, headers={"Cache-Control": "no-store"})


def is_foreign(host: str, arrived_at: str) -> bool:
    """Return whether this `Host` cannot be a name of the loopback address of the request."""
    if not _is_loopback(arrived_at):
        return False
    bare = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = bare.removesuffix(".").lower()
    if name in ("localhost", socket.gethostname().lower()) or name.endswith(".localhost"):
        return False
    return _address(name) is None


@lru_cache(_REMEMBERED)
def _is_loopback(address: str) -> bool:
    found = _address(address)
    # The form of IPv4 on a socket for both.
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return found is not None and found.is_loopback


@lru_cache(_REMEMBERED)
def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
