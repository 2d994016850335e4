"""The file of `--state-file`: read once, and replaced before each snapshot is published.

A slow disk does not delay the page: if a write takes too long, counters continue in memory and the next write has them.
An unusable file is never overwritten: it gets another name first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from gpumap.agent.executors import SerialExecutor
from gpumap.agent.join import Memory
from gpumap.agent.state import decode, encode, worth_saving
from gpumap.model.observations import Moment

BYTES_MAX = 16 << 20
"""16 GPUs with 128 containers each need 0.6 MiB."""
DEADLINE_SECONDS = 1.0
LOAD_SECONDS = 5.0
"""A start may wait longer than a page: without the file, counters restart at 0."""
UNREAD, DAMAGED = ".unread", ".damaged"
"""Suffixes for a file that gpumap could not read, or that is not a state file."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""random(4): a new one after each boot, the same in all containers. It is not on a disk, so reading it never waits."""
SYNC_SECONDS = 60.0
"""From one fsync to the next. The page cache survives the end of this process in any case. A crash of the machine loses
the last minute; the driver's counters then restart too. fsync has its own thread, because a busy disk needs seconds."""

log = logging.getLogger("gpumap")


def replace_file(path: Path, text: bytes) -> None:
    """Replace the file atomically: if gpumap is killed meanwhile, the old file stays. Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(text)
        temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


_TOO_LARGE = f"it is larger than {BYTES_MAX >> 20} MiB"


def read_file(path: Path) -> bytes:
    """Return the text of the file. Raises OSError, or ValueError if it cannot be a state file."""
    # O_NONBLOCK: opening a pipe would otherwise wait for its writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a file")
        text = file.read(BYTES_MAX + 1)
    if len(text) > BYTES_MAX:
        raise ValueError(_TOO_LARGE)
    return text


def _sync(path: Path) -> None:
    """Write the file, and its name in its folder, to the disk itself. A failure is repeated at the next time."""
    for place in (path, path.parent):
        with contextlib.suppress(OSError):
            opened = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)


def read_boot_id() -> str | None:
    """Return the id of this boot, if the system has one."""
    try:
        return BOOT_ID.read_text("ascii").strip() or None
    except (OSError, ValueError):
        return None


class StateFile:
    """Keeps what survives a restart. One call at a time; no call raises for a fault of the disk."""

    def __init__(
        self,
        path: Path,
        deadline_seconds: float = DEADLINE_SECONDS,
        replace_file: Callable[[Path, bytes], None] = replace_file,
        read_file: Callable[[Path], bytes] = read_file,
        load_seconds: float = LOAD_SECONDS,
    ) -> None:
        self._path = path
        self._deadline_seconds = deadline_seconds
        self._replace_file = replace_file
        self._read_file = read_file
        self._load_seconds = load_seconds
        self._boot_id = read_boot_id()
        self._writes = True
        self._executor = SerialExecutor("gpumap-state")
        self._sync_executor = SerialExecutor("gpumap-state-sync")
        self._writing: asyncio.Task[None] | None = None
        self._syncing: asyncio.Task[None] | None = None
        self._sync_at = time.monotonic() + SYNC_SECONDS
        self._newest: Memory | None = None
        self._failing = False

    async def load(self, now: Moment) -> Memory:
        """Return the memory to start with. An unusable file is logged and treated as missing."""
        try:
            state = await self._executor.run(
                lambda: decode(self._read_file(self._path), now, self._boot_id), self._load_seconds
            )
        except FileNotFoundError:
            log.info("counters start at 0: there is no state file yet path=%s", self._path)
            return Memory()
        except (OSError, ValueError) as error:
            await self._set_aside(UNREAD if isinstance(error, OSError) else DAMAGED, _why(error))
            return Memory()
        bad = f" rows_left_out={state.left_out}" if state.left_out else ""
        log.log(
            logging.WARNING if bad else logging.INFO,
            "counters go on path=%s away_seconds=%.1f%s",
            self._path,
            state.away_seconds,
            bad,
        )
        return Memory(ledger=state.ledger, xids=state.xids)

    async def _set_aside(self, suffix: str, why: str) -> None:
        """Rename the file, replacing an earlier one of that name. If this fails, nothing is written until a restart.

        It has its own executor: the one that reads may hang.
        """
        aside, executor = self._path.with_name(self._path.name + suffix), SerialExecutor("gpumap-state-aside")
        outcome = f"set_aside={aside}"
        try:
            await executor.run(lambda: self._path.rename(aside), self._load_seconds)
        except FileNotFoundError:
            outcome = "set_aside=none"  # gone meanwhile: there is nothing to overwrite
        except OSError as error:
            self._writes = False
            outcome = f"and nothing is written, as it cannot be set aside: {_why(error)!r}"
        finally:
            executor.close()
        log.warning("counters start at 0: the state file is not used path=%s detail=%r %s", self._path, why, outcome)

    async def save(self, memory: Memory) -> None:
        """Write the memory. Returns when it is written, has failed or takes too long."""
        if not self._writes or not worth_saving(memory):
            return
        self._newest = memory
        await self._write(memory)
        if time.monotonic() >= self._sync_at:
            self._begin_to_sync()

    async def close(self) -> None:
        """Write the newest memory to the disk itself, if the disk answers."""
        if self._newest is not None:
            await self._wait_for(self._writing)
            await self._write(self._newest)
            await self._wait_for(self._syncing)
            self._begin_to_sync()
            await self._wait_for(self._syncing)
        self._executor.close()
        self._sync_executor.close()

    async def _write(self, memory: Memory) -> None:
        if self._writing is not None:
            if not self._writing.done():
                return  # it hangs, which is logged: there is never a second write at the same time
            self._writing.exception()  # of an older state: the next write shows whether the disk works
        self._writing = asyncio.create_task(self._executor.run(lambda: self._put(memory)))
        await self._wait_for(self._writing)
        if not self._writing.done():
            self._log_trouble(f"no end within {self._deadline_seconds:g} s")
            return
        error, self._writing = self._writing.exception(), None
        self._log_trouble(_why(error) if error is not None else "")

    def _put(self, memory: Memory) -> None:
        text = encode(memory, self._boot_id)
        if len(text) > BYTES_MAX:
            raise ValueError(_TOO_LARGE)  # gpumap could not read it back
        self._replace_file(self._path, text)

    def _begin_to_sync(self) -> None:
        if self._syncing is not None and not self._syncing.done():
            return
        self._sync_at = time.monotonic() + SYNC_SECONDS
        self._syncing = asyncio.create_task(self._sync_executor.run(lambda: _sync(self._path)))

    async def _wait_for(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            await asyncio.wait({task}, timeout=self._deadline_seconds)

    def _log_trouble(self, trouble: str) -> None:
        """Log when trouble starts and when it ends."""
        if trouble and not self._failing:
            log.warning("state file cannot be written, counters go on in memory path=%s detail=%r", self._path, trouble)
        elif self._failing and not trouble:
            log.info("state file is written again path=%s", self._path)
        self._failing = bool(trouble)


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no end in time"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
