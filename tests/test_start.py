"""What a command imports: a person waits for it, often in a container that has a tenth of a CPU.

Times would depend on the machine. What is imported does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpumap.agent import dialects, flags, metrics
from tests.demo_process import environment, fetch, listening, running, wait_for
from tests.test_watch import FakeAgent, on_terminal, serve_fake

__all__ = ["serve_fake"]
OF_AGENTS = {
    *("aiohttp", "grpc", "google.protobuf", "prometheus_client", "pynvml", "yaml"),
    *("gpumap.agent.collect", "gpumap.agent.dialects", "gpumap.agent.metrics", "gpumap.agent.service"),
    *("gpumap.agent.sources", "gpumap.agent.web", "gpumap.lab", "gpumap.cli.sources.prometheus"),
}
OF_TABLES = {"asyncio", "msgspec", "ssl", "yarl", "gpumap.cli.watch", "gpumap.cli.table", "gpumap.model.node"}
MAIN = """
import sys
from {module} import main
code = main(sys.argv[2:])
open(sys.argv[1], "w").write("\\n".join(sys.modules))
sys.exit(code)
"""


def command(folder: Path, *words: str, module: str = "gpumap.__main__") -> list[str]:
    """A Python that runs the command, and then writes the names of its modules into a file."""
    return [sys.executable, "-c", MAIN.format(module=module), str(folder / "modules"), *words]


def imported(folder: Path) -> set[str]:
    return set((folder / "modules").read_text().split())


def run(folder: Path, *words: str, module: str = "gpumap.__main__") -> set[str]:
    """Run the command; return what it imported."""
    done = subprocess.run(
        command(folder, *words, module=module), env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout
    return imported(folder)


@pytest.mark.parametrize("module", ["gpumap.__main__", "gpumap.cli.kubectl.cli"])
@pytest.mark.parametrize("words", [("--version",), ("--help",), ("top", "--help"), ("waste", "--help")])
def test_help_imports_only_flags(tmp_path: Path, module: str, words: tuple[str, ...]) -> None:
    """The help of a table imports its columns, which are in the file of the command."""
    needless = OF_AGENTS | OF_TABLES if words[0].startswith("-") else OF_AGENTS | {"asyncio", "ssl", "yarl"}
    assert not run(tmp_path, *words, module=module) & needless


@pytest.mark.parametrize("words", [("map",), ("top", "--once"), ("top", "--processes"), ("waste",), ("doctor",)])
async def test_a_table_imports_no_part_of_the_agent(fake: FakeAgent, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Nor a library that only servers, the kubelet, the driver and other forms need."""
    found = await asyncio.to_thread(run, tmp_path, *words, "--url", fake.url)
    assert "gpumap.cli.table" in found
    assert not found & OF_AGENTS


async def test_top_on_a_terminal_imports_no_part_of_the_agent(fake: FakeAgent, tmp_path: Path) -> None:
    with on_terminal(command(tmp_path, "top", "--url", fake.url), {}) as found:
        await found.until(lambda _: len(found.frames) > 2 and "pod-0" in found.shown, "it does not show the answer")
        os.write(found._master, b"q")
        await found.end()
    assert "gpumap.cli.watch" in imported(tmp_path)
    assert not imported(tmp_path) & OF_AGENTS


def test_kubectl_gpumap_imports_no_part_of_the_agent() -> None:
    code = "import sys; from gpumap.cli.kubectl.program import prepared; prepared(['top', '-A']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert "gpumap.cli.sources.kubectl" in done.stdout.split()
    assert not set(done.stdout.split()) & OF_AGENTS


NOT_OF_SERVE = {
    *("aiohttp.client", "aiohttp.connector", "google.protobuf.descriptor_pb2", "pynvml", "yaml"),
    *("gpumap.agent.web.config", "gpumap.agent.web.guard"),
    *("gpumap.cli.commands.doctor", "gpumap.cli.table", "gpumap.lab"),
}


def test_an_agent_imports_only_what_it_serves_with(tmp_path: Path) -> None:
    """Not aiohttp's client, which reads all CA certificates of the machine."""
    log = tmp_path / "log"
    with running(command(tmp_path, "serve", "--listen", "127.0.0.1:0"), log, tmp_path) as process:
        url = f"http://{listening(process, log)}"
        wait_for("page", lambda: fetched(f"{url}/metrics"), process, log)
    assert {"aiohttp.web", "grpc", "gpumap.agent.sources.kubelet", "gpumap.agent.web.app"} <= imported(tmp_path)
    assert imported(tmp_path) & NOT_OF_SERVE == set()


def fetched(url: str) -> str | None:
    with contextlib.suppress(OSError):
        return fetch(url)[0]
    return None


AFTER_THE_SERVER = """
from gpumap.agent.web import aiohttp_server_only
with aiohttp_server_only():
    from gpumap.agent.web.app import web
from aiohttp import ClientSession, web as again
assert again is web, "the server is imported twice"
"""


def test_the_client_can_be_imported_after_the_server() -> None:
    """A program may run an agent and ask it, as tests do."""
    subprocess.run([sys.executable, "-c", AFTER_THE_SERVER], env=environment(), check=True)


INTERRUPTED = """
import os, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == {at!r}:
            os.kill(os.getpid(), 2)
sys.meta_path.insert(0, Interrupt())
from {module} import main
sys.exit(main(["--version"]))
"""
"""A Python that gets SIGINT when it begins to import a module."""


@pytest.mark.parametrize("module", ["gpumap.__main__", "gpumap.cli.kubectl.cli"])
@pytest.mark.parametrize(("at", "code"), [("gpumap.cli.main", -signal.SIGINT), ("gpumap.cli.parser", 0)])
def test_ctrl_c_during_the_imports_prints_no_traceback(module: str, at: str, code: int) -> None:
    command = [sys.executable, "-c", INTERRUPTED.format(module=module, at=at)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (code, "", "")


def test_names_that_flags_repeat() -> None:
    """The tables of groups and dialects take long to import, so the flags have their names a second time."""
    assert tuple(metrics.GROUPS) == flags.GROUPS
    assert tuple(dialects.DIALECTS) == flags.DIALECTS
