"""`gpumap inspect`: the columns and numbers of `kubectl inspect gpushare` and `cgpu`, and with --used real use too.

The original is AliyunContainerService/gpushare-device-plugin, cmd/inspect/display.go. Its totals are cut off, not
rounded; so are these.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gpumap.cli.inspect.gpu_grants import Amount, GpuGrants, PodShare, sum_of
from gpumap.cli.inspect.grants import Grants, NodeGrants, PodGrants
from gpumap.cli.table import Column, Shape, joined, notes, refuse_huge, table
from gpumap.model.shown import UNKNOWN

VERSION = 1
OVER = "!"
LEGEND = f"{OVER} a pod uses more than it was granted"
NO_ADDRESS = "unknown"
_NO_GPU = "0/0"
"""A GPU that another node has, and this one does not."""
_CELL = 16
"""About the characters of a cell."""


def inspect_table(
    found: Grants, beside: Sequence[str], shape: Shape, *, details: bool = False, used: bool = False
) -> str:
    """Return a line for each node, or with `details` a table of pods for each. The unit is that of `found`.

    `beside` are sentences about what is not known.
    """
    if details:
        refuse_huge(sum(len(node.gpus) * len(node.pods) for node in found.nodes) * _CELL)
        blocks = [_details(node, found.unit_bytes, shape, used=used) for node in found.nodes]
    else:
        blocks = [table(_node_columns(found, used=used), found.nodes, shape)] if found.nodes else []
    sums = [f"{_title(used=used)} GPU Memory In Cluster: {_of_all(found, used=used)}"]
    over = used and any(gpu.over for node in found.nodes for gpu in node.gpus)
    return joined([*blocks, notes([*sums, *([LEGEND] if over else [])], shape.screen), notes(beside, shape.screen)])


# --- a line a node ----------------------------------------------------------------------------------------------------


def _node_columns(found: Grants, *, used: bool) -> list[Column[NodeGrants]]:
    unit, title = found.unit_bytes, _title(used=used)
    gpus = range(max((len(node.gpus) for node in found.nodes), default=0))
    waits = any(node.pending is not None for node in found.nodes)
    pending: Column[NodeGrants] = Column(
        "PENDING(Allocated)", lambda node: "" if node.pending is None else _shown(node.pending, unit)
    )
    return [
        Column("NAME", lambda node: node.name, name=True),
        Column("IPADDRESS", lambda node: node.address or NO_ADDRESS),
        *(Column(f"GPU{index}({title})", partial(_gpu_cell, index, unit, used)) for index in gpus),
        *([pending] if waits else []),
        Column(f"GPU Memory({found.unit})", partial(_memory_cell, unit, used)),
    ]


def _gpu_cell(index: int, unit: int, used: bool, node: NodeGrants) -> str:
    if index >= len(node.gpus):
        if node.blind:
            return "/".join([UNKNOWN] * (3 if used else 2))
        return f"0/{_NO_GPU}" if used else _NO_GPU
    gpu = node.gpus[index]
    granted = f"{_shown(gpu.allocated, unit)}/{_shown(gpu.total, unit)}"
    return f"{_shown(gpu.used, unit)}{OVER if gpu.over else ''}/{granted}" if used else granted


def _memory_cell(unit: int, used: bool, node: NodeGrants) -> str:
    parts = [node.used, node.allocated, node.total] if used else [node.allocated, node.total]
    return "/".join(_shown(part, unit) for part in parts)


def _title(*, used: bool) -> str:
    return "Used/Allocated/Total" if used else "Allocated/Total"


# --- a table a node ---------------------------------------------------------------------------------------------------


def _details(node: NodeGrants, unit: int, shape: Shape, *, used: bool) -> str:
    pods = [pod for pod in node.pods if used or any(share.held for share in pod.shares)]
    sums = [f"Allocated: {_part(node.allocated, node.total, unit)}", f"Total: {_shown(node.total, unit)}"]
    if used:
        sums.insert(1, f"Used: {_part(node.used, node.total, unit)}")
    head = notes([f"NAME: {node.name}   IPADDRESS: {node.address or NO_ADDRESS}"], shape.screen)
    rows = [table(_pod_columns(node, unit, used=used), pods, shape)] if pods else []
    return "\n".join([head, *rows, "   ".join(sums)])


def _part(amount: Amount, total: Amount, unit: int) -> str:
    return f"{_shown(amount, unit)} ({_percent(amount, total)})"


def _pod_columns(node: NodeGrants, unit: int, *, used: bool) -> list[Column[PodGrants]]:
    title = "Used/Allocated" if used else "Allocated"
    pending: Column[PodGrants] = Column("Pending(Allocated)", partial(_pending, unit))
    return [
        Column("NAME", lambda pod: pod.pod, name=True, kept=True),
        Column("NAMESPACE", lambda pod: pod.namespace, name=True),
        *(
            Column(f"GPU{place}({title})", partial(_share_of_gpu, gpu, unit, used))
            for place, gpu in enumerate(node.gpus)
        ),
        *([pending] if node.pending is not None else []),
    ]


def _share_of_gpu(gpu: GpuGrants, unit: int, used: bool, pod: PodGrants) -> str:
    """A pod without a share of a GPU has nothing of it if all pods that have one are known."""
    share = next((one for one in reversed(pod.shares) if one.index == gpu.index), None)
    if share is not None and (used or share.held):
        return _share_cell(share, unit, used=used)
    granted = "0" if gpu.holders_known else UNKNOWN
    return f"{'0' if gpu.use_known else UNKNOWN}/{granted}" if used else granted


def _pending(unit: int, pod: PodGrants) -> str:
    share = next((one for one in pod.shares if one.index is None), None)
    return _share_cell(share, unit, used=False) if share is not None and share.held else "0"


def _share_cell(share: PodShare, unit: int, *, used: bool) -> str:
    granted = _shown(share.allocated, unit)
    return f"{_shown(share.used, unit)}{OVER if share.over else ''}/{granted}" if used else granted


# --- amounts ----------------------------------------------------------------------------------------------------------


def _shown(amount: Amount, unit: int) -> str:
    """Return whole units, cut off; a part of a unit as <1, and what is known in part as >=."""
    number, rest = divmod(amount.bytes, unit)
    if not amount.whole:
        return f">={number}" if number else UNKNOWN
    return "<1" if rest and not number else str(number)


def _percent(part: Amount, total: Amount) -> str:
    """Return a percentage, cut off as Go's int64(float64) does it: 29/100 is 28%."""
    if not total.whole or (not part.whole and not part.bytes):
        return UNKNOWN
    number = int(part.bytes / total.bytes * 100) if total.bytes else 0
    return f"{number}%" if part.whole else f">={number}%"


def _sums(found: Grants) -> tuple[Amount, Amount, Amount]:
    """Return what is used, allocated, and there in all nodes."""
    return (
        sum_of(node.used for node in found.nodes),
        sum_of(node.allocated for node in found.nodes),
        sum_of(node.total for node in found.nodes),
    )


def _of_all(found: Grants, *, used: bool) -> str:
    in_use, allocated, total = _sums(found)
    parts: Sequence[Amount] = (in_use, allocated, total) if used else (allocated, total)
    ratios = [_percent(part, total) for part in parts[:-1]]
    return f"{'/'.join(_shown(part, found.unit_bytes) for part in parts)} ({'/'.join(ratios)})"


# --- values -----------------------------------------------------------------------------------------------------------


def inspect_values(found: Grants, missing: Sequence[str]) -> dict[str, object]:
    """Return the same for scripts, always with pods and use. An amount that is unknown, or known only in part, is
    null."""
    used, allocated, total = _sums(found)
    return {
        "version": VERSION,
        "unit": found.unit,
        "nodes": list(map(_node_values, found.nodes)),
        "cluster": _amounts(allocated, total, used),
        "missing": list(missing),
    }


def _node_values(node: NodeGrants) -> dict[str, object]:
    return {
        "node": node.name,
        "internal_ip": node.address,
        "gpus": [
            {"index": gpu.index, "uuid": gpu.uuid, **_amounts(gpu.allocated, gpu.total, gpu.used)} for gpu in node.gpus
        ],
        "pods": [
            {"namespace": pod.namespace, "pod": pod.pod, "gpus": list(map(_share_values, pod.shares))}
            for pod in node.pods
        ],
        "pending_bytes": None if node.pending is None else _bytes(node.pending),
        **_amounts(node.allocated, node.total, node.used),
    }


def _share_values(share: PodShare) -> dict[str, object]:
    return {
        "index": share.index,
        "allocated_bytes": _bytes(share.allocated),
        "used_bytes": _bytes(share.used),
        "over": share.over,
    }


def _amounts(allocated: Amount, total: Amount, used: Amount) -> dict[str, int | None]:
    return {"allocated_bytes": _bytes(allocated), "total_bytes": _bytes(total), "used_bytes": _bytes(used)}


def _bytes(amount: Amount) -> int | None:
    return amount.bytes if amount.whole else None
