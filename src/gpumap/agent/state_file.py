"""The file of `--state-file`: read once, and replaced before each snapshot is published.

A restart never takes up counters that are older than served ones. If a write fails, gpumap removes the file. If it can
neither write nor remove the file, the page has no counters until the file expires. A slow disk does not delay the page.
gpumap never overwrites an unusable file: it renames the file first. While another gpumap uses the file, the page has no
counters either: two agents would overwrite each other's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gpumap.agent.executors import SerialExecutor
from gpumap.agent.files import open_at_once
from gpumap.agent.join import Memory
from gpumap.agent.join.accounting import elapsed
from gpumap.agent.state import USABLE_SECONDS, OutdatedError, State, decode, encode, usable_until, worth_saving
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
    with open_at_once(path) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a file")
        text = file.read(BYTES_MAX + 1)
    if len(text) > BYTES_MAX:
        raise ValueError(_TOO_LARGE)
    return text


def remove_file(path: Path) -> None:
    """Remove the file, if it exists. Raises OSError."""
    path.unlink(missing_ok=True)


def read_boot_id() -> str | None:
    """Return the id of this boot, if the system has one."""
    try:
        return BOOT_ID.read_text("ascii").strip() or None
    except (OSError, ValueError):
        return None


def lock_path(path: Path) -> Path:
    """Return the file whose lock protects the state file, which is itself replaced at each write."""
    return path.with_name(f"{path.name}.lock")


class FileLock:
    """A lock of one process. The kernel releases it when the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def take(self) -> bool:
        """Return whether no other process holds it. If the disk cannot lock, there is no lock to respect."""
        if self._file is not None:
            return True
        more = os.O_NONBLOCK | os.O_NOFOLLOW
        try:
            file = open(self._path, "ab", opener=lambda name, flags: os.open(name, flags | more, 0o600))  # noqa: SIM115
        except OSError:
            return True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            return not isinstance(error, BlockingIOError)
        self._file = file
        return True

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class _InUseError(Exception):
    """Another gpumap uses the file."""


class _Outcome(NamedTuple):
    """What became of a write: why it failed, or ""; and whether the older file is gone then."""

    trouble: str = ""
    removed: bool = False


class StateFile:
    """Keeps what survives a restart. One call at a time; no call raises for a fault of the disk."""

    def __init__(
        self,
        path: Path,
        deadline_seconds: float = DEADLINE_SECONDS,
        replace_file: Callable[[Path, bytes], None] = replace_file,
        read_file: Callable[[Path], bytes] = read_file,
        load_seconds: float = LOAD_SECONDS,
        remove_file: Callable[[Path], None] = remove_file,
        lock: FileLock | None = None,
    ) -> None:
        self._path = path
        self.deadline_seconds = deadline_seconds
        self._replace_file = replace_file
        self._read_file = read_file
        self._remove_file = remove_file
        self._load_seconds = load_seconds
        self._lock = lock or FileLock(lock_path(path))
        self._in_use = False
        """Whether another gpumap uses the file."""
        self._boot_id = read_boot_id()
        self._writes = True
        self._usable_until = 0.0
        """Until then (clock of `elapsed`) a restart may take up what is in the file."""
        self._executor = SerialExecutor("gpumap-state")
        self._writing: asyncio.Task[_Outcome] | None = None
        self._newest: Memory | None = None
        self._failing = False

    async def load(self, now: Moment) -> Memory:
        """Return the memory to start with. An unusable file is logged and treated as missing."""
        try:
            state = await self._executor.run(lambda: self._read(now), self._load_seconds)
        except _InUseError:
            self._in_use = True
            log.warning("no counters on the page: another gpumap uses the state file path=%s", self._path)
            return Memory()
        except FileNotFoundError:
            log.info("counters start at 0: the state file does not exist yet path=%s", self._path)
            return Memory()
        except OutdatedError as error:
            log.info("counters start at 0: the state file is outdated path=%s detail=%r", self._path, str(error))
            return Memory()
        except (OSError, ValueError) as error:
            unread = isinstance(error, OSError)
            await self._set_aside(UNREAD if unread else DAMAGED, _why(error))
            if unread and not self._writes:
                self._usable_until = elapsed(now) + USABLE_SECONDS  # a restart may be able to read it
            return Memory()
        bad = f" rows_left_out={state.left_out}" if state.left_out else ""
        log.log(
            logging.WARNING if bad else logging.INFO,
            "counters continue path=%s away_seconds=%.1f%s",
            self._path,
            state.away_seconds,
            bad,
        )
        self._usable_until = elapsed(now) + USABLE_SECONDS
        return Memory(ledger=state.ledger, xids=state.xids, uses=state.uses)

    def _read(self, now: Moment) -> State:
        if not self._lock.take():
            raise _InUseError
        return decode(self._read_file(self._path), now, self._boot_id)

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
            outcome = f"and gpumap writes nothing because it cannot rename the file: {_why(error)!r}"
        finally:
            executor.close()
        log.warning("counters start at 0: the state file is not usable path=%s detail=%r %s", self._path, why, outcome)

    async def save(self, memory: Memory) -> bool:
        """Write the memory. Returns when it is written, has failed or takes too long.

        The result is whether its counters may be served: no restart can take up older ones.
        """
        if not worth_saving(memory):
            return True
        if self._in_use and not await self._take_over(memory):
            return False
        if self._writes:
            self._newest = memory
            if await self._write(memory):
                return True
        return elapsed(memory.ledger.at or Moment(0.0, 0.0)) > self._usable_until

    async def _take_over(self, memory: Memory) -> bool:
        """Return whether the other gpumap has ended. Its counters are not taken up: this page starts at 0."""
        try:
            self._in_use = not await self._executor.run(self._lock.take, self.deadline_seconds)
        except TimeoutError:
            return False
        if not self._in_use:
            self._usable_until = usable_until(memory)  # of the other's file, until it is overwritten
            log.info("counters start at 0: the other gpumap ended path=%s", self._path)
        return not self._in_use

    async def close(self) -> None:
        """Write the newest memory, if the disk answers."""
        if self._newest is not None:
            await self._wait_for_write()
            await self._write(self._newest)
        if self._writing is None or self._writing.done():
            self._lock.release()
        self._executor.close()

    async def _write(self, memory: Memory) -> bool:
        """Return whether the memory is in the file."""
        if self._writing is not None and not self._writing.done():
            return False  # it hangs, which is logged: there is never a second write at the same time
        usable_before, self._usable_until = self._usable_until, usable_until(memory)
        self._writing = asyncio.create_task(self._executor.run(lambda: self._put(memory)))
        await self._wait_for_write()
        if not self._writing.done():
            self._log_trouble(f"not finished within {self.deadline_seconds:g} s")
            return False
        outcome = self._writing.result()
        if outcome.trouble:
            self._usable_until = 0.0 if outcome.removed else usable_before
        self._log_trouble(outcome.trouble)
        return not outcome.trouble

    def _put(self, memory: Memory) -> _Outcome:
        try:
            text = encode(memory, self._boot_id)
            if len(text) > BYTES_MAX:
                raise ValueError(_TOO_LARGE)  # gpumap could not read it back
            try:
                self._replace_file(self._path, text)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._remove():
                    raise
                self._replace_file(self._path, text)  # the disk has no room for two files, but perhaps for one
        except Exception as error:  # whatever it is, the page goes on
            return _Outcome(_why(error), removed=self._remove())
        return _Outcome()

    def _remove(self) -> bool:
        """Remove the file: a restart must not take up its older counters."""
        try:
            self._remove_file(self._path)
        except OSError:
            return False
        return True

    async def _wait_for_write(self) -> None:
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=self.deadline_seconds)

    def _log_trouble(self, trouble: str) -> None:
        """Log when trouble starts and when it ends."""
        if trouble and not self._failing:
            log.warning("cannot write the state file path=%s detail=%r", self._path, trouble)
        elif self._failing and not trouble:
            log.info("state file written again path=%s", self._path)
        self._failing = bool(trouble)


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "not finished in time"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
