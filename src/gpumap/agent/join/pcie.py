"""One counter of a GPU's bytes over PCIe. The driver counts them, or the NVML worker does by the driver's rates.

The worker counts from 0 with each handle of a GPU, and a driver may begin or cease to count. Neither is traffic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from msgspec import structs

from gpumap.agent.join.settings import GPUS_AWAY_MAX
from gpumap.model.observations import Observations, Observed
from gpumap.model.readings import PCIE_TOTALS, GpuReading, Uuid


class PcieCount(NamedTuple):
    """The last counts of a GPU, (transmitted, received), and what to add to them for the page."""

    source: str
    counts: tuple[int, int]
    added: tuple[int, int]

    @property
    def values(self) -> tuple[int, int]:
        return self.counts[0] + self.added[0], self.counts[1] + self.added[1]


def count_pcie(
    previous: Mapping[Uuid, PcieCount], observations: Observations
) -> tuple[Mapping[Uuid, PcieCount], Observations]:
    """Return the observations with continuous counters, and what to remember of them."""
    if not isinstance(observations.nvml, Observed):
        return previous, observations
    counts_now: dict[Uuid, PcieCount] = {}
    readings = []
    for reading in observations.nvml.value.gpus:
        count = _count(previous, reading)
        if count is not None and reading.uuid is not None:
            counts_now[reading.uuid] = count
            reading = structs.replace(reading, pcie_transmit_bytes=count.values[0], pcie_receive_bytes=count.values[1])
        readings.append(reading)
    if not counts_now:
        return previous, observations
    nvml = replace(observations.nvml, value=replace(observations.nvml.value, gpus=tuple(readings)))
    absent = [(uuid, count) for uuid, count in previous.items() if uuid not in counts_now]
    return dict(absent[-GPUS_AWAY_MAX:]) | counts_now, replace(observations, nvml=nvml)


def _count(previous: Mapping[Uuid, PcieCount], reading: GpuReading) -> PcieCount | None:
    """Return the count of a reading; `None` if it has none.

    A driver's count appears as it is, also after it restarted. The worker's count appears at 0, and continues. After a
    change of the source the counter continues from its last value.
    """
    if reading.uuid is None or reading.pcie_source is None:
        return None
    if reading.pcie_transmit_bytes is None or reading.pcie_receive_bytes is None:
        return None
    source, counts = reading.pcie_source, (reading.pcie_transmit_bytes, reading.pcie_receive_bytes)
    last_count = previous.get(reading.uuid)
    restarted = last_count is not None and (counts[0] < last_count.counts[0] or counts[1] < last_count.counts[1])
    if last_count is None or last_count.source != source:
        value = last_count.values if last_count else counts if source == PCIE_TOTALS else (0, 0)
        added = value[0] - counts[0], value[1] - counts[1]
    elif restarted:
        added = (0, 0) if source == PCIE_TOTALS else last_count.values
    else:
        added = last_count.added
    return PcieCount(source, counts, added)
