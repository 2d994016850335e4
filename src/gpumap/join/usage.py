"""What each container uses of each leaf, and each owner of each leaf's memory.

Sums of measured values only. A holder that certainly has no process has 0; where that is not certain, nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpumap.join.attribution import Attributed
from gpumap.join.memory import LastProcess, UseMemory
from gpumap.model import (
    ContainerName,
    ContainerUse,
    DeviceMemory,
    Moment,
    Owner,
    OwnerUse,
    PodName,
    PodUid,
    ProcessSample,
    Uuid,
)

KEPT_SECONDS = 300.0
"""How long a container's peak is remembered after it was last seen."""

_ALWAYS = frozenset({Owner.HOST, Owner.UNKNOWN})
_OF_THE_LIST = frozenset({Owner.ASSIGNED})
_OF_THIS_LIST = frozenset({Owner.UNASSIGNED, Owner.GONE})


@dataclass(frozen=True, slots=True)
class LeafUse:
    """All that was measured on one leaf. `samples` is `None` where the GPU tells no process's time."""

    uuid: Uuid
    attributed: tuple[Attributed, ...]
    samples: tuple[ProcessSample, ...] | None
    before: Mapping[tuple[Uuid, int], LastProcess]

    def container_uses(self, idle: Iterable[ContainerName]) -> dict[ContainerName, ContainerUse]:
        """Sum up by container; `idle` are the holders whose zeros stand."""
        of_container: dict[ContainerName, list[Attributed]] = {name: [] for name in idle}
        for item in self.attributed:
            if item.measures and item.name is not None:
                of_container.setdefault(item.name, []).append(item)
        left = self._left_by_container()
        return {name: self._use(items, left.get(name, ())) for name, items in of_container.items()}

    def _use(self, items: list[Attributed], left: tuple[ProcessSample, ...]) -> ContainerUse:
        memories = [item.process.used_memory_bytes for item in items]
        known = [memory for memory in memories if memory is not None]
        times = self._times(items, left)
        return ContainerUse(
            memory_bytes=sum(known) if len(known) == len(memories) else None,
            memory_peak_bytes=None,
            processes=len(items),
            sm_ratio=times.sm if times else None,
            memory_controller_ratio=times.memory_controller if times else None,
            encoder_ratio=times.encoder if times else None,
            decoder_ratio=times.decoder if times else None,
            unassigned=any(item.owner is Owner.UNASSIGNED for item in items),
            last_active=None,
        )

    def _times(self, items: list[Attributed], left: tuple[ProcessSample, ...]) -> _Times | None:
        if self.samples is None:
            return None
        found = [*left]
        for item in items:
            sample = self.sample(item)
            if sample is None:
                return None
            found.append(sample)
        return (
            _Times(*(min(1.0, sum(column)) for column in zip(*(_Times.of(sample) for sample in found), strict=True)))
            if found
            else _Times(0.0, 0.0, 0.0, 0.0)
        )

    def sample(self, item: Attributed) -> ProcessSample | None:
        """A process's time in this interval: 0 where the driver saw none of it; `None` where it cannot tell."""
        if self.samples is None:
            return None
        before = self.before.get((self.uuid, item.process.pid))
        if before is not None and before.start != item.start:
            return None  # the row may be of the process that had this PID before
        for sample in self.samples:
            if sample.pid == item.process.pid:
                return sample
        # The driver credits MPS clients' time to their server: no row is no zero.
        return None if "M" in item.process.types else ProcessSample(item.process.pid, 0.0, 0.0, 0.0, 0.0)

    def _left_by_container(self) -> dict[ContainerName, tuple[ProcessSample, ...]]:
        """Time of processes that have left since the last snapshot, by the container that they were in."""
        running = {item.process.pid for item in self.attributed}
        left: dict[ContainerName, tuple[ProcessSample, ...]] = {}
        for sample in self.samples or ():
            before = self.before.get((self.uuid, sample.pid))
            if sample.pid not in running and before is not None and before.container is not None:
                left[before.container] = (*left.get(before.container, ()), sample)
        return left


class _Times(NamedTuple):
    sm: float
    memory_controller: float
    encoder: float
    decoder: float

    @staticmethod
    def of(sample: ProcessSample) -> _Times:
        return _Times(sample.sm_ratio, sample.memory_controller_ratio, sample.encoder_ratio, sample.decoder_ratio)


def certainly_idle(
    holders: Iterable[ContainerName], attributed: tuple[Attributed, ...], uid_of: Mapping[PodName, PodUid]
) -> Iterator[ContainerName]:
    """Give the holders of a leaf that have no process on it, leaving out those of whom one may be."""
    for holder in holders:
        pod = PodName(holder.namespace, holder.pod)
        if not any(_may_be_of(item, pod, uid_of.get(pod)) for item in attributed):
            yield holder


def _may_be_of(item: Attributed, pod: PodName, uid: PodUid | None) -> bool:
    if item.name is not None:
        same_pod = (item.name.namespace, item.name.pod) == pod
        return same_pod and (item.unresolved or (item.measures and not item.name.container))
    return item.unresolved and (item.pod_uid is None or uid is None or item.pod_uid == uid)


def owner_uses(
    memory: DeviceMemory | None,
    attributed: tuple[Attributed, ...] | None,
    siblings: tuple[Attributed, ...],
    list_current: bool,
    list_read_now: bool,
    visible: bool,
) -> tuple[OwnerUse, ...]:
    """Split a leaf among owners; with `unaccounted` the bytes add up to what the leaf uses (L1).

    `attributed` is `None` where the driver lists no processes: then all of it is unaccounted.
    """
    standing: frozenset[Owner] = frozenset()
    if attributed is not None:
        standing = _ALWAYS if visible else frozenset({Owner.UNKNOWN})
        standing |= _OF_THE_LIST if visible and list_current else frozenset()
        standing |= _OF_THIS_LIST if visible and list_read_now else frozenset()
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
    use: ContainerUse, before: UseMemory | None, uid: PodUid | None, at: Moment
) -> tuple[ContainerUse, UseMemory]:
    """Complete a use with what time adds to it: the peak, and when it was last active. Another pod starts anew."""
    if before is None or (before.pod_uid and uid and before.pod_uid != uid):
        before = UseMemory(uid, at.wall, None, at.wall, at.monotonic)
    peaks = [value for value in (before.peak_bytes, use.memory_bytes) if value is not None]
    after = replace(
        before,
        pod_uid=uid or before.pod_uid,
        peak_bytes=max(peaks, default=None),
        last_active=at.wall if use.sm_ratio else before.last_active,
        kept_until=at.monotonic + KEPT_SECONDS,
    )
    completed = replace(
        use,
        memory_peak_bytes=after.peak_bytes if use.memory_bytes is not None else None,
        last_active=after.last_active if use.sm_ratio is not None else None,
    )
    return completed, after
