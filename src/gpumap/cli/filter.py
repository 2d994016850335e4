"""WORDs: which devices, rows and findings of a node match them. The filter of the page has the same cases
(agent/web/page/model.js). Pure.

`gpu:3` and `pod:web,db` test one field, a bare word tests all. All words must match.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from msgspec import structs

from gpumap.cli.parser import WORD_FIELDS
from gpumap.cli.rows import NodeMaps, finding_key, work_name
from gpumap.model.devices import NO_CONTAINER, OfContainer, container_of, device_name
from gpumap.model.grouping import grouped
from gpumap.model.node import Device, Finding, Gpu, Node, Process
from gpumap.model.terms import Owner

_UUID_LENGTH = 8
"""A bare word that is so long may be a part of a UUID or of a PCI address."""
Texts = Mapping[str, str | Collection[str]]
"""By field a text that may contain the value, or several whole values; under "" the text for bare words."""
Term = tuple[str, str]
"""Field and value of a word. The field of a bare one is empty."""


class OfOwner(OfContainer, Protocol):
    """What has an owner: a container on a device, other use, a process."""

    @property
    def owner(self) -> Owner: ...


Entry = TypeVar("Entry", bound=OfOwner)


def parse_words(words: Iterable[str]) -> list[Term]:
    """Return the terms of a filter. `GPU 3` is `gpu:3`, as people write it."""
    text = re.sub(r"\b(gpu|xid) (\d+)\b", r"\1:\2", " ".join(words).lower(), flags=re.ASCII)
    terms = []
    for word in text.split():
        field, _, value = word.partition(":")
        terms.append((field, value) if field in WORD_FIELDS and value else ("", word))
    return terms


def matches(term: Term, *texts_of_row: Texts) -> bool:
    """Return whether one of the texts has the term. A bare number is not a part of a longer number or name."""
    field, value = term
    if field:
        return any(part in texts.get(field, ()) for texts in texts_of_row for part in value.split(","))
    text = "\n".join(str(texts[""]) for texts in texts_of_row)
    if re.fullmatch("[0-9]+", value):
        return re.search(rf"\b{value}\b", text, re.ASCII) is not None
    return value in text or (
        len(value) >= _UUID_LENGTH and any(value in texts.get("uuid", "") for texts in texts_of_row)
    )


def select_rows(maps: NodeMaps, namespace: str, words: Sequence[str]) -> NodeMaps:
    """Return what is of the namespace and matches the words: devices with their rows, findings, slots.

    A device without such a row remains if the words describe the device itself.
    """
    terms = parse_words(words)
    if not terms and not namespace:
        return maps
    return maps._replace(
        maps=tuple(_Selection(node, terms, namespace, fleet=maps.fleet).select() for node in maps.maps)
    )


class _Selection:
    """What matches on a node. Of a fleet, bare words also test the name of the node."""

    def __init__(self, node: Node, terms: Sequence[Term], namespace: str, *, fleet: bool) -> None:
        self._node, self._terms, self._namespace = node, terms, namespace
        self._no_device: Texts = {"": node.name.lower() if fleet else ""}
        self._findings = grouped((finding_key(finding), finding) for finding in node.findings or ())
        self._users: dict[object, tuple[OfContainer, Sequence[Process]]] = {}
        """By the key of a finding, the row of its container."""

    def select(self) -> Node:
        node = self._node
        gpus = {gpu.uuid: gpu for gpu in node.gpus}
        texts: dict[str | None, Texts] = {gpu.uuid: self._device_texts(gpu, str(gpu.index), None) for gpu in node.gpus}
        devices: list[Device] = []
        for device in node.devices:
            gpu = gpus.get(device.gpu_uuid or device.uuid)
            texts[device.uuid] = self._device_texts(gpu, device_name(device), device)
            devices += self._select_device(device, texts[device.uuid])
        findings = tuple(
            finding
            for finding in node.findings or ()
            if self._selects(
                *self._users.get(finding_key(finding), (finding, ())),
                [finding],
                texts.get(finding.uuid, self._no_device),
            )
        )
        unmatched = tuple(
            slots
            for slots in node.unmatched
            if self._selects(slots, (), self._findings.get((None, slots.name, False), ()), self._no_device)
        )
        return structs.replace(node, devices=tuple(devices), findings=node.findings and findings, unmatched=unmatched)

    def _selects(
        self, entry: OfContainer, processes: Sequence[Process], findings: Iterable[Finding], device_texts: Texts
    ) -> bool:
        if self._namespace not in ("", entry.namespace):
            return False
        row_texts = _row_texts(entry, processes, findings) if self._terms else {}
        return all(matches(term, device_texts, row_texts) for term in self._terms)

    def _select_device(self, device: Device, device_texts: Texts) -> Iterable[Device]:
        """Return the device with its rows that match; nothing if neither they nor the device itself match."""
        processes = {process.pid: process for process in device.processes}
        others = [(use, [processes.pop(pid) for pid in use.pids if pid in processes]) for use in device.others]
        of_containers = grouped((container_of(process), process) for process in processes.values())

        def select(pairs: Iterable[tuple[Entry, Sequence[Process]]]) -> tuple[Entry, ...]:
            selected = []
            for entry, entry_processes in pairs:
                key = device.uuid, container_of(entry), entry.owner is Owner.GONE
                self._users.setdefault(key, (entry, entry_processes))
                if self._selects(entry, entry_processes, self._findings.get(key, ()), device_texts):
                    selected.append(entry)
            return tuple(selected)

        device = structs.replace(
            device,
            containers=select((row, of_containers.get(row.name, ())) for row in device.containers),
            others=select(others),
            processes=select((process, (process,)) for process in device.processes),
        )
        is_described = not self._namespace and all(matches(term, device_texts) for term in self._terms)
        return [device] if is_described or device.containers or device.others or device.processes else []

    def _device_texts(self, gpu: Gpu | None, place: str, device: Device | None) -> Texts:
        """Return the texts of a device, or of a GPU."""
        uuids = {*([gpu.uuid] if gpu else []), *([device.uuid] if device else [])}
        findings = [finding for uuid in uuids for finding in self._findings.get((uuid, NO_CONTAINER, False), ())]
        xids = next((xids for xids in self._node.xids if xids.uuid in uuids), None)
        meanings = {str(code): xids.meanings.get(code, "") for code in xids.counts} if xids else {}
        place, _, profile = place.partition(" ")
        return _lowered(
            gpu=(place, place.partition("/")[0]),
            uuid=" ".join((*uuids, gpu.pci_bus_id if gpu else "")),
            model=f"{gpu.model if gpu else ''} {profile}",
            xid=tuple(meanings),
            finding=tuple(finding.finding for finding in findings),
            words=[
                *self._no_device.values(),
                *(f"XID {code}: {meaning}" for code, meaning in meanings.items()),
                *(finding.why for finding in findings),
            ],
        )


def _row_texts(entry: OfContainer, processes: Sequence[Process], findings: Iterable[Finding]) -> Texts:
    """Return the texts of a row: a container, other use, a process, a finding, slots on no device."""
    work = work_name(getattr(entry, "work", None))
    return _lowered(
        ns=entry.namespace or "",
        pod=entry.pod or work,
        container=entry.container or "",
        owner=getattr(entry, "owner", ""),
        finding=tuple(finding.finding for finding in findings),
        words=[
            "/".join(filter(None, container_of(entry))),
            getattr(entry, "resource", ""),
            getattr(entry, "reason", ""),
            *(f"{process.pid} {process.comm}" for process in processes),
            *(finding.why for finding in findings),
        ],
    )


def _lowered(*, words: Iterable[object], **fields: str | Collection[str]) -> Texts:
    """Return texts in small letters. Bare words test all of them but UUIDs."""
    texts = {field: value.lower() if isinstance(value, str) else value for field, value in fields.items()}
    parts = [value if isinstance(value, str) else " ".join(value) for field, value in texts.items() if field != "uuid"]
    return {**texts, "": "\n".join((*parts, *map(str, words))).lower()}
