"""What every table reads out of the document: keys, names of devices, who besides containers uses memory, order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from gpumap.document import Document

T = TypeVar("T")
Key = tuple[str, str, str]
"""Namespace, pod, container; each may be empty."""
Sorter = Callable[[T], str | float | None]


_NO_USERS = ("gone", "mps_server")
"""Owners whose processes count for no container, also where a container of that name is a user."""


class Other(NamedTuple):
    """What is used on a device by processes of no container that has a row, and by none at all (`unaccounted`).

    `key` names the pod and container where they are known. `processes` are the document's.
    """

    owner: str
    key: Key
    memory_bytes: int | None
    processes: tuple[Document, ...]


def key_of(row: Document) -> Key:
    return row["namespace"] or "", row["pod"] or "", row["container"] or ""


def device_name(device: Document) -> str:
    """The index, as nvidia-smi has it; of a MIG device with its instances and profile."""
    if device["index"] is None:
        return "?"
    if device["mig_profile"] is None:
        return str(device["index"])
    return f"{device['index']}/{device['gpu_instance_id']}/{device['compute_instance_id']} {device['mig_profile']}"


def others(device: Document) -> Iterator[Other]:
    """By owner, then by pod and container; without those that neither use memory nor run."""
    users = {key_of(row) for row in device["users"]}
    for owner in device["owners"]:
        name, told = owner["owner"], owner["memory_bytes"]
        of_owner = [process for process in device["processes"] if process["owner"] == name]
        rest = [one for one in of_owner if name in _NO_USERS or key_of(one) not in users]
        if name == "unaccounted" or (name == "sibling" and not rest):
            if told:
                yield Other(name, ("", "", ""), told, ())
            continue
        for key in sorted({key_of(one) for one in rest}):
            processes = tuple(one for one in rest if key_of(one) == key)
            yield Other(name, key, sum_of(one["memory_bytes"] for one in processes), processes)


def sum_of(values: Iterable[int | None]) -> int | None:
    """The sum of what is told; `None` where nothing is."""
    told = [value for value in values if value is not None]
    return sum(told) if told else None


def in_order(rows: Iterable[T], by: Sorter[T], *, largest_first: bool, reverse: bool) -> list[T]:
    """Sort, equal rows as they were; what is not known stands last either way."""
    known: list[tuple[str | float, T]] = []
    unknown: list[T] = []
    for row in rows:
        value = by(row)
        if value is None or value == "":
            unknown.append(row)
        else:
            known.append((value, row))
    known.sort(key=lambda pair: pair[0], reverse=largest_first != reverse)
    return [row for _, row in known] + unknown


def sources_up(document: Document) -> set[str]:
    """The sources that have answered; none, where what they said is too old."""
    return {source["source"] for source in document["sources"] if source["up"] and not document.get("stale")}


def no_devices(document: Document) -> str:
    """What stands in the place of a table without a device."""
    return "No current data." if document.get("stale") else "No devices."


def troubles(document: Document) -> Iterator[str]:
    """What keeps the document from being whole, a sentence each."""
    if document.get("stale"):
        yield document["stale"]
    for gpu in document["gpus"]:
        if not gpu["up"]:
            yield f"GPU {gpu['index']} {gpu['uuid']} is down: {gpu['fault']}"
    for source in document["sources"]:
        if not source["up"]:
            yield f"{source['source']} is down: {source['reason']} ({source['detail'] or ''})"
    if not document["capabilities"].get("pid_visibility"):
        yield invisible(document)


def invisible(document: Document) -> str:
    """Why no use by container is known."""
    told: Mapping[str, str] = document.get("remedies") or {}
    return told.get("pid_visibility") or "Processes of other containers are not visible: hostPID: true is needed."
