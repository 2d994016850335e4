"""Reads and checks the files of a frame. Pure: bytes in, values out, ValueError.

`answers` reads the answers of the kubelet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct, structs

from gpumap.agent.nvml_worker import wire
from gpumap.lab.capture import answers
from gpumap.lab.decoding import decode_json, matching
from gpumap.lab.node_files import parents
from gpumap.model import remedies
from gpumap.model.observations import NvmlReading, PciFunction
from gpumap.model.readings import GpuReading, Listening, XidError

LIST, ALLOCATABLE = "kubelet/list", "kubelet/allocatable"
PODS = "pods_api.json"
"""Pods of the Pods API, of the whole capture. Optional; a recording has none."""
SOCKET = "kubelet/socket"
"""Counts the kubelet's starts; without it, 1."""
CHECKPOINT = "kubelet_internal_checkpoint"
DRA_STATE = "dra_manager_state"
DRA_CHECKPOINT = "dra_checkpoint.json"
"""NVIDIA's DRA driver's `plugins/gpu.nvidia.com/checkpoint.json`. Both files are optional."""
LOG_TREE = "log.tree"
NVML = "nvml.json"
PCI = "pci.json"
"""GPUs of NVIDIA's on PCI. Optional."""
DOWN = "down.json"
OWN_CGROUP = "own/cgroup"
OWN_PID_IN_TREE = "own/pid_in_tree"
"""gpumap ran on the bare host: its own PID is in the process tree."""
_SOURCES = "kubelet|checkpoint|pod_logs|gpu_fractioning|procfs"
Source = Annotated[str, matching(_SOURCES, f"one of {_SOURCES}")]
"""The sources that can be down by `down.json`; NVML's errors are in `nvml.json`, in the worker's words."""

NAME_BYTES_MAX = 255
"""Linux's limit (NAME_MAX)."""

MAX_XIDS = 10_000
"""Of one reading."""

MAX_FUNCTIONS = 1024
_DRIVERS = ("", "nvidia", "nouveau", "vfio-pci")
"""Of GPUs on PCI. A capture names no others."""

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
    | {wire.word(code) for code in range(1000)}
)
"""gpumap's words for the reasons why a source or a GPU is down, among them a gRPC status and NVML's codes."""


class Down(Struct, frozen=True):
    """Why a source is down: one of `REASONS`, and the source's own message."""

    reason: str
    detail: str = ""


class LogEntry(NamedTuple):
    """A name below the log root: `kind` is d, f or l; `target` is a link's."""

    kind: str
    mode: str
    path: str
    target: str = ""


# --- in ---------------------------------------------------------------------------------------------------------------


def check(
    files: Mapping[str, bytes], last_files: Mapping[str, bytes] | None = None, *, has_kubelet: bool = True
) -> None:
    """Read the values of a frame. Raises ValueError with the name of the file if it cannot be played.

    Parts that are the same as in `last_files`, those of the frame before, were checked there.
    """

    def is_new(*names: str) -> bool:
        return last_files is None or any(files.get(name) is not last_files.get(name) for name in names)

    if is_new(NVML):
        reading(files)
    if is_new(LOG_TREE):
        log_entries(files)
    if is_new(PCI):
        pci_functions(files)
    missing_sources = down(files)
    listed = [f"{LIST}.pb", f"{LIST}.json"]
    is_asked = has_kubelet and "kubelet" not in missing_sources
    if is_asked and not any(name in files for name in listed):
        raise ValueError(f"no {LIST}.pb or {LIST}.json, and {DOWN} does not say that the kubelet is down")
    if is_new(*listed, DOWN) and is_asked:
        answers.answer(files, LIST)
    if is_new(f"{ALLOCATABLE}.pb", f"{ALLOCATABLE}.json"):
        answers.answer(files, ALLOCATABLE)
    if PODS in files and is_new(PODS):
        answers.pods(files[PODS])
    starts(files)
    if "procfs" not in missing_sources and OWN_CGROUP not in files:
        raise ValueError(f"no {OWN_CGROUP}, and {DOWN} does not say that procfs is down")


class _NvmlFile(Struct, frozen=True):
    """`nvml.json`: a reading, or the error in its place."""

    driver_version: str = ""
    cuda_version: str = ""
    nvml_version: str = ""
    gpus: Annotated[tuple[GpuReading, ...], Meta(max_length=wire.MAX_GPUS)] | None = None
    xids: Annotated[tuple[XidError, ...], Meta(max_length=MAX_XIDS)] = ()
    listening: Annotated[tuple[Listening, ...], Meta(max_length=wire.MAX_GPUS)] = ()
    error: Down | None = None

    def __post_init__(self) -> None:
        for number, period in enumerate(self.listening):
            if period.since_seconds < period.until_seconds:
                raise ValueError(f"listening[{number}] ends before it begins")


def reading(files: Mapping[str, bytes]) -> NvmlReading | Down:
    """NVML's reading, or the error in its place."""
    if NVML not in files:
        raise ValueError(f"no {NVML}")
    file = decode_json(files[NVML], _NvmlFile, NVML)
    if file.error is not None:
        return file.error
    if file.gpus is None:
        raise ValueError(f'{NVML}: "gpus" is missing')
    if [gpu.index for gpu in file.gpus] != list(range(len(file.gpus))):
        raise ValueError(f"{NVML}: the GPUs' indices are not 0, 1, …")
    return NvmlReading(file.driver_version, file.cuda_version, file.nvml_version, file.gpus, file.xids, file.listening)


class _PciFile(Struct, frozen=True):
    functions: Annotated[tuple[PciFunction, ...], Meta(max_length=MAX_FUNCTIONS)]


def pci_functions(files: Mapping[str, bytes]) -> tuple[PciFunction, ...] | None:
    """Return the GPUs on PCI; `None` if they are not known."""
    if PCI not in files:
        return None
    return decode_json(files[PCI], _PciFile, PCI).functions


def down(files: Mapping[str, bytes]) -> dict[str, Down]:
    """Return which sources were down, with the reasons."""
    return decode_json(files[DOWN], dict[Source, Down], DOWN) if DOWN in files else {}


def starts(files: Mapping[str, bytes]) -> int:
    """Return how often the kubelet had made its socket, including this time."""
    text = files.get(SOCKET, b"1").strip()
    if re.fullmatch(rb"[0-9]{1,9}", text) is None:
        raise ValueError(f"{SOCKET}: is not a number")
    return int(text)


def log_entries(files: Mapping[str, bytes]) -> tuple[LogEntry, ...] | None:
    """Return the names below the log root, a folder before its content; `None` without a `log.tree`.

    No line can leave the log root: links are only in `containers`, and nothing is below them.
    """
    if LOG_TREE not in files:
        return None
    entries = []
    for number, line in enumerate(files[LOG_TREE].decode(errors="replace").splitlines(), 1):
        try:
            entries.append(_log_entry(line))
        except ValueError as error:
            raise ValueError(f"{LOG_TREE}:{number}: {error}") from error
    if len({entry.path for entry in entries}) < len(entries):
        raise ValueError(f"{LOG_TREE}: a name exists twice")
    plain_files = {entry.path for entry in entries if entry.kind == "f"}
    if any(parent in plain_files for entry in entries for parent in parents(entry.path)):
        raise ValueError(f"{LOG_TREE}: a name is below a file")
    return tuple(sorted(entries, key=lambda entry: entry.path.split("/")))


def _log_entry(line: str) -> LogEntry:
    """A line is kind, mode, path, size, "->" and a link's target."""
    kind, mode, path, _, _, target, *_ = [*line.split(" "), "", "", "", "", ""]
    steps = path.removeprefix(_LOG_ROOT).split("/")
    is_plain = "\0" not in line and not any(step in ("", ".", "..") for step in steps)
    is_log_path = path.startswith(_LOG_ROOT) and len(steps) <= 4 and is_plain
    if kind not in ("d", "f", "l") or re.fullmatch("[0-7]{3,4}", mode) is None or not is_log_path:
        raise ValueError(f"is no name below {_LOG_ROOT}")
    if not is_short(path) or not is_short(target):
        raise ValueError(f"a name is longer than {NAME_BYTES_MAX} bytes")
    may_link = path.startswith(_LINKS) and "/" not in path.removeprefix(_LINKS) and ".." not in target.split("/")
    if (kind == "l") != bool(target) or (kind == "l" and not (may_link and _LINK_TARGET.fullmatch(target))):
        raise ValueError(f"is no link of {_LINKS} to a log below /var/log/pods")
    if kind != "l" and path.startswith(_LINKS):
        raise ValueError(f"{_LINKS} has only links")
    return LogEntry(kind, mode, path, target)


def is_short(path: str) -> bool:
    """Return whether every name of a path is valid. With at most four of them, the path is valid, too."""
    return all(len(step.encode(errors="surrogatepass")) <= NAME_BYTES_MAX for step in path.split("/"))


# --- out --------------------------------------------------------------------------------------------------------------


def reading_text(answer: NvmlReading | Down) -> bytes:
    """Return `nvml.json`: one line for each GPU, XID event and listening period."""
    if isinstance(answer, Down):
        return json.dumps({"error": {"code": 0, "reason": answer.reason, "detail": answer.detail}}).encode() + b"\n"
    versions = {name: getattr(answer, name) for name in ("driver_version", "cuda_version", "nvml_version")}
    head = json.dumps(versions).removesuffix("}")
    # The time of samples differs by microseconds. It matters only if they cover nothing new.
    gpus = (gpu if gpu.sampled_seconds == 0 else structs.replace(gpu, sampled_seconds=None) for gpu in answer.gpus)
    parts = [_rows_text("gpus", map(msgspec.to_builtins, gpus))]
    if answer.xids:
        xids = (xid._replace(age_seconds=round(xid.age_seconds, 6)) for xid in answer.xids)
        parts.append(_rows_text("xids", xids))
    if answer.listening:
        listening = ((uuid, round(since, 6), round(until, 6)) for uuid, since, until in answer.listening)
        parts.append(_rows_text("listening", listening))
    return ",\n".join([head, *parts]).encode() + b"}\n"


def _rows_text(name: str, rows: Iterable[object]) -> str:
    lines = ",\n".join(f"  {json.dumps(row, separators=(',', ':'))}" for row in rows)
    return f' "{name}": [\n{lines}\n]'


def pci_text(functions: Iterable[PciFunction]) -> bytes:
    """Return `pci.json`: one line for each function."""
    rows = (
        function._replace(driver=_driver(function.driver), driver_override=_driver(function.driver_override))
        for function in functions
    )
    return f"{{{_rows_text('functions', rows)}}}\n".encode()


def _driver(name: str) -> str:
    return name if name in _DRIVERS else "other"


def down_text(reasons: Mapping[str, Down]) -> bytes:
    plain = {name: msgspec.structs.asdict(why) for name, why in sorted(reasons.items())}
    return json.dumps(plain, indent=1).encode() + b"\n"


def log_text(entries: Iterable[LogEntry]) -> bytes:
    lines = (f"{entry.kind} {entry.mode} {entry.path} 0 -> {entry.target}".encode() for entry in entries)
    return b"".join(line + b"\n" for line in lines)
