"""Where gpumap's agents are, by the API server's list of pods: which pod is asked for a node, and what that leaves out.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from gpumap.model.units import counted

CONTAINER_NAME, PORT_NAME = "gpumap", "metrics"
"""As the chart calls the agent's container and its port."""
DEFAULT_PORT = 9401
_OVER = ("Succeeded", "Failed")
"""Phases of a pod that will not run again: another one has taken its place, or will."""

Json = Mapping[str, Any]


class Agent(NamedTuple):
    """A pod of gpumap's. `why_not` is why it cannot be asked, empty where it can. `created` is as the API server writes
    it, which sorts by time."""

    node: str
    namespace: str
    pod: str
    port: int = DEFAULT_PORT
    https: bool = False
    ready: bool = True
    created: str = ""
    why_not: str = ""

    @property
    def path(self) -> str:
        """Its map, below the API server. https stands before the name (Kubernetes, `pods/proxy`)."""
        scheme = "https:" if self.https else ""
        name = f"{scheme}{quote(self.pod, safe='')}:{self.port}"
        return f"/api/v1/namespaces/{quote(self.namespace, safe='')}/pods/{name}/proxy/api/v1/map"


def agents_of(pods: Iterable[Json]) -> list[Agent]:
    """The agents among pods that have their label. Raises ValueError for what is no pod."""
    return [agent for pod in pods if (agent := _agent(pod)) is not None]


def one_for_each_node(agents: Iterable[Agent]) -> tuple[list[Agent], list[str]]:
    """The agent to ask of each node, by the node's name, and a sentence for each that is not asked.

    Of several that run, the newest that is ready. One that does not run says nothing where another of its node does.
    """
    nodes: dict[str, list[Agent]] = {}
    for agent in agents:
        nodes.setdefault(agent.node, []).append(agent)
    chosen, doubled = [], []
    for _, found in sorted(nodes.items()):
        best = max(found, key=lambda one: (not one.why_not, one.ready, one.created, one.pod))
        chosen.append(best)
        others = sorted(one.pod for one in found if one is not best and not one.why_not)
        if others:
            doubled.append(
                f"node {best.node} has {counted(len(others) + 1, 'agent')}: {best.pod} was asked, and "
                f"{', '.join(others)} not"
            )
    return chosen, doubled


def _agent(pod: Json) -> Agent | None:
    """One pod; None for one that is over, or on no node yet, or on its way out."""
    try:
        metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
        name, namespace, node = str(metadata["name"]), str(metadata["namespace"]), str(spec.get("nodeName") or "")
        if not node or metadata.get("deletionTimestamp") or status.get("phase") in _OVER:
            return None
        container = _container(spec)
        port, https = _port(container)
        return Agent(
            node=node,
            namespace=namespace,
            pod=name,
            port=port,
            https=https,
            ready=any(
                one.get("type") == "Ready" and one.get("status") == "True" for one in _list(status, "conditions")
            ),
            created=str(metadata.get("creationTimestamp") or ""),
            why_not=_why_not(status, str(container.get("name") or "")),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("is no pod") from error


def _container(spec: Json) -> Json:
    """The agent's own among the pod's: the one that the chart names, else the first with its port. A proxy may stand
    beside it, whose port has the same name."""
    found = _list(spec, "containers")
    with_port = [one for one in found if any(port.get("name") == PORT_NAME for port in _list(one, "ports"))]
    return next((one for one in found if one.get("name") == CONTAINER_NAME), (with_port or found or [{}])[0])


def _port(container: Json) -> tuple[int, bool]:
    """The port that the chart calls `metrics`, and whether the probes speak TLS to it."""
    for port in _list(container, "ports"):
        number = port.get("containerPort")
        if port.get("name") == PORT_NAME and isinstance(number, int):
            probes = (container.get("readinessProbe") or {}, container.get("livenessProbe") or {})
            return number, any((one.get("httpGet") or {}).get("scheme") == "HTTPS" for one in probes)
    return DEFAULT_PORT, False


def _why_not(status: Json, container: str) -> str:
    """What the agent's container waits for, or how it ended, where it does not run."""
    of_container = [one for one in _list(status, "containerStatuses") if one.get("name") == container]
    state = (of_container[0].get("state") or {}) if of_container else {}
    others = (how for how in ("waiting", "terminated") if state.get(how) is not None)
    ended = next((state[how].get("reason") or how for how in others), "")
    if status.get("phase") == "Running" and not ended:
        return ""
    return f"is not running ({ended or status.get('reason') or status.get('phase') or 'unknown'})"


def _list(found: Json, name: str) -> list[Json]:
    return list(found.get(name) or ())
