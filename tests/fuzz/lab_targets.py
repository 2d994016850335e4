"""What people pass on: captures of other machines."""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Iterator

from gpumap.agent.exposition import Exposition
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
from tests.fuzz.changes import changed_files, edited, pack, unpack
from tests.fuzz.folders import folder, lay_out
from tests.fuzz.node_targets import FAMILIES
from tests.fuzz.target import target
from tests.golden import captures
from tests.nodes import RULES


def _load(data: bytes) -> on_disk.Capture:
    with folder() as place:
        lay_out(unpack(data), place / "capture")
        (place / "capture").mkdir(exist_ok=True)
        return on_disk.load(place / "capture")


@target(
    lambda: _capture_examples(corpus.SMALL_BYTES), changed_files(corpus.choose_change), UsageError, lines_per_byte=400
)
def read_capture(data: bytes) -> object:
    """The folder of a capture from a bug report, and the same without names."""
    capture = _load(data)
    anonymous = anonymize(capture, Pseudonyms(b"k" * KEY_BYTES))
    assert anonymous.size_bytes <= 4 * capture.size_bytes + 100_000, "the anonymous capture is much larger"
    return capture, anonymous


@target(lambda: _capture_examples(20_000), changed_files(corpus.choose_change), UsageError, FatalError, slow=True)
def read_replay(data: bytes) -> object:
    """The same, played to a whole agent: real sources, a gRPC server and a worker process. The page is valid."""
    capture = _load(data)
    page = Exposition(FAMILIES).render(asyncio.run(replay.snapshots(capture))[-1])
    samples = Page(page.decode())
    assert [*laws.inconsistent(samples)] == []
    assert not samples.by("gpumap_source_errors_total", "source", reason="internal_error"), "an undeclared error"
    return page


def _capture_examples(bytes_max: int) -> Iterator[bytes]:
    for capture in captures():
        paths = [path for path in sorted(capture.rglob("*")) if path.is_file() and path.suffix != ".prom"]
        if sum(path.stat().st_size for path in paths) <= bytes_max:
            yield pack({str(path.relative_to(capture)): path.read_bytes() for path in paths})


@target(
    lambda: map(pack, corpus.nodes()), changed_files(corpus.choose_change), UsageError, SourceError, lines_per_byte=400
)
def read_record(data: bytes) -> object:
    """The files of a node that `gpumap record` copies. What it keeps of any of them can be read back."""
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
        copies: dict[str, bytes] = {}
        for recorded in identity.recorded.values():
            copies |= recorded if isinstance(recorded, dict) else {}
        for path, content in files.items():
            name = path.rpartition("/")[2]
            if path.startswith("proc/") and name in _BARE:
                copies[path] = _BARE[name](content)
        contents.log_entries(copies)
        if contents.CHECKPOINT in copies:
            checkpoint.parse(copies[contents.CHECKPOINT])
        return copies


@target(
    lambda: [b"nvidia\\.com/(?!.*(mps-control|imex)).+|aliyun\\.com/gpu-mem", b"example.com/[a-z]+", b"(a|b)c{1,3}"],
    edited,
)
def read_capture_expression(data: bytes) -> object:
    """The `resource` of a capture, an expression that gpumap may run. Raises nothing."""
    text = data.decode(errors="replace")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Python would print one to the reader's terminal
        why = refused(text)
        if why is None:
            re.compile(text).fullmatch("nvidia.com/" + "a" * 300)
    return why
