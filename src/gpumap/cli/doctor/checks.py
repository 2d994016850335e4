"""The checks of `gpumap doctor`: each source and each step of the privilege ladder, one row each.

Pure: a check judges the map of a node and, on the node itself, the facts that only its own files show. The remedies
come with the map; `gpumap.model.remedies` is their only table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from gpumap.cli.doctor.gpu_checks import Result, gpu_results
from gpumap.cli.node_maps import NodeMaps
from gpumap.cli.tables.fleets import values_of
from gpumap.model import remedies
from gpumap.model.devices import has_kubelet
from gpumap.model.formatting import counted, listed
from gpumap.model.gaps import use_known
from gpumap.model.grouping import grouped
from gpumap.model.names import Source
from gpumap.model.node import Finding, Gpu, Node, SourceHealth
from gpumap.model.node_facts import Answer, Facts, Privileges
from gpumap.model.plugins import DRA_DRIVER

_ABSENT = ("_missing", "_not_found", "_not_loaded")
"""Endings of the reasons of something that does not exist. What fails with another reason exists."""
SECOND_LIST = "pod_resources_"
"""Beginning of the reasons of the second List, which are the kubelet's: the kubelet itself answers."""
_NO_ANSWER = SourceHealth("")
"""A source that the node does not have."""
_NO_GPU_ANSWERS = Result("unknown", "", "no GPU answers")


Judge = Callable[[Node, Facts | None], Result | None]


class Check(NamedTuple):
    """A check of a node. `judge` returns `None` if there is nothing to say, such as without `Facts`."""

    name: str
    judge: Judge
    required: bool = False
    of_kubelet: bool = False
    """It is of no use on a machine without a kubelet (--no-kubelet)."""


def examine(node_map: Node, facts: Facts | None) -> tuple[Result, ...]:
    """Judge everything, in the order of the ladder. Without `facts` only the map of a running agent is judged."""
    if node_map.stale:
        return tuple(_stale(node_map))
    return (
        *_results(DRIVER_CHECKS, node_map, facts),
        *gpu_results(node_map),
        *_results(OPTIONAL_CHECKS, node_map, facts),
        *_results(REQUESTED_CHECKS, node_map, facts),
        *_unmatched_by_reason(node_map),
        *_results(PRIVILEGE_CHECKS, node_map, facts),
    )


def works(results: Iterable[Result]) -> bool:
    """Return whether everything that is required works."""
    return all(one.state in ("ok", "degraded") for one in results if one.required)


def doctor_values(maps: NodeMaps, results: Sequence[Result]) -> dict[str, object]:
    """Return the results of a node for scripts."""
    return values_of(maps, ok=works(results), checks=[{"check": one.check, **one._asdict()} for one in results])


def _results(checks: Iterable[Check], node_map: Node, facts: Facts | None) -> Iterator[Result]:
    for check in _of_node(checks, node_map):
        if outcome := check.judge(node_map, facts):
            yield outcome._replace(check=check.name, required=check.required)


def _of_node(checks: Iterable[Check], node_map: Node) -> Iterator[Check]:
    return (check for check in checks if not check.of_kubelet or has_kubelet(node_map))


def _stale(node_map: Node) -> Iterator[Result]:
    """What is required has failed while nothing new is known. Of everything else, what was known is too old."""
    for check in _of_node(DRIVER_CHECKS, node_map):
        yield Result("failed", why=node_map.stale or "", check=check.name, required=True)
    for check in _of_node(OPTIONAL_CHECKS, node_map):
        yield Result("unknown", why="the last data is too old", check=check.name)


# --- what is required -------------------------------------------------------------------------------------------------


def _kubelet(node_map: Node, facts: Facts | None) -> Result:
    source = _source(node_map, Source.KUBELET)
    if not source.up:
        return _down(source)
    holders = [one for device in node_map.devices for one in device.containers if one.holds]
    pods = len({one.pod_name for one in (*holders, *node_map.unmatched)})  # not pods that only use devices
    offered = [slots for device in node_map.devices for slots in device.allocatable.values()]
    seen = [facts.kubelet.seen] if facts and facts.kubelet.seen else []
    seen += [f"{counted(pods, 'pod')} with GPUs"]
    no_slots = "GPUs assigned by claims" if _has_only_claims(node_map) else "slots offered on devices: unknown"
    seen += [f"{counted(sum(offered), 'slot')} offered on devices" if offered else no_slots]
    if source.reason.startswith(SECOND_LIST):
        return Result("ok", ", ".join(seen))
    return _answered(source, ", ".join(seen))


def _nvml(node_map: Node, _: Facts | None) -> Result:
    source = _source(node_map, Source.NVML)
    if not source.up:
        return _down(source)
    driver = node_map.driver
    faults = [*(gpu.fault for gpu in node_map.gpus), *(gpu.fault for gpu in node_map.nameless_gpus)]
    down = [fault for fault in faults if fault]
    leaves = sum(device.memory is not None or use_known(device) for device in node_map.devices)
    versions = (driver.driver_version, driver.cuda_version) if driver else ("", "")
    seen = "driver {}, CUDA {}".format(*(version or "unknown" for version in versions))
    seen += f", {counted(len(faults), 'GPU')}, {counted(leaves, 'device')} readable"
    if not faults:
        return Result("degraded", seen, "the driver lists no GPU: the node has none, or the container has no access")
    if down:
        state = "failed" if len(down) == len(faults) else "degraded"
        why = f"{len(down)} of {len(faults)} GPUs down ({', '.join(sorted(set(down)))}): see below"
        return Result(state, seen, why, source.remedy)
    return _answered(source, seen)


# --- the ladder -------------------------------------------------------------------------------------------------------


def _pod_identity(capability: str, prefix: str, node_map: Node, facts: Facts | None) -> Result:
    """Judge one of the two sources of pod identity, by its reasons in the map and by its answer here."""
    answer = Answer() if facts is None else facts.pod_logs if capability == "pod_logs" else facts.checkpoint
    source = _source(node_map, Source.POD_IDENTITY)
    reported = source.reason
    reason, detail = (reported, source.detail) if reported.startswith(prefix) else ("", "")
    if answer.reason:
        reason, detail = answer.reason, answer.detail
    if node_map.capabilities.get(capability):
        if not reason:
            return Result("ok", answer.seen or "read")
        return Result("degraded", answer.seen, _words(reason, detail), _identity_remedy(node_map, capability, reason))
    if capability == "device_checkpoint" and reason in ("", "checkpoint_missing") and _has_only_claims(node_map):
        return Result("not needed", answer.seen, "DRA claims assign the GPUs of this node, and no device plugin does")
    remedy = _identity_remedy(node_map, capability, reason)
    if reported and not reason and not source.up and not reported.startswith(("checkpoint_", "pod_logs_")):
        reason, detail = reported, source.detail
    return Result(_state_of(reason), answer.seen, _words(reason or "not read", detail), remedy)


def _identity_remedy(node_map: Node, capability: str, reason: str) -> str | None:
    """Return the remedy of the reason, or of the missing capability if the source does not exist."""
    of_reason = remedies.SOURCES[Source.POD_IDENTITY].get(reason) if not reason.endswith(_ABSENT) else None
    return of_reason or node_map.remedies.get(capability) or remedies.CAPABILITIES.get(capability)


def _has_only_claims(node_map: Node) -> bool:
    rows = [row for device in node_map.devices for row in device.containers]
    is_offered = any(device.allocatable for device in node_map.devices)
    return not is_offered and {resource for row in rows for resource in row.slots} == {DRA_DRIVER}


def _dra_claims(node_map: Node, _: Facts | None) -> Result | None:
    """Judge whether gpumap knows which claims have admin access. Without claims there is nothing to know."""
    rows = [row for device in node_map.devices for row in device.containers]
    grants = [row.grant for row in rows if row.grant and DRA_DRIVER in row.grant.slots]
    unknown = sum(grant.admin_access is None for grant in grants)
    if not unknown:
        return Result("ok", f"{counted(len(grants), 'holder')} by claims") if grants else None
    why = f"{unknown} of {counted(len(grants), 'holder')} by claims may have admin access"
    return Result("missing", "", why, remedies.FINDINGS["admin_access_unknown"])


def _requested(source: Source, prefix: str, fact: Callable[[Facts], Answer | None]) -> Judge:
    """Judge a part of a source that a flag turns on. A map shows it only while it fails."""

    def judge(node_map: Node, facts: Facts | None) -> Result | None:
        reported, answer = _source(node_map, source), fact(facts) if facts else None
        reason, detail = (reported.reason, reported.detail) if reported.reason.startswith(prefix) else ("", "")
        if answer is not None:
            reason, detail = answer.reason, answer.detail
        if not reason:
            return Result("ok", answer.seen) if answer else None
        return Result(_state_of(reason), "", _words(reason, detail), remedies.SOURCES[source].get(reason))

    return judge


def _push(node_map: Node, facts: Facts | None) -> Result:
    """Judge whether allocations start a collection: of an agent by its map, else by what this process may do."""
    if facts is not None:
        answer, why = facts.push, _words(facts.push.reason, facts.push.detail)
    elif node_map.capabilities.get("push"):
        answer, why = Answer("allocations start a collection"), ""
    else:
        answer = Answer(reason="directory_missing")
        why = "--no-push is set, or gpumap can watch no directory: see the agent's log"
    if not answer.reason:
        return Result("ok", answer.seen)
    return Result(_state_of(answer.reason), "", why, remedies.PUSH.get(answer.reason))


def _proc(node_map: Node, _: Facts | None) -> Result:
    source = _source(node_map, Source.PROCFS)
    return _answered(source, "read") if source.up else _down(source)


def _pid_visibility(node_map: Node, _: Facts | None) -> Result:
    reason = node_map.pid_visibility_reason
    if node_map.capabilities.get("pid_visibility"):
        return Result("ok", reason or "processes of other containers are visible")
    remedy = node_map.remedies.get("pid_visibility") or remedies.CAPABILITIES["pid_visibility"]
    return Result("missing", "", reason or "processes of other containers are not visible", remedy)


def _pci(node_map: Node, _: Facts | None) -> Result | None:
    """Judge whether NVML lists the GPUs on PCI. Those that it does not list have a line of their own."""
    if node_map.missing_gpus is None:
        return Result("unknown", "", node_map.missing_gpus_reason or "the agent does not report it")
    return None if node_map.missing_gpus.count else Result("ok", "NVML lists every GPU on PCI")


def _process_utilization(node_map: Node, _: Facts | None) -> Result:
    """Say which call of the driver gives SM time, on which GPUs."""
    by_call = grouped((gpu.samples_from, gpu.index) for gpu in _readable(node_map) if not gpu.partitioned)
    if not _readable(node_map):
        return _NO_GPU_ANSWERS
    if not by_call:
        return Result("not needed", "", "every GPU is partitioned, and no driver reports SM time on MIG devices")
    on = {
        call: f"GPU {', '.join(map(str, indexes))}" if len(by_call) > 1 else counted(len(indexes), "GPU")
        for call, indexes in by_call.items()
    }
    seen = "; ".join(f"SM time by {call} on {gpus}" for call, gpus in on.items() if call)
    if None not in on:
        return Result("ok", seen)
    why = f"SM time is not available on {on[None]}: the driver does not report it for processes"
    return Result("degraded" if seen else "missing", seen, why, remedies.CAPABILITIES["process_utilization"])


def _gpm(node_map: Node, _: Facts | None) -> Result:
    """GPUs before Hopper have no GPM. There is nothing to repair, and a map does not show the age of a GPU."""
    if node_map.capabilities.get("gpm"):
        measured = sum(device.activity is not None for device in node_map.devices)
        return Result("ok", f"activity of SMs, tensor cores and memory, on {counted(measured, 'device')}")
    why = "no GPU reports the activity of its engines: GPM requires Hopper or later, without --nvml-release"
    return _not_collected(node_map, "gpm") or Result("not needed", "", why, node_map.remedies.get("gpm"))


def _xid_events(node_map: Node, _: Facts | None) -> Result:
    if node_map.capabilities.get("xid_events"):
        return Result("ok", f"registered on {counted(len(node_map.xids), 'GPU')}")
    why = (
        "no listener: the driver does not support it (WSL, vGPU guests), or gpumap releases the driver (--nvml-release)"
    )
    remedy = node_map.remedies.get("xid_events")
    return _not_collected(node_map, "health") or Result("missing", "", why, remedy)


def _not_collected(node_map: Node, group: str) -> Result | None:
    """Return why nothing of a group of metrics can be judged; `None` if it can."""
    if node_map.collect is not None and group not in node_map.collect:
        return Result("not needed", "", f"--collect leaves out the group {group}")
    return None if _readable(node_map) else _NO_GPU_ANSWERS


def _unmatched_slots(node_map: Node, _: Facts | None) -> Result | None:
    """Slots on no device have a line for each reason instead."""
    if node_map.unmatched or _assigned_twice(node_map):
        return None
    if not _source(node_map, Source.KUBELET).up:
        return Result("unknown", "", "the kubelet does not answer: the assignments are not known")
    return Result("ok", "every slot matches a device")


def _unmatched_by_reason(node_map: Node) -> Iterator[Result]:
    for reason in sorted({entry.reason for entry in node_map.unmatched}):
        of_reason = [entry for entry in node_map.unmatched if entry.reason == reason]
        slots = counted(sum(entry.slots for entry in of_reason), "slot")
        resources = ", ".join(sorted({entry.resource for entry in of_reason}))
        why = f"{reason}: {listed(sorted({f'{entry.namespace}/{entry.pod}' for entry in of_reason}))}"
        check = UNMATCHED_BY_REASON.replace("<reason>", reason)
        yield Result("degraded", f"{slots} of {resources}", why, of_reason[0].remedy, check)
    if twice := _assigned_twice(node_map):
        why = f"assigned_twice: {listed(sorted({'/'.join(finding.name.pod_name) for finding in twice}))}"
        check = UNMATCHED_BY_REASON.replace("<reason>", "assigned_twice")
        yield Result("degraded", counted(len(twice), "finding"), why, twice[0].remedy, check)


def _assigned_twice(node_map: Node) -> list[Finding]:
    return [finding for finding in node_map.findings or () if finding.reason == "assigned_twice"]


# --- more privileges than gpumap needs: a warning in a container; a shell has the rights of its user ------------------


def _capabilities(_: Node, facts: Facts | None) -> Result | None:
    if facts is None:
        return None
    held, count = facts.privileges, len(facts.privileges.capabilities)
    if held.bare_host:
        of_uid = f"uid {held.uid}, {counted(count, 'capability', 'capabilities')}"
        return Result("ok", f"{of_uid}, of this shell")
    if not count:
        return Result("ok", f"uid {held.uid}, no capability")
    privileged = " (privileged)" if "SYS_ADMIN" in held.capabilities else ""
    seen = f"uid {held.uid}{privileged}, {listed(held.capabilities, 4)}"
    remedy = "Set `securityContext: {privileged: false, capabilities: {drop: [ALL]}}`, as the chart does."
    return Result("warning", seen, "gpumap needs none", remedy)


def _api_token(_: Node, facts: Facts | None) -> Result | None:
    if (held := _of_container(facts)) is None:
        return None
    if not held.api_token:
        return Result("ok", "none is mounted")
    remedy = "Set `automountServiceAccountToken: false`, as the chart does."
    return Result("warning", held.api_token, "gpumap does not use the API server", remedy)


def _runtime_socket(_: Node, facts: Facts | None) -> Result | None:
    if (held := _of_container(facts)) is None:
        return None
    if not held.runtime_sockets:
        return Result("ok", "none is mounted")
    why = "write access to it controls the node, and gpumap does not use it"
    return Result("warning", ", ".join(held.runtime_sockets), why, "Do not mount it.")


def _of_container(facts: Facts | None) -> Privileges | None:
    return facts.privileges if facts is not None and not facts.privileges.bare_host else None


# --- the lists --------------------------------------------------------------------------------------------------------

DRIVER_CHECKS = (
    Check("kubelet", _kubelet, required=True, of_kubelet=True),
    Check("nvml", _nvml, required=True),
)
"""Before those of each GPU, which are in `gpu_checks.GPU_CHECKS`."""
OPTIONAL_CHECKS = (
    Check("device_checkpoint", partial(_pod_identity, "device_checkpoint", "checkpoint_"), of_kubelet=True),
    Check("pod_logs", partial(_pod_identity, "pod_logs", "pod_logs_"), of_kubelet=True),
    Check("push", _push, of_kubelet=True),
    Check("proc", _proc),
    Check("pid_visibility", _pid_visibility),
    Check("pci", _pci),
    Check("process_utilization", _process_utilization),
    Check("gpm", _gpm),
    Check("xid_events", _xid_events),
    Check("unmatched_slots", _unmatched_slots, of_kubelet=True),
)
REQUESTED_CHECKS = (
    Check("second_list", _requested(Source.KUBELET, SECOND_LIST, lambda facts: facts.second_list)),
    Check("gpu_fractioning", _requested(Source.POD_IDENTITY, "gpu_fractioning_", lambda facts: facts.gpu_fractioning)),
    Check("pods_api", _requested(Source.POD_IDENTITY, "pods_api_", lambda facts: facts.pods_api)),
    Check("dra_claims", _dra_claims, of_kubelet=True),
)
"""Of sources that a flag turns on, and of claims. They have no row without it."""
UNMATCHED_BY_REASON = "unmatched_slots/<reason>"
PRIVILEGE_CHECKS = (
    Check("capabilities", _capabilities),
    Check("api_token", _api_token),
    Check("runtime_socket", _runtime_socket),
)


# --- what checks have in common ---------------------------------------------------------------------------------------


def _source(node_map: Node, source: Source) -> SourceHealth:
    return next((one for one in node_map.sources if one.source == source.value), _NO_ANSWER)


def _down(source: SourceHealth) -> Result:
    reason = source.reason or "unknown"
    return Result(_state_of(reason), "", _words(reason, source.detail), source.remedy)


def _answered(source: SourceHealth, seen: str) -> Result:
    """Judge a source that answers, and may complain nevertheless."""
    if source.reason:
        return Result("degraded", seen, _words(source.reason, source.detail), source.remedy)
    return Result("ok", seen)


def _state_of(reason: str) -> str:
    return "missing" if not reason or reason.endswith(_ABSENT) else "failed"


def _words(reason: str, detail: str | None) -> str:
    return f"{reason}: {detail}" if detail else reason


def _readable(node_map: Node) -> list[Gpu]:
    return [gpu for gpu in node_map.gpus if gpu.up]
