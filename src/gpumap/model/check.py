"""The faults of a node as one short line: what `gpumap check` and /api/v1/check answer. Pure.

A problem is a finding that lasts until now. What no source reports is unknown, never well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal, NamedTuple

from gpumap.model import remedies
from gpumap.model.findings import condition_of
from gpumap.model.formatting import counted, printable
from gpumap.model.node import Finding, Gpu, Node, Unjudged
from gpumap.model.terms import GPU_CONDITIONS, GPU_FINDINGS, Source

LINE_BYTES = 80
"""node-problem-detector cuts a longer line (max_output_length)."""
HUNG_SECONDS = 60.0
"""A driver under load may not answer for 45 s (NVSentinel #1574). Only then is it evidence that the GPU hangs."""


class Verdict(NamedTuple):
    """The exit code of `gpumap check` (0: well, 1: problem, 2: unknown) and its line, in ASCII."""

    code: Literal[0, 1, 2]
    line: str


_REPORTED: Mapping[str, Callable[[Gpu, Node], bool]] = {
    "down": lambda gpu, node: True,
    "row_remap_failure": lambda gpu, node: gpu.reading is not None and gpu.reading.row_remap_failure is not None,
    "recovery_action": lambda gpu, node: gpu.recovery_action is not None,
    "ecc_uncorrected": lambda gpu, node: gpu.reading is not None and bool(gpu.reading.ecc_errors),
    "xid": lambda gpu, node: (
        bool(node.capabilities.get("xid_events")) and any(xids.uuid == gpu.uuid for xids in node.xids)
    ),
    "row_remap_pending": lambda gpu, node: gpu.reading is not None and gpu.reading.row_remap_pending is not None,
}
"""By condition: whether its value is known of a GPU."""


def check(node: Node, only: Collection[str] = ()) -> Verdict:
    """Judge the GPUs by these conditions. By default by all that their driver reports."""
    if node.stale:
        return _line(2, f"no current data: {node.stale}")
    nvml = next((source for source in node.sources if source.source == Source.NVML.value), None)
    if nvml is None or not nvml.up:
        return _line(2, f"NVML does not answer: {nvml.reason if nvml else 'unknown'}")
    count = len(node.gpus) + len(node.nameless_gpus)
    if not count:
        return _line(2, "the driver lists no GPU")
    faults = [finding for finding in node.findings or () if finding.finding in GPU_FINDINGS]
    faults = [fault for fault in faults if condition_of(fault) in (only or GPU_CONDITIONS[:-1])]
    proved = [fault for fault in faults if _is_proved(fault, node)]
    if proved:
        gpus = {fault.uuid or fault.reason: 1.0 if fault.uuid else fault.gpus or 0.0 for fault in proved}
        other_gpus = round(sum(gpus.values()) - gpus[proved[0].uuid or proved[0].reason])
        return _line(1, _what_to_do(proved[0], node), f" (+{counted(other_gpus, 'GPU')})" if other_gpus else "")
    unknown = [*(_what_to_do(fault, node) for fault in faults), *_unknown(node, only)]
    if unknown:
        return _line(2, unknown[0])
    not_offered = sum(finding.finding == "not_offered" for finding in node.findings or ()) if not only else 0
    words = f"{counted(count, 'GPU')} well" + (f", {not_offered} not offered" if not_offered else "")
    return _line(0, words + (f" ({', '.join(only)})" if only else ""))


def _is_proved(fault: Finding, node: Node) -> bool:
    """Return whether a fault is certainly the GPU's. Of some, gpumap or its container may be the cause."""
    if condition_of(fault) != "down":
        return True
    has_hung = fault.reason != "hung" or node.timestamp - fault.since >= HUNG_SECONDS
    return has_hung and fault.reason in remedies.IN_SHORT


def _what_to_do(fault: Finding, node: Node) -> str:
    """Return what is wrong with which GPU, and in short what to do."""
    problem, separator, other_reasons = fault_of_gpu(fault, node).partition("; also ")
    action = remedies.IN_SHORT.get(fault.reason.removeprefix("recovery_"), "").partition(": ")[2]
    return f"{problem}{action and f': {action}'}{separator}{other_reasons}"


def fault_of_gpu(fault: Finding, node: Node) -> str:
    """Return what is wrong with which GPU. GPUs without a uuid are named by the `why` of their faults."""
    return f"{gpu_name(fault, node)} {fault.why}" if fault.uuid else fault.why


def gpu_name(entry: Finding | Unjudged, node: Node) -> str:
    index = next((gpu.index for gpu in node.gpus if gpu.uuid == entry.uuid), None)
    return "A GPU" if index is None else f"GPU {index}"


def _unknown(node: Node, only: Collection[str]) -> Iterator[str]:
    """Return what was asked for and is not known of a GPU. One that answers without a value does not support it, unless
    no GPU reports it."""
    for name in only:
        if name == "not_offered":
            entries = (entry for entry in node.unjudged if name in entry.findings)
            yield from (f"{gpu_name(entry, node)}: {name} is unknown: {entry.reason}" for entry in entries)
            continue
        reported = any(_REPORTED[name](gpu, node) for gpu in node.gpus)
        for gpu in node.gpus:
            if name != "down" and not gpu.up:
                yield f"GPU {gpu.index}: {name} is unknown: {gpu.fault}"
            elif gpu.up and not reported:
                yield f"GPU {gpu.index}: {name} is not reported (driver, GPU or --collect)"
        if name != "down":
            yield from (f"GPU {gpu.index}: {name} is unknown: {gpu.fault}" for gpu in node.nameless_gpus)


def _line(code: Literal[0, 1, 2], words: str, end: str = "") -> Verdict:
    return Verdict(code, short_line(words, LINE_BYTES - len(end)) + end)


def short_line(words: str, max_bytes: int = LINE_BYTES) -> str:
    """Return the words as one line of printable ASCII, cut at so many bytes. They may be of another agent's answer."""
    line = " ".join(printable(word) for word in words.encode("ascii", "replace").decode().split())
    return line if len(line) <= max_bytes else f"{line[: max_bytes - 3]}..."
