"""Decides which request gets a page, by its certificate and password and the current web configuration.

It reads the configuration and its files repeatedly. A change is active after two equal reads, not while it is written.
An invalid change is logged once, and the configuration before it stays active. `/healthz` and `/readyz` are open to
every client: they name no pod, and a kubelet's probe has neither certificate nor password.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from aiohttp import web
from aiohttp.helpers import BasicAuth

from gpumap.agent.executors import SerialExecutor
from gpumap.agent.web.config import REQUIRED, WebConfig, WebConfigError, make_context, parse, read_pems, read_text
from gpumap.agent.web.requests import Handler
from gpumap.model.errors import UsageError

LOOK_SECONDS = 2.0
_DEADLINE_SECONDS = 5.0
_OPEN_PATHS = ("/healthz", "/readyz")
_NO_STORE = {"Cache-Control": "no-store"}
_ASK = {**_NO_STORE, "WWW-Authenticate": 'Basic realm="gpumap", charset="UTF-8"'}
_BCRYPT_BYTES = 72
"""bcrypt never reads more of a password, and the module refuses a longer one."""

log = logging.getLogger("gpumap.agent.web.guard")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, the bytes of the files that it names, and the context that they make; None for plain HTTP."""

    config: WebConfig
    pems: dict[str, bytes] = field(repr=False)
    context: ssl.SSLContext | None = field(compare=False)


class Guard:
    """The configuration of a file. Raises UsageError if it is not usable at the start."""

    def __init__(self, path: Path, *, look_seconds: float = LOOK_SECONDS) -> None:
        self._path = path
        self._look_seconds = look_seconds
        self._thread = SerialExecutor("gpumap-web-config")
        self._passwords = Passwords()
        self._text = b""
        self._parsed: WebConfig | str = WebConfig()
        self._active = Loaded(WebConfig(), {}, None)
        self._mistake = ""
        try:
            self._use(self._load(self._parse()))
        except WebConfigError as error:
            raise UsageError(f"--web-config {path}: {error}") from error

    def context(self) -> ssl.SSLContext | None:
        """Return the context for a new connection; None for plain HTTP."""
        return self._active.context

    def words(self) -> str:
        """Return what clients need, for the log."""
        return self._active.config.words()

    def close(self) -> None:
        self._thread.close()
        self._passwords.close()

    # --- files --------------------------------------------------------------------------------------------------------

    async def apply_changes(self, close_idle: Callable[[], None]) -> None:
        """Apply changes for ever. After each, close the idle connections from before."""
        previous = self._active, ""
        self._warn()
        while True:
            await asyncio.sleep(self._look_seconds)
            try:
                state = await self._thread.run(self._read_files, _DEADLINE_SECONDS)
            except TimeoutError:
                continue  # a file system hangs: the active configuration stays
            except Exception as error:  # no file may end the service, whatever error it causes in a library
                state = self._active, f"cannot be read: {type(error).__name__}"
            is_settled, previous = state == previous, state
            if is_settled:
                self._apply(*state, close_idle)

    def _read_files(self) -> tuple[Loaded, str]:
        """Return what the files say, and their mistake: then the configuration stays, with renewed certificates."""
        try:
            config = self._parse()
            config.check_complete(self._active.config)
            return self._load(config), ""
        except WebConfigError as error:
            mistake = str(error)
        try:
            return self._load(self._active.config), mistake
        except WebConfigError:
            return self._active, mistake

    def _parse(self) -> WebConfig:
        """Return the configuration in the file. It parses the same text only once."""
        text = read_text(self._path)
        if text != self._text:
            try:
                self._parsed = parse(text)
            except WebConfigError as error:
                self._parsed = str(error)
            self._text = text
        if isinstance(self._parsed, str):
            raise WebConfigError(self._parsed)
        return self._parsed

    def _load(self, config: WebConfig) -> Loaded:
        """Read the files of a configuration. Their time stamps may have any value, so their bytes are compared."""
        folder = self._path.parent
        if config.tls is None:
            return Loaded(config, {}, None)
        pems = read_pems(config.tls, folder)
        if (config, pems) == (self._active.config, self._active.pems):
            return self._active
        return Loaded(config, pems, make_context(config.tls, folder))

    def _apply(self, loaded: Loaded, mistake: str, close_idle: Callable[[], None]) -> None:
        if loaded != self._active:
            words_before = self.words()
            self._use(loaded)
            close_idle()
            log.info("web config loaded again: file=%s %s (before: %s)", self._path, self.words(), words_before)
            self._warn()
        if mistake and mistake != self._mistake:
            log.warning("web config not loaded, the previous one stays active: file=%s error=%s", self._path, mistake)
        self._mistake = mistake

    def _use(self, loaded: Loaded) -> None:
        self._active = loaded
        self._passwords.users = loaded.config.users

    def _warn(self) -> None:
        config = self._active.config
        if config.tls is None and not config.users:
            log.warning("web config requires nothing: everyone who reaches the port can read the pages in plain HTTP")
        elif config.tls is None:
            log.warning("clients send passwords unencrypted: the web config has no tls_server_config")

    # --- requests -----------------------------------------------------------------------------------------------------

    @web.middleware
    async def check_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The middleware that checks every request."""
        # By the route, not by the path: the page is open, however its address is written.
        resource = request.match_info.route.resource
        is_open = resource is not None and resource.canonical in _OPEN_PATHS
        refusal = None if is_open else await self._refusal(request)
        response = refusal or await handler(request)
        if request.get_extra_info("sslcontext") is not self._active.context:
            response.force_close()  # an older configuration accepted the connection
        return response

    async def _refusal(self, request: web.Request) -> web.Response | None:
        refusal = self._certificate_refusal(request)
        if refusal is not None or not self._active.config.users:
            return refusal
        credentials = _credentials(request.headers.get("Authorization", ""))
        if credentials is None or not await self._passwords.are_right(*credentials):
            return web.Response(status=401, text="this page requires a user and a password\n", headers=_ASK)
        return self._certificate_refusal(request)  # the configuration may have changed during the check

    def _certificate_refusal(self, request: web.Request) -> web.Response | None:
        """Refuse a client without a required certificate, or with one that has expired since the handshake."""
        tls = self._active.config.tls
        connection = request.get_extra_info("ssl_object") if tls is not None else None
        certificate = connection.getpeercert() if connection is not None else None
        if tls is not None and tls.client_auth_type == REQUIRED and not certificate:
            return web.Response(status=403, text="this page requires a client certificate\n", headers=_NO_STORE)
        if certificate and ssl.cert_time_to_seconds(str(certificate["notAfter"])) < time.time():
            return web.Response(status=403, text="this client certificate has expired\n", headers=_NO_STORE)
        return None


def _credentials(authorization: str) -> tuple[str, str] | None:
    """Return user and password; None if the header has none (RFC 7617)."""
    try:
        words = BasicAuth.decode(authorization, "latin1")
    except ValueError:
        return None
    user, password = (word.encode("latin1").decode(errors="surrogateescape") for word in words[:2])  # may be any bytes
    return user, password


class Passwords:
    """Checks passwords of users: one at a time in order of arrival, in a thread.

    A check costs as much CPU time as its hash requires. A right password is remembered, and then waits for no check.
    """

    def __init__(self) -> None:
        self.users: dict[str, str] = {}
        """Names and hashes."""
        self._right_answers: set[bytes] = set()
        """Digests of user, hash and password. Only this process knows the key."""
        self._key = secrets.token_bytes(32)
        self._turn = asyncio.Lock()
        self._thread = SerialExecutor("gpumap-passwords")

    def close(self) -> None:
        self._thread.close()

    async def are_right(self, user: str, password: str) -> bool:
        """Return whether user and password match. The result, and how long it takes, do not show which users exist."""
        if self._digest(user, self.users.get(user, ""), password) in self._right_answers:
            return True
        async with self._turn:  # asyncio.Lock serves in order of arrival; a request that is cancelled leaves
            if not self.users:
                return True
            # An unknown user is checked against the hash of some user, always the same.
            hashes = list(self.users.values())
            hashed = self.users.get(user, hashes[self._digest(user)[0] % len(hashes)])
            answer = self._digest(user, hashed, password)
            # A page makes many requests at once with one password: that is one check.
            is_right = answer in self._right_answers or await self._thread.run(partial(_matches, password, hashed))
            if is_right and self.users.get(user) == hashed:
                self._right_answers.add(answer)
            return answer in self._right_answers

    def _digest(self, *words: str) -> bytes:
        """Neither a name nor a hash contains a colon."""
        return hashlib.blake2b(":".join(words).encode(errors="surrogateescape"), key=self._key).digest()


def _matches(password: str, hashed: str) -> bool:
    import bcrypt  # only a configuration with users needs it

    return bcrypt.checkpw(password.encode(errors="surrogateescape")[:_BCRYPT_BYTES], hashed.encode())
