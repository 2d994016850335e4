"""`gpumap demo` as a process of its own, for tests that need a neighbour over HTTP, and HTTP without ado."""

import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

GPUMAP = Path(sys.executable).with_name("gpumap")
"""The installed command."""
WITH_LONG_DEADLINES = """
import sys
from gpumap.__main__ import main
from gpumap.agent import collect
collect.DEADLINE_SECONDS_MIN = collect.DEADLINE_SECONDS_MAX
sys.exit(main())
"""
PATIENT_GPUMAP = (sys.executable, "-P", "-c", WITH_LONG_DEADLINES)
"""The same with the longest deadline of sources at each interval: a busy machine is no fault."""
START_SECONDS = 60.0
END_SECONDS = 60.0


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without what would steer gpumap or its Python, and with `variables`."""
    steering = ("GPUMAP_", "NODE_", "NVIDIA_", "PYTHON")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    return inherited | variables


def fetch(url: str, accept: str = "*/*", timeout_seconds: float = 10.0) -> tuple[str, str]:
    """Give an answer's text and content type. Raises OSError."""
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=timeout_seconds) as response:
        return response.read().decode(), response.headers["Content-Type"]


def wait_for(what: str, found: Callable[[], str | None], process: subprocess.Popen[bytes], log: Path) -> str:
    """Poll until `found` gives something; fail with the log where it does not, or the process has ended."""
    deadline = time.monotonic() + START_SECONDS
    while (answer := found()) is None:
        assert process.poll() is None, f"ended with {process.returncode}:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"no {what}:\n{log.read_text()}"
        time.sleep(0.05)
    return answer


@contextlib.contextmanager
def running(command: Sequence[str | Path], log: Path, cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command with its output in `log`, and end it with SIGTERM; a traceback in it is a failure."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=cwd, env=environment(), stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        finally:
            process.kill()
            process.wait()
    assert "Traceback" not in log.read_text()


def listening(process: subprocess.Popen[bytes], log: Path) -> str:
    """The host and port where gpumap serves, once it says so."""

    def address() -> str | None:
        match = re.search(r"serving address=(\S+)", log.read_text())
        return match and match[1]

    return wait_for("address", address, process, log)


@contextlib.contextmanager
def demo(folder: Path, *arguments: str, gpumap: Sequence[str | Path] = PATIENT_GPUMAP) -> Iterator[str]:
    """Run `gpumap demo` from `folder` on a free port. Gives its URL once it serves a page."""
    log = folder.parent / f"{folder.name}.log"
    command = (*gpumap, "demo", "--listen", "127.0.0.1:0", *arguments)
    with running(command, log, folder) as process:
        url = f"http://{listening(process, log)}"

        def page() -> str | None:
            with contextlib.suppress(OSError):
                return fetch(f"{url}/metrics")[0]
            return None

        wait_for("page", page, process, log)
        yield url
    assert process.returncode == 0, log.read_text()
