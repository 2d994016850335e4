"""WORDs: which devices, rows and findings of a node match them. The filter of the page has the same cases
(agent/web/page/model.js). Pure.

`gpu:3` and `pod:web,db` test one field, a bare word tests all. All words must match.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

from msgspec import structs

from gpumap.cli.parser import WORD_FIELDS
from gpumap.cli.rows import NodeMaps, finding_key, work_name
from gpumap.model.devices import NO_CONTAINER, OfContainer, container_of, device_name
from gpumap.model.grouping import grouped
from gpumap.model.node import Device, Finding, Gpu, Node, Process
from gpumap.model.readings import Uuid
from gpumap.model.terms import GPU_FINDINGS

_WHOLE_FIELDS = ("gpu", "xid", "finding")
"""Fields that test the whole value, not a part of it."""
_UUID_LENGTH = 8
"""A bare word that is so long may be a part of a UUID or of a PCI address."""
Pairs = Sequence[tuple[str, str]]
"""Fields and values. The field of a bare word, and of a text that only bare words test, is empty."""
Entry = TypeVar("Entry", bound=OfContainer)
_UNMATCHED = [("finding", "unmatched")]


def parse_words(words: Iterable[str]) -> Pairs:
    """Return the terms of a filter. `GPU 3` is `gpu:3`, as people write it."""
    text = re.sub(r"\b(gpu|xid) (\d+)\b", r"\1:\2", " ".join(words).lower(), flags=re.ASCII)
    parts = ((word, *word.partition(":")) for word in text.split())
    return [(field, value) if field in WORD_FIELDS and value else ("", word) for word, field, _, value in parts]


def matches(term: tuple[str, str], pairs: Pairs) -> bool:
    """Return whether one of the values has the term. A bare number is not a part of a longer number or name."""
    field, word = term
    if field:
        values = [value.lower() for name, value in pairs if name.rstrip("/") == field]
        parts = word.split(",")
        return any(part in (values if field in _WHOLE_FIELDS else "\n".join(values)) for part in parts)
    hidden = ("gpu/", "uuid") if len(word) < _UUID_LENGTH else ("gpu/",)
    text = "\n".join(value for name, value in pairs if name not in hidden).lower()
    return bool(re.search(rf"\b{word}\b", text, re.ASCII)) if re.fullmatch("[0-9]+", word) else word in text


def select_rows(maps: NodeMaps, namespace: str, words: Sequence[str]) -> NodeMaps:
    """Return what is of the namespace and matches the words: devices with their rows, findings, slots.

    A device without such a row remains if the words describe the device itself. Faults of the GPU of a device remain
    with it. Of a fleet, bare words also test the names of nodes.
    """
    terms = parse_words(words)
    if not terms and not namespace:
        return maps
    return maps._replace(
        maps=tuple(_Selection(node, terms, namespace, node.name if maps.fleet else "").select() for node in maps.maps)
    )


class _Selection:
    """What matches on a node."""

    def __init__(self, node: Node, terms: Pairs, namespace: str, node_name: str) -> None:
        self._node, self._terms, self._namespace, self._node_name = node, terms, namespace, node_name
        self._findings = grouped((finding_key(finding), finding) for finding in node.findings or ())
        self._rows: dict[object, Pairs] = {}
        """By the key of a finding, the row of its container."""

    def select(self) -> Node:
        node = self._node
        gpus = {gpu.uuid: gpu for gpu in node.gpus}
        about = {gpu.uuid: self._device_pairs(str(gpu.index), gpu, gpu.uuid) for gpu in node.gpus}
        devices: list[Device] = []
        for device in node.devices:
            gpu = gpus.get(device.gpu_uuid or device.uuid)
            about[device.uuid] = self._device_pairs(device_name(device), gpu, device.uuid)
            devices += self._select_device(device, about[device.uuid])
        selected_gpus = {device.gpu_uuid for device in devices}
        findings = [
            finding
            for finding in node.findings or ()
            for row_pairs in [self._rows.get(finding_key(finding)) or _row_pairs(finding, ())]
            if (finding.finding in GPU_FINDINGS and finding.uuid in selected_gpus)
            or self._has(finding, row_pairs, _finding_pairs([finding]), about.get(finding.uuid or Uuid(""), ()))
        ]
        unmatched = [slots for slots in node.unmatched if self._has(slots, _row_pairs(slots, ()), _UNMATCHED)]
        entries: list[OfContainer] = [*unmatched]
        for device in devices:
            entries += [*device.containers, *device.processes]
        pods = {container_of(entry).pod_name for entry in entries}
        parts = {field: getattr(node, field) for field in ("pods", "accounts", "container_xids", "device_health")}
        return structs.replace(
            node,
            devices=tuple(devices),
            unmatched=tuple(unmatched),
            findings=None if node.findings is None else tuple(findings),
            finding_sums={},
            unjudged=(),
            unjudged_sentences=(),
            **{
                field: values and tuple(value for value in values if value.pod_name in pods)
                for field, values in parts.items()
            },
        )

    def _has(self, entry: OfContainer, *pairs: Pairs) -> bool:
        return self._namespace in ("", entry.namespace) and self._match(*pairs)

    def _match(self, *pairs: Pairs) -> bool:
        all_pairs = [("", self._node_name), *(pair for part in pairs for pair in part)] if self._terms else []
        return all(matches(term, all_pairs) for term in self._terms)

    def _select_device(self, device: Device, device_pairs: Pairs) -> list[Device]:
        """Return the device with its rows that match; nothing if neither they nor the device itself match."""
        if not self._namespace and self._match(device_pairs):
            return [device]
        processes = {process.pid: process for process in device.processes}
        others = [(use, [processes.pop(pid) for pid in use.pids if pid in processes]) for use in device.others]
        of_containers = grouped((container_of(process), process) for process in processes.values())

        def select(rows: Iterable[tuple[Entry, Sequence[Process]]]) -> tuple[Entry, ...]:
            selected = []
            for entry, row_processes in rows:
                key = device.uuid, container_of(entry), getattr(entry, "owner", "") == "gone"
                row_pairs = _row_pairs(entry, row_processes) if self._terms else []
                self._rows.setdefault(key, row_pairs)
                if self._has(entry, row_pairs, _finding_pairs(self._findings.get(key, ())), device_pairs):
                    selected.append(entry)
            return tuple(selected)

        containers = select((row, of_containers.get(row.name, ())) for row in device.containers)
        other_uses = select(others)
        own_processes = select((process, (process,)) for process in device.processes)
        works = {use.work for use in other_uses}
        narrowed = structs.replace(
            device,
            containers=containers,
            host=tuple(use for use in device.host if use.work in works),
            processes=own_processes,
            others=other_uses,
        )
        return [narrowed] if containers or other_uses or own_processes else []

    def _device_pairs(self, name: str, gpu: Gpu | None, uuid: str) -> Pairs:
        """Return what is tested of a device, or of a GPU."""
        uuids = {uuid, *([gpu.uuid] if gpu else [])}
        place, _, profile = name.partition(" ")
        pairs = [("gpu", place.partition("/")[0]), ("gpu/", place), *(("uuid", text) for text in uuids)]
        pairs += [("model", profile)] + ([("model", gpu.model), ("uuid", gpu.pci_bus_id)] if gpu else [])
        for xids in self._node.xids:
            for code in xids.counts if xids.uuid in uuids else ():
                pairs += [("xid", str(code)), ("", f"XID {code}: {xids.meanings.get(code)}")]
        findings = (finding for uuid in uuids for finding in self._findings.get((uuid, NO_CONTAINER, False), ()))
        return [*pairs, *_finding_pairs(findings)]


def _row_pairs(entry: OfContainer, processes: Iterable[Process]) -> Pairs:
    """Return what is tested of a row: a container, other use, a process, a finding, slots on no device."""
    name, work = container_of(entry), work_name(getattr(entry, "work", None))
    texts = ["/".join(filter(None, name)), *(getattr(entry, field, "") for field in ("resource", "reason"))]
    texts += [f"{process.pid} {process.comm}" for process in processes]
    pairs = [("ns", name.namespace), ("pod", name.pod or work), ("container", name.container)]
    return [*pairs, ("owner", getattr(entry, "owner", "")), *(("", text) for text in texts)]


def _finding_pairs(findings: Iterable[Finding]) -> Pairs:
    return [pair for finding in findings for pair in (("finding", finding.finding), ("", finding.why))]
