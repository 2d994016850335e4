"""The findings of all nodes, as rows of a Prometheus' series, joined with the names of nodes and devices.

What series do not have is not known: evidence, processes, granted and used memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from gpumap.cli.rows import NodeMaps
from gpumap.cli.sources.prometheus import Prometheus, Row, together
from gpumap.cli.sources.scraped_nodes import (
    CONTAINER,
    Cluster,
    Place,
    ScrapedNode,
    braced,
    invalid_row,
    labels_by,
    left_out,
    number_of,
    own_values,
    place_of,
    scraped_cluster,
)
from gpumap.model import remedies
from gpumap.model.devices import NO_CONTAINER, sources_up
from gpumap.model.findings import sort_findings, why_of
from gpumap.model.formatting import age, reason_sentences
from gpumap.model.grouping import grouped
from gpumap.model.node import Device, Finding, Gpu, Node, SourceHealth, Unjudged
from gpumap.model.readings import MigInstance, Uuid
from gpumap.model.terms import FINDINGS, Source

OLD_SECONDS = 60.0
"""A gpumap serves nothing older than its --stale-after, which is a minute by default."""
_DIGITS_MAX = 10
_KINDS = f'finding=~"{"|".join(FINDINGS)}"'
_FINDING = ("finding", "reason", *CONTAINER, "uuid")
_DEVICE = ("uuid", "gpu_uuid", "index", "mig_profile", "gpu_instance_id", "compute_instance_id")
_NOT_SERVED = "its gpumap does not report"


class Family(NamedTuple):
    """A family of series. `labels` are its own; `only` selects among its series."""

    name: str
    labels: tuple[str, ...]
    only: str = ""
    is_whole: bool = False

    def question(self, match: str, place_labels: Collection[str]) -> str:
        """Return PromQL for the series by their own labels and those of the target."""
        return f"max by ({labels_by(self.labels, place_labels)}) ({self.name}{braced(self.only, match)})"


SINCE = Family("gpumap_finding_since_timestamp_seconds", _FINDING, _KINDS)
"""It exists for each finding."""
GPUS = Family("gpumap_finding_gpus", _FINDING, _KINDS)
MEMORY = Family("gpumap_finding_memory_bytes", _FINDING, _KINDS, is_whole=True)
JUDGED = Family("gpumap_finding_judged", ("finding",), is_whole=True)
UNJUDGED = Family("gpumap_finding_unjudged", ("finding", "reason"), is_whole=True)
SOURCE_UP = Family("gpumap_source_up", ("source",))
DEVICE_INFO = Family("gpumap_device_info", _DEVICE)
WITHOUT_DEVICE = Family("gpumap_gpu_without_device_info", ("gpu_uuid", "index"))
FAMILIES = (SINCE, GPUS, MEMORY, JUDGED, UNJUDGED, SOURCE_UP, DEVICE_INFO, WITHOUT_DEVICE)
Series = Mapping[str, Mapping[Place, list[Row]]]
"""By family, then by target."""


async def cluster_findings(server: Prometheus, match: str) -> NodeMaps:
    """Ask once for the findings of every node."""
    cluster = await scraped_cluster(server, match)
    answers = await together([server.instant(_question(family, match, cluster), cluster.moment) for family in FAMILIES])
    return findings_of_nodes(cluster, dict(zip(FAMILIES, answers, strict=True)))


def _question(family: Family, match: str, cluster: Cluster) -> str:
    """Return PromQL for a family; of devices, only for those with a finding, and for all of a GPU with one."""
    question = family.question(match, cluster.place_labels)
    if family is not DEVICE_INFO:
        return question
    finding = f"{SINCE.name}{braced(match)}"
    gpu_finding = f'label_replace({finding}, "gpu_uuid", "$1", "uuid", "(.+)")'
    return f"{question} and on (uuid) {finding} or {question} and on (gpu_uuid) {gpu_finding}"


def findings_of_nodes(cluster: Cluster, answers: Mapping[Family, list[Row]]) -> NodeMaps:
    """Join the rows of each node. `answers` are by family."""
    series: dict[str, dict[Place, list[Row]]] = {}
    invalid = [*cluster.invalid]
    for family, rows in answers.items():
        is_valid = [number_of(row, is_whole=family.is_whole) is not None for row in rows]
        invalid += [invalid_row(family.name, row) for row, valid in zip(rows, is_valid, strict=True) if not valid]
        valid_rows = (row for row, valid in zip(rows, is_valid, strict=True) if valid)
        series[family.name] = grouped((place_of(row.labels), row) for row in valid_rows)
    nodes = [_node(node, series) for node in cluster.nodes]
    reasons = [(node.name, _missing(node, cluster.moment)) for node in nodes]
    missing = (
        *reason_sentences((name, "Prometheus cannot scrape its gpumap (up is 0)") for name in cluster.down),
        *reason_sentences((name, reason) for name, reason in reasons if reason),
        *left_out(invalid),
    )
    current = tuple(node for node in nodes if not _is_old(node, cluster.moment))
    return NodeMaps(current, missing, fleet=True)


def _is_old(node: Node, moment: int) -> bool:
    """Return whether nothing was collected for so long that nothing is served."""
    return not node.judged and moment - node.timestamp > OLD_SECONDS + 2 * (node.interval_seconds or 0)


def _missing(node: Node, moment: int) -> str:
    """Return why the findings of a node are not known although its gpumap answers; empty if they are."""
    if _is_old(node, moment):
        return f"its gpumap has not collected for {age(moment - node.timestamp)}"
    if not node.sources:
        return f"{_NOT_SERVED} its sources (Prometheus drops gpumap_source_up)"
    if sources_up(node) and not node.judged:
        return f"{_NOT_SERVED} what is wrong on it (add --collect findings, or stop dropping its series)"
    return ""


# --- a node -----------------------------------------------------------------------------------------------------------


def _node(node: ScrapedNode, series: Series) -> Node:
    """Return what series have of a node. Of several targets, the newest that serves findings counts: the findings of
    two agents must not be added up."""
    judges = (target for target in node.targets if target.place in series[JUDGED.name])
    target = next(judges, node.targets[0])

    def rows(family: Family) -> list[tuple[tuple[str, ...], float]]:
        """Return the rows by their own labels. Two servers that scrape the same give equal ones."""
        values: dict[tuple[str, ...], float] = {}
        for row in series[family.name].get(target.place, ()):
            labels = own_values(row.labels, family.labels, target)
            values[labels] = max(values.get(labels, 0.0), number_of(row) or 0.0)
        return sorted(values.items())

    infos = [labels for labels, _ in rows(DEVICE_INFO)]
    gpu_indices = {gpu_uuid: index for _, gpu_uuid, index, *_ in infos}
    gpu_indices |= {gpu_uuid: index for (gpu_uuid, index), _ in rows(WITHOUT_DEVICE)}
    indices = {uuid: index for uuid, text in gpu_indices.items() if uuid and (index := _nvml_number(text)) is not None}
    gpus, memory = dict(rows(GPUS)), dict(rows(MEMORY))
    # The names of a finding were empty if they are gpumap's own.
    own_names = [target.labels.get(label, "") for label in CONTAINER]
    findings = []
    for labels, since in rows(SINCE):
        kind, reason, *names, uuid = labels
        if kind not in FINDINGS:
            continue  # no server that heeds the query answers this
        findings.append(
            Finding(
                *(NO_CONTAINER if names == own_names else names),
                finding=kind,
                reason=reason,
                uuid=Uuid(uuid) if uuid else None,
                since=since,
                gpus=gpus.get(labels),
                memory_bytes=int(memory[labels]) if labels in memory else None,
                why=why_of(kind, reason, max(target.collected_at - since, 0.0)),
                remedy=remedies.finding_remedy(kind, reason, indices.get(uuid)),
            )
        )
    sources = {source: value for (source,), value in rows(SOURCE_UP)}
    return Node(
        timestamp=target.collected_at,
        interval_seconds=target.interval_seconds,
        name=node.name,
        internal_ip=node.internal_ip,
        gpus=tuple(Gpu(Uuid(uuid), index, None, "", "", False, None) for uuid, index in indices.items()),
        devices=tuple(_device(*labels) for labels in infos),
        sources=tuple(SourceHealth(name, up=bool(sources[name])) for name in Source if name in sources),
        findings=sort_findings(findings),
        judged={kind: int(count) for (kind,), count in rows(JUDGED)},
        unjudged=tuple(
            Unjudged(*NO_CONTAINER, reason=reason, findings=(kind,))
            for (kind, reason), count in rows(UNJUDGED)
            for _ in range(int(count))
        ),
    )


def _device(
    uuid: str, gpu_uuid: str, index: str, mig_profile: str, gpu_instance_id: str, compute_instance_id: str
) -> Device:
    gpu_instance, compute_instance = _nvml_number(gpu_instance_id), _nvml_number(compute_instance_id)
    mig = None
    if mig_profile and gpu_instance is not None and compute_instance is not None:
        mig = MigInstance(Uuid(uuid), gpu_instance, compute_instance, mig_profile)
    return Device(Uuid(uuid), Uuid(gpu_uuid) if gpu_uuid else None, _nvml_number(index), mig=mig)


def _nvml_number(text: str) -> int | None:
    """Return NVML's number; None for other text, and for a number that no machine has."""
    return int(text) if len(text) < _DIGITS_MAX and text.isascii() and text.isdigit() else None
