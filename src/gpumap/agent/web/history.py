"""The last hour of each device and of each container on one, in bounded memory: buckets of half a minute.

Memory is a bucket's maximum, SM its mean. An unknown value is a gap, never 0. No clock is read: the time is that of the
snapshots.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterator

import msgspec

from gpumap.model.observations import Moment
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import ContainerName

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


class SeriesDocument(msgspec.Struct, frozen=True):
    """A curve in JSON: the oldest value first, the last one is of the newest bucket; null is a gap."""

    uuid: Uuid
    namespace: str | None
    pod: str | None
    container: str | None
    memory_mib: list[int | None]
    sm_permille: list[int | None]


class HistoryDocument(msgspec.Struct, frozen=True):
    """The JSON of /api/v1/history. `interval_seconds` is the expected time until the next snapshot, if it is known."""

    version: int
    timestamp: float
    interval_seconds: float | None
    bucket_seconds: int
    buckets: int
    series: list[SeriesDocument]


class _Series:
    """Two rings, of MiB and thousandths; bucket n is at n modulo their length. After `newest`, values are unknown."""

    __slots__ = ("memory", "newest", "sm", "sm_count", "sm_sum")

    def __init__(self, bucket: int) -> None:
        self.memory, self.sm = _GAPS_MIB[:], _GAPS_SM[:]
        self.newest = bucket
        self.sm_sum, self.sm_count = 0.0, 0

    def add(self, bucket: int, memory_bytes: int | None, sm_ratio: float | None) -> None:
        index = bucket % BUCKETS
        if bucket != self.newest:
            self._go_to(bucket)
        if memory_bytes is not None:
            mib = min(-(-memory_bytes // _MIB), _MOST_MIB)  # rounded up: 0 only for nothing
            self.memory[index] = max(self.memory[index], mib)
        if sm_ratio is not None:
            self.sm_sum += min(max(sm_ratio, 0.0), 1.0)
            self.sm_count += 1
            self.sm[index] = round(_PER_ONE * self.sm_sum / self.sm_count)

    def copy(self) -> _Series:
        rings = copy.copy(self)
        rings.memory, rings.sm = self.memory[:], self.sm[:]
        return rings

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
            self._series = {key: series for key, series in self._series.items() if series.newest > bucket - BUCKETS}
        if self._newest is not None:
            passed = snapshot.at.monotonic - self._newest.monotonic
            # Pushed collections are early: a short time between two does not predict the next.
            self._interval_seconds = max(passed, 0.9 * (self._interval_seconds or 0.0))
        self._bucket, self._newest = bucket, snapshot.at
        for key, memory_bytes, sm_ratio in _measured(snapshot):
            series = self._series.get(key) or self._begin(key, bucket)
            if series is not None:
                series.add(bucket, memory_bytes, sm_ratio)

    def copy(self) -> History:
        """Return a copy, which another thread may read."""
        history = copy.copy(self)
        history._series = {key: series.copy() for key, series in self._series.items()}
        return history

    def document(self) -> HistoryDocument:
        """Return the curves with their values by age."""
        series = []
        for (uuid, name), rings in self._series.items():
            namespace, pod, container = name or (None, None, None)
            memory_mib = _values(rings.memory, rings.newest, self._bucket)
            sm_permille = _values(rings.sm, rings.newest, self._bucket)
            series.append(SeriesDocument(uuid, namespace, pod, container, memory_mib, sm_permille))
        timestamp = self._newest.wall if self._newest else 0.0
        return HistoryDocument(VERSION, timestamp, self._interval_seconds, BUCKET_SECONDS, BUCKETS, series)

    def _begin(self, key: _Key, bucket: int) -> _Series | None:
        if len(self._series) >= self._max_series:
            ended_keys = [key for key, series in self._series.items() if series.newest < bucket]
            ended_keys.sort(key=lambda key: self._series[key].newest)
            if not ended_keys:
                return None
            for ended_key in ended_keys[: max(1, self._max_series // 16)]:
                del self._series[ended_key]
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


def _values(ring: array[int], newest: int, bucket: int) -> list[int | None]:
    """Return a ring's values up to `bucket`, without the gaps before the first; empty if there are only gaps."""
    values = [ring[number % BUCKETS] for number in range(bucket - BUCKETS + 1, newest + 1)]
    values += [_GAP] * (bucket - newest)
    first = next((index for index, value in enumerate(values) if value != _GAP), len(values))
    return [None if value == _GAP else value for value in values[first:]]
