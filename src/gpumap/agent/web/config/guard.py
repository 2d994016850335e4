"""Decides which request gets a page, by its certificate and password and the current web configuration.

`/healthz` and `/readyz` are open to every client: they name no pod, and a kubelet's probe has neither.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from aiohttp import web

from gpumap.agent.web.config.passwords import Passwords
from gpumap.agent.web.config.schema import REQUIRED, WebConfig
from gpumap.agent.web.config.tls import make_context

OPEN_PATHS = ("/healthz", "/readyz")
_NO_STORE = {"Cache-Control": "no-store"}
_ASK = {**_NO_STORE, "WWW-Authenticate": 'Basic realm="gpumap", charset="UTF-8"'}
_LATER = {**_NO_STORE, "Retry-After": "1"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Requirements:
    """The requirements of a configuration, ready to use. The default requires nothing."""

    context: ssl.SSLContext | None = None
    certificate_required: bool = False
    users: Mapping[str, str] = field(default_factory=dict, repr=False)


def requirements_of(config: WebConfig, pems: Mapping[str, bytes]) -> Requirements:
    """Make it. Raises WebConfigError. `pems` has the bytes of the files, by key."""
    tls = config.tls
    return Requirements(
        context=make_context(tls, pems) if tls else None,
        certificate_required=tls is not None and tls.client_auth == REQUIRED,
        users=dict(config.users),
    )


class Guard:
    """The current requirements, and what must survive a change of them."""

    def __init__(self, requirements: Requirements) -> None:
        self._passwords = Passwords()
        self.busy: set[asyncio.Transport | None] = set()
        """The connections with a request that is not answered yet."""
        self.take(requirements)

    def take(self, requirements: Requirements) -> None:
        """Activate these requirements."""
        self.requirements = requirements
        self._passwords.users = requirements.users

    def context(self) -> ssl.SSLContext | None:
        """Return the context for a new connection; None for plain HTTP."""
        return self.requirements.context

    def watch_over(self, application: web.Application) -> None:
        """Check every request to an application."""
        application.middlewares.append(self._ask)

    def close(self) -> None:
        self._passwords.close()

    @web.middleware
    async def _ask(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        transport = request.transport
        self.busy.add(transport)
        try:
            response = await self._answer(request, handler)
        finally:
            self.busy.discard(transport)
        if request.get_extra_info("sslcontext") is not self.requirements.context:
            response.force_close()  # older requirements accepted the connection
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        # By the route, not by the path: the page is open, however its address is written.
        resource = request.match_info.route.resource
        if resource is None or resource.canonical not in OPEN_PATHS:
            refusal = await self._refusal(request)
            if refusal is not None:
                return refusal
        return await handler(request)

    async def _refusal(self, request: web.Request) -> web.Response | None:
        requirements = self.requirements
        refusal = self._without_certificate(request) or await self._without_password(request)
        if refusal is None and requirements is not self.requirements:
            text = "the configuration changed during the check of the password\n"
            refusal = web.Response(status=503, text=text, headers=_LATER)
        return refusal

    def _without_certificate(self, request: web.Request) -> web.Response | None:
        """Refuse a client without a required certificate, or with one that has expired."""
        requirements = self.requirements
        shown = request.get_extra_info("ssl_object") if requirements.context is not None else None
        certificate = shown.getpeercert() if shown is not None else None
        if not certificate:
            if not requirements.certificate_required:
                return None
            return web.Response(status=403, text="this page requires a client certificate\n", headers=_NO_STORE)
        if ssl.cert_time_to_seconds(str(certificate["notAfter"])) < time.time():  # since the handshake
            return web.Response(status=403, text="this client certificate has expired\n", headers=_NO_STORE)
        return None

    async def _without_password(self, request: web.Request) -> web.Response | None:
        if not self.requirements.users:
            return None
        given = _credentials(request.headers.get("Authorization", ""))
        are_right = given is not None and await self._passwords.are_right(*given, request.remote or "")
        if are_right:
            return None
        if are_right is None:
            return web.Response(status=429, text="too many password checks at the same time\n", headers=_LATER)
        return web.Response(status=401, text="this page requires a user and a password\n", headers=_ASK)


def _credentials(authorization: str) -> tuple[str, str] | None:
    """Return user and password; None if the header has none (RFC 7617)."""
    scheme, _, word = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        text = base64.b64decode(word.strip(), validate=True)
    except ValueError:
        return None
    user, colon, password = text.decode(errors="surrogateescape").partition(":")  # a password may be any bytes
    return (user, password) if colon else None
