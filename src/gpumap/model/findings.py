"""What findings mean: their order, why, their sums. Only the agent makes them (`gpumap.agent.judgement`). Pure."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec import structs

from gpumap.model import remedies
from gpumap.model.formatting import age, counted
from gpumap.model.grouping import grouped
from gpumap.model.node import Finding, MissingGpus, NamelessGpu, Node
from gpumap.model.terms import (
    BUSY_WITHOUT_PROCESS,
    FINDINGS,
    GPU_CONDITIONS,
    GPU_FINDINGS,
    MEMORY_WITHOUT_PROCESS,
    ContainerName,
)

_STARTS = (*remedies.FAULTS, *("row_remap_failure", "recovery_", "ecc_uncorrected", "xid_", "row_remap_pending"))
"""How the reasons of faults begin, worst first."""


def sort_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings, the worst first."""
    return tuple(sorted(findings, key=worst_first))


def worst_first(finding: Finding) -> tuple[int, int, int, float, ContainerName]:
    """Sort key: the worst kind first; of faults the worst reason, of other kinds the larger waste."""
    unknown = _STARTS.index("unknown")
    rank = next((rank for rank, start in enumerate(_STARTS) if finding.reason.startswith(start)), unknown)
    return FINDINGS.index(finding.finding), rank * (finding.finding == "fault"), *waste_rank(finding), finding.name


def condition_of(finding: Finding) -> str:
    """Return the condition of `gpumap check` that a fault, or a GPU that is not offered, belongs to."""
    if finding.finding == "not_offered":
        return "not_offered"
    return next((name for name in GPU_CONDITIONS if finding.reason.startswith(name.removesuffix("action"))), "down")


def waste_rank(finding: Finding) -> tuple[int, float]:
    """Sort key: the larger waste first."""
    return -(finding.memory_bytes or 0), -(finding.gpus or 0.0)


def count_gpus_once(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Return findings of which only the worst fault counts its GPU. Its `why` names the other reasons."""
    reasons = grouped(
        (finding.uuid, finding.reason) for finding in sort_findings(findings) if finding.finding == "fault"
    )
    for finding in findings:
        if finding.finding != "fault" or not finding.uuid:
            yield finding
        elif finding.reason != reasons[finding.uuid][0]:
            yield structs.replace(finding, gpus=0.0)
        else:
            yield structs.replace(finding, gpus=1.0, why=finding.why + _also(reasons[finding.uuid][1:]))


def faulty_gpus(findings: Iterable[Finding] | None) -> list[Finding]:
    """Return the worst fault of each GPU: its line for people. GPUs without a uuid share a line for each reason."""
    return [finding for finding in findings or () if finding.finding == "fault" and finding.gpus != 0]


def findings_of_gpus(findings: Iterable[Finding] | None) -> list[Finding]:
    """Return the lines of GPUs for people: the worst fault of each, and those that are not offered."""
    return [finding for finding in findings or () if finding.finding in GPU_FINDINGS and finding.gpus != 0]


# --- why --------------------------------------------------------------------------------------------------------------

_XIDS = {str(code): meaning for code, meaning in remedies.XIDS.items()}


WHY = {
    "squatter": "uses a device that it does not hold",
    "leftover": "its pod no longer exists",
    "memory_without_process": "unexplained memory for {age}: no process uses it",
    "busy_without_process": "stuck at high utilization without a process for {age}",
    "over": "uses more memory than granted",
    "stalled": "may be stalled: its GPU has been busy for {age}, but does next to nothing",
    "unused": "its peak leaves memory unused",
}


_NOT_OFFERED = {
    "left_out": "is not offered: its device plugin leaves it out",
    "no_resource": "is not offered: device plugin stopped or removed, for example for DRA",
}


_UNMATCHED = {
    "assigned_twice": "slots also assigned to another pod",
    "unparsed": "slots without a device: gpumap cannot parse their ids",
    "untrusted_id": "slots without a device: their ids do not name the GPU",
    "not_in_nvml": "slots without a device: the driver does not list the GPU",
    "device_down": "slots without a device: a GPU has not reported its identity",
    "nvml_down": "slots without a device: the driver does not answer",
}


def why_of(kind: str, reason: str, seconds: float) -> str:
    """Return why, as far as the reason and the time for which a finding has held show it."""
    if kind == "fault":
        return why_broken(reason)
    if kind == "not_offered":
        return _NOT_OFFERED.get(reason, "is not offered")
    if kind == "unmatched":
        return _UNMATCHED.get(reason) or f"slots without a device: {reason}"
    if kind == "maybe_idle":
        return f"may be idle: no sign of its work seen for {age(seconds)}"
    if kind == "idle":
        return f"no {reason.removeprefix('no_')} seen for {age(seconds)}"
    return WHY.get(reason if kind == "unexplained" else kind, reason).format(age=age(seconds))


def why_nameless(reason: str, gpus: Collection[NamelessGpu]) -> str:
    """Return what is wrong with GPUs without a uuid, with their number and addresses."""
    other_reasons = dict.fromkeys(word for gpu in gpus if gpu.fault == reason for word in gpu.reasons[1:])
    addresses = ", ".join(gpu.pci_bus_id or f"index {gpu.index}" for gpu in gpus)
    return f"{counted(len(gpus), 'GPU')}: {why_broken(reason)}{_also(other_reasons)} ({addresses})"


def why_missing(gpus: MissingGpus) -> str:
    """Return what is wrong with GPUs that NVML does not list, with their number and addresses."""
    quantifier = "of " if len(gpus.pci_bus_ids) > gpus.count else ""
    return f"{counted(gpus.count, 'GPU')}: {why_broken('not_in_nvml')} ({quantifier}{', '.join(gpus.pci_bus_ids)})"


def _also(reasons: Collection[str]) -> str:
    """Return the other reasons as words, such as "; also XID 79"."""
    return f"; also {', '.join(reasons)}".replace("xid_", "XID ").replace("_", " ") if reasons else ""


def why_broken(reason: str) -> str:
    """Return what is wrong with a GPU, for a line of 80 bytes with what to do."""
    if reason.startswith("xid_"):
        code = reason.removeprefix("xid_")
        return f"had XID {code}: {_XIDS.get(code, 'see dmesg')}"
    action = reason.removeprefix("recovery_")
    if words := remedies.IN_SHORT.get(action):
        return words.partition(": ")[0]
    return f"needs recovery: {action[:20]}" if action != reason else f"cannot be read: {reason}"


# --- sums -------------------------------------------------------------------------------------------------------------


class _Sum(NamedTuple):
    """What a sum adds up: GPUs or bytes of findings of these kinds, or their number."""

    kinds: tuple[str, ...]
    field: str = ""
    reason: str = ""
    """Only findings of this reason; empty: of any."""


SUMS = {
    "faults": _Sum(("fault",), "gpus"),
    "not_offered_gpus": _Sum(("not_offered",), "gpus"),
    "squatter_bytes": _Sum(("squatter",), "memory_bytes"),
    "leftover_bytes": _Sum(("leftover",), "memory_bytes"),
    "unexplained_bytes": _Sum(("unexplained",), "memory_bytes", MEMORY_WITHOUT_PROCESS),
    "unexplained_gpus": _Sum(("unexplained",), "gpus", BUSY_WITHOUT_PROCESS),
    "over_bytes": _Sum(("over",), "memory_bytes"),
    "stalled_gpus": _Sum(("stalled",), "gpus"),
    "idle_gpus": _Sum(("idle",), "gpus"),
    "idle_holders": _Sum(("idle",)),
    "maybe_idle_gpus": _Sum(("maybe_idle",), "gpus"),
    "unused_bytes": _Sum(("idle", "unused"), "memory_bytes"),
    "unmatched": _Sum(("unmatched",)),
}
"""By name, worst first."""


def judged_kinds(node: Node) -> frozenset[str]:
    """Return the kinds of which all can be judged, apart from what this hardware or set-up never reports.

    If no holder has a known grant, nothing is known of grants.
    """
    reasons = grouped((kind, entry.reason) for entry in node.unjudged for kind in entry.findings)
    kinds = {kind for kind in node.judged if set(reasons.get(kind, ())) <= {"not_supported"}}
    if node.judged.get("idle") or "idle" in reasons:
        kinds -= {kind for kind in ("over", "unused") if not node.judged.get(kind)}
    return frozenset(kinds | ({"maybe_idle"} if "idle" in kinds else set()))


def judged_holders(nodes: Iterable[Node]) -> str | None:
    """Return "14 of 16 holders judged for idle" for people; `None` if all were, or if none can be."""
    judged = unjudged = 0
    for node in nodes:
        judged += node.judged.get("idle", 0)
        unjudged += sum("idle" in entry.findings and entry.reason != "not_supported" for entry in node.unjudged)
    return f"{judged} of {counted(judged + unjudged, 'holder')} judged for idle" if judged and unjudged else None


def sums(findings: Sequence[Finding], judged: Container[str]) -> dict[str, float | None]:
    """Return the sums of findings, such as those of one namespace. What is not known is not in them.

    `None`: 0, but an amount is unknown, or not all of the kind is `judged`.
    """
    return {name: _added(findings, summed, judged) for name, summed in SUMS.items()}


def _added(findings: Iterable[Finding], summed: _Sum, judged: Container[str]) -> float | None:
    of_kinds = [
        finding for finding in findings if finding.finding in summed.kinds and summed.reason in ("", finding.reason)
    ]
    values = [getattr(finding, summed.field) for finding in of_kinds] if summed.field else [1] * len(of_kinds)
    total = sum(value for value in values if value is not None)
    is_known = None not in values and all(kind in judged for kind in summed.kinds)
    return round(total, 3) if total or is_known else None
