"""Asks every agent of a cluster for its map, through the API server.

It needs the rights to list pods and to get `pods/proxy`. If an agent does not answer, its node is named with the
reason, and the other nodes are shown.
"""

from __future__ import annotations

import asyncio
from http.client import HTTPException
from typing import Literal, NamedTuple
from urllib.parse import urlencode

import msgspec

from gpumap.cli.agent_client import map_in
from gpumap.cli.http_get import Endpoint, get, no_answer
from gpumap.cli.kubectl.agents import Agent, PodList, agents_of, one_for_each_node, pod_list
from gpumap.cli.kubectl.proxy import has_context, proxying
from gpumap.cli.node_maps import NodeMaps, NodeMapStream
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
"""What an agent with a --web-config may require (agent/web/config/guard.py)."""
_INSTEAD = "use `kubectl port-forward` and `gpumap map --url` with its flags"


class Scope(NamedTuple):
    """Which cluster, by kubectl's flags; where its agents are; and the only node to ask, empty for all."""

    kubectl_flags: tuple[str, ...]
    selector: str
    agent_namespace: str
    node: str
    request_seconds: float | None


async def from_cluster(scope: Scope, interval_seconds: float) -> NodeMapStream:
    """Ask again and again, through one proxy; if it ended, through another.

    Raises FatalError if none starts.
    """
    while True:
        async with proxying(scope.kubectl_flags) as proxy:
            place = Endpoint("localhost", socket=str(proxy.path))
            while True:
                answer: NodeMaps | FatalError
                try:
                    answer = await _ask_all(place, scope)
                except FatalError as error:
                    answer = FatalError(f"kubectl proxy ended: {proxy.last_message()}") if proxy.ended else error
                yield answer
                await asyncio.sleep(interval_seconds)
                if proxy.ended:
                    break


async def _ask_all(place: Endpoint, scope: Scope) -> NodeMaps:
    """Return the maps of all agents. Raises FatalError if none answers."""
    agents, notices = one_for_each_node(await _agents(place, scope))
    if not agents:
        raise FatalError(_no_agent(scope))
    slots = asyncio.Semaphore(_AT_ONCE)
    answers = await asyncio.gather(*(_map_of(place, agent, scope, slots) for agent in agents))
    maps = [one for one in answers if not isinstance(one, str)]
    reasons = [(agent.node, one) for agent, one in zip(agents, answers, strict=True) if isinstance(one, str)]
    missing = tuple(reason_sentences(reasons))
    if not maps:
        more = f" (and {len(missing) - 1} more reasons)" if len(missing) > 1 else ""
        raise FatalError(f"no agent answered: {missing[0]}{more}")
    maps.sort(key=lambda one: one.name)
    return NodeMaps(tuple(maps), missing, fleet=not scope.node, notices=tuple(notices))


async def _agents(place: Endpoint, scope: Scope) -> list[Agent]:
    """List all pods with the agents' label, a page at a time."""
    where = f"namespaces/{scope.agent_namespace}/pods" if scope.agent_namespace else "pods"
    parameters = {"labelSelector": scope.selector, "limit": str(_PAGE_PODS)}
    if scope.node:
        parameters["fieldSelector"] = f"spec.nodeName={scope.node}"
    found: list[Agent] = []
    while True:
        page = await _page(place, f"/api/v1/{where}", parameters, scope)
        found += agents_of(page.items or ())
        if not page.next_page:
            return found
        parameters["continue"] = page.next_page


async def _page(place: Endpoint, path: str, parameters: dict[str, str], scope: Scope) -> PodList:
    try:
        async with asyncio.timeout(scope.request_seconds):
            answer = await get(place, f"{path}?{urlencode(parameters)}", {}, "the API server")
    except TimeoutError as error:
        raise FatalError(f"the API server did not answer within {scope.request_seconds:g} s") from error
    except (OSError, HTTPException) as error:
        raise FatalError(f"kubectl proxy did not answer: {no_answer(error)}") from error
    if answer.status != 200:
        why = _no_list(answer.status, answer.body, of_all_namespaces=not scope.agent_namespace)
        lost = answer.status == 500 and not await asyncio.to_thread(has_context, scope.kubectl_flags)
        raise FatalError(why + (" (kubectl has no current context)" if lost else ""))
    try:
        return pod_list(answer.body)
    except (ValueError, RecursionError) as error:
        raise FatalError("the API server did not answer with a list of pods") from error


async def _map_of(place: Endpoint, agent: Agent, scope: Scope, slots: asyncio.Semaphore) -> Node | str:
    """Return an agent's map, or why there is none: a clause about its node."""
    if agent.why_not:
        return f"its agent {agent.why_not}"
    seconds = min(AGENT_SECONDS, scope.request_seconds or AGENT_SECONDS)
    try:
        async with slots, asyncio.timeout(seconds):
            answer = await get(place, agent.path, {}, "its agent")
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


def _no_agent(scope: Scope) -> str:
    where = f" in namespace {scope.agent_namespace}" if scope.agent_namespace else ""
    there = f" on node {scope.node}" if scope.node else ""
    return f"no pod{there}{where} has the label {scope.selector}. Install gpumap, or set --agent-selector"


# --- why something cannot be seen: the reason of the API server, kubectl or the agent ---------------------------------


def _no_map(status: int, body: bytes) -> str:
    """Return why a status came instead of a map: from the API server, whose answer is a Status, or from the agent."""
    message = _status_message(body)
    if message is None and status in _AGENT_ASKS:
        return f"its agent requires {_AGENT_ASKS[status]}, which the API server does not forward: {_INSTEAD}"
    if message is None:
        return f"its agent answered {status}: {cut_off(body.decode(errors='replace'), _REASON_CHARACTERS)}"
    match status:
        case 403:
            return f"{_without_pod(message)}; a role needs the rule {RULE}"
        case 404:
            return "its agent's pod was deleted"
    return f"the API server cannot reach its agent: {message.removeprefix('error trying to reach service: ')}"


def _no_list(status: int, body: bytes, *, of_all_namespaces: bool) -> str:
    """Return why there is no list of pods: in the words of the API server, or of kubectl, which did not reach it."""
    message = _status_message(body)
    if message is None:
        return f"the API server did not answer: {cut_off(body.decode(errors='replace'), _REASON_CHARACTERS) or status}"
    match status:
        case 401:
            return f"the API server does not accept the user: {message}"
        case 403:
            advice = "; --agent-namespace needs rights in one namespace only" if of_all_namespaces else ""
            return _without_pod(message) + advice
    return f"the API server answered {status}: {message}"


def _without_pod(message: str) -> str:
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
