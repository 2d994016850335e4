"""The dialect dcgm-join: who holds what, under the labels that a real dcgm-exporter's series can be joined on.

One row per container and what dcgm-exporter has a series of: never per slot, so that a join multiplies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpumap.agent.dialects.dcgm_entities import cards, entities
from gpumap.agent.dialects.rows import owns
from gpumap.model.families import Family, Series
from gpumap.model.snapshot import Snapshot

_LABELS = ("UUID", "GPU_I_ID", "GPU_I_PROFILE", "namespace", "pod", "container")


def _owners(snapshot: Snapshot) -> Iterator[Series]:
    """Who holds a partitioned GPU as a whole owns each of its instances too."""
    partitioned = [card for card in cards(snapshot) if card.gpu.partitioned]
    for entity in (*partitioned, *entities(snapshot)):
        number = "" if entity.gpu_instance_id is None else str(entity.gpu_instance_id)
        for owner in entity.owners:
            yield Series((entity.gpu.uuid, number, entity.profile, *owner), 1)
    known = {gpu.uuid for gpu in snapshot.gpus}
    for row in snapshot.containers:
        # While NVML is down: a GPU's uuid is dcgm-exporter's key as it is; of a MIG device nobody can tell the GPU.
        if owns(row) and row.uuid.startswith("GPU-") and row.uuid not in known:
            yield Series((row.uuid, "", "", *row.name), 1)


FAMILIES: tuple[Family, ...] = (
    Family(
        "gpumap_dcgm_owner_info",
        "gauge",
        "A container that holds the GPU or GPU instance, by the labels of dcgm-exporter.",
        _LABELS,
        _owners,
        optional_labels=frozenset({"GPU_I_ID", "GPU_I_PROFILE"}),
    ),
)
