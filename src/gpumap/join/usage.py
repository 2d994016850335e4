"""What each container uses of each leaf, and each owner of each leaf's memory.

Sums of measured values only. A holder that certainly has no process has 0; where that is not certain, nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpumap.join.attribution import Attributed
from gpumap.join.memory import LastProcess, UseMemory
from gpumap.model import ContainerName, DeviceMemory, Moment, PodName, PodUid, ProcessSample, Uuid
from gpumap.snapshot import ContainerUse, Owner, OwnerUse

KEPT_SECONDS = 300.0
"""How long a container's peak is remembered after it was last seen."""

_ALWAYS = frozenset({Owner.HOST, Owner.UNKNOWN})
_OF_THE_LIST = frozenset({Owner.ASSIGNED})
_ACCUSED = frozenset({Owner.UNASSIGNED, Owner.GONE})


class Measured(NamedTuple):
    """What one collection measured of a container on a leaf. `times` is `None` where they cannot be told."""

    memory_bytes: int | None
    processes: int
    times: _Times | None
    unassigned: bool


def _ratio(total: float) -> float:
    return min(max(total, 0.0), 1.0)


class _Times(NamedTuple):
    """Ratios 0-1 of the interval."""

    sm: float
    memory_controller: float
    encoder: float
    decoder: float


@dataclass(frozen=True, slots=True)
class LeafUse:
    """All that was measured on one leaf. `samples`, by PID, is `None` where the GPU tells no process's time."""

    uuid: Uuid
    attributed: tuple[Attributed, ...]
    samples: Mapping[int, ProcessSample] | None
    before: Mapping[tuple[Uuid, int], LastProcess]

    def by_container(
        self, idle: Iterable[ContainerName], uid_of: Mapping[PodName, PodUid]
    ) -> dict[ContainerName, Measured]:
        """Sum up by container; `idle` are the holders whose zeros stand."""
        of_container: dict[ContainerName, list[Attributed]] = {name: [] for name in idle}
        for item in self.attributed:
            if item.measures and item.name is not None:
                of_container.setdefault(item.name, []).append(item)
        left = self._left_by_container()
        measured = {}
        for name, items in of_container.items():
            uid = items[0].pod_uid if items else uid_of.get(name.pod_name)
            measured[name] = self._measured(items, left.get((name, uid), ()))
        return measured

    def _measured(self, items: list[Attributed], left: Iterable[ProcessSample]) -> Measured:
        memories = [item.process.used_memory_bytes for item in items]
        known = [memory for memory in memories if memory is not None]
        return Measured(
            memory_bytes=sum(known) if len(known) == len(memories) else None,
            processes=len(items),
            times=self._times(items, left),
            unassigned=any(item.owner is Owner.UNASSIGNED for item in items),
        )

    def _times(self, items: list[Attributed], left: Iterable[ProcessSample]) -> _Times | None:
        if self.samples is None:
            return None
        found = [self.sample(item) for item in items]
        told = [sample for sample in found if sample is not None]
        if len(told) < len(found):
            return None
        told.extend(left)
        return _Times(
            _ratio(sum((sample.sm_ratio for sample in told), 0.0)),
            _ratio(sum((sample.memory_controller_ratio for sample in told), 0.0)),
            _ratio(sum((sample.encoder_ratio for sample in told), 0.0)),
            _ratio(sum((sample.decoder_ratio for sample in told), 0.0)),
        )

    def sample(self, item: Attributed) -> ProcessSample | None:
        """A process's time in this interval: 0 where the driver saw none of it; `None` where it cannot tell."""
        if self.samples is None:
            return None
        before = self.before.get((self.uuid, item.process.pid))
        if before is not None and before.start != item.start:
            return None  # the row may be of the process that had this PID before
        sample = self.samples.get(item.process.pid)
        # The driver credits MPS clients' time to their server: no row is no zero.
        if sample is None and "M" not in item.process.types:
            return ProcessSample(item.process.pid, 0.0, 0.0, 0.0, 0.0)
        return sample

    def _left_by_container(self) -> dict[tuple[ContainerName, PodUid | None], list[ProcessSample]]:
        """Time of processes that have left since the last snapshot, by the container and pod that they were in."""
        running = {item.process.pid for item in self.attributed}
        left: dict[tuple[ContainerName, PodUid | None], list[ProcessSample]] = {}
        for pid, sample in (self.samples or {}).items():
            before = self.before.get((self.uuid, pid))
            if pid not in running and before is not None and before.container is not None:
                left.setdefault((before.container, before.pod_uid), []).append(sample)
        return left


def certainly_idle(
    holders: Iterable[ContainerName], attributed: tuple[Attributed, ...], uid_of: Mapping[PodName, PodUid]
) -> Iterator[ContainerName]:
    """Give the holders of a leaf that have no process on it, leaving out those of whom one may be."""
    doubtful = {
        item.name.pod_name
        for item in attributed
        if item.name is not None and (item.unresolved or (item.measures and not item.name.container))
    }
    nameless = {item.pod_uid for item in attributed if item.name is None and item.unresolved}
    for holder in holders:
        pod = holder.pod_name
        uid = uid_of.get(pod)
        if pod in doubtful or None in nameless or (nameless and (uid is None or uid in nameless)):
            continue
        yield holder


class Grounds(NamedTuple):
    """What owners may be told by in this snapshot."""

    visible: bool
    """Processes of other containers can be seen."""
    list_served: bool
    """There is a List young enough to be served."""
    pods_named: bool
    """There is, and UIDs can be named by it."""
    may_accuse: bool
    """Both are of this collection."""


def owner_uses(
    memory: DeviceMemory | None,
    attributed: tuple[Attributed, ...] | None,
    siblings: tuple[Attributed, ...],
    grounds: Grounds,
) -> tuple[OwnerUse, ...]:
    """Split a leaf among owners; with `unaccounted` the bytes add up to what the leaf uses (L1).

    `attributed` is `None` where the driver lists no processes: then all of it is unaccounted.
    """
    standing: frozenset[Owner] = frozenset()
    if attributed is not None:
        standing = _ALWAYS if grounds.visible else frozenset({Owner.UNKNOWN})
        standing |= _OF_THE_LIST if grounds.visible and grounds.pods_named else frozenset()
        standing |= _ACCUSED if grounds.visible and grounds.may_accuse else frozenset()
    items: dict[Owner, list[Attributed]] = {owner: [] for owner in standing}
    for item in attributed or ():
        items.setdefault(item.owner, []).append(item)
    if siblings:
        items[Owner.SIBLING] = list(siblings)
    uses = [OwnerUse(owner, _told_bytes(of_owner), len(of_owner)) for owner, of_owner in items.items()]
    if memory is not None:
        told = sum(use.memory_bytes or 0 for use in uses)
        uses.append(OwnerUse(Owner.UNACCOUNTED, memory.used_bytes - told, None))
    return tuple(sorted(uses, key=lambda use: use.owner))


def _told_bytes(items: list[Attributed]) -> int | None:
    told = [item.process.used_memory_bytes for item in items if item.process.used_memory_bytes is not None]
    return sum(told) if told or not items else None


def remember(
    measured: Measured, before: UseMemory | None, uid: PodUid | None, at: Moment
) -> tuple[ContainerUse, UseMemory]:
    """Add what time tells of a use: its peak, and when it was last active. Another pod of the name starts anew.

    While a pod's UID is not known that its name had before, what is remembered may be another pod's: it waits.
    """
    if before is None or (before.pod_uid and uid and before.pod_uid != uid):
        before = UseMemory(uid, None, at.wall, at.monotonic)
    elif before.pod_uid and uid is None:
        return _use(measured, None, None), before._replace(kept_until=at.monotonic + KEPT_SECONDS)
    peaks = [value for value in (before.peak_bytes, measured.memory_bytes) if value is not None]
    times = measured.times
    after = UseMemory(
        pod_uid=uid or before.pod_uid,
        peak_bytes=max(peaks, default=None),
        last_active=at.wall if times and times.sm else before.last_active,
        kept_until=at.monotonic + KEPT_SECONDS,
    )
    return _use(measured, after.peak_bytes, after.last_active), after


def _use(measured: Measured, peak_bytes: int | None, last_active: float | None) -> ContainerUse:
    times = measured.times
    return ContainerUse(
        memory_bytes=measured.memory_bytes,
        memory_peak_bytes=peak_bytes if measured.memory_bytes is not None else None,
        processes=measured.processes,
        sm_ratio=times.sm if times else None,
        memory_controller_ratio=times.memory_controller if times else None,
        encoder_ratio=times.encoder if times else None,
        decoder_ratio=times.decoder if times else None,
        unassigned=measured.unassigned,
        last_active=last_active if times else None,
    )
