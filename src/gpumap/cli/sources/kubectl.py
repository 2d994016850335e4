"""Asks every agent of a cluster for its map, through the API server.

It needs the rights to list pods and to get `pods/proxy`. If an agent does not answer, its node is named with the
reason, and the other nodes are shown.
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
from http.client import HTTPException
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlencode

import msgspec

from gpumap.cli.rows import NodeMaps, NodeMapStream
from gpumap.cli.sources.agent import map_in
from gpumap.cli.sources.http_client import Endpoint, ask, no_answer
from gpumap.cli.sources.kubectl_agents import Agent, PodList, agents_of, one_for_each_node, pod_list
from gpumap.model.errors import FatalError
from gpumap.model.formatting import cut_off, reason_sentences
from gpumap.model.node import Node

SELECTOR = "app.kubernetes.io/name=gpumap"
"""The label of the chart's pods."""
AGENT_SECONDS = 10.0
"""For each agent; less if --request-timeout is shorter."""
_AT_ONCE = 32
_PAGE_PODS = 500
RULE = '{apiGroups: [""], resources: [pods/proxy], verbs: [get]}'
"""What a Role or ClusterRole must have, in addition to listing pods."""
_REASON_CHARACTERS, _NAME_CHARACTERS = 400, 60
_AGENT_ASKS = {401: "a password", 403: "a client certificate"}
"""What an agent with a --web-config may require (agent/web/guard.py)."""
_INSTEAD = "use `kubectl port-forward` and `gpumap map --url` with its flags"


class AgentSelection(NamedTuple):
    """Which cluster, by kubectl's flags; where its agents are; and the only node to ask, empty for all."""

    kubectl_flags: tuple[str, ...]
    selector: str
    agent_namespace: str
    node: str
    request_seconds: float | None


async def ask_cluster(selection: AgentSelection, interval_seconds: float) -> NodeMapStream:
    """Ask again and again, through one proxy; if it ended, through another.

    Raises FatalError if none starts.
    """
    while True:
        async with proxying(selection.kubectl_flags) as proxy:
            place = Endpoint("localhost", socket=str(proxy.path))
            while True:
                answer: NodeMaps | FatalError
                try:
                    answer = await _ask_all(place, selection)
                except FatalError as error:
                    answer = FatalError(f"kubectl proxy ended: {proxy.last_message()}") if proxy.ended else error
                yield answer
                await asyncio.sleep(interval_seconds)
                if proxy.ended:
                    break


async def _ask_all(place: Endpoint, selection: AgentSelection) -> NodeMaps:
    """Return the maps of all agents. Raises FatalError if none answers."""
    agents, notices = one_for_each_node(await _agents(place, selection))
    if not agents:
        node = f" on node {selection.node}" if selection.node else ""
        namespace = f" in namespace {selection.agent_namespace}" if selection.agent_namespace else ""
        why = f"no pod{node}{namespace} has the label {selection.selector}"
        hint = f". To select rows, write pod:{selection.node}" if selection.node else ""
        raise FatalError(f"{why}. Install gpumap, or set --agent-selector{hint}")
    slots = asyncio.Semaphore(_AT_ONCE)
    answers = await asyncio.gather(*(_map_of(place, agent, selection, slots) for agent in agents))
    maps = [answer for answer in answers if not isinstance(answer, str)]
    reasons = [(agent.node, answer) for agent, answer in zip(agents, answers, strict=True) if isinstance(answer, str)]
    missing = tuple(reason_sentences(reasons))
    if not maps:
        other_reasons = f" (and {len(missing) - 1} more reasons)" if len(missing) > 1 else ""
        raise FatalError(f"no agent answered: {missing[0]}{other_reasons}")
    maps.sort(key=lambda node: node.name)
    return NodeMaps(tuple(maps), missing, fleet=not selection.node, notices=tuple(notices))


async def _agents(place: Endpoint, selection: AgentSelection) -> list[Agent]:
    """List all pods with the agents' label, a page at a time."""
    where = f"namespaces/{selection.agent_namespace}/pods" if selection.agent_namespace else "pods"
    parameters = {"labelSelector": selection.selector, "limit": str(_PAGE_PODS)}
    if selection.node:
        parameters["fieldSelector"] = f"spec.nodeName={selection.node}"
    agents: list[Agent] = []
    while True:
        page = await _page(place, f"/api/v1/{where}", parameters, selection)
        agents += agents_of(page.items or ())
        if not page.next_page:
            return agents
        parameters["continue"] = page.next_page


async def _page(place: Endpoint, path: str, parameters: dict[str, str], selection: AgentSelection) -> PodList:
    try:
        async with asyncio.timeout(selection.request_seconds):
            answer = await ask(place, f"{path}?{urlencode(parameters)}", {}, "the API server")
    except TimeoutError as error:
        raise FatalError(f"the API server did not answer within {selection.request_seconds:g} s") from error
    except (OSError, HTTPException) as error:
        raise FatalError(f"kubectl proxy did not answer: {no_answer(error)}") from error
    if answer.status != 200:
        why = _no_list(answer.status, answer.body, of_all_namespaces=not selection.agent_namespace)
        words = "config", "view", "--minify", "--output=name"  # it fails without a current context
        lost = answer.status == 500 and await asyncio.to_thread(_kubectl, *words, *selection.kubectl_flags) is None
        raise FatalError(why + (" (kubectl has no current context)" if lost else ""))
    try:
        return pod_list(answer.body)
    except (ValueError, RecursionError) as error:
        raise FatalError("the API server did not answer with a list of pods") from error


async def _map_of(place: Endpoint, agent: Agent, selection: AgentSelection, slots: asyncio.Semaphore) -> Node | str:
    """Return an agent's map, or why there is none: a clause about its node."""
    if agent.why_not:
        return f"its agent {agent.why_not}"
    seconds = min(AGENT_SECONDS, selection.request_seconds or AGENT_SECONDS)
    try:
        async with slots, asyncio.timeout(seconds):
            answer = await ask(place, agent.path, {}, "its agent")
        if answer.status != 200:
            return _no_map(answer.status, answer.body)
        node = map_in(answer.body, "its agent")
    except TimeoutError:
        return f"its agent did not answer within {seconds:g} s"
    except FatalError as error:
        return str(error)
    except (OSError, HTTPException) as error:
        return f"kubectl proxy did not answer: {no_answer(error)}"
    if node.name != agent.node:
        name = f"another node, {cut_off(node.name, _NAME_CHARACTERS)}" if node.name else "no node"
        return f"the answer of pod {agent.namespace}/{agent.pod} does not count: it names {name}"
    return node


# --- why something cannot be seen: the reason of the API server, kubectl or the agent ---------------------------------


def _no_map(status: int, body: bytes) -> str:
    """Return why a status came instead of a map: the API server answered with a Status, or the agent."""
    message = _status_message(body)
    if message is None and status in _AGENT_ASKS:
        return f"its agent requires {_AGENT_ASKS[status]}, which the API server does not forward: {_INSTEAD}"
    if message is None:
        return f"its agent answered {status}: {cut_off(body.decode(errors='replace'), _REASON_CHARACTERS)}"
    match status:
        case 403:
            return f"{_shorten_refusal(message)}; a role needs the rule {RULE}"
        case 404:
            return "its agent's pod was deleted"
    return f"the API server cannot reach its agent: {message.removeprefix('error trying to reach service: ')}"


def _no_list(status: int, body: bytes, *, of_all_namespaces: bool) -> str:
    """Return why kubectl has no list of pods: in the words of the API server, or of kubectl if it did not reach it."""
    message = _status_message(body)
    if message is None:
        return f"the API server did not answer: {cut_off(body.decode(errors='replace'), _REASON_CHARACTERS) or status}"
    match status:
        case 401:
            return f"the API server does not accept the user: {message}"
        case 403:
            advice = "; --agent-namespace needs rights in one namespace only" if of_all_namespaces else ""
            return _shorten_refusal(message) + advice
    return f"the API server answered {status}: {message}"


def _shorten_refusal(message: str) -> str:
    """Shorten `pods "a" is forbidden: User "jane" cannot …`: the pod is one of many."""
    return message.partition(" is forbidden: ")[2] or message


class _Status(msgspec.Struct):
    kind: Literal["Status"]
    message: str | None = None
    reason: str | None = None


def _status_message(body: bytes) -> str | None:
    """Return the message of the API server's Status; None if the answer is none."""
    try:
        status = msgspec.json.decode(body, type=_Status)
    except (ValueError, RecursionError):
        return None
    return cut_off(status.message or status.reason or "no reason given", _REASON_CHARACTERS)


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
    path = shutil.which("kubectl")
    if path is None:
        raise FatalError("kubectl is not on PATH. gpumap uses it to log in to the API server")
    return path


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
