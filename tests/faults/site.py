"""The node and the running gpumap that rows share.

GPU 0 is time-sliced; `left` and `right` hold a slot each. `whole` holds GPU 1, and `idle` holds GPU 2. `squatter` holds
nothing and uses GPU 0. A process of the host uses GPU 1.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec

import aiohttp
import bcrypt

from tests.agent import PLAIN, Agent, Client, serve
from tests.machine import GIB, MIB, Node, Pod, gpu_uuid, short_directory
from tests.processes import PlainProcesses
from tests.secured import CLIENTS, make_certificates

WITHOUT_CAPABILITIES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()
WITH_DEADLINE = """
import functools, sys
from gpumap.__main__ import main
from gpumap.agent import collect
from gpumap.agent.web import guard
collect.DEADLINE_SECONDS_MIN = collect.DEADLINE_SECONDS_MAX = {seconds}
guard.Guard = functools.partial(guard.Guard, look_seconds=0.05)
sys.exit(main())
"""
SECURED = f"{CLIENTS}basic_auth_users:\n  alice: {{password}}\n"
PASSWORD = "hunter2"


class Start(NamedTuple):
    """How a service is started: flags beside those that point it at the node, a parent command, variables."""

    flags: tuple[str, ...] = ()
    parent: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    deadline_seconds: float = 30.0
    """For each source, instead of 1 s. Long: a busy machine is no fault. A row on a source that hangs shortens it."""
    is_secured: bool = False
    """With TLS, client certificates and a password. Their files are in the folder `web` of the node."""

    @property
    def program(self) -> Sequence[str]:
        """Without capabilities, as in the chart's pod: file rights hold for root too."""
        return *WITHOUT_CAPABILITIES, sys.executable, "-P", "-c", WITH_DEADLINE.format(seconds=self.deadline_seconds)


@dataclass
class Site:
    """A node, gpumap that runs over it, and the pods on it by name."""

    node: Node
    agent: Agent
    pods: dict[str, Pod] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    """The process of each pod that has one, and of the `host`."""

    @property
    def processes(self) -> PlainProcesses:
        assert isinstance(self.node.processes, PlainProcesses)
        return self.node.processes


class Sites:
    """Gives each row its site. The last one is kept while rows ask for the same start and recover."""

    def __init__(self, library: Path) -> None:
        self._library = library
        self._start: Start | None = None
        self._site: Site | None = None
        self._open = contextlib.AsyncExitStack()

    @contextlib.asynccontextmanager
    async def borrow(self, start: Start) -> AsyncIterator[Site]:
        """A site that is well. What fails on it is the last thing that happens on it."""
        if self._site is None or self._start != start:
            await self.close()
            self._site = await self._open.enter_async_context(running(start, self._library))
            self._start = start
        try:
            yield self._site
        except BaseException:
            self._site = None
            raise

    async def close(self) -> None:
        self._site = None
        stack, self._open = self._open, contextlib.AsyncExitStack()
        await stack.aclose()


@contextlib.asynccontextmanager
async def running(start: Start, library: Path) -> AsyncIterator[Site]:
    """A site of its own, settled: two snapshots have agreed on the squatter."""
    with short_directory() as directory:
        node = Node(directory, library, PlainProcesses(directory / "proc"))
        async with node.kubelet:
            pods = {pod.name: pod for pod in _admit(node)}
            pids = {
                "left": node.run(pods["left"].cgroup("main"), 0, 2 * GIB),
                "right": node.run(pods["right"].cgroup("main"), 0, 3 * GIB),
                "squatter": node.run(pods["squatter"].cgroup("main"), 0, 5 * GIB),
                "whole": node.run(pods["whole"].cgroup("main"), 1, 11 * GIB, sm_percent=30),
                "host": node.run("/system.slice/sshd.service", 1, 7 * MIB),
            }
            flags, client = start.flags, PLAIN
            if start.is_secured:
                client = make_web_config(node.directory / "web")
                flags = (*flags, "--web-config", str(node.directory / "web" / "web.yml"))
            started = serve(
                node,
                *flags,
                library=None,
                parent=start.parent,
                program=start.program,
                client=client,
                **dict(start.variables),
            )
            async with started as agent:
                await agent.until(
                    lambda page: page.value("gpumap_container_unassigned_use", pod="squatter") == 1,
                    "the squatter is not reported",
                )
                yield Site(node, agent, pods, pids)


def as_user(name: str, password: str) -> dict[str, str]:
    return {"Authorization": aiohttp.encode_basic_auth(name, password)}


def make_web_config(folder: Path) -> Client:
    """Write certificates and a configuration. Gives a client that may ask for everything."""
    folder.mkdir()
    make_certificates(folder)
    hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()
    (folder / "web.yml").write_text(SECURED.format(password=hashed))
    context = ssl.create_default_context(cafile=folder / "ca.crt")
    context.load_cert_chain(folder / "client.crt", folder / "client.key")
    return Client(context, as_user("alice", PASSWORD))


def _admit(node: Node) -> list[Pod]:
    return [
        node.admit("left", main=[f"{gpu_uuid(0)}::0"]),
        node.admit("right", main=[f"{gpu_uuid(0)}::1"]),
        node.admit("whole", main=[gpu_uuid(1)]),
        node.admit("idle", main=[gpu_uuid(2)]),
        node.admit("squatter", main=[]),
    ]


Inject = Callable[[Site], AbstractAsyncContextManager[object]]
P = ParamSpec("P")


def injects(hold: Callable[Concatenate[Site, P], AsyncIterator[None]]) -> Callable[P, Inject]:
    """A fault with parameters, from a generator that breaks the site, yields, and mends it."""
    enter = contextlib.asynccontextmanager(hold)
    return lambda *args, **kwargs: lambda site: enter(site, *args, **kwargs)
