"""Runs the user's own kubectl: its proxy to the API server on a private socket, and its context's namespace.

gpumap reads no kubeconfig and holds no credential: kubectl does, with its login plugins. The proxy always ends with the
command, also if that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gpumap.model.errors import FatalError
from gpumap.model.formatting import cut_off

START_SECONDS = 15.0
_END_SECONDS = 2.0
_POLL_SECONDS = 0.01
_NO_USER = "the kubeconfig has no user for this server, and kubectl cannot ask for a user here"
"""kubectl without a credential asks for a name and a password, and fails with EOF without an answer."""
_MESSAGE_CHARACTERS = 400
_READS = (
    "--accept-paths=^/api/v1/(namespaces/[^/]+/)?pods$,^/api/v1/namespaces/[^/]+/pods/[^/]+/proxy/api/v1/map$",
    "--reject-methods=^(POST|PUT|PATCH|DELETE)$",
)
"""The proxy has the user's rights: it passes on what this package asks, and nothing else."""
_PREFIX = "--append-server-path"
"""For servers below a path, such as Rancher's. kubectl has it since 1.23; without it kubectl leaves out the path."""
_WATCH = 'read pid; read end || { kill -9 "$pid"; rm -rf "$0"; }'
"""A shell gets the proxy's process id and, at a clean end, one more line. If this process is killed before, the shell
ends the proxy and removes its folder, $0."""


class Proxy(NamedTuple):
    """A running `kubectl proxy`, the path of its socket, and its log."""

    process: subprocess.Popen[bytes]
    path: Path
    log: Path

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def serves(self) -> bool:
        """Whether it accepts connections: the socket's file exists a moment before."""
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.path))
            except OSError:
                return False
        return True

    def last_message(self) -> str:
        """Return the last error that it wrote, else the last line."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        return cut_off((errors or lines or [""])[-1].removeprefix("error: "), _MESSAGE_CHARACTERS)


def kubectl_path() -> str:
    """Return the path of kubectl. Raises FatalError if it is not on PATH."""
    found = shutil.which("kubectl")
    if found is None:
        raise FatalError("kubectl is not on PATH. gpumap uses it to log in to the API server")
    return found


@contextlib.asynccontextmanager
async def proxying(flags: Sequence[str]) -> AsyncIterator[Proxy]:
    """Run the proxy until the block ends. Only this user can enter its folder and use its socket.

    Raises FatalError with kubectl's own reason.
    """
    with (
        tempfile.TemporaryDirectory(prefix="gpumap-", ignore_cleanup_errors=True) as folder,
        contextlib.ExitStack() as stack,
    ):
        path, log = Path(folder) / "s", Path(folder) / "log"
        command = (kubectl_path(), "proxy", f"--unix-socket={path}", _PREFIX, *_READS, *flags)
        watch = _started(("/bin/sh", "-c", _WATCH, folder), log, apart=True)
        stack.callback(watch.communicate, b"end\n")
        proxy = Proxy(_started(command, log), path, log)
        stack.callback(_end, proxy.process)
        assert watch.stdin is not None  # noqa: S101 -- it is a pipe
        os.write(watch.stdin.fileno(), b"%d\n" % proxy.process.pid)
        await _until_it_serves(proxy)
        yield proxy


def current_namespace(flags: Sequence[str]) -> str:
    """Return the namespace of kubectl's context: `default` if it names none."""
    namespace = _kubectl("config", "view", "--minify", "--output=jsonpath={.contexts[0].context.namespace}", *flags)
    return namespace or "default"


def has_context(flags: Sequence[str]) -> bool:
    """Whether the kubeconfig has a current context."""
    return _kubectl("config", "view", "--minify", "--output=name", *flags) is not None


def _kubectl(*words: str) -> str | None:
    """Return the output of a kubectl command that asks no server; None if it fails."""
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


def _started(command: Sequence[str], log: Path, *, apart: bool = False) -> subprocess.Popen[bytes]:
    """Start it in our process group and with our input: a login plugin may ask the user, and kubectl gets the
    terminal's signals as we do. If `apart`, it gets no such signal, and its input is a pipe."""
    stdin = subprocess.PIPE if apart else None
    try:
        with log.open("wb") as errors:
            return subprocess.Popen(  # noqa: S603 # as above
                command, stdin=stdin, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=apart
            )
    except OSError as error:
        raise FatalError(f"{command[0]} does not run: {error.strerror}") from error


async def _until_it_serves(proxy: Proxy) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not proxy.serves():
        if proxy.ended:
            reason = proxy.last_message() or f"ended with {proxy.process.returncode}"
            raise FatalError(f"kubectl: {_NO_USER if reason == 'EOF' else reason}")
        if time.monotonic() > deadline:
            message = f"kubectl proxy did not start within {START_SECONDS:g} s {proxy.last_message()}"
            raise FatalError(message.rstrip())
        await asyncio.sleep(_POLL_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
