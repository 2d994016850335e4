"""The user's own kubectl: its proxy to the API server on a private socket, and the namespace of its context.

gpumap reads no kubeconfig and holds no credential: kubectl does, with its plugins for logging in. The proxy is ended
whatever happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gpumap.model.errors import FatalError
from gpumap.model.text import cut_off

START_SECONDS = 15.0
_END_SECONDS = 2.0
_POLL_SECONDS = 0.01
_NO_USER = "the kubeconfig has no user for this server, and kubectl cannot ask for one here"
"""Where kubectl is told no credential, it asks for a name and a password, and fails with EOF where nobody answers."""
_SAID_CHARACTERS = 400
_READS = (
    "--accept-paths=^/api/v1/(namespaces/[^/]+/)?pods$,^/api/v1/namespaces/[^/]+/pods/[^/]+/proxy/api/v1/map$",
    "--reject-methods=^(POST|PUT|PATCH|DELETE)$",
)
"""The proxy carries the user's rights: it passes on what is asked here, and nothing else."""
_PREFIX = "--append-server-path"
"""Servers below a path, as Rancher's; known to kubectl since 1.23, without it the path is left out."""


class Proxy(NamedTuple):
    """A running `kubectl proxy`, the path of its socket, and what it writes."""

    process: subprocess.Popen[bytes]
    path: Path
    log: Path

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def serves(self) -> bool:
        """Whether it can be connected to: the socket's file is there a moment before."""
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.path))
            except OSError:
                return False
        return True

    def said(self) -> str:
        """The last that it wrote, in one line."""
        return _last_line(self.log.read_text(errors="replace"))


def kubectl_path() -> str:
    """Raises FatalError where there is none."""
    found = shutil.which("kubectl")
    if found is None:
        raise FatalError("kubectl is not on PATH: it asks the API server, and knows how to log in")
    return found


@contextlib.asynccontextmanager
async def proxying(flags: Sequence[str]) -> AsyncIterator[Proxy]:
    """Run the proxy until the block ends. Its folder can be entered by this user alone, and so can its socket.

    Raises FatalError with kubectl's own reason.
    """
    with tempfile.TemporaryDirectory(prefix="gpumap-", ignore_cleanup_errors=True) as folder:
        path, log = Path(folder) / "s", Path(folder) / "log"
        command = [kubectl_path(), "proxy", f"--unix-socket={path}", _PREFIX, *_READS, *flags]
        proxy = Proxy(_started(command, log), path, log)
        try:
            await _until_it_serves(proxy)
            yield proxy
        finally:
            _end(proxy.process)


def current_namespace(flags: Sequence[str]) -> str:
    """The namespace of the context, as kubectl knows it: `default` where it names none."""
    return (
        _asked("config", "view", "--minify", "--output=jsonpath={.contexts[0].context.namespace}", *flags) or "default"
    )


def has_context(flags: Sequence[str]) -> bool:
    """Whether the kubeconfig has a context to go by."""
    return _asked("config", "view", "--minify", "--output=name", *flags) is not None


def _asked(*words: str) -> str | None:
    """What kubectl answers without asking a server; None where it fails."""
    try:
        done = subprocess.run(  # noqa: S603 # the user's own kubectl, by the user's own flags
            [kubectl_path(), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=START_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None


def _started(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start it in our own process group, and with our input: a plugin for logging in may ask the user, and what a
    terminal sends us it sends to kubectl too."""
    try:
        with log.open("wb") as errors:
            return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)  # noqa: S603 # as above
    except OSError as error:
        raise FatalError(f"{command[0]} does not run: {error.strerror}") from error


async def _until_it_serves(proxy: Proxy) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not proxy.serves():
        if proxy.ended:
            said = proxy.said() or f"ended with {proxy.process.returncode}"
            raise FatalError(f"kubectl: {_NO_USER if said == 'EOF' else said}")
        if time.monotonic() > deadline:
            raise FatalError(f"kubectl proxy did not begin to serve within {START_SECONDS:g} s {proxy.said()}".rstrip())
        await asyncio.sleep(_POLL_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_line(text: str) -> str:
    lines = [line.strip().removeprefix("error: ") for line in text.splitlines() if line.strip()]
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    said = errors[-1].removeprefix("error: ") if errors else lines[-1] if lines else ""
    return cut_off(said, _SAID_CHARACTERS)
