"""The tables and values of one node's map, as the commands show them, and nodes with other devices and GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from gpumap.agent.judgement.free import add_free
from gpumap.agent.judgement.judge import judge
from gpumap.agent.judgement.unjudged import sentences
from gpumap.agent.published import published
from gpumap.cli.commands import map as map_report
from gpumap.cli.commands import top as top_report
from gpumap.cli.commands import waste as waste_report
from gpumap.cli.rows import NodeMaps
from gpumap.cli.table import Shape
from gpumap.model.findings import judged_kinds, sums
from gpumap.model.node import Device, Gpu, Node
from gpumap.model.snapshot import Snapshot

Noun = TypeVar("Noun", bound=msgspec.Struct)
Values = dict[str, Any]
"""What -o json prints, as a script reads it."""
changed = msgspec.structs.replace


def changed_in(of: Noun, part: str, **values: object) -> Noun:
    """The same with a part that has other values: a GPU's reading, a container's grant or use."""
    return changed(of, **{part: changed(getattr(of, part), **values)})


def maps(*snapshots: Snapshot) -> NodeMaps:
    return NodeMaps(tuple(map(published, snapshots)))


def values(shown: object) -> Values:
    """The values as they are printed."""
    found: Values = msgspec.json.decode(msgspec.json.encode(shown))
    return found


def with_devices(found: Node, change: Callable[[Device], Device], *numbers: int) -> Node:
    """The map with other devices: those of these numbers, or all of them."""
    devices = (change(one) if not numbers or n in numbers else one for n, one in enumerate(found.devices))
    return judged_again(changed(found, devices=tuple(devices)))


def with_gpus(found: Node, change: Callable[[Gpu], Gpu], *numbers: int) -> Node:
    """The map with other GPUs: those of these numbers, or all of them."""
    gpus = (change(one) if not numbers or n in numbers else one for n, one in enumerate(found.gpus))
    return judged_again(changed(found, gpus=tuple(gpus)))


def judged_again(found: Node, **values: object) -> Node:
    """The node with these values, judged as an agent judges it."""
    found = changed(found, **values)
    findings, judged, unjudged = judge(found)
    node = add_free(changed(found, findings=findings, judged=judged, unjudged=unjudged))
    return changed(node, finding_sums=sums(findings, judged_kinds(node)), unjudged_sentences=tuple(sentences(node)))


def map_table(found: Node, shape: Shape) -> str:
    return map_report.map_table(NodeMaps((found,)), shape)


def top_table(found: Node, shape: Shape) -> str:
    return top_report.top_table(NodeMaps((found,)), shape)


def top_values(found: Node, shape: Shape) -> Values:
    return values(top_report.top_values(NodeMaps((found,)), shape))


def waste_table(found: Node, shape: Shape) -> str:
    return waste_report.waste_table(NodeMaps((found,)), shape)


def waste_values(found: Node, shape: Shape) -> Values:
    return values(waste_report.waste_values(NodeMaps((found,)), shape))


def served_as_waste(found: Node) -> None:
    """Check that `gpumap waste` shows the findings of a map, except faults, and their sums."""
    served, shown = values(found), waste_values(found, Shape())
    names = ("namespace", "pod", "container")
    rows = [{**row, **{name: row[name] or "" for name in names}} for row in shown["findings"]]
    waste = [one for one in served["findings"] if one["finding"] != "fault"]
    assert waste == [{name: row[name] for name in row if name != "device"} for row in rows]
    assert {name: value for name, value in served["finding_sums"].items() if name != "faults"} == shown["sums"]
    assert served["unjudged_sentences"] == shown["unjudged_sentences"]
