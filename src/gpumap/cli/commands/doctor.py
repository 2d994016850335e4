"""`gpumap doctor`: what a node reports about its sources, capabilities, GPUs and slots, a line each.

States, reasons and remedies come with the map of the node: nothing is judged here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from gpumap.cli.args import HOW_TO_ASK, add_form, add_no_headers, add_url, node_maps
from gpumap.cli.commands import SUMMARIES, Program
from gpumap.cli.credentials import add_credentials
from gpumap.cli.main import until_stopped
from gpumap.cli.parser import add_command, leave_to_help_all
from gpumap.cli.rows import NodeMaps, values_of
from gpumap.cli.screen import screen_of_stdout, take_any_text, warn_if_stale
from gpumap.cli.sources.this_node import LOOK_SECONDS, NODE_FLAGS, add_node_flags
from gpumap.cli.table import Column, Shape, join_blocks, notes, table
from gpumap.model import remedies
from gpumap.model.devices import has_kubelet
from gpumap.model.errors import FatalError
from gpumap.model.findings import condition_of, findings_of_gpus
from gpumap.model.formatting import counted, listed
from gpumap.model.gaps import use_known
from gpumap.model.grouping import grouped
from gpumap.model.node import Node, SourceHealth
from gpumap.model.readings import Uuid
from gpumap.model.terms import Source
from gpumap.model.workloads import is_slurm_daemon

if TYPE_CHECKING:
    from gpumap.cli.commands import Commands
    from gpumap.cli.rows import NodeMapStream


GPU_CHECKS = {
    "gpu/<index>": "failed",
    "gpu/<index>/recovery_action": "degraded",
    "gpu/<index>/row_remap_failure": "failed",
    "gpu/<index>/row_remap_pending": "degraded",
    "gpu/<index>/ecc_uncorrected": "warning",
    "gpu/<index>/xid": "warning",
    "gpu/<index>/not_offered": "degraded",
}
"""The state of each condition of a GPU. `<index>` is NVML's index."""
_NOT_PRESENT = ("_missing", "_not_found", "_not_loaded")
"""Endings of the reasons of a source that does not exist. A source that fails with another reason exists."""
_IDENTITY_REASONS = {"device_checkpoint": "checkpoint_", "pod_logs": "pod_logs_"}
"""How the reasons of pod_identity begin that a capability is missing for."""
STATES = ("ok", "unknown", "missing", "warning", "degraded", "failed")
"""A terminal shows the end, so the worst comes last."""
_COLOURS = {"ok": "green", "missing": "yellow", "warning": "yellow", "degraded": "yellow", "failed": "red"}
_GUIDE = "More: docs/how-to/troubleshoot.md"


def add(commands: Commands, _: Program) -> None:
    doctor = add_command(
        commands,
        "doctor",
        _doctor,
        summary=SUMMARIES["doctor"],
        details="The exit code is 1 if NVML does not work, or the kubelet unless --no-kubelet is set. Everything else "
        "is optional.",
        examples=[
            (
                "in the agent's pod, with its mounts and rights",
                "kubectl exec -n NAMESPACE POD -- gpumap doctor",
            ),
            ("what a running agent can report", "gpumap doctor --url http://127.0.0.1:9401"),
        ],
    )
    output = doctor.add_argument_group("output")
    add_form(output, ("table", "json"))
    add_no_headers(output)
    add_url(doctor)
    add_credentials(doctor.add_argument_group(HOW_TO_ASK))
    add_node_flags(doctor)
    leave_to_help_all(doctor, HOW_TO_ASK, *NODE_FLAGS)


def _doctor(args: argparse.Namespace) -> int:
    """Examine the agent of --url, or this node. Raises UsageError and FatalError."""
    return asyncio.run(until_stopped(_examine(node_maps(args, LOOK_SECONDS, watch_allocations=True), args)))


async def _examine(stream: NodeMapStream, args: argparse.Namespace) -> int:
    """Print what works and what does not. Returns 1 if something required fails."""
    take_any_text()
    async with contextlib.aclosing(stream):
        maps = await anext(stream)
    if isinstance(maps, FatalError):
        raise maps
    (node,) = maps.maps
    if args.output == "table":
        text = doctor_table(node, Shape(headers=not args.no_headers, screen=screen_of_stdout()))
    else:
        text = json.dumps(doctor_values(maps), indent=2, ensure_ascii=False) + "\n"
    print(end=text, flush=True)
    warn_if_stale(maps)
    return 0 if works(doctor_checks(node)) else 1


# --- its lines --------------------------------------------------------------------------------------------------------


class Check(NamedTuple):
    """A line of `gpumap doctor`. `required`: gpumap cannot work without it. `seen` is what works."""

    check: str
    state: str
    seen: str = ""
    why: str | None = None
    remedy: str | None = None
    required: bool = False

    @property
    def is_broken(self) -> bool:
        return self.required and self.state not in ("ok", "degraded")

    @property
    def details(self) -> str:
        text = " – ".join(phrase for phrase in (self.seen, self.why) if phrase)
        return f"{text} → {self.remedy}".strip() if self.remedy else text


def doctor_checks(node: Node) -> list[Check]:
    """Return the lines of a node. Without current data, what is required has failed, and nothing else is known."""
    checks = [*_source_checks(node), *_capability_checks(node)]
    if node.stale:
        return [
            Check(check.check, "failed" if check.required else "unknown", why=node.stale, required=check.required)
            for check in checks
        ]
    if node.missing_gpus is None:
        checks.append(Check("pci", "unknown", why=node.missing_gpus_reason or "the agent does not report it"))
    return [*checks, *_gpu_checks(node), *_setup_checks(node)]


def works(checks: Sequence[Check]) -> bool:
    """Return whether everything that is required works."""
    return not any(check.is_broken for check in checks)


def doctor_values(maps: NodeMaps) -> dict[str, object]:
    """Return the lines of a node for scripts."""
    (node,) = maps.maps
    checks = doctor_checks(node)
    return values_of(
        maps,
        ok=works(checks),
        checks=[check._asdict() for check in checks],
        unjudged_sentences=list(node.unjudged_sentences),
    )


def doctor_table(node: Node, shape: Shape) -> str:
    """Return a line for each check, what gpumap cannot judge, and whether everything works that is required."""
    checks = doctor_checks(node)
    if shape.screen.columns is not None:
        checks = sorted(checks, key=lambda check: STATES.index(check.state))
    unjudged = () if node.stale else node.unjudged_sentences
    return join_blocks(
        [
            table(_COLUMNS, checks, replace(shape, wide=False)),
            notes(unjudged, shape.screen),
            notes([_summary(checks)], shape.screen, "bold"),
        ]
    )


_COLUMNS = (
    Column[Check]("CHECK", lambda check: check.check),
    Column[Check](
        "STATE",
        lambda check: check.state,
        colour=lambda check: "red" if check.is_broken else _COLOURS.get(check.state, ""),
    ),
    Column[Check]("DETAILS", lambda check: check.details, sentence=True),
)


# --- sources and capabilities -----------------------------------------------------------------------------------------


def _source_checks(node: Node) -> Iterator[Check]:
    reported = {source.source: source for source in node.sources}
    required = ["kubelet", "nvml"] if has_kubelet(node) else ["nvml"]
    untried = SourceHealth("")
    for name in dict.fromkeys([*required, *reported]):
        source = reported.get(name) or untried
        reason, is_required = source.reason, name in required
        why = f"{reason}: {source.detail}" if reason and source.detail else reason
        if source.up:
            check = Check(name, "degraded" if reason else "ok", "read", why or None, source.remedy, is_required)
        else:
            state = "missing" if not reason or reason.endswith(_NOT_PRESENT) else "failed"
            check = Check(name, state, "", why or "not read", source.remedy, is_required)
        if name == "kubelet" and source.up:
            check = check._replace(seen=_assigned(node))
        elif name == "nvml" and source.up:
            check = _nvml_check(check, node)
        yield check


def _assigned(node: Node) -> str:
    containers = (container for device in node.devices for container in device.containers if container.holds)
    pods = {holder.pod_name for holder in (*containers, *node.unmatched)}
    offers = [slots for device in node.devices for slots in device.allocatable.values()]
    offered = f"{counted(sum(offers), 'slot')} offered on devices" if offers else "slots offered on devices: unknown"
    return f"{counted(len(pods), 'pod')} with GPUs, {offered}"


def _nvml_check(check: Check, node: Node) -> Check:
    """Add what NVML reports. It fails if no GPU answers."""
    faults = [*(gpu.fault for gpu in node.gpus), *(gpu.fault for gpu in node.nameless_gpus)]
    driver, cuda = (node.driver.driver_version, node.driver.cuda_version) if node.driver else ("", "")
    readable = sum(device.memory is not None or use_known(device) for device in node.devices)
    versions = f"driver {driver or 'unknown'}, CUDA {cuda or 'unknown'}, {counted(len(faults), 'GPU')}"
    check = check._replace(seen=f"{versions}, {counted(readable, 'device')} readable")
    if not faults:
        why = "the driver lists no GPU: the node has none, or the container has no access"
        return check._replace(state="degraded", why=why)
    if reasons := [fault for fault in faults if fault]:
        why = f"{len(reasons)} of {len(faults)} GPUs down ({', '.join(sorted(set(reasons)))})"
        return check._replace(state="failed" if all(faults) else "degraded", why=why)
    return check


def _capability_checks(node: Node) -> Iterator[Check]:
    """Return the capabilities. What depends on the GPUs is unknown while no GPU answers."""
    identity = next((source for source in node.sources if source.source == Source.POD_IDENTITY), SourceHealth(""))
    silent = [gpu.index for gpu in node.gpus if gpu.up and not gpu.partitioned and gpu.samples_from is None]
    for name, is_present in node.capabilities.items():
        why, remedy = "", node.remedies.get(name)
        if name == "pid_visibility":
            why = node.pid_visibility_reason
        elif not is_present and name in _IDENTITY_REASONS and identity.reason.startswith(_IDENTITY_REASONS[name]):
            why, remedy = f"{identity.reason}: {identity.detail}", identity.remedy
        elif name == "process_utilization" and silent:
            why = f"the driver does not report SM time on GPU {', '.join(map(str, silent))}"
        if is_present and why and name == "process_utilization":
            yield Check(name, "degraded", "present", why, remedies.CAPABILITIES[name])
        elif is_present:
            yield Check(name, "ok", why or "present")
        elif remedy:
            yield Check(name, "missing", "", why or None, remedy)
        else:
            yield Check(name, "unknown", "", why or "no GPU answers")


# --- findings ---------------------------------------------------------------------------------------------------------


def _gpu_checks(node: Node) -> Iterator[Check]:
    """Return a line for each GPU with a fault, with its worst one, and for each that is not offered."""
    gpus = {gpu.uuid: gpu for gpu in node.gpus}
    for finding in findings_of_gpus(node.findings):
        condition, gpu = condition_of(finding), gpus.get(Uuid(finding.uuid or ""))
        name = "gpu/<index>" if condition == "down" else f"gpu/<index>/{condition}"
        identity = " ".join(filter(None, (gpu.uuid, gpu.pci_bus_id, gpu.model))) if gpu else ""
        check = name.replace("<index>", str(gpu.index) if gpu else "?")
        yield Check(check, GPU_CHECKS[name], identity, f"{finding.reason}: {finding.why}", finding.remedy)


def _setup_checks(node: Node) -> Iterator[Check]:
    """Return a line for each problem that the set-up of gpumap, a device plugin or Slurm causes."""
    findings = [
        finding
        for finding in node.findings or ()
        if finding.finding == "unmatched" or finding.reason == "admin_access_unknown"
    ]
    for (kind, reason), group in grouped(((entry.finding, entry.reason), entry) for entry in findings).items():
        name = f"unmatched_slots/{reason}" if kind == "unmatched" else "dra_claims"
        pods = listed(sorted({"/".join(finding.name.pod_name) for finding in group}))
        yield Check(name, "degraded", counted(len(group), "finding"), f"{reason}: {pods}", group[0].remedy)
    processes = (process for device in node.devices for process in device.processes)
    units = {process.pid: process.work.name for process in processes if process.work and is_slurm_daemon(process.work)}
    if units:
        why = f"{listed(sorted(set(units.values())))}: PID {listed([*map(str, sorted(units))])} in no job's cgroup"
        yield Check("slurm", "degraded", counted(len(units), "process", "processes"), why, remedies.NO_JOB_CGROUP)


# --- below the table --------------------------------------------------------------------------------------------------


def _summary(checks: Sequence[Check]) -> str:
    """Return the GPUs that fail, whether everything works that is required, and the page that has more.

    A GPU that fails does not change the exit code.
    """
    gpus = [check for check in checks if check.state == "failed" and check.check.startswith("gpu/")]
    broken = [check.check for check in checks if check.is_broken]
    named = {*broken, *(check.check for check in gpus)}
    worse = [check.check for check in checks if check.state not in ("ok", "unknown") and check.check not in named]
    sentences = [f"GPU {check.check.split('/')[1]} fails: {check.why}." for check in gpus]
    if broken:
        do, are = ("does", "is") if len(broken) == 1 else ("do", "are")
        sentences.append(f"{' and '.join(broken)} {do} not work, but {are} required.")
    else:
        sentences.append("gpumap has all that it requires." + (f" Check also: {', '.join(worse)}." if worse else ""))
    return " ".join([*sentences, _GUIDE] if named or worse else sentences)
