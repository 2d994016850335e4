"""The listening port: how many clients may be connected, and how long an unused connection stays open.

gpumap closes the connection of a client that sends nothing, that stops within a TLS handshake or a header, or that
requests a page and does not read it. If all places are taken, the client that was idle longest loses its place: gpumap
always accepts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, cast

from aiohttp import http_exceptions, web

MAX_CONNECTIONS = 256
MAX_TLS_CONNECTIONS = 128
"""asyncio uses 256 KiB for each TLS connection: twice as many connections would use more than everything else."""
SEND_BUFFER_BYTES = RECEIVE_BUFFER_BYTES = 1 << 16
"""The kernel takes twice as much as a maximum. Otherwise its buffers grow to 4 MiB for each client that does not
read its pages, and the kernel charges them to the pod."""
LARGE_SEND_BUFFER_BYTES = 1 << 18
"""It takes a whole page. With the smaller one, gpumap waits for the client several times in each page: half as many
scrapes a second."""
MAX_LARGE_BUFFERS = 8
MAX_PIPELINED = 8
"""Requests in one read. No scraper and no browser sends the next one before the answer."""
PATIENCE_SECONDS = 35.0
"""Longer than the usual scrape interval of 30 s: a scraper's connection is not closed just before its next request."""
_HANDSHAKE_SECONDS = 10.0
_LOOK_SECONDS = 0.05
"""How often gpumap checks whether a client that has sent its last request has all its answers."""
_QUIET_SECONDS = 60.0
_LOGGED_MAX = 64
"""Pairs of client and reason whose failed handshakes the log shows in a minute."""
_AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER: the kernel drops unsent data, and resets the connection."""

Tls = Callable[[], ssl.SSLContext | None]
"""Returns the context for a new connection; None for plain HTTP."""
CloseOthers = Callable[[Collection[asyncio.BaseTransport | None]], None]
"""Closes all connections but these."""

log = logging.getLogger("gpumap.agent.web.port")


@contextlib.asynccontextmanager
async def open_port(
    application: web.Application,
    listener: socket.socket,
    *,
    tls: Tls = lambda: None,
    patience_seconds: float = PATIENCE_SECONDS,
    max_connections: int = MAX_CONNECTIONS,
    shutdown_seconds: float = 1.0,
) -> AsyncIterator[CloseOthers]:
    """Serve an application on a bound socket until the block ends. Then no connection is left."""
    for option, most in ((socket.SO_SNDBUF, SEND_BUFFER_BYTES), (socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)):
        listener.setsockopt(socket.SOL_SOCKET, option, most)  # accepted connections inherit it
    runner = web.AppRunner(
        application,
        access_log=None,
        logger=_HttpLog(logging.getLogger("gpumap.http")),
        # aiohttp starts this clock with the connection and after each answer, until a request is complete.
        keepalive_timeout=patience_seconds,
        lingering_time=0,  # no page needs a body: do not wait for one that has not come with its request
        shutdown_timeout=shutdown_seconds,
    )
    await runner.setup()
    limiter = ConnectionLimiter(max_connections)
    try:
        http = cast(web.Server, runner.server)  # it exists after setup
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(limiter.handle_failure)
        server = await loop.create_server(lambda: _Client(limiter, http, tls, patience_seconds), sock=listener)
        try:
            yield limiter.close_others
        finally:
            server.close()
    finally:
        await runner.cleanup()
        limiter.clear()


class _HttpLog(logging.LoggerAdapter[logging.Logger]):
    """Passes on the log of the HTTP library, except for clients that send something else than HTTP."""

    def log(self, level: int, msg: object, *args: object, **more: Any) -> None:
        error = more.get("exc_info")
        if isinstance(error, http_exceptions.HttpProcessingError):
            # aiohttp's frame holds this error and its data, and by its callers' frames TLS: a cycle as below.
            error.__traceback__ = error.__cause__ = error.__context__ = None
        else:
            super().log(level, msg, *args, **more)


class ConnectionLimiter:
    """Knows the connected clients, and which of them was idle longest."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._clients: set[_Client] = set()
        self._quiet_until = 0.0
        self._refuses_until = 0.0
        self._quiet_about: dict[tuple[str, str], float] = {}

    def admit(self, client: _Client, now: float, *, over_tls: bool) -> int:
        """Return the number of clients, with this one. If all places, or those of its address, are taken, abort the one
        that was idle longest.

        One address gets half of the places: all scrapers of a cluster may have the same address (address translation).
        """
        most = min(self._max_connections, MAX_TLS_CONNECTIONS) if over_tls else self._max_connections
        most_of_one = max(1, most // 2)
        neighbours = [one for one in self._clients if one.address == client.address]
        if len(neighbours) >= most_of_one:
            self._make_room(neighbours, now, f"address={client.address} max={most_of_one}")
        elif len(self._clients) >= most:
            self._make_room(self._clients, now, f"max={most}")
        self._clients.add(client)
        return len(self._clients)

    def _make_room(self, among: Collection[_Client], now: float, why: str) -> None:
        """Abort the client that was idle longest. The log shows that at times.

        A client that waits for its page keeps its place while another one does not. A part of a request does not count:
        clients that send a byte now and then take no place from a scraper.
        """
        if now >= self._quiet_until:
            self._quiet_until = now + _QUIET_SECONDS
            log.warning("too many connections, closing the one that was idle longest %s", why)
        idlest = min(among, key=lambda one: (one.is_waiting(), one.last_heard))
        idlest.abort()
        self._clients.discard(idlest)

    def handle_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log a failure of the event loop. That gpumap cannot accept is logged once a minute: asyncio tries every
        second, and reports it once for each place in the backlog.
        """
        error = context.get("exception")
        if not isinstance(error, OSError) or "accept" not in context["message"]:
            loop.default_exception_handler(context)
        elif loop.time() >= self._refuses_until:
            self._refuses_until = loop.time() + _QUIET_SECONDS
            log.warning("cannot accept connections reason=%r (logged once a minute)", error.strerror)

    def leave(self, client: _Client) -> None:
        self._clients.discard(client)

    def log_failed_handshake(self, transport: asyncio.Transport, error: ssl.SSLError, now: float) -> None:
        """Log each pair of client and reason once a minute: asyncio sends the client no alert with the reason."""
        peer = transport.get_extra_info("peername") or ("",)
        failure = peer[0], (error.reason or "unknown").lower()
        if now < self._quiet_about.get(failure, now):
            return
        if len(self._quiet_about) >= _LOGGED_MAX:
            self._quiet_about = {one: until for one, until in self._quiet_about.items() if now < until}
        if len(self._quiet_about) < _LOGGED_MAX:
            self._quiet_about[failure] = now + _QUIET_SECONDS
            log.info("tls handshake failed client=%s reason=%s (logged once a minute)", *failure)

    def close_others(self, busy: Collection[asyncio.BaseTransport | None]) -> None:
        """Close every connection, except those with an answer in progress and those within a handshake."""
        for client in tuple(self._clients):
            if client.served_by is not None and client.served_by not in busy:
                client.served_by.close()

    def clear(self) -> None:
        for client in tuple(self._clients):
            client.abort()


class _Client(asyncio.Protocol):
    """A connection: passes everything to the HTTP protocol, and ends it if the peer does not read what was sent.

    It counts as a client from the start of its connection, also within its TLS handshake.
    """

    __slots__ = (
        "_early",
        "_finished_asking",
        "_handshake",
        "_http",
        "_limiter",
        "_loop",
        "_make_http",
        "_patience_seconds",
        "_tls",
        "_transport",
        "_untaken",
        "address",
        "last_heard",
        "served_by",
    )

    def __init__(self, limiter: ConnectionLimiter, make_http: web.Server, tls: Tls, patience_seconds: float) -> None:
        self._limiter = limiter
        self._make_http = make_http
        self._tls = tls
        self._patience_seconds = patience_seconds
        self._loop = asyncio.get_running_loop()
        self.address = ""
        self.last_heard = self._loop.time()
        self.served_by: asyncio.Transport | None = None
        """Return the transport of its pages, after the handshake: over TLS not the one of the connection."""
        self._http: web.RequestHandler | None = None
        self._finished_asking = False
        self._handshake: asyncio.Task[None] | None = None
        self._early = b""
        """Data that came with the end of the handshake, before its task continued."""
        self._untaken: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        context = self._tls()
        if self._limiter.admit(self, self._loop.time(), over_tls=context is not None) <= MAX_LARGE_BUFFERS:
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGE_SEND_BUFFER_BYTES)
        # "Paused" then means that the peer has not read everything, also after gpumap closed the connection.
        transport.set_write_buffer_limits(high=0)
        if context is None:
            self._begin(transport)
        else:
            transport.pause_reading()
            self._handshake = self._loop.create_task(self._shake_hands(transport, context))

    async def _shake_hands(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        # It lost its place already: asyncio would keep TLS's buffers until the deadline, and longer.
        if transport.is_closing():
            return
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
            # start_tls's frame holds the future that holds this error, and all of TLS with its buffer. Only Python's
            # collector would free this cycle, and it runs rarely.
            error.__traceback__ = None
            if isinstance(error, ssl.SSLError):
                self._limiter.log_failed_handshake(transport, error, self._loop.time())
            elif isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._handshake = None
            if secured is None:
                self._limiter.leave(self)
        if secured is None or secured.is_closing():
            return
        if self._tls() is not context:  # it changed since the start of the handshake
            secured.close()
        else:
            secured.set_write_buffer_limits(high=1)  # with 0, asyncio's TLS would pause while there is nothing to send
            self._begin(secured)

    def _begin(self, transport: asyncio.Transport) -> None:
        self.served_by = transport
        self._http = self._make_http()
        self._http.connection_made(transport)
        if self._early:
            self._http.data_received(self._early)
            self._early = b""

    def data_received(self, data: bytes) -> None:
        if data.count(b"\n\r\n") + data.count(b"\n\n") > MAX_PIPELINED:
            self.abort()  # aiohttp would keep them all, at some KiB each
        elif self._http is not None:
            self._http.data_received(data)
            if self.is_answering():
                self.last_heard = self._loop.time()
        elif self._handshake is not None:
            self._early += data

    def eof_received(self) -> bool | None:
        """Keep a connection with an open request until its answer. asyncio's TLS has no half-closed state."""
        if self.served_by is not self._transport or not self.is_answering():
            return None
        if not self._finished_asking:  # resumed reading finds the end again
            self._finished_asking = True
            self._close_when_answered()
        return True

    def is_answering(self) -> bool:
        """Return whether it has sent a request that is not yet answered."""
        if self._http is None:
            return False
        next_request = self._http._waiter  # aiohttp has no public name for it
        return next_request is None or next_request.done()

    def is_waiting(self) -> bool:
        """Return whether its answer is not complete, or not yet with the kernel."""
        return self.is_answering() or self._transport.get_write_buffer_size() > 0

    def _close_when_answered(self) -> None:
        if self.is_answering():
            self._loop.call_later(_LOOK_SECONDS, self._close_when_answered)
        else:
            self._transport.close()

    def pause_writing(self) -> None:
        self._untaken = self._loop.call_later(self._patience_seconds, self.abort)
        if self.served_by is not None:
            self.served_by.pause_reading()  # no further request of a client that does not read its answers
        if self._http is not None:
            self._http.pause_writing()

    def resume_writing(self) -> None:
        if self._untaken is not None:
            self._untaken.cancel()
        if self.served_by is not None and not self.served_by.is_closing():
            self.served_by.resume_reading()
        if self._http is not None:
            self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limiter.leave(self)
        if self._handshake is not None:
            self._handshake.cancel()
        if self._untaken is not None:
            self._untaken.cancel()
        if self._http is not None:
            self._http.connection_lost(exc)
            self._http = None

    def abort(self) -> None:
        """End the connection at once. The kernel drops what the peer has not read."""
        # It is lost: asyncio's TLS closes the socket first, and reports it afterwards.
        with contextlib.suppress(OSError):
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._transport.abort()
