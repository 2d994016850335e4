"""Watches with inotify when the kubelet allocates, so that a collection need not wait for its interval.

It watches directories, never files: the kubelet writes under a temporary name and renames, which gives the file
another inode. An event only starts a collection; the sources read what happened. Without inotify, gpumap sees all
later.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import math
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from gpumap.model.observations import Complaint
from gpumap.model.terms import PodName

# inotify(7). This module has its own prototypes of the three functions (`os` reads and closes). Packages for inotify
# only wrap these three, and would be one more thing to trust with root's rights.
CLOSE_WRITE, MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x8, 0x40, 0x80, 0x100, 0x200
DELETE_SELF, MOVE_SELF = 0x400, 0x800
UNMOUNT, QUEUE_OVERFLOW, IGNORED = 0x2000, 0x4000, 0x8000
ONLYDIR, MASK_ADD = 0x1000000, 0x20000000
LOST = DELETE_SELF | MOVE_SELF | UNMOUNT | IGNORED
"""Events that end a watch, or leave it on a directory that is no longer at its path."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.inotify_init1.argtypes = (ctypes.c_int,)
_libc.inotify_add_watch.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
_libc.inotify_rm_watch.argtypes = (ctypes.c_int, ctypes.c_int)

_HEAD = struct.Struct("iIII")
_READ_BYTES = 1 << 16
REASONS = {
    errno.ENOENT: "directory_missing",
    errno.ENOTDIR: "directory_missing",
    errno.EACCES: "permission_denied",
    errno.EMFILE: "inotify_instances",
    errno.ENFILE: "inotify_instances",
    errno.ENOSPC: "inotify_watches",
    errno.ENOSYS: "inotify_not_supported",
}
_CAUSES = {
    "inotify_instances": "no inotify instance (fs.inotify.max_user_instances for each user) or file descriptor is left",
    "inotify_watches": "no inotify watch is left (fs.inotify.max_user_watches for each user)",
}


class Place(NamedTuple):
    """A directory, its relevant events and names. `allocations`: it shows the kubelet's allocations."""

    directory: Path
    mask: int
    matters: Callable[[str], bool]
    allocations: bool = False
    beside: Path | None = None
    """Watched only while this file in it exists."""
    containers: bool = False
    """The names are links of containers. Only those of the pods in `Watcher.pods_with_gpu` count."""


def places(
    kubelet_socket: Path, checkpoints: tuple[Path, ...], claims: tuple[Path, ...], pod_log_root: Path
) -> tuple[Place, ...]:
    """Places where a kubelet shows an allocation, a restart, or the start or end of a pod. None must exist.

    `claims` are the files with the prepared claims, the kubelet's and a DRA driver's.
    """
    return (
        # Renamed into place at each allocation, before the container is created, and when a plugin's devices change
        # (k/k pkg/kubelet/cm/devicemanager). Each plugin, and the kubelet, makes a socket there when it starts.
        *(
            Place(path.parent, CREATE | MOVED_TO, _is(path.name, ".sock"), allocations=True)
            for path in dict.fromkeys(checkpoints)
        ),
        # Written when a claim is prepared, before the container is created, and when it is unprepared. Only if the file
        # exists: the kubelet's file is in its root, which contains much else.
        *(Place(path.parent, MOVED_TO | CLOSE_WRITE, _is(path.name), allocations=True, beside=path) for path in claims),
        # A kubelet that starts makes its socket under another name first (pkg/kubelet/util/util_unix.go).
        Place(kubelet_socket.parent, CREATE | MOVED_TO, _is(kubelet_socket.name)),
        # Made with a pod's sandbox, when its claims are prepared. It is the only sign of a pod if the files above are
        # not mounted. It is removed some time after the pod, and it is the only sign of the end of the pod.
        Place(pod_log_root / "pods", CREATE | DELETE | MOVED_TO | MOVED_FROM, lambda name: name.count("_") == 2),
        # The kubelet makes a link when it starts a container, and removes it with the container. Most containers of a
        # node have no GPU: their links do not count.
        Place(pod_log_root / "containers", CREATE | DELETE, lambda name: name.endswith(".log"), containers=True),
    )


def _is(expected: str, *endings: str) -> Callable[[str], bool]:
    return lambda name: name == expected or name.endswith(endings)


class Event(NamedTuple):
    watch: int
    mask: int
    name: str


class Watcher:
    """Watches places. What happens there sets `news`.

    The event loop creates, reads and closes it. `watch` reads files, which may hang, so another thread calls it.
    """

    def __init__(self, watched: tuple[Place, ...]) -> None:
        self.is_on = False
        """Whether allocations are visible: a place for them is watched."""
        self.trouble: Complaint | None = None
        """Why they are not visible, or why gpumap does not watch another existing place."""
        self.started_at = -math.inf
        """The last start of a followed container, on the monotonic clock. It will use its GPU soon."""
        self.pods_with_gpu: frozenset[PodName] = frozenset()
        """Starts and ends of these pods' containers are news."""
        self.news = asyncio.Event()
        self._places = watched
        self._loop = asyncio.get_running_loop()
        self._inotify: int | None = None
        self._watches: dict[int, tuple[Place, ...]] = {}
        self._closed = False

    def watch(self) -> None:
        """Watch each place that exists now, also one that was created again: later changes are news. Never raises."""
        if self._closed:
            return
        watches: dict[int, tuple[Place, ...]] = {}
        failed: list[tuple[Place, Complaint]] = []
        for place in self._places:
            try:
                watch = _add_watch(self._descriptor(), place)
            except OSError as error:
                reason = REASONS.get(error.errno or 0, "inotify_failed")
                complaint = Complaint(reason, f"{place.directory}: {_CAUSES.get(reason, error.strerror)}")
                failed.append((place, complaint))
            else:
                watches[watch] = (*watches.get(watch, ()), place)
        lost = self._watches.keys() - watches.keys()
        self._watches = watches
        for watch in lost:
            # Refused if its directory no longer exists; then the watch does not exist either.
            _libc.inotify_rm_watch(self._inotify, watch)
        self.is_on = any(place.allocations for watch_places in watches.values() for place in watch_places)
        # What a user must know: why nothing reports allocations, or which existing place gpumap cannot watch.
        complaints = [complaint for place, complaint in failed if self.is_on or place.allocations]
        existing = [complaint for complaint in complaints if complaint.reason != "directory_missing"]
        self.trouble = next(iter(existing if self.is_on else existing + complaints), None)

    def close(self) -> None:
        self._closed = True
        if self._inotify is not None:
            self._loop.remove_reader(self._inotify)
            os.close(self._inotify)

    def _descriptor(self) -> int:
        if self._inotify is None:
            self._inotify = _result(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
            self._loop.call_soon_threadsafe(self._listen, self._inotify)
        return self._inotify

    def _listen(self, inotify: int) -> None:
        if not self._closed:
            self._loop.add_reader(inotify, self._read_events, inotify)

    def _read_events(self, inotify: int) -> None:
        try:
            data = os.read(inotify, _READ_BYTES)
        except BlockingIOError:
            return
        for event in events(data):
            if self._matters(event):
                self.news.set()

    def _matters(self, event: Event) -> bool:
        if event.mask & QUEUE_OVERFLOW:
            return True  # some events were lost, unknown which
        watch_places = self._watches.get(event.watch)
        if watch_places is None:
            return not event.mask & IGNORED  # another thread has just begun, or stopped, to watch it
        return bool(event.mask & LOST) or any(self._is_news(event, place) for place in watch_places)

    def _is_news(self, event: Event, place: Place) -> bool:
        if not event.mask & place.mask or not place.matters(event.name):
            return False
        if place.containers:
            # `<pod>_<namespace>_<container>-<id>.log`: Kubernetes names have no underscore.
            words = event.name.split("_")
            if len(words) != 3 or PodName(words[1], words[0]) not in self.pods_with_gpu:
                return False
            if event.mask & CREATE:
                self.started_at = time.monotonic()
        return True


def events(data: bytes) -> Iterator[Event]:
    """The result of a read of inotify."""
    offset = 0
    while offset < len(data):
        watch, mask, _, length = _HEAD.unpack_from(data, offset)
        offset += _HEAD.size
        yield Event(watch, mask, os.fsdecode(data[offset : offset + length].rstrip(b"\0")))
        offset += length


def _add_watch(inotify: int, place: Place) -> int:
    """Watch a place, or confirm its watch: the same directory has the same number."""
    if place.beside and os.lstat(place.beside).st_dev != os.lstat(place.directory).st_dev:
        # The socket itself is mounted: the directory around it belongs to the container.
        raise FileNotFoundError(errno.ENOENT, "is not a directory of the node")
    # Places of one directory, which can have two paths, share a watch: each adds its events.
    mask = place.mask | DELETE_SELF | MOVE_SELF | ONLYDIR | MASK_ADD
    return _result(_libc.inotify_add_watch(inotify, os.fsencode(place.directory), mask))


def _result(returned: int) -> int:
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return returned
