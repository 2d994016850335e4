"""What a command found out: the maps of the nodes that it asked, one node or a whole cluster. No logic."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import NamedTuple

from gpumap.model.errors import FatalError
from gpumap.model.node import Node


class Sums(NamedTuple):
    """The sums of one node, namespace or workload, by the names of quantities. Those that are not known are absent.

    `namespace` is that of a workload.
    """

    name: str
    values: Mapping[str, float]
    namespace: str = ""


class FleetSums(NamedTuple):
    """A cluster in numbers. `rows` are by `by`: "node", "namespace" or "workload".

    `whole` are the sums over all of it. `nodes` have current series, `lost` have none. `unknown` says what is not in
    the sums, a sentence each. `collected_seconds` is the greatest age of a node's series, `recorded_seconds` that of
    the recording rules if they were read.
    """

    by: str
    rows: tuple[Sums, ...]
    whole: Mapping[str, float]
    nodes: int
    lost: int
    unknown: tuple[str, ...]
    collected_seconds: float
    recorded_seconds: float | None


class Week(NamedTuple):
    """What a pod used on a device in the last week.

    `sm_ratio` is its largest share of SM time in ten minutes. `days` have samples.
    """

    memory_peak_bytes: int
    sm_ratio: float
    days: float


class NodeMaps(NamedTuple):
    """`maps` are in the order of their nodes' names. `missing` says what is not in them, a sentence each. `notices` are
    about agents that were not asked.

    `fleet`: more than one node was asked, and tables have a column with the node of a row. `sums`: the server was asked
    for sums, in the place of maps. `weeks` are by namespace, pod and uuid, `workloads` by namespace and pod, if they
    were asked for.
    """

    maps: tuple[Node, ...]
    missing: tuple[str, ...] = ()
    fleet: bool = False
    sums: FleetSums | None = None
    weeks: Mapping[tuple[str, str, str], Week] | None = None
    workloads: Mapping[tuple[str, str], str] | None = None
    notices: tuple[str, ...] = ()


NodeMapStream = AsyncGenerator[NodeMaps | FatalError, None]
"""One answer after the other. A failed attempt is a FatalError in its place: a watch goes on after it."""
