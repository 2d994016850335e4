"""How a family is made of what NVML measured of a GPU: one value, or a value for each word that the driver has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from gpumap.model.families import Family, Kind, Series
from gpumap.model.readings import GpuReading
from gpumap.model.snapshot import Snapshot


def measured(name: str, help: str, value: Callable[[GpuReading], float | None], kind: Kind = "gauge") -> Family:
    """A family with one value a GPU."""

    def read(snapshot: Snapshot) -> Iterator[Series]:
        for gpu in snapshot.gpus:
            if gpu.reading is not None and (found := value(gpu.reading)) is not None:
                yield Series((gpu.uuid,), found)

    return Family(name, kind, help, ("uuid",), read)


def measured_by(
    label: str, name: str, help: str, values: Callable[[GpuReading], Iterable[tuple[str, float]]], kind: Kind = "gauge"
) -> Family:
    """A family with a value for each word of a label. A word that is told twice has the value told last (law L8)."""

    def read(snapshot: Snapshot) -> Iterator[Series]:
        for gpu in snapshot.gpus:
            if gpu.reading is not None:
                for word, value in dict(values(gpu.reading)).items():
                    yield Series((gpu.uuid, word), value)

    return Family(name, kind, help, ("uuid", label), read)
