"""What the files of a frame mean, and which of them can be believed. Pure: bytes in, values out, ValueError.

The answers of the kubelet are the subject of `answers`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from gpumap.agent.nvml_worker import codes, wire
from gpumap.lab.capture import answers
from gpumap.model import remedies
from gpumap.model.observations import NvmlReading
from gpumap.model.readings import GpuReading, Listening, XidError

T = TypeVar("T")

LIST, ALLOCATABLE = "kubelet/list", "kubelet/allocatable"
SOCKET = "kubelet/socket"
"""Counts the kubelet's starts; without it, 1."""
CHECKPOINT = "kubelet_internal_checkpoint"
DRA_STATE = "dra_manager_state"
DRA_CHECKPOINT = "dra_checkpoint.json"
"""NVIDIA's DRA driver's `plugins/gpu.nvidia.com/checkpoint.json`. Neither of the two has to be there."""
LOG_TREE = "log.tree"
NVML = "nvml.json"
DOWN = "down.json"
OWN_CGROUP = "own/cgroup"
OWN_PID_IN_TREE = "own/pid_in_tree"
"""gpumap ran on the bare host: its own PID stands in the process tree."""
SOURCES = ("kubelet", "checkpoint", "pod_logs", "procfs")
"""Who can be down by `down.json`; NVML's errors are in `nvml.json`, in the worker's words."""

NAME_BYTES_MAX = 255
"""Linux's limit (NAME_MAX)."""

MAX_XIDS = 10_000
"""Of one reading."""
_XID_MAX = 2**32 - 1

_LOG_ROOT = "var/log/"
_LINKS = "var/log/containers/"
_LINK_TARGET = re.compile(r"/var/log/pods/[^/\s]+/[^/\s]+/[^/\s]+")


_GRPC = """
    cancelled unknown invalid_argument deadline_exceeded not_found already_exists permission_denied resource_exhausted
    failed_precondition aborted out_of_range unimplemented internal unavailable data_loss unauthenticated
"""
REASONS = frozenset(
    {*_GRPC.split(), "internal_error", *remedies.FAULTS}
    | {reason for of_source in remedies.SOURCES.values() for reason in of_source}
    | {codes.word(code) for code in range(1000)}
)
"""gpumap's own words for why a source, or a GPU, is down: a gRPC status and NVML's codes among them."""


class Down(NamedTuple):
    """Why a source is down: one of `REASONS`, and what the source itself said of it."""

    reason: str
    detail: str


class LogEntry(NamedTuple):
    """A name below the log root: `kind` is d, f or l; `target` is a link's."""

    kind: str
    mode: str
    path: str
    target: str = ""


# --- in ---------------------------------------------------------------------------------------------------------------


def check(files: Mapping[str, bytes], before: Mapping[str, bytes] | None = None) -> None:
    """Raises ValueError where a frame cannot be played, with the name of the file.

    What is the very same as in the frame `before` was checked there.
    """

    def is_new(*names: str) -> bool:
        return before is None or any(files.get(name) is not before.get(name) for name in names)

    if is_new(NVML):
        reading(files)
    if is_new(LOG_TREE):
        log_entries(files)
    missing_sources = down(files)
    listed = [f"{LIST}.pb", f"{LIST}.json"]
    if "kubelet" not in missing_sources and not any(name in files for name in listed):
        raise ValueError(f"no {LIST}.pb or {LIST}.json, and {DOWN} does not say that the kubelet is down")
    if is_new(*listed, DOWN) and "kubelet" not in missing_sources:
        answers.answer(files, LIST)
    if is_new(f"{ALLOCATABLE}.pb", f"{ALLOCATABLE}.json"):
        answers.answer(files, ALLOCATABLE)
    starts(files)
    if "procfs" not in missing_sources and OWN_CGROUP not in files:
        raise ValueError(f"no {OWN_CGROUP}, and {DOWN} does not say that procfs is down")


def reading(files: Mapping[str, bytes]) -> NvmlReading | Down:
    """NVML's reading, or the error in its place."""
    if NVML not in files:
        raise ValueError(f"no {NVML}")
    said = parsed(files[NVML], NVML)
    error = said.get("error")
    try:
        if error is not None:
            text = json.dumps({"read": 0, "error": error}).encode()
            answer = wire.decode(text)
            if not isinstance(answer, wire.ErrorMessage):
                raise ValueError("not an error")
            return Down(answer.reason, answer.detail)
        gpus = said.get("gpus")
        if not isinstance(gpus, list) or len(gpus) > wire.MAX_GPUS:
            raise ValueError("gpus is not a list of GPUs")
        readings = tuple(map(wire.gpu_from_object, gpus))
        if [gpu.index for gpu in readings] != list(range(len(gpus))):
            raise ValueError("the GPUs' indices are not 0, 1, …")
        xids, listening = _xids(said), _listening(said)
    except ValueError as mistake:
        raise ValueError(f"{NVML}: {mistake}") from mistake
    versions = [said.get(name) for name in ("driver_version", "cuda_version", "nvml_version")]
    driver, cuda, nvml = (version if isinstance(version, str) else "" for version in versions)
    return NvmlReading(driver, cuda, nvml, readings, xids, listening)


def _rows(said: Mapping[str, object], name: str, most: int, kind: type[T]) -> tuple[T, ...]:
    """Rows as JSON has them: their numbers are finite."""
    rows = said.get(name, [])
    if isinstance(rows, list) and len(rows) > most:
        raise ValueError(f"{name} has more than {most} rows")
    text = json.dumps(rows, allow_nan=False)
    return tuple(msgspec.json.decode(text, type=list[kind]))  # type: ignore[valid-type] # a type that is a variable


def _xids(said: Mapping[str, object]) -> tuple[XidError, ...]:
    xids = _rows(said, "xids", MAX_XIDS, XidError)
    if not all(0 <= xid.code <= _XID_MAX and xid.times >= 1 for xid in xids):
        raise ValueError("an XID that is none")
    return xids


def _listening(said: Mapping[str, object]) -> tuple[Listening, ...]:
    listening = _rows(said, "listening", wire.MAX_GPUS, Listening)
    if any(heard.since_seconds < heard.until_seconds for heard in listening):
        raise ValueError("listening ends before it begins")
    return listening


def down(files: Mapping[str, bytes]) -> dict[str, Down]:
    """Which sources were down, and why."""
    said = parsed(files[DOWN], DOWN) if DOWN in files else {}
    found: dict[str, Down] = {}
    for name, why in said.items():
        reason, detail = (why.get("reason"), why.get("detail", "")) if isinstance(why, dict) else (None, "")
        if name not in SOURCES or not isinstance(reason, str) or not isinstance(detail, str):
            raise ValueError(f"{DOWN}: {name!r:.40} is not a source with its reason")
        found[name] = Down(reason, detail)
    return found


def starts(files: Mapping[str, bytes]) -> int:
    """How often the kubelet had made its socket anew, this time included."""
    text = files.get(SOCKET, b"1").strip()
    if re.fullmatch(rb"[0-9]{1,9}", text) is None:
        raise ValueError(f"{SOCKET}: is not a number")
    return int(text)


def log_entries(files: Mapping[str, bytes]) -> tuple[LogEntry, ...] | None:
    """The names below the log root, a folder before what is in it; `None` without a `log.tree`.

    A line is kind, mode, path, size, "->" and a link's target. Whatever a line says, it stays below the log root: links
    stand in `containers` alone, where nothing is below them.
    """
    if LOG_TREE not in files:
        return None
    entries = []
    for number, line in enumerate(files[LOG_TREE].decode(errors="replace").splitlines(), 1):
        words = line.split(" ")
        kind, path, target = words[0], words[2] if len(words) > 2 else "", words[5] if len(words) > 5 else ""
        steps = path.removeprefix(_LOG_ROOT).split("/")
        in_root = path.startswith(_LOG_ROOT) and len(steps) <= 4
        mode = words[1] if len(words) > 1 else ""
        is_plain = kind in ("d", "f", "l") and re.fullmatch("[0-7]{3,4}", mode) is not None and "\0" not in line
        if not is_plain or not in_root or any(step in ("", ".", "..") for step in steps):
            raise ValueError(f"{LOG_TREE}:{number}: is no name below {_LOG_ROOT}")
        if not is_short(path) or not is_short(target):
            raise ValueError(f"{LOG_TREE}:{number}: a name is longer than {NAME_BYTES_MAX} bytes")
        if (kind == "l") != bool(target) or (kind == "l" and not _is_link(path, target)):
            raise ValueError(f"{LOG_TREE}:{number}: is no link of {_LINKS} to a log below /var/log/pods")
        if kind != "l" and path.startswith(_LINKS):
            raise ValueError(f"{LOG_TREE}:{number}: {_LINKS} has links alone")
        entries.append(LogEntry(kind, mode, path, target))
    if len({entry.path for entry in entries}) < len(entries):
        raise ValueError(f"{LOG_TREE}: a name stands twice")
    plain_files = {entry.path for entry in entries if entry.kind == "f"}
    if any(parent in plain_files for entry in entries for parent in _parents(entry.path)):
        raise ValueError(f"{LOG_TREE}: a name stands below a file")
    return tuple(sorted(entries, key=lambda entry: entry.path.split("/")))


def is_short(path: str) -> bool:
    """Whether every name of a path can be one; with four of them at most, the path can be too."""
    return all(len(step.encode(errors="surrogatepass")) <= NAME_BYTES_MAX for step in path.split("/"))


def _is_link(path: str, target: str) -> bool:
    below = ".." not in target.split("/") and _LINK_TARGET.fullmatch(target) is not None
    return below and "/" not in path.removeprefix(_LINKS) and path.startswith(_LINKS)


def _parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def parsed(text: bytes, name: str) -> dict[str, object]:
    """A JSON object whose texts can be written out again: JSON can name half a character, which no page can hold."""
    try:
        said: object = json.loads(text)
        json.dumps(said, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise ValueError(f"{name}: is not a JSON object")
    return said


# --- out --------------------------------------------------------------------------------------------------------------


def reading_text(said: NvmlReading | Down) -> bytes:
    """`nvml.json`, a GPU a line, and an XID event or a GPU that was listened to."""
    if isinstance(said, Down):
        return json.dumps({"error": {"code": 0, "reason": said.reason, "detail": said.detail}}).encode() + b"\n"
    versions = {name: getattr(said, name) for name in ("driver_version", "cuda_version", "nvml_version")}
    head = json.dumps(versions).removesuffix("}")
    parts = [_rows_text("gpus", map(wire.gpu_object, map(_plain, said.gpus)))]
    if said.xids:
        xids = (one._replace(age_seconds=round(one.age_seconds, 6)) for one in said.xids)
        parts.append(_rows_text("xids", xids))
    if said.listening:
        listening = ((uuid, round(since, 6), round(until, 6)) for uuid, since, until in said.listening)
        parts.append(_rows_text("listening", listening))
    return ",\n".join([head, *parts]).encode() + b"}\n"


def _plain(gpu: GpuReading) -> GpuReading:
    """As it is told of a GPU that has not changed. How long samples cover differs by microseconds, and only where they
    cover nothing new is it something else than the time between two frames."""
    return gpu if gpu.sampled_seconds == 0 else gpu._replace(sampled_seconds=None)


def _rows_text(name: str, rows: Iterable[object]) -> str:
    lines = ",\n".join(f"  {json.dumps(row, separators=(',', ':'))}" for row in rows)
    return f' "{name}": [\n{lines}\n]'


def down_text(said: Mapping[str, Down]) -> bytes:
    return json.dumps({name: why._asdict() for name, why in sorted(said.items())}, indent=1).encode() + b"\n"


def log_text(entries: Iterable[LogEntry]) -> bytes:
    lines = (f"{entry.kind} {entry.mode} {entry.path} 0 -> {entry.target}".encode() for entry in entries)
    return b"".join(line + b"\n" for line in lines)
