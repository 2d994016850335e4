"""What people pass on: captures of other machines."""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Iterator

from gpumap.agent.sources import checkpoint
from gpumap.lab import node as captured_node
from gpumap.lab.capture import contents, replay
from gpumap.lab.capture import format as on_disk
from gpumap.lab.capture.anonymize import anonymize
from gpumap.lab.capture.checkpoints import SHARING_FOLDER
from gpumap.lab.capture.limits import refused
from gpumap.lab.capture.pseudonyms import Pseudonyms
from gpumap.lab.capture.recorders import _BARE, RecordingIdentity
from gpumap.lab.capture.run import KEY_BYTES
from gpumap.lab.node import files_of
from gpumap.lab.node_files import NodeFiles
from gpumap.model.errors import FatalError, UsageError
from gpumap.model.observations import SourceError
from tests import laws
from tests.exposed import Page
from tests.fuzz import corpus
from tests.fuzz.folders import folder, lay_out
from tests.fuzz.mutators import Mutate, mutate_json, mutate_protobuf, mutate_text, of_files, pack, unpack
from tests.fuzz.target import Target
from tests.golden import captures
from tests.nodes import RULES


def _load(data: bytes) -> on_disk.Capture:
    with folder() as place:
        lay_out(unpack(data), place / "capture")
        (place / "capture").mkdir(exist_ok=True)
        return on_disk.load(place / "capture")


def _read_capture(data: bytes) -> object:
    """The folder of a capture from a bug report, and the same without names. Raises UsageError of one line."""
    capture = _load(data)
    anonymous = anonymize(capture, Pseudonyms(b"k" * KEY_BYTES))
    assert anonymous.size_bytes <= 4 * capture.size_bytes + 100_000, "the anonymous capture is much larger"
    return capture, anonymous


def _replay(data: bytes) -> object:
    """The same, played to a whole agent: real sources, a gRPC server and a worker process. The page is valid.

    Raises UsageError, and FatalError.
    """
    capture = _load(data)
    page = asyncio.run(replay.page(capture))
    shown = Page(page.decode())
    found = [*laws.inconsistent(shown)]
    assert not found, "\n".join(found)
    failed = shown.by("gpumap_source_errors_total", "source", reason="internal_error")
    assert not failed, f"a source failed in a way that it does not declare: {failed}"
    return page


def _capture_seeds(bytes_max: int) -> Iterator[bytes]:
    for found in captures():
        files = {str(path.relative_to(found)): path for path in sorted(found.rglob("*")) if path.is_file()}
        content = {name: path.read_bytes() for name, path in files.items() if not name.endswith(".prom")}
        if sum(map(len, content.values())) <= bytes_max:
            yield pack(content)


def _kind(path: str) -> Mutate | None:
    if path.endswith(".pb"):
        return mutate_protobuf
    if path.endswith((".json", "kubelet_internal_checkpoint", "dra_manager_state")):
        return mutate_json
    return mutate_text


def _record(data: bytes) -> object:
    """The files of a node that `gpumap record` copies. What it keeps of any of them can be read back. Raises
    SourceError."""
    files = unpack(data)
    with folder() as place:
        try:
            NodeFiles(place).show(files_of({contents.NVML: b"", contents.OWN_CGROUP: b"0::/\n", **files}))
        except (ValueError, OSError):
            raise UsageError("not the files of a node") from None
        identity = RecordingIdentity(
            (place / captured_node.CHECKPOINT,),
            place / captured_node.LOGS,
            (place / captured_node.DRA_STATE, place / captured_node.DRA_CHECKPOINT),
            RULES.is_gpu_resource,
            place / SHARING_FOLDER,
        )
        identity.read()
        kept: dict[str, bytes] = {}
        for one in identity.recorded.values():
            kept |= one if isinstance(one, dict) else {}
        for path in files:
            name = path.rpartition("/")[2]
            if path.startswith("proc/") and name in _BARE:
                kept[path] = _BARE[name](files[path])
        contents.log_entries(kept)
        if contents.CHECKPOINT in kept:
            checkpoint.parse(kept[contents.CHECKPOINT])
        return kept


def _read_expression(data: bytes) -> object:
    """The `resource` of a capture, an expression that gpumap may run. Raises nothing."""
    text = data.decode(errors="replace")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Python would print one to the reader's terminal
        why = refused(text)
        if why is None:
            re.compile(text).fullmatch("nvidia.com/" + "a" * 300)
    return why


TARGETS = (
    Target(
        "record",
        _record,
        lambda: map(pack, corpus.nodes()),
        of_files(_kind),
        ("gpumap.lab.capture.recorders", "gpumap.lab.capture.checkpoints"),
        (UsageError, SourceError),
        lines_per_byte=400,
    ),
    Target(
        "capture",
        _read_capture,
        lambda: _capture_seeds(corpus.SMALL_BYTES),
        of_files(_kind),
        (
            "gpumap.lab.capture.format",
            "gpumap.lab.capture.contents",
            "gpumap.lab.capture.answers",
            "gpumap.lab.capture.anonymize",
            "gpumap.lab.capture.checkpoints",
            "gpumap.lab.capture.pseudonyms",
            "gpumap.lab.capture.limits",
            "gpumap.lab.decoding",
        ),
        (UsageError,),
        lines_per_byte=400,
    ),
    Target(
        "replay",
        _replay,
        lambda: _capture_seeds(20_000),
        of_files(_kind),
        (
            "gpumap.lab.capture.replay",
            "gpumap.lab.node",
            "gpumap.agent.collect",
            "gpumap.agent.sources.kubelet",
        ),
        (UsageError, FatalError),
        slow=True,
        repeatable=False,
    ),
    Target(
        "capture-expression",
        _read_expression,
        lambda: [rb"nvidia\.com/(?!.*(mps-control|imex)).+|aliyun\.com/gpu-mem", b"example.com/[a-z]+", b"(a|b)c{1,3}"],
        mutate_text,
        ("gpumap.lab.capture.limits",),
        (),
    ),
)
