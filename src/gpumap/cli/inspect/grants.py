"""What is granted, and used, of the memory of each node's GPUs, as documents tell it: by card, and by pod. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpumap.cli.inspect.cards import (
    GIB,
    GPU_MEM,
    MIB,
    UNKNOWN,
    Amount,
    Card,
    Counted,
    PodKey,
    Share,
    count,
    guessed_slot_bytes,
    slots_in,
    sum_of,
)
from gpumap.cli.node_documents import Seen
from gpumap.cli.tables.document import key_of, sources_up
from gpumap.cli.tables.unknowns import holders_known
from gpumap.model.document import Document

_DIGITS = re.compile(r"([0-9]+)")


class PodGrants(NamedTuple):
    """A pod that holds, or uses, part of a node's cards."""

    namespace: str
    pod: str
    shares: tuple[Share, ...]


class NodeGrants(NamedTuple):
    """A node. `pending` is held and on no card that is known; `None` where nothing is.

    `blind`: which GPUs it has is not known. `slot_bytes`: of gpushare's slots here; `None` where there are none.
    `moved`: at which places GPUs stand that have the index of another one, and that index.
    """

    name: str
    address: str | None
    cards: tuple[Card, ...]
    pods: tuple[PodGrants, ...]
    pending: Amount | None
    allocated: Amount
    total: Amount
    used: Amount
    blind: bool
    slot_bytes: int | None
    moved: Mapping[int, int] = {}


class Grants(NamedTuple):
    """All nodes with GPUs, by name. `unit_bytes` is what amounts are shown in."""

    nodes: tuple[NodeGrants, ...]
    unit_bytes: int

    @property
    def unit(self) -> str:
        return "MiB" if self.unit_bytes == MIB else "GiB"


def grants(seen: Seen) -> Grants:
    """Count what was seen. The unit is MiB where every card that gpushare shares out has slots of a MiB, else GiB."""
    nodes = sorted(
        (node for document in seen.documents if (node := _node(document)) is not None),
        key=lambda node: natural(node.name),
    )
    slot_bytes = {node.slot_bytes for node in nodes if node.slot_bytes is not None}
    return Grants(tuple(nodes), MIB if slot_bytes == {MIB} else GIB)


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sorts names as people do: node-9 before node-10."""
    return tuple((int(part) if place % 2 else 0, part) for place, part in enumerate(_DIGITS.split(name)))


def _node(document: Document) -> NodeGrants | None:
    """Count one node; `None` for one that has no GPU."""
    knows_holders = _knows_holders(document)
    index_of = _indexes(document)
    place_of = _places(index_of, [one["index"] for one in document["nameless_gpus"]])
    counted = _counted(document, place_of, knows_holders=knows_holders)
    placed = [one.card for one in counted if one.card is not None]
    slot_bytes = _slot_bytes(counted, document["unmatched"])
    waiting = _unmatched(document["unmatched"], slot_bytes or GIB)
    blind = not placed and ("nvml" not in sources_up(document) or bool(document["devices"]))
    if not counted and not waiting and not blind and not document["nameless_gpus"]:
        return None
    pods = _pods([*(one.shares for one in counted), waiting])
    unplaced = [share.allocated for pod in pods for share in pod.shares if share.index is None]
    cards = _in_places(placed, document["nameless_gpus"])
    # What other plugins gave away and nobody can lay on a card is on one of these cards all the same.
    unlaid = any(row["resource"] != GPU_MEM and row["reason"] != "not_in_nvml" for row in document["unmatched"])
    hidden = [UNKNOWN] if unlaid or not knows_holders else []
    dark = [UNKNOWN] if blind else []
    return NodeGrants(
        name=document["node"]["name"],
        address=document["node"]["internal_ip"],
        cards=cards,
        pods=pods,
        pending=sum_of(unplaced) if unplaced else None,
        allocated=sum_of([*(card.allocated for card in cards), *unplaced, *hidden]),
        total=sum_of([*(card.total for card in cards), *(one.total for one in counted if one.card is None), *dark]),
        used=sum_of([*(card.used for card in cards), *dark]),
        blind=blind,
        slot_bytes=slot_bytes,
        moved={place_of[uuid]: index for uuid, index in index_of.items() if place_of[uuid] != index},
    )


def _knows_holders(document: Document) -> bool:
    """Whether it is known of each device who holds it. Where nobody has said, nobody was seen to, which is not 0."""
    if document["devices"]:
        return all(map(holders_known, document["devices"]))
    told = [one for one in document["sources"] if one["source"] == "kubelet"]
    return not document.get("stale") and any(one["up"] or one["last_success"] is not None for one in told)


def _indexes(document: Document) -> dict[str, int]:
    """Of all GPUs, those without a device too."""
    index_of: dict[str, int] = {gpu["uuid"]: gpu["index"] for gpu in document["gpus"]}
    for device in document["devices"]:
        if device["gpu_uuid"] is not None and device["index"] is not None:
            index_of.setdefault(device["gpu_uuid"], device["index"])
    return index_of


def _places(index_of: Mapping[str, int], others: Iterable[int]) -> dict[str, int]:
    """Each at its index. Nodes of one name, of two clusters that nothing else tells apart, have two of an index: then
    one of them stands behind all."""
    place_of: dict[str, int] = {}
    taken: set[int] = set()
    late = []
    for uuid, index in sorted(index_of.items(), key=lambda pair: pair[::-1]):
        if index in taken:
            late.append(uuid)
        else:
            place_of[uuid] = index
            taken.add(index)
    behind = max([*taken, *others], default=-1) + 1
    return place_of | {uuid: behind + number for number, uuid in enumerate(late)}


def _counted(document: Document, place_of: Mapping[str, int], *, knows_holders: bool) -> list[Counted]:
    """Each GPU with its devices, those without a device too; then devices of which nobody knows the GPU."""
    memory_of = {gpu["uuid"]: gpu["memory"] for gpu in document["gpus"]}
    devices_of: dict[str, list[Document]] = {uuid: [] for uuid in place_of}
    lost: list[Document] = []
    for device in document["devices"]:
        # A partitioned GPU that is given out whole is its own, though no series tells where it stands.
        devices_of.get(device["gpu_uuid"] or device["uuid"], lost).append(device)
    sees = bool(document["capabilities"].get("pid_visibility"))

    def counted(place: int | None, uuid: str, memory: Document | None, devices: list[Document]) -> Counted:
        knows = all(map(holders_known, devices)) if devices else knows_holders
        return count(place, uuid, memory, devices, knows_holders=knows, sees_processes=sees)

    found = [counted(place_of[uuid], uuid, memory_of.get(uuid), devices) for uuid, devices in devices_of.items()]
    return found + [counted(None, one["uuid"], one["memory"], [one]) for one in lost]


def _slot_bytes(counted: Iterable[Counted], unmatched: Sequence[Document]) -> int | None:
    """Of the node's slots: MiB where all are; guessed where none is on a card."""
    units = {one.slot_bytes for one in counted if one.slot_bytes is not None}
    if units:
        return MIB if units == {MIB} else GIB
    most = max((slots_in([row]) for row in unmatched), default=0)
    return guessed_slot_bytes(most) if most else None


def _unmatched(rows: Iterable[Document], slot_bytes: int) -> dict[PodKey, Share]:
    """Slots of gpushare's that no card answers to: pods that kubectl inspect calls pending."""
    found: dict[PodKey, int] = {}
    for row in rows:
        if row["resource"] == GPU_MEM:
            key = key_of(row)[:2]
            found[key] = found.get(key, 0) + row["slots"] * slot_bytes
    return {key: Share(None, True, Amount(granted), UNKNOWN) for key, granted in found.items()}


def _in_places(cards: Sequence[Card], nameless: Sequence[Document]) -> tuple[Card, ...]:
    """Each card at the place of its index; of one between them that has told nothing, nothing is known."""
    known = {card.index: card for card in cards}
    size = max([*known, *(one["index"] for one in nameless)], default=-1) + 1
    return tuple(known.get(index) or Card(index, None, UNKNOWN, UNKNOWN, UNKNOWN) for index in range(size))


def _pods(found: Iterable[Mapping[PodKey, Share]]) -> tuple[PodGrants, ...]:
    """By the first card that they hold, those on no card last; then by name."""
    shares: dict[PodKey, list[Share]] = {}
    for of_card in found:
        for key, share in of_card.items():
            shares.setdefault(key, []).append(share)
    rows = [PodGrants(*key, _by_place(of_pod)) for key, of_pod in shares.items()]
    return tuple(sorted(rows, key=lambda row: (_first(row.shares), natural(row.namespace), natural(row.pod))))


def _first(shares: Sequence[Share]) -> float:
    """Where a pod stands: by the first card that it holds, whatever others it uses."""
    return _place(next((one for one in shares if one.held), shares[0]))


def _by_place(shares: Iterable[Share]) -> tuple[Share, ...]:
    """In the cards' order; what is on none that is known, by whatever resources, is one."""
    shares = list(shares)
    placed = sorted((one for one in shares if one.index is not None), key=_place)
    others = [one for one in shares if one.index is None]
    if others:
        allocated, used = sum_of(one.allocated for one in others), sum_of(one.used for one in others)
        placed.append(Share(None, True, allocated, used))
    return tuple(placed)


def _place(share: Share) -> float:
    return float("inf") if share.index is None else share.index
