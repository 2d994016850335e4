"""A page behind a web configuration, in this process, and curl asking for it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import bcrypt

from gpumap.agent.flags import DEFAULT_GROUPS
from gpumap.agent.metrics import native, self_families
from gpumap.agent.web.app import application
from gpumap.agent.web.guard import Guard
from gpumap.agent.web.pages import Pages
from gpumap.agent.web.port import MAX_CONNECTIONS, PATIENCE_SECONDS, open_port
from gpumap.model.observations import Moment
from tests.agent import until
from tests.certificates import make_certificate, make_signed_certificate
from tests.snapshots import busy_node
from tests.tools import tool

LOOK_SECONDS = 0.05
TLS = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"
CLIENTS = f"{TLS}  client_ca_file: ca.crt\n  client_auth_type: RequireAndVerifyClientCert\n"
ALICE = ("--user", "alice:hunter2é")
SHOWN = ("--cert", "client.crt", "--key", "client.key")


def users(cost: int = 4, name: str = "alice", password: str | bytes = "hunter2é") -> str:
    """The part of a configuration that knows one user."""
    word = password.encode() if isinstance(password, str) else password
    hashed = bcrypt.hashpw(word, bcrypt.gensalt(cost, b"2a")).decode()
    return f"basic_auth_users:\n  {name}: {hashed.replace('$2a$', '$2y$')}\n"


def make_certificates(folder: Path) -> Path:
    """Those of a server and a client by one authority, and of others by another; `server` is at 127.0.0.1."""
    for name in ("ca", "other"):
        make_certificate(folder, name)
    make_signed_certificate(folder, "server", "ca")
    make_signed_certificate(folder, "server2", "ca")
    names = "subjectAltName=DNS:prometheus.example,IP:2001:DB8::1,email:a@b.example,URI:spiffe://x/y"
    make_signed_certificate(folder, "client", "ca", names)
    make_signed_certificate(folder, "stranger", "other")
    return folder


def make_short_certificate(folder: Path, name: str, by: str, seconds: int) -> None:
    """A client's, that holds for a few seconds from now on."""
    made = folder / f"{name}-made"
    made.mkdir()
    (made / "index").touch()
    (made / "conf").write_text(
        f"[ca]\ndefault_ca=a\n[a]\ndatabase={made}/index\nnew_certs_dir={made}\nrand_serial=yes\n"
        "default_md=sha256\npolicy=p\n[p]\ncommonName=supplied\n"
    )
    until = (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y%m%d%H%M%SZ")
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}")
    pair = ("-cert", f"{by}.crt", "-keyfile", f"{by}.key", "-in", f"{name}.csr", "-out", f"{name}.crt")
    for command in (
        ("req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr"),
        ("ca", "-batch", "-notext", "-config", str(made / "conf"), "-enddate", until, *pair),
    ):
        subprocess.run((tool("openssl"), *command), cwd=folder, check=True, capture_output=True)


class Answer(NamedTuple):
    """Of curl: the status is 0, and `failed` not, where there was no answer."""

    status: int
    failed: int
    head: str
    body: str


class Secured(NamedTuple):
    folder: Path
    port: int
    guard: Guard

    async def curl(self, path: str, *flags: str, scheme: str = "https", ca: str = "ca.crt") -> Answer:
        command = (tool("curl"), "--silent", "--include", "--max-time", "20", "--http1.1", "--cacert", ca, *flags)
        process = await asyncio.create_subprocess_exec(
            *map(str, (*command, f"{scheme}://127.0.0.1:{self.port}{path}")),
            cwd=self.folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        message, _ = await process.communicate()
        head, _, body = message.decode().partition("\r\n\r\n")
        status = re.match(r"HTTP/\S+ (\d+)", head)
        return Answer(int(status[1]) if status else 0, process.returncode or 0, head, body)

    async def status(self, path: str, *flags: str) -> int:
        return (await self.curl(path, *flags)).status

    def write(self, text: str) -> None:
        """Replace the configuration, in one step."""
        (self.folder / "new").write_text(text)
        (self.folder / "new").rename(self.folder / "web.yml")

    def swap(self, name: str, by: str) -> None:
        """Replace a certificate and its key by other ones."""
        for end in ("crt", "key"):
            (self.folder / "new").write_bytes((self.folder / f"{by}.{end}").read_bytes())
            (self.folder / "new").rename(self.folder / f"{name}.{end}")

    async def until_status(self, status: int, path: str, *flags: str) -> None:
        await until(lambda: self.status(path, *flags), lambda found: found == status, f"{path} {flags} is not {status}")


@contextlib.asynccontextmanager
async def secured(
    folder: Path,
    config: str,
    patience_seconds: float = PATIENCE_SECONDS,
    max_connections: int = MAX_CONNECTIONS,
    gpus: int = 2,
) -> AsyncIterator[Secured]:
    """Serve a snapshot with this configuration. Its files are in `folder`."""
    (folder / "web.yml").write_text(config)
    guard = Guard(folder / "web.yml", look_seconds=LOOK_SECONDS)
    families = native(DEFAULT_GROUPS, process_metrics=False)
    pages = Pages(families, self_families("1", "3"), {}, 60.0, lambda: 0.0)
    pages.publish(replace(busy_node(gpus), at=Moment(0.0, 1_800_000_000.0)))
    app = application(pages)
    app.middlewares.append(guard.check_request)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        served = open_port(
            app,
            listener,
            tls=guard.context,
            patience_seconds=patience_seconds,
            max_connections=max_connections,
        )
        async with served as close_idle:
            following = asyncio.create_task(guard.apply_changes(close_idle))
            try:
                yield Secured(folder, listener.getsockname()[1], guard)
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                guard.close()
                pages.close()
