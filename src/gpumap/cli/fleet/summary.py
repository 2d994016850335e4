"""Sums of a whole cluster, by node or by namespace: a server adds up, and answers with a few numbers for each row.

The sums come from the recording rules of rules/fleet.yaml if the server evaluates them, else from `sum by (…)`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from gpumap.cli.fleet import queries
from gpumap.cli.fleet.joins import Answers, series_of_nodes
from gpumap.cli.fleet.quantities import QUANTITIES, Grouping, recorded, sharers
from gpumap.cli.fleet.queries import DEVICE_INFO, braced, matchers_of_targets
from gpumap.cli.fleet.source import (
    OLD_SECONDS,
    Agents,
    agents_of,
    left_out,
    maps_of,
    now,
    number_of,
    values_of_family,
)
from gpumap.cli.fleet.targets import OWN_LABELS, TargetsOfNode, down_nodes, nodes_of
from gpumap.cli.fleet.values import Limits, odd_row
from gpumap.cli.fleet.workloads import workloads_of
from gpumap.cli.kube_state import Object, unlisted, workload_of
from gpumap.cli.node_maps import FleetSums, NodeMaps, Sums
from gpumap.cli.prometheus import Prometheus, Row, together
from gpumap.cli.server_flags import MATCHER, OWN_JOBS, label_of
from gpumap.cli.sort_keys import WORKLOAD
from gpumap.model.errors import FatalError
from gpumap.model.formatting import age, counted, reason_sentences
from gpumap.model.grouping import grouped

NODE, NAMESPACE = "node", "namespace"
_NAMES = {NAMESPACE: (NAMESPACE,), WORKLOAD: (NAMESPACE, "pod")}
"""The labels that a row is made of: those of a pod for its workload."""
LAST_RECORDS = (
    "cluster:gpumap_node_info:count",
    "cluster:gpumap_device_memory_total_bytes:sum",
    "cluster:gpumap_gpu_up:count",
)
"""The last record of each group of rules that sums come from: groups are evaluated at different times."""
_RECORDED = 'job=""'
"""A series that a rule recorded has no job. What a scraped pod exposes under the same name has one."""
_SUM_MAX = 1 << 63
"""The memory of 100 000 GPUs is more than what is exact in a server's floats."""
_MAY_BE_PARTS = ("_bytes", "held_gpus", "sm_gpus")
"""Sums of shares. Compute instances share bytes too. All others are counts."""


# --- asking -----------------------------------------------------------------------------------------------------------


class Question(NamedTuple):
    """What a summary shows: quantities of each row, and others that are only added up over all nodes.

    `parts` are the parts of maps, which are asked for if the labels of targets hide those of gpumap.
    """

    by: str
    of_rows: tuple[str, ...]
    of_all: tuple[str, ...]
    parts: frozenset[str]
    kube_match: str = ""
    """Matchers for kube-state-metrics' series, which have the workloads."""

    def asked(self) -> dict[str, tuple[str, ...]]:
        """Return the quantities by node, and those by namespace if they are shown."""
        by_node = (*_NODES, *self.of_all)
        return {NODE: (*by_node, *self.of_rows)} if self.by == NODE else {NODE: by_node, self.by: self.of_rows}


class _Trouble(NamedTuple):
    """A series that is 0 for a node in trouble; or one that its gpumap does not serve (`is_gap`), which is no trouble
    if the node has this quantity (`unless`)."""

    sentence: str
    name: str
    only: str = ""
    is_gap: bool = False
    unless: str = ""


_NODES = ("gpus", "gpus_up", "devices_free")
"""Always asked for: they show which nodes are known."""
_NO_SOURCES = _Trouble("its gpumap does not report its sources", "gpumap_source_up", 'source="nvml"', is_gap=True)
_NO_KUBELET = _Trouble("", "gpumap_source_up", 'source="kubelet"', is_gap=True)
"""No trouble: with --no-kubelet nothing is assigned."""
_ALWAYS = (*_NODES, "devices_measured", "memory_total_bytes")
"""A node whose sources answer has these, one at least from each group of rules by node."""
_TROUBLES = (
    *(_Trouble(f"{one} is down", "gpumap_source_up", f'source="{one}"') for one in ("kubelet", "nvml", "procfs")),
    _Trouble("pod_identity is down", "gpumap_source_up", 'source="pod_identity"'),
    _Trouble("processes of other containers are not visible", "gpumap_capability", 'capability="pid_visibility"'),
    _NO_SOURCES,
    _NO_KUBELET,
    _Trouble("its gpumap serves no series of GPUs", "gpumap_driver_info", is_gap=True, unless="gpus"),
)
_LACKS = (
    ("devices_free", queries.HOLDERS, "its gpumap does not report the holders of its GPUs"),
    ("devices_measured", queries.USE, "its gpumap does not report the users of its GPUs"),
)
"""What a node lacks without a quantity although its sources answer; of importance if this part of a map is shown."""
Values = dict[str, dict[str, float]]
"""By node or namespace, then by quantity."""


class _Records(NamedTuple):
    """Recording rules that the server evaluates. `node_of` is the node with these labels `cluster` and `node`."""

    match: str
    age_seconds: float
    node_of: Mapping[tuple[str, ...], str]


class _Fleet(NamedTuple):
    """All that it takes to ask for sums, and to read them.

    `odd` are the rows that were left out until now: their quantities, with sentences.
    """

    server: Prometheus
    agents: Agents
    nodes: Sequence[TargetsOfNode]
    records: _Records | None
    shared: bool
    moment: int
    odd: dict[str, list[str]]

    async def sums(self, by: str, names: Iterable[str]) -> Values:
        """Ask for these quantities."""
        values: Values = {}
        for found in await together([self._quantity(by, one) for one in dict.fromkeys(names)]):
            for group, quantity, value in found:
                of_group = values.setdefault(group, {})
                of_group[quantity] = of_group.get(quantity, 0) + value
        return values

    async def _quantity(self, by: str, name: str) -> list[tuple[str, str, float]]:
        quantity = QUANTITIES[name]
        record = {NODE: quantity.by_node, NAMESPACE: quantity.by_namespace}.get(by, "")
        if record and self.records is not None:
            labels: tuple[str, ...] = ("cluster", by)
            rows = await self.server.instant(recorded(record, by, _RECORDED, self.records.match), self.moment)
            nodes: Mapping[tuple[str, ...], str] = self.records.node_of
        else:
            grouping, labels = self._grouping(by), self.agents.selection.key
            rows = await self.server.instant(quantity.ask(grouping), self.moment)
            nodes = {key: node.shown for node in self.nodes for key in node.keys}
        values = _by_node(rows, labels, nodes) if by == NODE else _by_name(rows, _NAMES[by])
        found: list[tuple[str, str, float]] = []
        for group, row in values:
            limits = Limits(most=_SUM_MAX, whole=not name.endswith(_MAY_BE_PARTS))
            if (value := number_of(row, limits)) is None:
                self.odd.setdefault(name, []).append(odd_row(name, row.labels, row.points[0][1]))
            else:
                found.append((group, name, value))
        return found

    def _grouping(self, by: str) -> Grouping:
        selection = self.agents.selection
        clusters = ("cluster",) if "cluster" in selection.labels else ()
        return Grouping(
            match=selection.match,
            group=selection.key if by == NODE else _NAMES[by],
            place=selection.key if by == NODE else clusters,
            moved=OWN_LABELS & selection.labels,
            shared=self.shared,
        )

    async def not_recorded(self, known: Values, names: Sequence[str], failing: Collection[str]) -> Values:
        """Ask the server to add up what the rules do not have of nodes whose sources answer.

        A rule has no value of a node that is new, or whose source was down, until its next evaluation.
        """
        always = [one for one in _ALWAYS if one in names]
        late = [
            node
            for node in self.nodes
            if node.shown not in failing and not known.get(node.shown, {}).keys() >= {*always}
        ]
        if self.records is None or not late:
            return {}
        lacking = [one for one in names if any(one not in known.get(node.shown, {}) for node in late)]
        selection = self.agents.selection
        if 2 * len(late) < len(self.nodes):
            targets = [self.agents.targets[key].labels for node in late for key in node.keys]
            match = ",".join((selection.match, *matchers_of_targets(targets, selection.key)))
            selection = selection._replace(match=match)
        fleet = self._replace(agents=self.agents._replace(selection=selection), nodes=late, records=None)
        return await fleet.sums(NODE, lacking)

    async def troubles(self) -> list[tuple[_Trouble, str]]:
        """Return each trouble with each node that has it."""
        key = self.agents.selection.key
        nodes = {one: node.shown for node in self.nodes for one in node.keys}
        answers = await together([self.server.instant(self._trouble(one), self.moment) for one in _TROUBLES])
        return [
            (one, node)
            for one, rows in zip(_TROUBLES, answers, strict=True)
            for node in sorted({group for group, _ in _by_node(rows, key, nodes)})
        ]

    def _trouble(self, one: _Trouble) -> str:
        match, key = self.agents.selection.match, ", ".join(self.agents.selection.key)
        series = f"{one.name}{braced(one.only, match)}"
        if not one.is_gap:
            return f"max by ({key}) ({series}) == 0"
        return f"max by ({key}) ({queries.SNAPSHOT}{braced(match)} unless on ({key}) {series})"


async def sums_of(server: Prometheus, match: str, question: Question) -> NodeMaps:
    """Ask once."""
    moment = await now(server)
    agents = await agents_of(server, match, moment, spaced=False)
    if agents.selection.mixed or not OWN_LABELS.isdisjoint(agents.selection.key):
        if question.by == WORKLOAD:
            raise FatalError(f"{server.url} scrapes gpumap without honorLabels, so --by {WORKLOAD} cannot name pods")
        return await maps_of(server, match, question.parts)
    nodes = await _nodes(server, agents, moment)
    questions = (sharers(match), *(_recorded_at(one, match) for one in LAST_RECORDS))
    shared, *evaluated = await together([server.instant(one, moment) for one in questions])
    records = _records(evaluated, match, moment, agents, nodes)
    fleet = _Fleet(server, agents, nodes, records, bool(shared), moment, {})
    asked = question.asked()
    by = dict(zip(asked, await together([fleet.sums(one, names) for one, names in asked.items()]), strict=True))
    troubles = await fleet.troubles()
    failing = {node for one, node in troubles if not one.is_gap}
    if any("gpus" not in by[NODE].get(node.shown, {}) and _is_old(node, fleet) for node in nodes):
        fleet = fleet._replace(agents=await agents_of(server, match, moment))
    late = await fleet.not_recorded(by[NODE], asked[NODE], failing)
    new = [] if question.by != NAMESPACE else [node for node in late if "gpus" not in by[NODE].get(node, {})]
    by[NODE] |= {node: {**row, **by[NODE].get(node, {})} for node, row in late.items()}
    doubts: list[str] = []
    if question.by == WORKLOAD:
        of_pods: dict[Object, dict[str, float]] = {}
        for name, row in by[WORKLOAD].items():
            namespace, _, pod = name.partition("/")
            of_pods[namespace, pod] = row
        known = await workloads_of(server, of_pods, question.kube_match, moment)
        by[WORKLOAD], doubts = _by_workload(of_pods, known), unlisted(of_pods, known)
    return _answer(fleet, question, by, troubles, new, doubts)


def _by_workload(of_pods: Mapping[Object, Mapping[str, float]], known: Mapping[Object, str]) -> Values:
    rows = grouped((f"{pod[0]}/{workload_of(pod, known)}", row) for pod, row in of_pods.items())
    return {name: _total(of_workload) for name, of_workload in rows.items()}


async def _nodes(server: Prometheus, agents: Agents, moment: int) -> list[TargetsOfNode]:
    """Return the nodes. Only if several targets may be of one node, it takes the GPUs of each to know."""
    nodes = nodes_of(agents.targets, agents.names, {})
    if len({node.name for node in nodes}) == len(agents.targets):
        return nodes
    infos = await values_of_family(server, DEVICE_INFO, agents.selection, moment)
    answers = Answers(agents.targets, agents.names, [DEVICE_INFO], {DEVICE_INFO.name: infos})
    return [one.node for one in series_of_nodes(answers)[0]]


# --- recording rules --------------------------------------------------------------------------------------------------


def _clusters_in(match: str) -> str | None:
    """Return the matchers of `cluster`; `None` if there are others, which records do not know."""
    matchers = [one[0] for one in re.finditer(MATCHER, match)]
    of_cluster = [one for one in matchers if label_of(one) == "cluster"]
    others = [one for one in matchers if label_of(one) != "cluster"]
    return ",".join(of_cluster) if others == [OWN_JOBS] else None


def _recorded_at(record: str, match: str) -> str:
    """Return PromQL for when each cluster's rule was evaluated."""
    return f"min by (cluster) (timestamp({record}{braced(_RECORDED, _clusters_in(match) or '')}))"


def _records(
    rows: Sequence[Sequence[Row]], match: str, moment: int, agents: Agents, nodes: Sequence[TargetsOfNode]
) -> _Records | None:
    """Return the rules if each group has every cluster, and they separate all nodes. They know only labels that are
    honored."""
    groups = [{row.labels.get("cluster", ""): number_of(row) for row in of_group} for of_group in rows]
    clusters, targets = _clusters_in(match), agents.targets
    node_of: dict[tuple[str, ...], str] = {
        (targets[key].labels.get("cluster", ""), targets[key].labels.get("node", "")): node.shown
        for node in nodes
        for key in node.keys
    }
    known = {cluster for cluster, _ in node_of}
    whole = all(one.keys() == known for one in groups) and len(node_of) == len(nodes)
    named = all(name for _, name in node_of) and len({*node_of.values()}) == len(nodes)
    times = [one for of_group in groups for one in of_group.values() if one is not None]
    if clusters is None or not (times and whole and named) or OWN_LABELS & agents.selection.labels:
        return None
    return _Records(clusters, moment - min(times), node_of)


# --- reading ----------------------------------------------------------------------------------------------------------


def _by_node(rows: Iterable[Row], labels: Sequence[str], nodes: Mapping[tuple[str, ...], str]) -> list[tuple[str, Row]]:
    """Return the rows of each node: of its newest target that has any."""
    by_place = grouped((tuple([row.labels.get(name, "") for name in labels]), row) for row in rows)
    first: dict[str, list[Row]] = {}
    for place, node in nodes.items():
        if place in by_place:
            first.setdefault(node, by_place[place])
    return [(node, row) for node, of_node in first.items() for row in of_node]


def _by_name(rows: Iterable[Row], labels: Sequence[str]) -> Iterator[tuple[str, Row]]:
    for row in rows:
        names = [row.labels.get(f"exported_{one}") or row.labels.get(one, "") for one in labels]
        if all(names):
            yield "/".join(names), row


# --- the answer -------------------------------------------------------------------------------------------------------


def _answer(
    fleet: _Fleet,
    question: Question,
    by: Mapping[str, Values],
    troubles: Sequence[tuple[_Trouble, str]],
    new: Sequence[str],
    doubts: Sequence[str],
) -> NodeMaps:
    ages = {node.shown: fleet.moment - fleet.agents.targets[node.keys[0]].collected_at for node in fleet.nodes}
    old = {node.shown for node in fleet.nodes if "gpus" not in by[NODE].get(node.shown, {}) and _is_old(node, fleet)}
    down = [one.shown for one in down_nodes(fleet.agents.down, fleet.agents.targets, fleet.nodes)]
    current = {node.shown: _with_down(by[NODE].get(node.shown, {})) for node in fleet.nodes if node.shown not in old}
    failing = [(node, one.sentence) for one, node in troubles if node in current and not one.is_gap]
    gaps = list(_gaps(current, question, troubles))
    unknown = {node for node, _ in (*failing, *gaps)} | _without_kubelet(troubles)
    of_nodes = {
        node: row if node in unknown else _with_zeros(row, question, fleet.odd) for node, row in current.items()
    }
    others = by[question.by].items()
    of_others = {name: _with_zeros(row, question, fleet.odd) if "used_bytes" in row else row for name, row in others}
    shown = of_nodes if question.by == NODE else of_others
    failing += [(node, f"the recorded sums by {question.by} do not contain it yet") for node in new]
    failing += [
        (node, f"{counted(round(gpus), 'GPU')} down") for node, row in current.items() if (gpus := row.get("gpus_down"))
    ]
    sums = FleetSums(
        by=question.by,
        rows=tuple(_row(question.by, name, row) for name, row in sorted(shown.items())),
        whole=_total(of_nodes.values()) | _total(shown.values()),
        nodes=len(current),
        lost=len(old) + len(down),
        unknown=(*reason_sentences(failing), *doubts),
        collected_seconds=max((ages[node] for node in current), default=0.0),
        recorded_seconds=None if fleet.records is None else fleet.records.age_seconds,
    )
    missing = (
        *reason_sentences((node, "Prometheus cannot scrape its gpumap (up is 0)") for node in down),
        *reason_sentences((node, f"its gpumap has not collected for {age(ages[node])}") for node in sorted(old)),
        *reason_sentences(gaps),
        *left_out([*fleet.agents.odd, *sorted({*chain(*fleet.odd.values())})]),
    )
    return NodeMaps((), missing, fleet=True, sums=sums)


def _row(by: str, name: str, row: Mapping[str, float]) -> Sums:
    namespace, _, workload = name.partition("/")
    return Sums(workload, row, namespace=namespace) if by == WORKLOAD else Sums(name, row)


def _with_down(row: Mapping[str, float]) -> dict[str, float]:
    """Return a row with the number of GPUs that are down."""
    down = {"gpus_down": row["gpus"] - row["gpus_up"]} if {"gpus", "gpus_up"} <= row.keys() else {}
    return {**row, **down}


def _is_old(node: TargetsOfNode, fleet: _Fleet) -> bool:
    """Whether a node has collected nothing for so long that its gpumap serves nothing."""
    target = fleet.agents.targets[node.keys[0]]
    return fleet.moment - target.collected_at > OLD_SECONDS + 2 * (target.interval_seconds or 0)


def _gaps(current: Values, question: Question, troubles: Sequence[tuple[_Trouble, str]]) -> Iterator[tuple[str, str]]:
    """Return nodes and what their gpumap does not report although its sources answer."""
    failing = {node for one, node in troubles if not one.is_gap}
    without_kubelet = _without_kubelet(troubles)
    for one, node in troubles:
        is_gap = one.is_gap and one.sentence
        if is_gap and node in current and node not in failing and one.unless not in current[node]:
            yield node, one.sentence
    for node, row in current.items():
        answers = row.get("gpus_up", 0) > 0
        for name, part, sentence in _LACKS:
            asked = name in (*_NODES, *question.of_all) and part in question.parts
            asked = asked and not (part == queries.HOLDERS and node in without_kubelet)
            if asked and answers and node not in failing and name not in row:
                yield node, sentence


def _without_kubelet(troubles: Iterable[tuple[_Trouble, str]]) -> set[str]:
    """Return the nodes whose kubelet is no source, although their gpumap reports its sources."""
    nodes = {one: {node for trouble, node in troubles if trouble is one} for one in (_NO_KUBELET, _NO_SOURCES)}
    return nodes[_NO_KUBELET] - nodes[_NO_SOURCES]


def _with_zeros(row: Mapping[str, float], question: Question, odd: Collection[str]) -> dict[str, float]:
    """Return a row with 0 for each quantity without a series, except the `odd` ones."""
    asked = (*question.of_rows, *question.of_all)
    zeros = dict.fromkeys((name for name in asked if QUANTITIES[name].measured and name not in odd), 0.0)
    return {**zeros, **row}


def _total(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up rows. What none of them has is absent."""
    added: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            added[name] = added.get(name, 0) + value
    return added
