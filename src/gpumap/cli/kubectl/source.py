"""Asks every agent of a cluster for its map, through the API server.

What is needed are the rights to list pods and to get `pods/proxy`. A node whose agent does not answer is named with the
reason, and the others are shown.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp

from gpumap.cli.agent_client import body_of, map_in
from gpumap.cli.http_errors import connection_error
from gpumap.cli.kubectl.agents import Agent, agents_of, one_for_each_node
from gpumap.cli.kubectl.proxy import Proxy, has_context, proxying
from gpumap.cli.kubectl.reasons import no_list, no_map
from gpumap.cli.node_documents import Seen, Sights
from gpumap.cli.words import by_reason
from gpumap.model.document import Document
from gpumap.model.errors import FatalError

SELECTOR = "app.kubernetes.io/name=gpumap"
"""As the chart labels its pods."""
AGENT_SECONDS = 10.0
"""For each agent, or less where --request-timeout says so."""
_AT_ONCE = 32
_PAGE_PODS = 500


class Scope(NamedTuple):
    """Which cluster, by kubectl's flags; where its agents are; and for which node alone, if not for all."""

    kubectl_flags: tuple[str, ...]
    selector: str
    agent_namespace: str
    node: str
    request_seconds: float | None


async def from_cluster(scope: Scope, interval_seconds: float) -> Sights:
    """Look again and again, through one proxy; where that ended, through another.

    Raises FatalError where none starts.
    """
    told: set[str] = set()
    while True:
        async with proxying(scope.kubectl_flags) as proxy, _session(proxy) as session:
            while True:
                found: Seen | FatalError
                try:
                    found, doubled = await _look(session, scope)
                    _tell([sentence for sentence in doubled if sentence not in told])
                    told.update(doubled)
                except FatalError as error:
                    found = FatalError(f"kubectl proxy ended: {proxy.said()}") if proxy.ended else error
                yield found
                await asyncio.sleep(interval_seconds)
                if proxy.ended:
                    break


def _session(proxy: Proxy) -> aiohttp.ClientSession:
    # Unpacked by `body_of`, a piece at a time: a small answer may unpack to one that fills the memory.
    connector = aiohttp.UnixConnector(str(proxy.path))
    takes = {"Accept-Encoding": "gzip", "Accept": "application/json"}
    return aiohttp.ClientSession("http://localhost", connector=connector, headers=takes, auto_decompress=False)


async def _look(session: aiohttp.ClientSession, scope: Scope) -> tuple[Seen, list[str]]:
    """What all agents answered, and who was not asked because another was. Raises FatalError where nobody answered."""
    agents, doubled = one_for_each_node(await _agents(session, scope))
    if not agents:
        raise FatalError(_nobody(scope))
    room = asyncio.Semaphore(_AT_ONCE)
    told = await asyncio.gather(*(_map_of(session, agent, scope, room) for agent in agents))
    documents = [one for one in told if not isinstance(one, str)]
    reasons = [(agent.node, one) for agent, one in zip(agents, told, strict=True) if isinstance(one, str)]
    missing = tuple(by_reason(reasons))
    if not documents:
        more = f" (and {len(missing) - 1} more reasons)" if len(missing) > 1 else ""
        raise FatalError(f"no agent answered: {missing[0]}{more}")
    documents.sort(key=_name)
    return Seen(tuple(documents), missing, fleet=not scope.node), doubled


async def _agents(session: aiohttp.ClientSession, scope: Scope) -> list[Agent]:
    """All pods with the agents' label, a page at a time."""
    where = f"namespaces/{scope.agent_namespace}/pods" if scope.agent_namespace else "pods"
    parameters = {"labelSelector": scope.selector, "limit": str(_PAGE_PODS)}
    if scope.node:
        parameters["fieldSelector"] = f"spec.nodeName={scope.node}"
    found: list[Agent] = []
    while True:
        page = await _page(session, f"/api/v1/{where}", parameters, scope)
        try:
            found += agents_of(page["items"] or ())
            more = (page.get("metadata") or {}).get("continue")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise FatalError("the API server did not answer with a list of pods") from error
        if not more:
            return found
        parameters["continue"] = str(more)


async def _page(session: aiohttp.ClientSession, path: str, parameters: dict[str, str], scope: Scope) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=scope.request_seconds)
    try:
        async with session.get(path, params=parameters, timeout=timeout) as response:
            body = await body_of(response, "the API server")
    except TimeoutError as error:
        raise FatalError(f"the API server did not answer within {scope.request_seconds:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise FatalError(f"kubectl proxy did not answer: {connection_error(error)}") from error
    if response.status != 200:
        why = no_list(response.status, body, of_all_namespaces=not scope.agent_namespace)
        lost = response.status == 500 and not await asyncio.to_thread(has_context, scope.kubectl_flags)
        raise FatalError(why + (" (kubectl has no current context)" if lost else ""))
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise FatalError("the API server did not answer with a list of pods")
    return found


async def _map_of(
    session: aiohttp.ClientSession, agent: Agent, scope: Scope, room: asyncio.Semaphore
) -> Document | str:
    """An agent's map, or why there is none: a sentence's predicate."""
    if agent.why_not:
        return f"its agent {agent.why_not}"
    seconds = min(AGENT_SECONDS, scope.request_seconds or AGENT_SECONDS)
    try:
        async with room, session.get(agent.path, timeout=aiohttp.ClientTimeout(total=seconds)) as response:
            body = await body_of(response, "its agent")
            if response.status != 200:
                return no_map(response.status, body)
            return map_in(body, "its agent")
    except TimeoutError:
        return f"its agent did not answer within {seconds:g} s"
    except FatalError as error:
        return str(error)
    except (aiohttp.ClientError, OSError) as error:
        return f"kubectl proxy did not answer: {connection_error(error)}"


def _nobody(scope: Scope) -> str:
    where = f" in namespace {scope.agent_namespace}" if scope.agent_namespace else ""
    there = f" on node {scope.node}" if scope.node else ""
    return f"no pod{there}{where} has the label {scope.selector}: gpumap does not run there (see --agent-selector)"


def _name(found: Document) -> str:
    try:
        return str(found["node"]["name"])
    except (KeyError, TypeError):
        return ""  # what is no map is told where it is shown


def _tell(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        print(f"gpumap: {sentence}", file=sys.stderr, flush=True)
