"""Whether the GPUs of a node work, as one short line: what `gpumap check` and /api/v1/check answer. Pure.

A problem needs positive evidence that lasts until now. What no source reports is unknown, never well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Literal, NamedTuple

from gpumap.model import remedies
from gpumap.model.node import Gpu, Node
from gpumap.model.shown import counted, printable
from gpumap.model.terms import GPU_CONDITIONS, Source

LINE_BYTES = 80
"""node-problem-detector cuts a longer line (max_output_length)."""
RECENT_SECONDS = 3600.0
"""An error without a lasting state, such as an XID error, is a problem for so long."""
HUNG_SECONDS = 60.0
"""A driver under load may not answer for 45 s (NVSentinel #1574). Only then is it evidence that the GPU hangs."""
FATAL_XIDS = frozenset({46, 48, 54, 62, 63, 64, 74, 79, 95, 110, 119, 120, 136, 140, 142, 143, 151, 155, 156, 158})
"""Those that EKS's node monitoring agent 1.7 counts as fatal, without 109, which NVIDIA's device plugin counts as an
error of the application."""


class Verdict(NamedTuple):
    """The exit code of `gpumap check` (0: well, 1: problem, 2: unknown) and its line, in ASCII."""

    code: Literal[0, 1, 2]
    line: str


class _Judgement(NamedTuple):
    """Of one GPU and one condition. Neither: the GPU is well."""

    problem: str = ""
    unknown: str = ""


_HEALTHY = _Judgement()
_NOT_REPORTED = _Judgement(unknown="is not reported (driver, GPU or --collect)")


class Condition(NamedTuple):
    """A kind of problem of a GPU."""

    name: str
    judge: Callable[[Gpu, Node], _Judgement]


def _down(gpu: Gpu, node: Node) -> _Judgement:
    hangs = gpu.last_success is not None and node.timestamp - gpu.last_success >= HUNG_SECONDS
    return _of_fault(gpu.fault, hangs=hangs)


def _of_fault(fault: str | None, *, hangs: bool) -> _Judgement:
    """`hangs`: it has not answered for long. Of other faults, gpumap or its container may be the cause."""
    if fault is None:
        return _HEALTHY
    words = remedies.IN_SHORT.get(fault, "") if fault != "hung" or hangs else ""
    return _Judgement(problem=words) if words else _Judgement(unknown=f"cannot be read: {fault}")


def _recovery_action(gpu: Gpu, _: Node) -> _Judgement:
    action = gpu.recovery_action
    if action is None:
        return _NOT_REPORTED
    return _HEALTHY if action == "none" else _Judgement(remedies.IN_SHORT.get(action, f"needs recovery: {action[:20]}"))


def _row_remap_failure(gpu: Gpu, _: Node) -> _Judgement:
    return _of_flag("row_remap_failure", gpu.reading.row_remap_failure if gpu.reading else None)


def _row_remap_pending(gpu: Gpu, _: Node) -> _Judgement:
    return _of_flag("row_remap_pending", gpu.reading.row_remap_pending if gpu.reading else None)


def _of_flag(name: str, flag: bool | None) -> _Judgement:
    if flag is None:
        return _NOT_REPORTED
    return _Judgement(remedies.IN_SHORT[name]) if flag else _HEALTHY


def _ecc_uncorrected(gpu: Gpu, node: Node) -> _Judgement:
    if gpu.reading is None or not gpu.reading.ecc_errors:
        return _NOT_REPORTED
    return _Judgement(remedies.IN_SHORT["ecc_uncorrected"]) if _recent(gpu.ecc_uncorrected_at, node) else _HEALTHY


def _xid(gpu: Gpu, node: Node) -> _Judgement:
    xids = next((one for one in node.xids if one.uuid == gpu.uuid), None)
    codes = [one for one, at in xids.last_at.items() if one in FATAL_XIDS and _recent(at, node)] if xids else []
    if codes:
        return _Judgement(f"had XID {codes[0]}: {remedies.IN_SHORT['xid']}")
    listens = xids is not None and node.capabilities.get("xid_events")
    return _HEALTHY if listens else _NOT_REPORTED


def _recent(moment: float | None, node: Node) -> bool:
    return moment is not None and node.timestamp - moment < RECENT_SECONDS


_JUDGES = (_down, _row_remap_failure, _recovery_action, _ecc_uncorrected, _xid, _row_remap_pending)
CONDITIONS = tuple(Condition(name, judge) for name, judge in zip(GPU_CONDITIONS, _JUDGES, strict=True))


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
    asked = [one for one in CONDITIONS if not only or one.name in only]
    problems, unknown = [], []
    for condition in asked:
        for index, found in _judgements(condition, node, optional=not only):
            if found.problem:
                problems.append((index, found.problem))
            elif found.unknown:
                unknown.append(f"GPU {index}: {condition.name} {found.unknown}")
    if problems:
        index, words = problems[0]
        others = len({one for one, _ in problems}) - 1
        return _line(1, f"GPU {index} {words}" + (f" (+{counted(others, 'GPU')})" if others else ""))
    if unknown:
        return _line(2, unknown[0])
    return _line(0, f"{counted(count, 'GPU')} well" + (f" ({', '.join(only)})" if only else ""))


def _judgements(condition: Condition, node: Node, *, optional: bool) -> Iterator[tuple[int, _Judgement]]:
    """Judge each GPU by one condition. `optional`: what no GPU reports is no question either.

    A GPU that answers without the value does not support it, unless no GPU reports it.
    """
    if condition.judge is _down:
        for nameless in node.nameless_gpus:
            yield nameless.index, _of_fault(nameless.fault, hangs=False)
        yield from ((gpu.index, _down(gpu, node)) for gpu in node.gpus)
        return
    found = [(gpu, condition.judge(gpu, node)) for gpu in node.gpus]
    reported = any(not one.unknown for _, one in found)
    for gpu, one in found:
        if one.problem:
            yield gpu.index, one
        elif not gpu.up and not optional:
            yield gpu.index, _Judgement(unknown=f"is unknown: {gpu.fault}")
        elif gpu.up and not (one.unknown and (optional or reported)):
            yield gpu.index, one
    if not optional:
        yield from ((one.index, _Judgement(unknown=f"is unknown: {one.fault}")) for one in node.nameless_gpus)


def _line(code: Literal[0, 1, 2], words: str) -> Verdict:
    return Verdict(code, short_line(words))


def short_line(words: str) -> str:
    """Return the words as one line of printable ASCII, cut at `LINE_BYTES`. They may be of another agent's answer."""
    line = " ".join(printable(part) for part in words.encode("ascii", "replace").decode().split())
    return line if len(line) <= LINE_BYTES else f"{line[: LINE_BYTES - 3]}..."
