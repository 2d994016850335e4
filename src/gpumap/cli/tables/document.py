"""What every table reads out of the document: keys, names of devices, who besides containers uses memory, order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from gpumap.cli.node_documents import Seen
from gpumap.cli.words import by_reason
from gpumap.model.document import VERSION, Document

T = TypeVar("T")
Key = tuple[str, str, str]
"""Namespace, pod, container; each may be empty."""
Sorter = Callable[[T], str | float | None]


SENTENCES_MAX = 20
NOBODY: Key = ("", "", "")
_NO_USERS = ("gone", "mps_server")
"""Owners whose processes count for no container, also where a container of that name is a user."""


class Other(NamedTuple):
    """What is used on a device by processes of no container that has a row, and by none at all (`unaccounted`).

    `key` names the pod and container where they are known. `processes` are the document's; one that is made of series
    has none, and `running` says how many there are.
    """

    owner: str
    key: Key
    memory_bytes: int | None
    processes: tuple[Document, ...]
    running: int | None


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
    users = {key_of(row): row for row in device["users"]}
    beside = _beside_users(device["processes"], users)
    for owner in device["owners"]:
        name, told = owner["owner"], owner["memory_bytes"]
        of_owner = [process for process in device["processes"] if process["owner"] == name]
        rest = [one for one in of_owner if name in _NO_USERS or key_of(one) not in users or one["pid"] in beside]
        if name == "unaccounted" or (name == "sibling" and not rest):
            if told:
                yield Other(name, NOBODY, told, (), None)
            continue
        if not device["processes"] and name not in ("assigned", "unassigned"):
            yield from _without_processes(device, owner)
        for key in sorted({key_of(one) for one in rest}):
            processes = tuple(one for one in rest if key_of(one) == key)
            yield Other(name, key, sum_of(one["memory_bytes"] for one in processes), processes, len(processes))


def _beside_users(processes: Iterable[Document], users: Mapping[Key, Document]) -> set[int]:
    """PIDs of processes that have a user's name and are not in its row: nobody knows whose they are, of a pod that was
    there before under that name, or of one of several. What a row counts is what it has."""
    doubted = {key_of(one) for one in processes if one["owner"] == "unknown"}
    found: set[int] = set()
    for key in doubted & users.keys():
        of_name = [one for one in processes if one["owner"] not in _NO_USERS and key_of(one) == key]
        too_many = len(of_name) - users[key]["processes"]
        if too_many > 0:
            unknown = [one for one in of_name if one["owner"] == "unknown"]
            pods = [[one for one in unknown if one["pod_uid"] == uid] for uid in {one["pod_uid"] for one in unknown}]
            rest = next((of_pod for of_pod in pods if len(of_pod) == too_many), unknown)
            found.update(one["pid"] for one in rest)
    return found


def _without_processes(device: Document, owner: Document) -> Iterator[Other]:
    """An owner of a document without processes, less the containers that have rows of their own."""
    rows = [user for user in device["users"] if user["owner"] == owner["owner"]]
    memory_bytes, count = owner["memory_bytes"], owner["processes"]
    if memory_bytes is not None:
        memory_bytes = max(memory_bytes - (sum_of(row["memory_bytes"] for row in rows) or 0), 0)
    if count is not None:
        count = max(count - sum(row["processes"] for row in rows), 0)
    if memory_bytes or count:
        yield Other(owner["owner"], NOBODY, memory_bytes, (), count)


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


def few(sentences: Iterable[str], fleet: bool) -> Iterator[str]:
    """So many of a cluster's that a screen holds them."""
    told = list(sentences)
    yield from told[:SENTENCES_MAX] if fleet else told
    if fleet and len(told) > SENTENCES_MAX:
        yield f"and {len(told) - SENTENCES_MAX} more of the kind"


def name_of(document: Document) -> str:
    """The node's."""
    name: str = document["node"]["name"]
    return name


def cluster_values(seen: Seen) -> Document:
    """What values of a cluster begin with: the nodes that they are of, and when each was collected."""
    nodes = [{**document["node"], "timestamp": document["timestamp"]} for document in seen.documents]
    return {"version": VERSION, "nodes": nodes}


def pods_in(rows: Iterable[Key]) -> list[tuple[str, str]]:
    """Namespace and name of each pod once, as it comes first."""
    return list(dict.fromkeys((namespace, pod) for namespace, pod, _ in rows if pod))


def of_each(seen: Seen, sentences: Callable[[Document], Iterable[str]]) -> Iterator[str]:
    """What is said of each node; of a cluster's, a sentence that is the same of many stands once, with their names."""
    if not seen.fleet:
        for document in seen.documents:
            yield from sentences(document)
        return
    yield from by_reason(
        (name_of(document), sentence) for document in seen.documents for sentence in dict.fromkeys(sentences(document))
    )


def invisible(document: Document) -> str:
    """Why no use by container is known."""
    told: Mapping[str, str] = document.get("remedies") or {}
    return told.get("pid_visibility") or "Processes of other containers are not visible: hostPID: true is needed."
