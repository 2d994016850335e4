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
from collections.abc import AsyncIterator, Callable
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
PATIENCE_SECONDS = 35.0
"""Longer than the usual scrape interval of 30 s: a scraper's connection is not closed just before its next request."""
_SHUTDOWN_SECONDS = 1.0
"""How long answers may take after a signal."""
_BACKLOG = 128
_HANDSHAKE_SECONDS = 10.0
_QUIET_SECONDS = 60.0
_LOGGED_MAX = 64
"""Different lines that the log shows in a minute."""
_AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER: the kernel drops unsent data, and resets the connection."""

Tls = Callable[[], ssl.SSLContext | None]
"""Returns the context for a new connection; None for plain HTTP."""

log = logging.getLogger("gpumap.agent.web.port")


@contextlib.asynccontextmanager
async def open_port(
    application: web.Application,
    listener: socket.socket,
    *,
    tls: Tls | None = None,
    patience_seconds: float = PATIENCE_SECONDS,
    max_connections: int = MAX_CONNECTIONS,
) -> AsyncIterator[Callable[[], None]]:
    """Serve an application on a bound socket until the block ends. Then no connection is left.

    The block gets a function that closes all connections, except those with an answer in progress.
    """
    for option, size in ((socket.SO_SNDBUF, SEND_BUFFER_BYTES), (socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)):
        listener.setsockopt(socket.SOL_SOCKET, option, size)  # accepted connections inherit it
    # A request of a client that is gone waits no longer, for example for the check of a password.
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    clients = Clients(max_connections)
    try:
        http = cast(web.Server, runner.server)  # it exists after setup
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(clients.handle_failure)
        # asyncio accepts so many connections at once. More would use up the open files before an idle one is closed.
        server = await loop.create_server(
            lambda: Client(clients, http, tls, patience_seconds), sock=listener, backlog=1
        )
        listener.listen(_BACKLOG)
        try:
            yield clients.close_idle
        finally:
            server.close()
    finally:
        await runner.cleanup()
        clients.abort_all()


class Clients:
    """Knows the connected clients, and which of them was idle longest."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._clients: set[Client] = set()
        self._quiet_until: dict[tuple[object, ...], float] = {}

    def admit(self, client: Client, *, over_tls: bool) -> int:
        """Return the number of clients, with this one. If all places are taken, abort the client that was idle longest.

        A client that waits for its page keeps its place while another one does not. A part of a request does not count:
        clients that send a byte now and then take no place from a scraper.
        """
        places = min(self._max_connections, MAX_TLS_CONNECTIONS) if over_tls else self._max_connections
        if len(self._clients) >= places:
            text = "too many connections, closing the one that was idle longest max=%d"
            self.log_seldom(logging.WARNING, text, places)
            idlest = min(self._clients, key=lambda rival: (rival.is_waiting(), rival.last_heard))
            idlest.abort()
            self._clients.discard(idlest)
        self._clients.add(client)
        return len(self._clients)

    def handle_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log a failure of the event loop. If gpumap cannot accept, asyncio tries again every second."""
        error = context.get("exception")
        if isinstance(error, OSError) and "accept" in context["message"]:
            text = "cannot accept connections reason=%r (logged once a minute)"
            self.log_seldom(logging.WARNING, text, error.strerror)
        else:
            loop.default_exception_handler(context)

    def log_seldom(self, level: int, message: str, *args: object) -> None:
        """Log the same line once a minute."""
        monotonic = asyncio.get_running_loop().time()
        self._quiet_until = {line: until for line, until in self._quiet_until.items() if monotonic < until}
        if (message, *args) not in self._quiet_until and len(self._quiet_until) < _LOGGED_MAX:
            self._quiet_until[message, *args] = monotonic + _QUIET_SECONDS
            log.log(level, message, *args)

    def drop(self, client: Client) -> None:
        self._clients.discard(client)

    def close_idle(self) -> None:
        """Close every connection, except those with an answer in progress and those within a handshake."""
        for client in tuple(self._clients):
            if client.transport is not None and not client.is_answering():
                client.transport.close()

    def abort_all(self) -> None:
        for client in tuple(self._clients):
            client.abort()


class _BadRequest(web.Response):
    """The answer to bytes that are no request, without aiohttp's version. `app.application` removes it elsewhere."""

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        self.headers.popall("Server", None)


class Client(web.RequestHandler):
    """A connection. It counts from its start, also within its TLS handshake."""

    def __init__(self, clients: Clients, server: web.Server, tls: Tls | None, patience_seconds: float) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type] # none
            logger=logging.getLogger("gpumap.http"),
            # aiohttp starts this clock with the connection and after each answer, until a request is complete.
            keepalive_timeout=patience_seconds,
            lingering_time=0,  # no page needs a body: do not wait for one that has not come with its request
        )
        self._clients = clients
        self._tls = tls
        self._patience_seconds = patience_seconds
        self.address = ""
        self.last_heard = self._loop.time()
        self._handshake: asyncio.Task[None] | None = None
        self._early = b""
        """Data that came with the end of the handshake, before its task continued."""
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket_transport = transport = cast(asyncio.Transport, transport)
        """Over TLS not the one of the pages, which is `transport`."""
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        context = self._tls() if self._tls is not None else None
        if self._clients.admit(self, over_tls=context is not None) <= MAX_LARGE_BUFFERS:
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGE_SEND_BUFFER_BYTES)
        # "Paused" then means that the peer has not read everything, also after gpumap closed the connection.
        transport.set_write_buffer_limits(high=0)
        if context is None:
            super().connection_made(transport)
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
                transport, self, context, server_side=True, ssl_handshake_timeout=seconds, ssl_shutdown_timeout=seconds
            )
        except (OSError, asyncio.CancelledError) as error:
            # start_tls's frame holds the future that holds this error, and all of TLS with its buffer. Only Python's
            # collector would free this cycle, and it runs rarely.
            error.__traceback__ = None
            if isinstance(error, ssl.SSLError):  # asyncio sends the client no alert with the reason
                message = "tls handshake failed client=%s reason=%s (logged once a minute)"
                self._clients.log_seldom(logging.INFO, message, self.address, (error.reason or "unknown").lower())
            elif isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._handshake = None
            if secured is None:
                self._clients.drop(self)
        if secured is None or secured.is_closing():
            return
        if self._tls is None or self._tls() is not context:  # it changed since the start of the handshake
            secured.close()
            return
        secured.set_write_buffer_limits(high=1)  # with 0, asyncio's TLS would pause while there is nothing to send
        super().connection_made(secured)
        super().data_received(self._early)
        self._early = b""

    def data_received(self, data: bytes) -> None:
        if self._handshake is not None:
            self._early += data
            return
        super().data_received(data)
        if self.is_answering():
            self.last_heard = self._loop.time()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a client that has sent its last byte (`nc -N`), and then close. With --web-config, such a client is
        gone: TLS has no half-closed state, and the check of its password would delay others."""
        if self._tls is not None or not self.is_answering():
            return False
        self.close()
        return True

    def is_answering(self) -> bool:
        """Return whether it has sent a request that is not yet answered."""
        # aiohttp has no public name for the future of the next request.
        return self.transport is not None and (self._waiter is None or self._waiter.done())

    def is_waiting(self) -> bool:
        """Return whether its answer is not complete, or not yet with the kernel."""
        return self.is_answering() or self._socket_transport.get_write_buffer_size() > 0

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Answer the next request only after the client has read this answer. aiohttp would keep all the answers."""
        finished = await super().finish_response(request, resp, start_time)
        await self._drain_helper()
        return finished

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer without aiohttp's words, which quote bytes as Python does. A malformed request is not logged."""
        if isinstance(exc, http_exceptions.HttpProcessingError):
            # aiohttp's frame holds this error and its data, and by its callers' frames TLS: a cycle as above.
            exc.__traceback__ = exc.__cause__ = exc.__context__ = None
            text = "this is not a valid HTTP request, or its headers are too long\n"
        else:
            super().handle_error(request, status, exc, message)  # it logs
            text = "gpumap failed to answer: see its log\n"
        response = _BadRequest(status=status, text=text)
        response.force_close()
        return response

    def pause_writing(self) -> None:
        self._unread = self._loop.call_later(self._patience_seconds, self.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._clients.drop(self)
        if self._handshake is not None:
            self._handshake.cancel()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def abort(self) -> None:
        """End the connection at once. The kernel drops what the peer has not read."""
        # It is lost: asyncio's TLS closes the socket first, and reports it afterwards.
        with contextlib.suppress(OSError):
            self._socket_transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._socket_transport.abort()
