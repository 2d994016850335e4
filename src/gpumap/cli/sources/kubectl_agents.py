"""Finds gpumap's agents in the API server's list of pods: which pod to ask about a node, and which others exist.

Only the fields of a pod that this needs are declared. The API server leaves out what is empty, or sends null. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from gpumap.model.formatting import counted, listed
from gpumap.model.grouping import grouped

CONTAINER_NAME, PORT_NAME = "gpumap", "metrics"
"""The chart's names of the agent's container and its port."""
DEFAULT_PORT = 9401
_ENDED = ("Succeeded", "Failed")
"""Phases of a pod that does not run again: another pod replaces it."""


# --- a pod, as the API server writes it -------------------------------------------------------------------------------


class _Entry(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A part of a pod."""


class _Port(_Entry, frozen=True, kw_only=True):
    name: str | None = None
    container_port: int | None = None


class _HttpGet(_Entry, frozen=True, kw_only=True):
    scheme: str | None = None


class _Probe(_Entry, frozen=True, kw_only=True):
    http_get: _HttpGet | None = None


class _Container(_Entry, frozen=True, kw_only=True):
    name: str | None = None
    ports: tuple[_Port, ...] | None = None
    readiness_probe: _Probe | None = None
    liveness_probe: _Probe | None = None


class _Spec(_Entry, frozen=True, kw_only=True):
    node_name: str | None = None
    containers: tuple[_Container, ...] | None = None


class _Metadata(_Entry, frozen=True, kw_only=True):
    name: str
    namespace: str
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class _Reason(_Entry, frozen=True, kw_only=True):
    reason: str | None = None


class _ContainerStatus(_Entry, frozen=True, kw_only=True):
    name: str | None = None
    state: dict[str, _Reason | None] | None = None
    """By `waiting`, `running` or `terminated`."""


class _Status(_Entry, frozen=True, kw_only=True):
    phase: str | None = None
    reason: str | None = None
    conditions: tuple[dict[str, object], ...] | None = None
    container_statuses: tuple[_ContainerStatus, ...] | None = None


class Pod(_Entry, frozen=True, kw_only=True):
    metadata: _Metadata
    spec: _Spec
    status: _Status | None = None


class PodList(msgspec.Struct, frozen=True):
    """A page of pods."""

    items: tuple[Pod, ...] | None
    metadata: dict[str, object] | None = None

    @property
    def next_page(self) -> str:
        """What asks for the next page; empty for the last one."""
        return str((self.metadata or {}).get("continue") or "")


def pod_list(body: bytes) -> PodList:
    """Read the API server's answer. Raises ValueError if it is no list of pods."""
    return msgspec.json.decode(body, type=PodList)


# --- the agents -------------------------------------------------------------------------------------------------------


class Agent(NamedTuple):
    """A pod of gpumap. `why_not` is why it cannot be asked, empty if it can. `created` is as the API server writes it,
    which sorts by time."""

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
        """The path of its map at the API server. https precedes the name (Kubernetes, `pods/proxy`)."""
        scheme = "https:" if self.https else ""
        name = f"{scheme}{quote(self.pod, safe='')}:{self.port}"
        return f"/api/v1/namespaces/{quote(self.namespace, safe='')}/pods/{name}/proxy/api/v1/map"


def agents_of(pods: Iterable[Pod]) -> list[Agent]:
    """Return the agents among pods that have their label."""
    return [agent for pod in pods if (agent := _agent(pod)) is not None]


def one_for_each_node(agents: Sequence[Agent]) -> tuple[list[Agent], list[str]]:
    """Return the agent to ask of each node, by the node's name, and sentences about those that are not asked.

    Of several that run, the newest that is ready is asked. One that does not run is not named if another one of its
    node does.
    """
    agents, notices = _choose_namespace(agents)
    chosen = []
    for node, members in sorted(grouped((agent.node, agent) for agent in agents).items()):
        best = max(members, key=lambda agent: (not agent.why_not, agent.ready, agent.created, agent.pod))
        chosen.append(best)
        other_pods = sorted(agent.pod for agent in members if agent is not best and not agent.why_not)
        if other_pods:
            count = counted(len(other_pods) + 1, "agent")
            notices.append(f"node {node} has {count}: gpumap asked {best.pod}, not {listed(other_pods)}")
    return chosen, notices


def _choose_namespace(agents: Sequence[Agent]) -> tuple[Sequence[Agent], list[str]]:
    """Return the agents of the namespace in which they run on most nodes, and a sentence about each other one.

    Any user who may create a pod can give it the agents' label. If two namespaces have equally many, none is asked.
    """
    namespaces = grouped((agent.namespace, agent) for agent in agents)
    sizes = {name: len({agent.node for agent in members if not agent.why_not}) for name, members in namespaces.items()}
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    if len(names) > 1 and sizes[names[0]] == sizes[names[1]]:
        why = f"is not certain: pods of the namespaces {listed(sorted(names))} have its label; set --agent-namespace"
        return [agent._replace(why_not=why) for agent in agents], []
    return namespaces[names[0]] if names else (), [
        f"not asked: {counted(len(namespaces[name]), 'pod')} of namespace {name}, "
        f"{listed(sorted(agent.pod for agent in namespaces[name]))}. The agents are of {names[0]}; --agent-namespace "
        "chooses another one"
        for name in names[1:]
    ]


def _agent(pod: Pod) -> Agent | None:
    """Return the agent of a pod; None if the pod has ended, has no node yet, or is being deleted."""
    status, node = pod.status or _Status(), pod.spec.node_name
    if not node or pod.metadata.deletion_timestamp or status.phase in _ENDED:
        return None
    container = _agent_container(pod.spec)
    port, https = _port(container)
    return Agent(
        node=node,
        namespace=pod.metadata.namespace,
        pod=pod.metadata.name,
        port=port,
        https=https,
        ready=any(
            (condition.get("type"), condition.get("status")) == ("Ready", "True")
            for condition in status.conditions or ()
        ),
        created=pod.metadata.creation_timestamp or "",
        why_not=_why_not(status, container.name or ""),
    )


def _agent_container(spec: _Spec) -> _Container:
    """Return the agent's container: the one with the chart's name, else the first with its port. A proxy in the same
    pod may have a port of that name too."""
    containers = spec.containers or ()
    with_port = [container for container in containers if any(port.name == PORT_NAME for port in container.ports or ())]
    first = next(iter((*with_port, *containers)), _Container())
    return next((container for container in containers if container.name == CONTAINER_NAME), first)


def _port(container: _Container) -> tuple[int, bool]:
    """Return the port that the chart names `metrics`, and whether the probes use TLS."""
    for port in container.ports or ():
        if port.name == PORT_NAME and port.container_port is not None:
            probes = (container.readiness_probe, container.liveness_probe)
            return port.container_port, any(
                probe is not None and probe.http_get is not None and probe.http_get.scheme == "HTTPS"
                for probe in probes
            )
    return DEFAULT_PORT, False


def _why_not(status: _Status, container: str) -> str:
    """Return what the agent's container waits for, or how it ended; empty if it runs."""
    states = (
        status_of_container.state
        for status_of_container in status.container_statuses or ()
        if status_of_container.name == container
    )
    state = next(states, None) or {}
    reasons = ((how, state.get(how)) for how in ("waiting", "terminated"))
    stopped = next((reason.reason or how for how, reason in reasons if reason is not None), "")
    if status.phase == "Running" and not stopped:
        return ""
    return f"is not running ({stopped or status.reason or status.phase or 'unknown'})"
