"""`gpumap record` and `gpumap demo --capture`: the service's own sources over a real node, and over a captured one."""

from __future__ import annotations

import contextlib
import logging
import secrets
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from gpumap.agent.own_process import stop_by_signal
from gpumap.agent.settings import Settings
from gpumap.lab.capture import format as on_disk
from gpumap.lab.capture import replay
from gpumap.lab.capture.anonymize import anonymize
from gpumap.lab.capture.limits import refused
from gpumap.lab.capture.pseudonyms import Pseudonyms
from gpumap.lab.capture.record import record
from gpumap.lab.node_files import temporary_folder
from gpumap.model.errors import UsageError
from gpumap.model.formatting import counted, printable
from gpumap.model.snapshot import Snapshot

KEY_BYTES = 32


async def record_node(
    settings: Settings,
    driver_command: Sequence[str],
    folder: Path,
    notify: Callable[[Iterable[str]], None],
    *,
    seconds: float | None,
    anonymous: bool,
) -> int:
    """Record a node into `folder`, with its page.

    Returns 0 also if some sources are down, as the capture then shows. Returns 1 if all are down.
    """
    on_disk.refuse_unless_new(folder)
    why = refused(settings.resource.pattern)
    if why is not None:
        raise UsageError(f"--resource {why}: a capture cannot bring it")
    temporary_folder().cleanup()  # fail before the recording, not after it, if the folder cannot be written
    recorded = await record(settings, driver_command, seconds, stop_by_signal())
    if recorded is None:
        notify(["stopped before anything was recorded"])
        return 0
    capture, snapshot = recorded
    if anonymous:
        capture = anonymize(capture, Pseudonyms(secrets.token_bytes(KEY_BYTES)))
    with _silence():
        page = await replay.page(capture)
    on_disk.write(capture, folder, page)
    down = (health for health in snapshot.node.sources if not health.up)
    notify(f"{health.source} is down, and is recorded so: {health.reason}: {health.detail}" for health in down)
    print(end=_summary(capture, snapshot, folder, anonymous))
    return 0 if any(health.up for health in snapshot.node.sources) else 1


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What a replay logs was logged before, when it happened."""
    log = logging.getLogger("gpumap")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _summary(capture: on_disk.Capture, snapshot: Snapshot, folder: Path, anonymous: bool) -> str:
    last_frame = capture.frames[-1]
    counts = (
        counted(len(capture.frames), "frame"),
        f"{last_frame.offset_seconds:.0f} s",
        counted(len(snapshot.node.gpus), "GPU"),
        counted(len(snapshot.node.pods), "pod"),
        counted(len({process.pid for process in snapshot.processes}), "process", "processes"),
        f"{(capture.size_bytes + 1023) // 1024} KiB",
    )
    place = printable(shlex.quote(str(folder)))
    names = "" if anonymous else "It contains names and UUIDs unchanged; --anonymize replaces them.\n"
    return (
        f"Recorded {', '.join(counts)}: {place}\n{names}"
        f"Play it:          gpumap demo --capture {place}\n"
        f"Make it a test:   cp -r {place} tests/captures/\n"
    )


def load_capture(folder: Path) -> on_disk.Capture:
    """Raises UsageError that names the flag."""
    try:
        return on_disk.load(folder)
    except UsageError as error:
        raise UsageError(f"--capture {error}") from error
