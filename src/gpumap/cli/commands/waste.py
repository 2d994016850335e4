"""`gpumap waste`: the agents' findings except faults, worst first; their sums; and what could not be judged."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from gpumap.cli.args import SUMS_BY, add_by, add_output, read_shape
from gpumap.cli.commands import Program
from gpumap.cli.filter import select_rows
from gpumap.cli.rows import NodeMaps, pods_in, values_of
from gpumap.cli.screen import Report
from gpumap.cli.table import (
    NODE,
    Column,
    Shape,
    SortKey,
    add_node_column,
    amount,
    join_blocks,
    make_container_droppable,
    name,
    notes,
    sort_keys,
    sort_rows,
    table,
)
from gpumap.cli.unknowns import all_known, few, gpus_to_repair, no_rows, sentences_of_each
from gpumap.model.devices import device_name, has_kubelet
from gpumap.model.errors import UsageError
from gpumap.model.findings import judged_holders, judged_kinds, sums, waste_rank, worst_first
from gpumap.model.formatting import UNKNOWN, age, counted, gpus, listed, number, ratio, size
from gpumap.model.grouping import grouped
from gpumap.model.node import Device, Finding, Node
from gpumap.model.terms import FINDINGS

if TYPE_CHECKING:
    from gpumap.cli.commands import Ask, Commands

ORDERS = (
    *("severity", "waste", "gpus", "granted", "used", "for"),
    *("device", "namespace", "pod", "container", "node"),
)
"""The keys of --sort-by. The first one is the default."""
_DETAILS = """\
Findings, worst first:
  not offered  a GPU that no container can be assigned
  squatter     uses a device that it does not hold
  leftover     a process of a pod that no longer exists
  unexplained  memory or load of a GPU without a process
  over         uses more memory than granted
  stalled      keeps its GPU busy, but the GPU draws next to no power: it may hang
  idle         holds a device, but did no work on any engine for five minutes (serve --idle-after)
  maybe idle   may be idle, but gpumap cannot prove that it rests
  unused       even its peak left more than 20% and 1 GiB of its grant unused
  unmatched    holds slots that match no device, or that another pod holds
gpumap reports only what it can prove. Below the table it lists what it could not check, with the reason."""
_EXAMPLES = {
    "gpumap": [
        (
            "the whole cluster, one line for each namespace",
            "gpumap waste --by namespace --prometheus http://prom:9090",
        )
    ],
    "kubectl gpumap": [
        ("the whole cluster", "kubectl gpumap waste -A"),
        ("sums of each namespace", "kubectl gpumap waste -A --by namespace"),
    ],
}


def add(commands: Commands, program: Program) -> None:
    parser = program.add_command(commands, "waste", _waste, _EXAMPLES, details=_DETAILS)
    add_by(add_output(parser, ORDERS, program.interval_help), SUMS_BY)
    program.add_source(parser, "waste")


def _waste(program: Program, args: argparse.Namespace) -> int:
    if args.by and args.sort_by:
        raise UsageError("--sort-by sorts findings, but --by prints no findings")
    if args.by and args.output == "name":
        raise UsageError(f"--by {args.by}: prints sums, but -o name prints pods")
    shape = replace(read_shape(args, program.namespace(args)), sums_by=args.by or "")
    ask: Ask | None = None
    if getattr(args, "prometheus", None) is not None:
        from gpumap.cli.sources.scraped_findings import cluster_findings as ask
    return program.show(args, REPORT, shape, ask)


_KINDS = FINDINGS[1:]
"""Without faults: `gpumap check` and `gpumap doctor` show them."""
_SHOWN_MAX = 40
"""Rows of a fleet on a screen. -o wide, json and yaml have all."""


class FindingRow(NamedTuple):
    """A finding with the node and the device that have it."""

    node: str
    device: str
    seconds: float
    """For how long it has held."""
    finding: Finding


_COLOURS = {
    "fault": "red",
    "not_offered": "red",
    "squatter": "red",
    "leftover": "red",
    "unexplained": "red",
    "over": "red",
    "stalled": "yellow",
    "idle": "yellow",
    "maybe_idle": "cyan",
    "unmatched": "yellow",
}
_IN_CAPITALS = ("squatter", "leftover", "unexplained")


def shown_finding(finding: Finding) -> str:
    """Return the kind of a finding as tables show it."""
    return finding.finding.upper() if finding.finding in _IN_CAPITALS else finding.finding.replace("_", " ")


def finding_colour(finding: Finding) -> str:
    return _COLOURS.get(finding.finding, "")


COLUMNS: tuple[Column[FindingRow], ...] = (
    Column(
        "FINDING",
        lambda row: shown_finding(row.finding),
        colour=lambda row: finding_colour(row.finding),
    ),
    name("NAMESPACE", lambda row: row.finding.namespace),
    name("POD", lambda row: row.finding.pod),
    name("CONTAINER", lambda row: row.finding.container),
    Column("DEVICE", lambda row: row.device, lambda row: row.device),
    amount("GPUS", ratio, lambda row: row.finding.gpus, drop_rank=4),
    amount("GRANTED", size, lambda row: row.finding.granted_bytes, wide=True),
    amount("USED", size, lambda row: row.finding.used_bytes, wide=True),
    amount("WASTE", size, lambda row: row.finding.memory_bytes),
    Column("FOR", lambda row: age(row.seconds), lambda row: row.seconds, largest_first=True),
    Column("UUID", lambda row: row.finding.uuid or UNKNOWN, name=True, wide=True),
    Column("WHY", lambda row: row.finding.why, sentence=True),
)
SORT_KEYS: dict[str, SortKey[FindingRow]] = sort_keys((NODE, *COLUMNS))
_BY_SEVERITY = ORDERS[0]


class GroupSums(NamedTuple):
    """What is wasted by the pods of a namespace, or on a node."""

    name: str
    sums: dict[str, float | None]


def _summed(title: str, text: Callable[[float | None], str], key: str, *, drop_rank: int = 0) -> Column[GroupSums]:
    return amount(title, text, lambda group: group.sums[key], drop_rank=drop_rank)


GROUP_COLUMNS: tuple[Column[GroupSums], ...] = (
    _summed("IDLE GPUS", ratio, "idle_gpus"),
    _summed("IDLE HOLDERS", number, "idle_holders"),
    _summed("UNUSED", size, "unused_bytes"),
    _summed("OVER", size, "over_bytes", drop_rank=1),
    _summed("SQUATTERS", size, "squatter_bytes"),
    _summed("LEFTOVERS", size, "leftover_bytes"),
)
"""After the name of the namespace or node."""


def waste_table(maps: NodeMaps, shape: Shape) -> str:
    """Return the findings, what could not be judged, and a last line of sums."""
    finding_rows = _rows(maps, shape)
    doubts = _add_source(few(_unjudged(maps), maps.fleet), shape)
    selected_maps = select_rows(maps, shape.namespace, shape.words)
    repairs = _add_source(sentences_of_each(selected_maps, gpus_to_repair), shape)
    groups = _groups(maps, shape.sums_by, shape) if shape.sums_by else []
    rows_max = _SHOWN_MAX if maps.fleet and not shape.wide else len(groups or finding_rows)
    unseen = max(len(groups or finding_rows) - rows_max, 0)
    if groups:
        first: Column[GroupSums] = name(shape.sums_by.upper(), lambda group: group.name)
        block = table((first, *GROUP_COLUMNS), groups[:rows_max], shape)
    elif finding_rows:
        columns_of_rows = make_container_droppable(COLUMNS, (row.finding.name for row in finding_rows[:rows_max]))
        block = table(add_node_column(columns_of_rows, fleet=maps.fleet), finding_rows[:rows_max], shape)
    elif not maps.fleet and not any(node.devices for node in selected_maps.maps):
        block = no_rows(maps, shape.namespace, shape.words)
        if shape.namespace or shape.words:
            return notes([block, *(() if all_known(maps) else doubts), *maps.missing], shape.screen) + "\n"
    elif not any(map(has_kubelet, maps.maps)):
        return notes([*doubts, *repairs, *maps.missing], shape.screen) + "\n"
    elif any(judged_kinds(node) & {*_KINDS} for node in maps.maps):
        is_whole = not maps.missing and all(judged_kinds(node) >= {*_KINDS} for node in maps.maps)
        block = "No waste found." if is_whole else "No waste found in the known data."
    else:
        block, doubts = notes(["gpumap could not check anything.", *doubts], shape.screen), []
    total = sum_texts([row.finding for row in finding_rows])
    noun = f"more {shape.sums_by if groups else 'finding'}"
    hints = [f"{counted(unseen, noun)}: -o wide shows all."] if unseen else []
    hints += [] if groups else sentences_of_each(selected_maps, _sharing)
    return join_blocks(
        [
            block,
            notes(hints, shape.screen),
            notes(_remedies(() if groups else finding_rows, every=shape.wide), shape.screen),
            notes(doubts, shape.screen),
            notes(few([*repairs, *maps.missing], maps.fleet), shape.screen, "red"),
            notes([f"Sum of the findings: {', '.join(total)}."] if total else (), shape.screen, "bold"),
        ]
    )


def _add_source(sentences: Iterable[str], shape: Shape) -> list[str]:
    """Return sentences. The commands that they name ask the source of this one."""
    return [re.sub("`gpumap (doctor|top)", lambda name: name[0] + shape.source_flags, text) for text in sentences]


def _sharing(node: Node) -> Iterator[str]:
    """Name the findings on memory that several containers were granted: WASTE has a part of it for each."""
    devices: dict[str | None, Device] = {device.uuid: device for device in node.devices}
    pools = grouped(
        (
            (device.gpu_uuid or device.uuid, device.mig and device.mig.gpu_instance_id, device.memory.total_bytes),
            finding,
        )
        for finding in node.findings or ()
        if finding.finding in ("idle", "maybe_idle", "unused")
        and (device := devices.get(finding.uuid))
        and device.memory
    )
    sharers = [
        "/".join(finding.pod_name)
        for (_, _, total_bytes), findings in pools.items()
        if sum(finding.granted_bytes or 0 for finding in findings) > total_bytes
        for finding in findings
    ]
    if sharers:
        yield f"WASTE counts memory that containers share only once, not as GRANTED minus USED: {listed(sharers)}."


def waste_values(maps: NodeMaps, shape: Shape) -> dict[str, object]:
    """Return the same for scripts: findings, sums, also by namespace, and sentences on what is not known."""
    finding_rows = _rows(maps, shape)
    levels = SUMS_BY if maps.fleet else SUMS_BY[:1]
    return values_of(
        maps,
        findings=[_value(row, fleet=maps.fleet) for row in finding_rows],
        sums=_sums(finding_rows, _judged_by_all(maps.maps)),
        **{
            f"by_{level}": [{level: group.name or None, **group.sums} for group in _groups(maps, level, shape)]
            for level in levels
        },
        unjudged_sentences=list(_unjudged(maps)),
    )


def waste_names(maps: NodeMaps, shape: Shape) -> list[tuple[str, str]]:
    """Return the pods of the findings, in their order; only pods that exist."""
    return pods_in(row.finding.name for row in _rows(maps, shape) if row.finding.finding != "leftover")


def _rows(maps: NodeMaps, shape: Shape) -> list[FindingRow]:
    finding_rows = [row for node in select_rows(maps, shape.namespace, shape.words).maps for row in _rows_of(node)]
    order = shape.order or _BY_SEVERITY
    if order in _ORDER_KEYS:
        return sorted(finding_rows, key=_ORDER_KEYS[order], reverse=shape.reverse)
    return sort_rows(finding_rows, SORT_KEYS[order], reverse=shape.reverse)


_ORDER_KEYS = {
    _BY_SEVERITY: lambda row: (worst_first(row.finding), row.node),
    "waste": lambda row: (waste_rank(row.finding), row.node, row.finding.name),
}


def _rows_of(node: Node) -> Iterator[FindingRow]:
    names: dict[str | None, str] = {gpu.uuid: str(gpu.index) for gpu in node.gpus}
    names |= {device.uuid: device_name(device) for device in node.devices}
    for finding in node.findings or ():
        if finding.finding in _KINDS:
            yield FindingRow(
                node.name, names.get(finding.uuid, UNKNOWN), max(node.timestamp - finding.since, 0.0), finding
            )


def _unjudged(maps: NodeMaps) -> Iterator[str]:
    """Return what the agents say, or, of a Prometheus, which nodes cannot judge which kinds."""
    yield from sentences_of_each(maps, lambda node: node.unjudged_sentences)
    if maps.fleet and (count := judged_holders(maps.maps)):
        yield f"{count}."
    silent = [node for node in maps.maps if maps.fleet and not node.unjudged_sentences]
    down = {
        node.name: ", ".join(f"{source.source} down" for source in node.sources if not source.up) for node in silent
    }
    unknown_kinds = ((kind, node.name) for node in silent for kind in _KINDS if kind not in judged_kinds(node))
    kinds = grouped(((kind, down[name]), name) for kind, name in unknown_kinds)
    nodes = grouped(((tuple(names), why), kind) for (kind, why), names in kinds.items())
    for (unable, why), of_nodes in nodes.items():
        sentence = f"{', '.join(of_nodes)}: not known on {len(unable)} of {counted(len(maps.maps), 'node')}"
        yield f"{sentence}{f': {why}' if why else ''} ({', '.join(unable[:3])}{', …' if len(unable) > 3 else ''})."


def _remedies(finding_rows: Iterable[FindingRow], *, every: bool) -> Iterator[str]:
    """Return the first remedy of each kind, or `every` one. Those of slots on no device are about a pod."""
    texts = grouped((row.finding.finding, row.finding) for row in finding_rows if row.finding.remedy)
    for kind, findings in texts.items():
        sentences = (
            f"{kind.replace('_', ' ')}{f' of {finding.pod}' if kind == 'unmatched' else ''}: {finding.remedy}"
            for finding in (findings if every else findings[:1])
        )
        yield from dict.fromkeys(sentences)


def _groups(maps: NodeMaps, level: str, shape: Shape) -> list[GroupSums]:
    """Return the sums of each namespace or node that has a finding, and of nodes that cannot be judged; the largest
    first."""
    groups = grouped((row.node if level == "node" else row.finding.namespace, row) for row in _rows(maps, shape))
    if level == "node":
        groups = {node.name: [] for node in maps.maps if not judged_kinds(node) >= {*_KINDS}} | groups
    judged = {node.name: judged_kinds(node) for node in maps.maps}
    by_all = _judged_by_all(maps.maps)
    group_sums = [
        GroupSums(group, _sums(of_group, judged[group] if level == "node" else by_all))
        for group, of_group in groups.items()
    ]
    group_sums.sort(key=lambda group: group.name)
    return sorted(
        group_sums,
        key=lambda group: (
            group.sums["idle_gpus"] or 0.0,
            sum(amount or 0.0 for key, amount in group.sums.items() if key.endswith("_bytes")),
        ),
        reverse=not shape.reverse,
    )


def _judged_by_all(nodes: Sequence[Node]) -> frozenset[str]:
    return frozenset.intersection(*map(judged_kinds, nodes)) if nodes else frozenset()


def _sums(rows: Iterable[FindingRow], judged: Container[str]) -> dict[str, float | None]:
    return {key: value for key, value in sums([row.finding for row in rows], judged).items() if key != "faults"}


def sum_texts(findings: Sequence[Finding]) -> list[str]:
    """Return the sums of findings as `squatter 9.0GiB`, worst first. Leaves out what is 0 or not known."""
    texts: dict[str, list[str]] = {}
    for key, total in sums(findings, ()).items():
        kind, _, unit = key.rpartition("_")
        text = {"bytes": size, "gpus": gpus}.get(unit, number)(total)
        if total and key != "idle_holders":
            texts.setdefault((kind or unit.removesuffix("s")).replace("_", " "), []).append(text)
    if shareless := sum(finding.finding == "idle" and finding.gpus is None for finding in findings):
        texts.setdefault("idle", []).append(f"{counted(shareless, 'holder')} of unknown share")
    return [f"{word} {' and '.join(amounts)}" for word, amounts in texts.items()]


def _value(row: FindingRow, *, fleet: bool) -> dict[str, object]:
    """Return a finding as -o json has it."""
    finding = row.finding
    return {
        **({"node": row.node} if fleet else {}),
        "finding": finding.finding,
        "reason": finding.reason,
        "namespace": finding.namespace or None,
        "pod": finding.pod or None,
        "container": finding.container or None,
        "device": row.device if finding.uuid else None,
        "uuid": finding.uuid,
        "since": finding.since,
        "gpus": finding.gpus,
        "granted_bytes": finding.granted_bytes,
        "used_bytes": finding.used_bytes,
        "memory_bytes": finding.memory_bytes,
        "why": finding.why,
        "pids": finding.pids,
        "remedy": finding.remedy,
    }


REPORT = Report(waste_table, waste_values, waste_names)
