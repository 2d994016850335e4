"""The faults of a node as one short line: what `gpumap check` and /api/v1/check answer. Pure.

A problem is a finding that lasts until now. What no source reports is unknown, never well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal, NamedTuple

from gpumap.model import remedies
from gpumap.model.findings import condition_of
from gpumap.model.node import Finding, Gpu, Node
from gpumap.model.shown import counted, printable
from gpumap.model.terms import GPU_CONDITIONS, Source

LINE_BYTES = 80
"""node-problem-detector cuts a longer line (max_output_length)."""
HUNG_SECONDS = 60.0
"""A driver under load may not answer for 45 s (NVSentinel #1574). Only then is it evidence that the GPU hangs."""


class Verdict(NamedTuple):
    """The exit code of `gpumap check` (0: well, 1: problem, 2: unknown) and its line, in ASCII."""

    code: Literal[0, 1, 2]
    line: str


def _reports_xids(gpu: Gpu, node: Node) -> bool:
    return bool(node.capabilities.get("xid_events")) and any(one.uuid == gpu.uuid for one in node.xids)


_REPORTED: Mapping[str, Callable[[Gpu, Node], bool]] = {
    "down": lambda gpu, node: True,
    "row_remap_failure": lambda gpu, node: gpu.reading is not None and gpu.reading.row_remap_failure is not None,
    "recovery_action": lambda gpu, node: gpu.recovery_action is not None,
    "ecc_uncorrected": lambda gpu, node: gpu.reading is not None and bool(gpu.reading.ecc_errors),
    "xid": _reports_xids,
    "row_remap_pending": lambda gpu, node: gpu.reading is not None and gpu.reading.row_remap_pending is not None,
}
"""By condition: whether its value is known of a GPU."""


def faults(node: Node) -> list[Finding]:
    """Return the faults of a node's GPUs, in the order of the GPUs."""
    return [one for one in node.findings or () if one.finding == "fault"]


def check(node: Node, only: Collection[str] = ()) -> Verdict:
    """Judge the GPUs by these conditions. By default by all that their driver reports."""
    if node.stale:
        return _line(2, f"no current data: {node.stale}")
    nvml = next((one for one in node.sources if one.source == Source.NVML.value), None)
    if nvml is None or not nvml.up:
        return _line(2, f"NVML does not answer: {nvml.reason if nvml else 'unknown'}")
    count = len(node.gpus) + len(node.nameless_gpus)
    if not count:
        return _line(2, "the driver lists no GPU")
    found = sorted(faults(node), key=lambda one: GPU_CONDITIONS.index(condition_of(one)))
    asked = [one for one in found if not only or condition_of(one) in only]
    proved = [one for one in asked if _is_proved(one, node)]
    if proved:
        others = len({one.uuid for one in proved} - {proved[0].uuid})
        return _line(1, _words(proved[0], node) + (f" (+{counted(others, 'GPU')})" if others else ""))
    unknown = [*(f"{_words(one, node)}" for one in asked), *_unknown(node, only)]
    if unknown:
        return _line(2, unknown[0])
    return _line(0, f"{counted(count, 'GPU')} well" + (f" ({', '.join(only)})" if only else ""))


def _is_proved(fault: Finding, node: Node) -> bool:
    """Return whether a fault is certainly the GPU's. Of some, gpumap or its container may be the cause."""
    if condition_of(fault) != "down":
        return True
    has_hung = fault.reason != "hung" or node.timestamp - fault.since >= HUNG_SECONDS
    return has_hung and fault.reason in remedies.IN_SHORT


def _words(fault: Finding, node: Node) -> str:
    index = next((gpu.index for gpu in node.gpus if gpu.uuid == fault.uuid), None)
    return fault.why if index is None else f"GPU {index} {fault.why}"


def _unknown(node: Node, only: Collection[str]) -> Iterator[str]:
    """Return what was asked for and is not known of a GPU. One that answers without a value does not support it, unless
    no GPU reports it."""
    for name in only:
        reported = any(_REPORTED[name](gpu, node) for gpu in node.gpus)
        for gpu in node.gpus:
            if name != "down" and not gpu.up:
                yield f"GPU {gpu.index}: {name} is unknown: {gpu.fault}"
            elif gpu.up and not reported:
                yield f"GPU {gpu.index}: {name} is not reported (driver, GPU or --collect)"
        if name != "down":
            yield from (f"GPU {one.index}: {name} is unknown: {one.fault}" for one in node.nameless_gpus)


def _line(code: Literal[0, 1, 2], words: str) -> Verdict:
    return Verdict(code, short_line(words))


def short_line(words: str) -> str:
    """Return the words as one line of printable ASCII, cut at `LINE_BYTES`. They may be of another agent's answer."""
    line = " ".join(printable(part) for part in words.encode("ascii", "replace").decode().split())
    return line if len(line) <= LINE_BYTES else f"{line[: LINE_BYTES - 3]}..."
