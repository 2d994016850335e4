"""The listening port: how many clients there may be, and how long one may keep its connection without using it.

Clients that connect and say nothing, that stop within a TLS handshake or a header, or that ask for a page and do not
take it are let go; when all places are taken the one that has been idle for longest makes room, so that accepting never
stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from asyncio import sslproto
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, cast

from aiohttp import http_exceptions, web

MAX_CONNECTIONS = 256
PATIENCE_SECONDS = 35.0
"""Longer than the usual scrape interval of 30 s: the connection of a scraper is not closed just when it asks again."""
_HANDSHAKE_SECONDS = 10.0
_QUIET_SECONDS = 60.0
_TLS_BUFFER_BYTES = 1 << 15
"""What each TLS connection is read into: two records. asyncio's own 256 KiB, 256 times, are more than all else here."""
_TOLD_MAX = 64
"""Clients whose handshake failed and the reasons, of which the log tells in a minute."""
_AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER: the kernel drops what was not sent, and resets the connection."""

Tls = Callable[[], ssl.SSLContext | None]
"""What a new connection is taken with; None for plain HTTP."""
CloseOthers = Callable[[Collection[asyncio.BaseTransport | None]], None]
"""Ends all connections but these."""

log = logging.getLogger("gpumap.agent.web.port")


def _plain() -> None:
    return None


@contextlib.asynccontextmanager
async def open_port(
    application: web.Application,
    listener: socket.socket,
    *,
    tls: Tls = _plain,
    patience_seconds: float = PATIENCE_SECONDS,
    max_connections: int = MAX_CONNECTIONS,
    shutdown_seconds: float = 1.0,
) -> AsyncIterator[CloseOthers]:
    """Serve an application on a bound socket until the block ends; then no connection is left."""
    runner = web.AppRunner(
        application,
        access_log=None,
        logger=_HttpLog(logging.getLogger("gpumap.http")),
        # aiohttp starts this clock with the connection and after each answer, and heeds it until a request is whole.
        keepalive_timeout=patience_seconds,
        lingering_time=0,  # nothing here takes a body: one that has not come with its request is not waited for
        shutdown_timeout=shutdown_seconds,
    )
    await runner.setup()
    sslproto.SSLProtocol.max_size = _TLS_BUFFER_BYTES
    door = ConnectionLimiter(max_connections)
    try:
        http = cast(web.Server, runner.server)  # it is there after setup
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Client(door, http, tls, patience_seconds), sock=listener)
        try:
            yield door.close_others
        finally:
            server.close()
    finally:
        await runner.cleanup()
        door.clear()


class _HttpLog(logging.LoggerAdapter[logging.Logger]):
    """What the HTTP library logs, but for what clients send that is no HTTP: that is not worth it."""

    def log(self, level: int, msg: object, *args: object, **more: Any) -> None:
        error = more.get("exc_info")
        if isinstance(error, http_exceptions.HttpProcessingError):
            # aiohttp's frame holds this error, and what was sent, and by its callers' frames TLS: a ring as below.
            error.__traceback__ = error.__cause__ = error.__context__ = None
        else:
            super().log(level, msg, *args, **more)


class ConnectionLimiter:
    """Knows who is in, and who has asked nothing for the longest."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._inside: set[_Client] = set()
        self._quiet_until = 0.0
        self._told_until: dict[tuple[str, str], float] = {}

    def admit(self, client: _Client, now: float) -> None:
        """Let a client in; where all places are taken, the one idle for longest goes. That is said at times."""
        if len(self._inside) >= self._max_connections:
            if now >= self._quiet_until:
                self._quiet_until = now + _QUIET_SECONDS
                log.warning("too many connections, closing the idlest max=%d", self._max_connections)
            idlest = min(self._inside, key=lambda one: one.last_heard)
            idlest.abort()
            self._inside.discard(idlest)
        self._inside.add(client)

    def leave(self, client: _Client) -> None:
        self._inside.discard(client)

    def tell_refused(self, transport: asyncio.Transport, error: ssl.SSLError, now: float) -> None:
        """Say at times that a handshake failed: asyncio lets the client have no alert that would tell it why."""
        peer = transport.get_extra_info("peername") or ("",)
        told = peer[0], (error.reason or "unknown").lower()
        if now < self._told_until.get(told, now):
            return
        if len(self._told_until) >= _TOLD_MAX:
            self._told_until = {one: until for one, until in self._told_until.items() if now < until}
        if len(self._told_until) < _TOLD_MAX:
            self._told_until[told] = now + _QUIET_SECONDS
            log.info("tls handshake failed client=%s reason=%s (told once a minute)", *told)

    def close_others(self, busy: Collection[asyncio.BaseTransport | None]) -> None:
        """End every connection, but for those that are being answered and those that shake hands."""
        for client in tuple(self._inside):
            if client.served_by is not None and client.served_by not in busy:
                client.served_by.close()

    def clear(self) -> None:
        for client in tuple(self._inside):
            client.abort()


class _Client(asyncio.Protocol):
    """A connection: passes everything on to the HTTP protocol, and ends it when what was sent is not taken.

    It is a client from the moment that it connected: its TLS handshake takes place inside the door.
    """

    __slots__ = (
        "_door",
        "_early",
        "_handshake",
        "_http",
        "_loop",
        "_make_http",
        "_patience_seconds",
        "_tls",
        "_transport",
        "_untaken",
        "last_heard",
        "served_by",
    )

    def __init__(
        self, door: ConnectionLimiter, make_http: Callable[[], asyncio.Protocol], tls: Tls, patience_seconds: float
    ) -> None:
        self._door = door
        self._make_http = make_http
        self._tls = tls
        self._patience_seconds = patience_seconds
        self._loop = asyncio.get_running_loop()
        self.last_heard = self._loop.time()
        self.served_by: asyncio.Transport | None = None
        """What its pages are sent by, once it may ask for some: over TLS not the transport that it connected with."""
        self._http: asyncio.Protocol | None = None
        self._handshake: asyncio.Task[None] | None = None
        self._early = b""
        """What came with the end of the handshake, before its task knew."""
        self._untaken: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        self._door.admit(self, self._loop.time())
        # "Paused" is then whenever the peer has not taken all: also after the connection was closed on our side.
        transport.set_write_buffer_limits(high=0)
        context = self._tls()
        if context is None:
            self._begin(transport)
        else:
            transport.pause_reading()
            self._handshake = self._loop.create_task(self._shake_hands(transport, context))

    async def _shake_hands(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        seconds = min(_HANDSHAKE_SECONDS, self._patience_seconds)
        secured = None
        try:
            secured = await self._loop.start_tls(
                transport,
                self,
                context,
                server_side=True,
                ssl_handshake_timeout=seconds,
                ssl_shutdown_timeout=seconds,
            )
        except (OSError, asyncio.CancelledError) as error:
            # start_tls's frame holds the future that holds this error, and all of TLS with its buffer: a ring, which
            # only Python's collector would break, and that looks seldom.
            error.__traceback__ = None
            if isinstance(error, ssl.SSLError):
                self._door.tell_refused(transport, error, self._loop.time())
            elif isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._handshake = None
            if secured is None:
                self._door.leave(self)
        if secured is None or secured.is_closing():
            return
        if self._tls() is not context:  # there is another since it began: the next connection is taken with that
            secured.close()
        else:
            secured.set_write_buffer_limits(high=1)  # with 0 asyncio's TLS would pause while there is nothing to send
            self._begin(secured)

    def _begin(self, transport: asyncio.Transport) -> None:
        self.served_by = transport
        self._http = self._make_http()
        self._http.connection_made(transport)
        if self._early:
            self._http.data_received(self._early)
            self._early = b""

    def data_received(self, data: bytes) -> None:
        self.last_heard = self._loop.time()
        if self._http is not None:
            self._http.data_received(data)
        elif self._handshake is not None:
            self._early += data

    def eof_received(self) -> bool | None:
        return self._http.eof_received() if self._http is not None else None

    def pause_writing(self) -> None:
        self._untaken = self._loop.call_later(self._patience_seconds, self.abort)
        if self._http is not None:
            self._http.pause_writing()

    def resume_writing(self) -> None:
        if self._untaken is not None:
            self._untaken.cancel()
        if self._http is not None:
            self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.leave(self)
        if self._handshake is not None:
            self._handshake.cancel()
        if self._untaken is not None:
            self._untaken.cancel()
        if self._http is not None:
            self._http.connection_lost(exc)
            self._http = None

    def abort(self) -> None:
        """End the connection at once, whatever the peer has not taken; the kernel keeps none of it either."""
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._transport.abort()
