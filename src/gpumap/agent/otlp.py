"""Render families and a snapshot as an OTLP request, for `--otlp-endpoint`. Nothing imports this without the flag.

A counter's start time is the time of its first sample: what it counted before is its base and no increase. A counter
that falls starts again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE,
    Metric,
    NumberDataPoint,
    SummaryDataPoint,
)

from gpumap.agent.exposition import encodable
from gpumap.model.families import Family, Numbered, Series
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import Source

_UNITS = {
    "byte_seconds": "By.s",
    "bytes": "By",
    "seconds": "s",
    "joules": "J",
    "watts": "W",
    "hertz": "Hz",
    "celsius": "Cel",
    "ratio": "1",
}
"""UCUM units by the end of a family's name."""
_Key = tuple[str, tuple[str, ...], str]
"""Family, label values and suffix of a series."""


class OtlpExposition:
    """Renders a fixed list of families. Not safe for concurrent use by several threads."""

    def __init__(self, families: Iterable[Family | Numbered], version: str) -> None:
        self._families = tuple(families)
        self._version = version
        self._starts: dict[_Key, tuple[int, float]] = {}
        """Of each counter: its start time, and its last value."""

    def render(self, snapshot: Snapshot) -> bytes:
        """Return an ExportMetricsServiceRequest. A family without a sample is not in it."""
        request = ExportMetricsServiceRequest()
        resource = request.resource_metrics.add()
        node = snapshot.node.name
        names = {"service.name": "gpumap", "service.version": self._version}
        names |= dict.fromkeys(("service.instance.id", "host.name"), node)
        if any(health.source is Source.KUBELET for health in snapshot.sources):
            names["k8s.node.name"] = node
        resource.resource.attributes.extend(_attributes(names.items()))
        scope = resource.scope_metrics.add()
        scope.scope.name = "gpumap"
        scope.scope.version = self._version
        time_ns = int(snapshot.at.wall * 1e9)
        starts: dict[_Key, tuple[int, float]] = {}
        for family in self._fixed(snapshot):
            if series := list(family.read(snapshot)):
                metric = Metric(name=family.name, description=family.help, unit=_unit(family.name))
                if family.kind == "summary":
                    metric.summary.data_points.extend(self._summaries(family, series, time_ns, starts))
                elif family.kind == "counter":
                    metric.sum.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
                    metric.sum.is_monotonic = True
                    metric.sum.data_points.extend(self._point(family, one, time_ns, starts) for one in series)
                else:
                    metric.gauge.data_points.extend(self._point(family, one, time_ns) for one in series)
                scope.metrics.append(metric)
        self._starts = starts
        return request.SerializeToString()

    def _fixed(self, snapshot: Snapshot) -> Iterator[Family]:
        for family in self._families:
            if isinstance(family, Family):
                yield family
            else:
                yield from family.families(snapshot)

    def _point(
        self, family: Family, one: Series, time_ns: int, starts: dict[_Key, tuple[int, float]] | None = None
    ) -> NumberDataPoint:
        """`starts` is that of counters."""
        start = 0 if starts is None else self._start(family, one, time_ns, starts)
        return NumberDataPoint(
            attributes=_labels(family, one),
            start_time_unix_nano=start,
            time_unix_nano=time_ns,
            as_double=float(one.value),
        )

    def _summaries(
        self, family: Family, series: Iterable[Series], time_ns: int, starts: dict[_Key, tuple[int, float]]
    ) -> Iterator[SummaryDataPoint]:
        points: dict[tuple[str, ...], SummaryDataPoint] = {}
        for one in series:
            if one.labels not in points:
                points[one.labels] = SummaryDataPoint(attributes=_labels(family, one), time_unix_nano=time_ns)
            point = points[one.labels]
            start = self._start(family, one, time_ns, starts)
            point.start_time_unix_nano = max(start, point.start_time_unix_nano)
            if one.suffix == "_count":
                point.count = int(one.value)
            else:
                point.sum = float(one.value)
        yield from points.values()

    def _start(self, family: Family, one: Series, time_ns: int, starts: dict[_Key, tuple[int, float]]) -> int:
        key = (family.name, one.labels, one.suffix)
        start, last = self._starts.get(key, (time_ns, one.value))
        if one.value < last or start > time_ns:  # the counter, or the clock, went back
            start = time_ns
        starts[key] = (start, one.value)
        return start


def _labels(family: Family, one: Series) -> Iterator[KeyValue]:
    """Return the labels that a line of the text page has."""
    pairs = zip(family.labels, one.labels, strict=True)
    return _attributes((name, value) for name, value in pairs if value or name not in family.optional_labels)


def _attributes(pairs: Iterable[tuple[str, str]]) -> Iterator[KeyValue]:
    return (KeyValue(key=name, value=AnyValue(string_value=encodable(value))) for name, value in pairs)


def _unit(name: str) -> str:
    name = name.removesuffix("_total")
    return next((unit for end, unit in _UNITS.items() if name.endswith(f"_{end}")), "")
