"""The last hour of each device and of each container on one, in bounded memory: buckets of half a minute.

Memory is a bucket's maximum, SM its mean. An unknown value is a gap, never 0. No clock is read: the time is that of the
snapshots.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from gpumap.model.names import ContainerName
from gpumap.model.observations import Moment
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot

VERSION = 1
BUCKET_SECONDS = 30
BUCKETS = 120
MAX_SERIES = 2048
"""Sixteen GPUs with a hundred pods each; about 2 MiB."""

_GAP = -1
_MOST_MIB = (1 << 31) - 1
"""The limit of a curve. A driver may report any number."""
_GAPS_MIB = array("i", [_GAP]) * BUCKETS
_GAPS_SM = array("h", [_GAP]) * BUCKETS
_MIB = 1 << 20
_PER_ONE = 1000

_Key = tuple[Uuid, ContainerName | None]


class Curve(NamedTuple):
    """A copy of a series: rings of MiB and thousandths. `newest` is its last bucket's number."""

    uuid: Uuid
    name: ContainerName | None
    newest: int
    memory: array[int]
    sm: array[int]


class Curves(NamedTuple):
    """All series at one moment. `timestamp` is the time of the newest snapshot, `bucket` is the bucket of that time.

    `interval_seconds` is the expected time until the next snapshot; `None` before the second.
    """

    timestamp: float
    interval_seconds: float | None
    bucket: int
    curves: tuple[Curve, ...]


class _Series:
    """Two rings; bucket n is at n modulo their length. After `newest`, values are unknown."""

    __slots__ = ("memory", "newest", "sm", "sm_count", "sm_sum")

    def __init__(self, bucket: int) -> None:
        self.memory, self.sm = _GAPS_MIB[:], _GAPS_SM[:]
        self.newest = bucket
        self.sm_sum, self.sm_count = 0.0, 0

    def add(self, bucket: int, memory_bytes: int | None, sm_ratio: float | None) -> None:
        place = bucket % BUCKETS
        if bucket != self.newest:
            self._go_to(bucket)
        if memory_bytes is not None:
            mib = min(-(-memory_bytes // _MIB), _MOST_MIB)  # rounded up: 0 only for nothing
            if mib > self.memory[place]:
                self.memory[place] = mib
        if sm_ratio is not None:
            self.sm_sum += min(max(sm_ratio, 0.0), 1.0)
            self.sm_count += 1
            self.sm[place] = round(_PER_ONE * self.sm_sum / self.sm_count)

    def _go_to(self, bucket: int) -> None:
        for skipped in range(max(self.newest + 1, bucket - BUCKETS + 1), bucket + 1):
            self.memory[skipped % BUCKETS] = self.sm[skipped % BUCKETS] = _GAP
        self.newest = bucket
        self.sm_sum, self.sm_count = 0.0, 0


class History:
    """Keeps the curves. A new series takes the place of the one that ended first; a current one is never dropped."""

    def __init__(self, max_series: int = MAX_SERIES) -> None:
        self._max_series = max_series
        self._series: dict[_Key, _Series] = {}
        self._bucket = 0
        self._newest: Moment | None = None
        self._interval_seconds: float | None = None

    def add(self, snapshot: Snapshot) -> None:
        """Add the newest snapshot."""
        bucket = int(snapshot.at.monotonic // BUCKET_SECONDS)
        if bucket != self._bucket:
            self._series = {key: one for key, one in self._series.items() if one.newest > bucket - BUCKETS}
        if self._newest is not None:
            passed = snapshot.at.monotonic - self._newest.monotonic
            # Pushed collections are early: a short time between two does not predict the next.
            self._interval_seconds = max(passed, 0.9 * (self._interval_seconds or 0.0))
        self._bucket, self._newest = bucket, snapshot.at
        for key, memory_bytes, sm_ratio in _measured(snapshot):
            series = self._series.get(key) or self._begin(key, bucket)
            if series is not None:
                series.add(bucket, memory_bytes, sm_ratio)

    def curves(self) -> Curves:
        """Return a copy of all curves, which another thread may read."""
        found = self._series.items()
        copies = (Curve(*key, one.newest, one.memory[:], one.sm[:]) for key, one in found)
        timestamp = self._newest.wall if self._newest else 0.0
        return Curves(timestamp, self._interval_seconds, self._bucket, tuple(copies))

    def _begin(self, key: _Key, bucket: int) -> _Series | None:
        if len(self._series) >= self._max_series:
            gone = sorted((one.newest, at) for at, one in enumerate(self._series.values()) if one.newest < bucket)
            oldest = {at for _, at in gone[: max(1, self._max_series // 16)]}
            if not oldest:
                return None
            self._series = {key: one for at, (key, one) in enumerate(self._series.items()) if at not in oldest}
        series = self._series[key] = _Series(bucket)
        return series


def _measured(snapshot: Snapshot) -> Iterator[tuple[_Key, int | None, float | None]]:
    readings = {gpu.uuid: gpu.reading for gpu in snapshot.node.gpus if not gpu.partitioned}
    for leaf in snapshot.node.devices:
        reading = readings.get(leaf.uuid)
        sm = reading.utilization_ratio if reading else None
        if leaf.memory is not None or sm is not None:
            yield (leaf.uuid, None), leaf.memory.used_bytes if leaf.memory else None, sm
    for row in snapshot.containers:
        use = row.use
        if use is not None and (use.memory_bytes is not None or use.busy_ratio is not None):
            yield (row.uuid, row.name), use.memory_bytes, use.busy_ratio


class SeriesDocument(msgspec.Struct, frozen=True):
    """Return a curve in JSON: the oldest value first, the last one is of the newest bucket; null is a gap."""

    uuid: Uuid
    namespace: str | None
    pod: str | None
    container: str | None
    memory_mib: list[int | None]
    sm_permille: list[int | None]


class HistoryDocument(msgspec.Struct, frozen=True):
    """Return the JSON of /api/v1/history."""

    version: int
    timestamp: float
    interval_seconds: float | None
    bucket_seconds: int
    buckets: int
    series: list[SeriesDocument]


def history_document(curves: Curves) -> HistoryDocument:
    """Arrange the curves by age."""
    series = [
        SeriesDocument(
            curve.uuid,
            curve.name.namespace if curve.name else None,
            curve.name.pod if curve.name else None,
            curve.name.container if curve.name else None,
            memory_mib=_by_age(curve.memory, curve.newest, curves.bucket),
            sm_permille=_by_age(curve.sm, curve.newest, curves.bucket),
        )
        for curve in curves.curves
    ]
    return HistoryDocument(VERSION, curves.timestamp, curves.interval_seconds, BUCKET_SECONDS, BUCKETS, series)


def _by_age(ring: array[int], newest: int, bucket: int) -> list[int | None]:
    """Return a ring's values up to `bucket`, without the gaps before the first; empty if there are only gaps."""
    values = [ring[number % BUCKETS] for number in range(bucket - BUCKETS + 1, newest + 1)]
    values += [_GAP] * (bucket - newest)
    first = next((at for at, value in enumerate(values) if value != _GAP), len(values))
    return [None if value == _GAP else value for value in values[first:]]
