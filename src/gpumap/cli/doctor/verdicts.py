"""`gpumap doctor`: each source and each step of the privilege ladder judged, by the document and, locally, by facts.

Pure: the words on what to do come with the document, of which `gpumap.model.remedies` is the one table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from gpumap.cli.doctor.checks import Check
from gpumap.cli.doctor.gpu_checks import gpu_capabilities, gpu_checks
from gpumap.model import remedies
from gpumap.model.document import OF_GPUS, VERSION, Document
from gpumap.model.node_facts import Answer, Facts, Privileges
from gpumap.model.observations import Source
from gpumap.model.units import counted

_OTHERS = ("device_checkpoint", "pod_logs", "push", "proc", "pid_visibility", *OF_GPUS, "unmatched_slots")
_NOT_THERE = ("_missing", "_not_found", "_not_loaded")
"""Endings of the reasons of what is not there at all; what fails in another way is there."""


def examine(document: Document, facts: Facts | None) -> tuple[Check, ...]:
    """Judge everything, in the order of the ladder. Without `facts` the document alone: a running agent's."""
    if document.get("stale"):
        return tuple(_stale(document["stale"]))
    return (
        _kubelet(document, facts),
        _nvml(document),
        *gpu_checks(document),
        _identity(document, "device_checkpoint", "checkpoint_", facts.checkpoint if facts else None),
        _identity(document, "pod_logs", "pod_logs_", facts.pod_logs if facts else None),
        _push(document, facts.push if facts else None),
        _procfs(document),
        _pid_visibility(document),
        *gpu_capabilities(document),
        *_unmatched(document),
        *(_privileges(facts.privileges) if facts else ()),
    )


def works(checks: tuple[Check, ...]) -> bool:
    """Whether all that is required does."""
    return all(one.state in ("ok", "degraded") for one in checks if one.required)


def as_values(document: Document, checks: tuple[Check, ...]) -> Document:
    """For scripts: the checks as they are."""
    node, timestamp = document.get("node"), document.get("timestamp")
    rows = [asdict(one) for one in checks]
    return {"version": VERSION, "timestamp": timestamp, "node": node, "ok": works(checks), "checks": rows}


def _stale(why: str) -> Iterator[Check]:
    """What is required has failed while nothing new is known; of all else the last word is too old."""
    for name in ("kubelet", "nvml"):
        yield Check(name, "failed", True, "", why)
    for name in _OTHERS:
        yield Check(name, "unknown", False, "", "what was last seen is too old")


def _source(document: Document, name: str) -> Document:
    return next(
        (one for one in document["sources"] if one["source"] == name), {"up": False, "reason": None, "detail": None}
    )


def _down(check: str, source: Document, *, required: bool) -> Check:
    reason, detail = source["reason"] or "unknown", source["detail"]
    state = "missing" if reason.endswith(_NOT_THERE) else "failed"
    return Check(check, state, required, "", f"{reason}: {detail}" if detail else reason, source.get("remedy"))


def _kubelet(document: Document, facts: Facts | None) -> Check:
    source = _source(document, "kubelet")
    if not source["up"]:
        return _down("kubelet", source, required=True)
    held = [*(row for device in document["devices"] for row in device["holders"]), *document["unmatched"]]
    pods = len({(row["namespace"], row["pod"]) for row in held})  # not those that use what they do not hold
    offered = [row["slots"] for device in document["devices"] for row in device["allocatable"]]
    seen = [facts.kubelet.seen] if facts and facts.kubelet.seen else []
    seen += [f"{counted(pods, 'pod')} with GPUs"]
    seen += [f"{counted(sum(offered), 'slot')} offered on devices" if offered else "not told what is offered"]
    if source["reason"]:  # it answered, and complained
        return Check("kubelet", "degraded", True, ", ".join(seen), _complaint(source), source.get("remedy"))
    return Check("kubelet", "ok", True, ", ".join(seen))


def _nvml(document: Document) -> Check:
    source = _source(document, "nvml")
    if not source["up"]:
        return _down("nvml", source, required=True)
    driver = document["driver"] or {}
    faults = [gpu["fault"] for gpu in (*document["gpus"], *document.get("nameless_gpus", ()))]
    down = [fault for fault in faults if fault]
    leaves = sum(device["memory"] is not None for device in document["devices"])
    seen = f"driver {driver.get('driver_version') or 'unknown'}, CUDA {driver.get('cuda_version') or 'unknown'}"
    seen += f", {counted(len(faults), 'GPU')}, {counted(leaves, 'device')} readable"
    if not faults:
        return Check("nvml", "degraded", True, seen, "the driver counts no GPU: the node has none, or none is let in")
    if down:
        state = "failed" if len(down) == len(faults) else "degraded"
        why = f"{len(down)} of {len(faults)} GPUs down ({', '.join(sorted(set(down)))}): see below"
        return Check("nvml", state, True, seen, why, source.get("remedy"))
    if source["reason"]:
        return Check("nvml", "degraded", True, seen, _complaint(source), source.get("remedy"))
    return Check("nvml", "ok", True, seen)


def _identity(document: Document, capability: str, prefix: str, answer: Answer | None) -> Check:
    """One of the two sources of pod identity; the document's word on it, or what it said when it was asked here."""
    source = _source(document, "pod_identity")
    told = source["reason"] or ""
    reason, detail = (told, source["detail"]) if told.startswith(prefix) else ("", "")
    if answer and answer.reason:
        reason, detail = answer.reason, answer.detail
    present = bool(document["capabilities"].get(capability))
    seen = answer.seen if answer else ""
    if present and not reason:
        return Check(capability, "ok", False, seen or "read")
    known = remedies.SOURCES[Source.POD_IDENTITY]
    remedy = known.get(reason) if reason and not reason.endswith(_NOT_THERE) else None
    remedy = remedy or _remedies(document).get(capability) or remedies.CAPABILITIES.get(capability)
    if present:
        return Check(capability, "degraded", False, seen, _words(reason, detail), remedy)
    if not reason and not source["up"] and told and not told.startswith(("checkpoint_", "pod_logs_")):
        reason, detail = told, source["detail"]
    state = "missing" if not reason or reason.endswith(_NOT_THERE) else "failed"
    return Check(capability, state, False, seen, _words(reason or "not read", detail), remedy)


def _push(document: Document, answer: Answer | None) -> Check:
    """Whether allocations start a collection: of an agent by its word, else by what this process is let do."""
    if answer is None:
        told = bool(document["capabilities"].get("push"))
        answer = Answer("allocations start a collection") if told else Answer(reason="directory_missing")
        why = "turned off by --no-push, or no directory can be watched: the agent's log says which"
    else:
        why = _words(answer.reason, answer.detail)
    if not answer.reason:
        return Check("push", "ok", False, answer.seen)
    state = "missing" if answer.reason.endswith(_NOT_THERE) else "failed"
    return Check("push", state, False, "", why, remedies.PUSH.get(answer.reason))


def _procfs(document: Document) -> Check:
    source = _source(document, "procfs")
    if not source["up"]:
        return _down("proc", source, required=False)
    if source["reason"]:
        return Check("proc", "degraded", False, "read", _complaint(source), source.get("remedy"))
    return Check("proc", "ok", False, "read")


def _pid_visibility(document: Document) -> Check:
    reason = document.get("pid_visibility_reason")
    if document["capabilities"].get("pid_visibility"):
        return Check("pid_visibility", "ok", False, reason or "processes of other containers are seen")
    why = reason or "processes of other containers are not seen"
    remedy = _remedies(document).get("pid_visibility") or remedies.CAPABILITIES["pid_visibility"]
    return Check("pid_visibility", "missing", False, "", why, remedy)


def _unmatched(document: Document) -> Iterator[Check]:
    rows = document["unmatched"]
    if not rows and not _source(document, "kubelet")["up"]:
        yield Check("unmatched_slots", "unknown", False, "", "the kubelet does not answer: who holds what is not known")
    elif not rows:
        yield Check("unmatched_slots", "ok", False, "every slot is on a device")
    for reason in sorted({row["reason"] for row in rows}):
        of_reason = [row for row in rows if row["reason"] == reason]
        slots = sum(row["slots"] for row in of_reason)
        pods = sorted({f"{row['namespace']}/{row['pod']}" for row in of_reason})
        more = f" and {len(pods) - 3} more" if len(pods) > 3 else ""
        seen = f"{counted(slots, 'slot')} of {', '.join(sorted({row['resource'] for row in of_reason}))}"
        why = f"{reason}: {', '.join(pods[:3])}{more}"
        yield Check(f"unmatched_slots/{reason}", "degraded", False, seen, why, of_reason[0].get("remedy"))


def _privileges(held: Privileges) -> Iterator[Check]:
    """More than gpumap needs: a warning each, in a container; a person's shell has what the person has."""
    count = len(held.capabilities)
    if held.bare_host:
        seen = f"uid {held.uid}, {counted(count, 'capability', 'capabilities')}: of this shell, not of a container"
        yield Check("capabilities", "ok", False, seen)
        return
    if count:
        named = ", ".join(held.capabilities[:4]) + (f" and {count - 4} more" if count > 4 else "")
        privileged = " (privileged)" if "SYS_ADMIN" in held.capabilities else ""
        remedy = "`securityContext: {privileged: false, capabilities: {drop: [ALL]}}`, as the chart has it."
        why = "gpumap needs none"
        yield Check("capabilities", "warning", False, f"uid {held.uid}{privileged}, {named}", why, remedy)
    else:
        yield Check("capabilities", "ok", False, f"uid {held.uid}, no capability")
    if held.api_token:
        remedy = "`automountServiceAccountToken: false`, as the chart has it."
        yield Check("api_token", "warning", False, held.api_token, "gpumap asks no API server", remedy)
    else:
        yield Check("api_token", "ok", False, "none is mounted")
    if held.runtime_sockets:
        why, remedy = "whoever can write to it owns the node; gpumap never does", "Do not mount it."
        yield Check("runtime_socket", "warning", False, ", ".join(held.runtime_sockets), why, remedy)
    else:
        yield Check("runtime_socket", "ok", False, "none is mounted")


def _remedies(document: Document) -> dict[str, str]:
    return document.get("remedies") or {}


def _complaint(source: Document) -> str:
    return _words(source["reason"], source["detail"])


def _words(reason: str, detail: str | None) -> str:
    return f"{reason}: {detail}" if detail else reason
