"""`gpumap inspect`: the tables of `kubectl inspect gpushare` and `cgpu`, byte for byte, and with real use beside them.

The original's printer is AliyunContainerService/gpushare-device-plugin, cmd/inspect/display.go. Its lines end in blanks
and its totals are cut off, not rounded; so are these. Nothing is coloured, nothing shortened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpumap.cli.inspect.cards import Amount, Card, Share, sum_of
from gpumap.cli.inspect.grants import Grants, NodeGrants, PodGrants
from gpumap.cli.tables.amounts import UNKNOWN
from gpumap.cli.tables.tabwriter import tabulated
from gpumap.model.document import Document
from gpumap.model.text import printable

VERSION = 1
OVER = "!"
LEGEND = f"{OVER} uses more than it was granted"
NO_ADDRESS = "unknown"
_NONE_THERE = "0/0"
"""A GPU that another node has, and this one has not."""
_RULE_OF_SUMMARY, _RULE_OF_DETAILS = 20, 10
"""So much longer than the first node's text, tabs and ends of lines included, is the line of dashes."""


def inspect_table(found: Grants, *, details: bool = False, used: bool = False) -> str:
    """A line for each node, or with `details` a table of pods for each; amounts in GiB, or in MiB if slots are such."""
    lines = _details(found, used=used) if details else _summary(found, used=used)
    over = used and any(card.over for node in found.nodes for card in node.cards)
    return tabulated([*lines, *([LEGEND] if over else [])])


def inspect_values(found: Grants, missing: Sequence[str]) -> Document:
    """The same for scripts, always with pods and use. What is not known, or known in part, is `null`."""
    used, allocated, total = _sums(found)
    return {
        "version": VERSION,
        "unit": found.unit,
        "nodes": [_node_values(node) for node in found.nodes],
        "cluster": _amounts(allocated, total, used),
        "missing": list(missing),
    }


# --- a line a node ----------------------------------------------------------------------------------------------------


def _summary(found: Grants, *, used: bool) -> Iterator[str]:
    title = "Used/Allocated/Total" if used else "Allocated/Total"
    count = max((len(node.cards) for node in found.nodes), default=0)
    waits = any(node.pending is not None for node in found.nodes)
    titles = [f"GPU{index}({title})" for index in range(count)] + (["PENDING(Allocated)"] if waits else [])
    rows = ["\t".join(_row(node, count, found, waits=waits, used=used)) for node in found.nodes]
    yield "\t".join(["NAME", "IPADDRESS", *titles, f"GPU Memory({found.unit})"])
    yield from rows
    yield _rule(rows[:1], _RULE_OF_SUMMARY) if rows else ""
    yield f"{title} GPU Memory In Cluster:"
    yield f"{_of_all(found, used=used)}\t"


def _row(node: NodeGrants, count: int, found: Grants, *, waits: bool, used: bool) -> Iterator[str]:
    unit = found.unit_bytes
    yield printable(node.name)
    yield printable(node.address or NO_ADDRESS)
    for index in range(count):
        if index < len(node.cards):
            yield _cell(node.cards[index], unit, used=used)
        else:
            yield _unknown_cell(used=used) if node.blind else f"0/{_NONE_THERE}" if used else _NONE_THERE
    if waits:
        yield "" if node.pending is None else _text(node.pending, unit)
    parts = [node.used, node.allocated, node.total] if used else [node.allocated, node.total]
    yield "/".join(_text(part, unit) for part in parts)


def _cell(card: Card, unit: int, *, used: bool) -> str:
    granted = f"{_text(card.allocated, unit)}/{_text(card.total, unit)}"
    return f"{_text(card.used, unit)}{OVER if card.over else ''}/{granted}" if used else granted


def _unknown_cell(*, used: bool) -> str:
    return "/".join([UNKNOWN] * (3 if used else 2))


# --- a table a node ---------------------------------------------------------------------------------------------------


def _details(found: Grants, *, used: bool) -> Iterator[str]:
    unit = found.unit_bytes
    rule = ""
    for node in found.nodes:
        rows = [_pod_row(pod, node, unit, used=used) for pod in node.pods if used or _holds(pod)]
        rule = rule or _rule(rows, _RULE_OF_DETAILS)
        yield from ("", f"NAME:\t{printable(node.name)}", f"IPADDRESS:\t{printable(node.address or NO_ADDRESS)}", "")
        title = "Used/Allocated" if used else "Allocated"
        titles = [f"GPU{index}({title})" for index in range(len(node.cards))]
        titles += ["Pending(Allocated)"] if node.pending is not None else []
        yield "".join(f"{one}\t" for one in ("NAME", "NAMESPACE", *titles))
        yield from rows
        yield f"Allocated :\t{_text(node.allocated, unit)} ({_percent(node.allocated, node.total)})\t"
        if used:
            yield f"Used :\t{_text(node.used, unit)} ({_percent(node.used, node.total)})\t"
        yield f"Total :\t{_text(node.total, unit)} \t"
        yield rule
    yield ""
    yield ""
    title = "Used/Allocated/Total" if used else "Allocated/Total"
    yield f"{title} GPU Memory In Cluster:\t{_of_all(found, used=used)}\t"


def _pod_row(pod: PodGrants, node: NodeGrants, unit: int, *, used: bool) -> str:
    shares = {share.index: share for share in pod.shares}
    cells = [_card_cell(shares.get(card.index), card, unit, used=used) for card in node.cards]
    if node.pending is not None:
        waits = shares.get(None)
        cells.append(_share_cell(waits, unit, used=False) if waits is not None and waits.held else "0")
    return "".join(f"{printable(one)}\t" for one in (pod.pod, pod.namespace, *cells))


def _card_cell(share: Share | None, card: Card, unit: int, *, used: bool) -> str:
    """Who has no share of a card has nothing of it, where all that have one are known."""
    if share is not None and (used or share.held):
        return _share_cell(share, unit, used=used)
    granted = "0" if card.tells_holders else UNKNOWN
    return f"{'0' if card.tells_use else UNKNOWN}/{granted}" if used else granted


def _share_cell(share: Share, unit: int, *, used: bool) -> str:
    granted = _text(share.allocated, unit)
    return f"{_text(share.used, unit)}{OVER if share.over else ''}/{granted}" if used else granted


def _holds(pod: PodGrants) -> bool:
    return any(share.held for share in pod.shares)


# --- amounts ----------------------------------------------------------------------------------------------------------


def _rule(rows: Iterable[str], more: int) -> str:
    """Dashes, by the bytes of these lines with their ends."""
    return "-" * (sum(len(f"{row}\n".encode()) for row in rows) + more)


def _text(amount: Amount, unit: int) -> str:
    """Whole units, cut off; a part of one is not nothing. What is known in part is at least so much."""
    number, rest = divmod(amount.bytes, unit)
    if not amount.whole:
        return f">={number}" if number else UNKNOWN
    return "<1" if rest and not number else str(number)


def _percent(part: Amount, total: Amount) -> str:
    """Cut off as Go's int64(float64) does it, which has its own mind on 29/100: 28%."""
    if not total.whole or (not part.whole and not part.bytes):
        return UNKNOWN
    number = int(part.bytes / total.bytes * 100) if total.bytes else 0
    return f"{number}%" if part.whole else f">={number}%"


def _sums(found: Grants) -> tuple[Amount, Amount, Amount]:
    """Used, allocated and total, of all nodes."""
    return (
        sum_of(node.used for node in found.nodes),
        sum_of(node.allocated for node in found.nodes),
        sum_of(node.total for node in found.nodes),
    )


def _of_all(found: Grants, *, used: bool) -> str:
    in_use, allocated, total = _sums(found)
    parts: Sequence[Amount] = (in_use, allocated, total) if used else (allocated, total)
    ratios = [_percent(part, total) for part in parts[:-1]]
    return f"{'/'.join(_text(part, found.unit_bytes) for part in parts)} ({'/'.join(ratios)})"


# --- values -----------------------------------------------------------------------------------------------------------


def _node_values(node: NodeGrants) -> Document:
    return {
        "node": node.name,
        "internal_ip": node.address,
        "gpus": [
            {
                "index": node.moved.get(card.index, card.index),
                "uuid": card.uuid,
                **_amounts(card.allocated, card.total, card.used),
            }
            for card in node.cards
        ],
        "pods": [
            {"namespace": pod.namespace, "pod": pod.pod, "gpus": [_share_values(share, node) for share in pod.shares]}
            for pod in node.pods
        ],
        "pending_bytes": None if node.pending is None else _bytes(node.pending),
        **_amounts(node.allocated, node.total, node.used),
    }


def _share_values(share: Share, node: NodeGrants) -> Document:
    return {
        "index": None if share.index is None else node.moved.get(share.index, share.index),
        "allocated_bytes": _bytes(share.allocated),
        "used_bytes": _bytes(share.used),
        "over": share.over,
    }


def _amounts(allocated: Amount, total: Amount, used: Amount) -> Document:
    return {"allocated_bytes": _bytes(allocated), "total_bytes": _bytes(total), "used_bytes": _bytes(used)}


def _bytes(amount: Amount) -> int | None:
    return amount.bytes if amount.whole else None
