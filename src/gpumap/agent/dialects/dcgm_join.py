"""The dialect dcgm-join: the owners of each GPU, with labels that match the series of a real dcgm-exporter.

There is one row per container and entity of dcgm-exporter, never per slot: a join multiplies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpumap.agent.dialects.common import owns
from gpumap.agent.dialects.dcgm_entities import cards, entities
from gpumap.model.families import Family, Series
from gpumap.model.snapshot import Snapshot

_LABELS = ("UUID", "GPU_I_ID", "GPU_I_PROFILE", "namespace", "pod", "container")


def _owners(snapshot: Snapshot) -> Iterator[Series]:
    """The owner of a whole partitioned GPU also owns each of its instances."""
    partitioned = [card for card in cards(snapshot) if card.gpu.partitioned]
    for entity in (*partitioned, *entities(snapshot)):
        number = "" if entity.gpu_instance_id is None else str(entity.gpu_instance_id)
        for owner in entity.owners:
            yield Series((entity.gpu.uuid, number, entity.profile, *owner), 1)
    known = {gpu.uuid for gpu in snapshot.node.gpus}
    for row in snapshot.containers:
        # While NVML is down: a GPU's uuid is dcgm-exporter's key, but the GPU of a MIG device is unknown.
        if owns(row) and row.uuid.startswith("GPU-") and row.uuid not in known:
            yield Series((row.uuid, "", "", *row.name), 1)


FAMILIES: tuple[Family, ...] = (
    Family(
        "gpumap_dcgm_owner_info",
        "gauge",
        "A container that holds the GPU or GPU instance, with the labels of dcgm-exporter.",
        _LABELS,
        _owners,
        optional_labels=frozenset({"GPU_I_ID", "GPU_I_PROFILE"}),
    ),
)
