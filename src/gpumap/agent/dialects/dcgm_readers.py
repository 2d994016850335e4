"""How a family of the dialect dcgm is read: its labels in dcgm-exporter's order, and who stands on its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpumap.agent.dialects.dcgm_entities import Entity, cards, entities
from gpumap.agent.dialects.reading import Reading
from gpumap.agent.dialects.rows import device_node, driver_version
from gpumap.model.families import Family, Kind, Series
from gpumap.model.observations import ContainerName
from gpumap.model.readings import Activity, DeviceMemory
from gpumap.model.snapshot import ContainerUse, Snapshot

LABELS = (
    "gpu",
    "UUID",
    "pci_bus_id",
    "device",
    "modelName",
    "GPU_I_PROFILE",
    "GPU_I_ID",
    "hostname",
    "DCGM_FI_DRIVER_VERSION",
    "container",
    "namespace",
    "pod",
)
"""In the original's order: those of the entity, those that are the same on all, then the pod's by their names."""
_OPTIONAL = frozenset(LABELS[:-3])
"""Left out where they have nothing to say, as in the original. The pod's are written empty, which says the same: those
that are not there at all Prometheus takes from the target where it honors labels, and they name gpumap's own pod."""
_XID_LABELS = (*LABELS[:-2], "err_code", *LABELS[-2:])


def _labels(snapshot: Snapshot, entity: Entity, name: ContainerName | None) -> tuple[str, ...]:
    gpu = entity.gpu
    namespace, pod, container = name or ("", "", "")
    return (
        str(gpu.index),
        gpu.uuid,
        gpu.pci_bus_id,
        device_node(gpu),
        gpu.model,
        entity.profile,
        "" if entity.gpu_instance_id is None else str(entity.gpu_instance_id),
        snapshot.node.name,
        driver_version(snapshot),
        container,
        namespace,
        pod,
    )


def _family(name: str, help: str, read: Callable[[Snapshot], Iterator[Series]], kind: Kind = "gauge") -> Family:
    return Family(name, kind, help, LABELS, read, optional_labels=_OPTIONAL)


def on_cards(name: str, help: str, value: Reading, kind: Kind = "gauge") -> Family:
    """Of the card as a whole, once also where it is partitioned."""

    def read(snapshot: Snapshot) -> Iterator[Series]:
        for card in cards(snapshot):
            reading = card.gpu.reading
            if reading is not None and (found := value(reading)) is not None:
                yield Series(_labels(snapshot, card, card.sole), found)

    return _family(name, help, read, kind)


def of_memory(name: str, help: str, value: Callable[[DeviceMemory], float | None]) -> Family:
    """Of the GPU's or the GPU instance's memory, whoever uses it."""
    return _on_entities(name, help, lambda entity: None if entity.memory is None else value(entity.memory))


def of_activity(name: str, help: str, value: Callable[[Activity], float | None]) -> Family:
    """What GPM measured of the GPU's or the GPU instance's engines."""
    return _on_entities(name, help, lambda entity: None if entity.activity is None else value(entity.activity))


def _on_entities(name: str, help: str, value: Callable[[Entity], float | None]) -> Family:
    def read(snapshot: Snapshot) -> Iterator[Series]:
        for entity in entities(snapshot):
            if (found := value(entity)) is not None:
                yield Series(_labels(snapshot, entity, entity.sole), found)

    return _family(name, help, read)


def shared_out(
    name: str,
    help: str,
    whole: Callable[[Entity], float | None],
    own: Callable[[ContainerUse], float | None],
) -> Family:
    """What can be told of each container: the device's value where one has it to itself or none is on it; else what was
    measured of each, and no row for the device."""

    def read(snapshot: Snapshot) -> Iterator[Series]:
        for entity in entities(snapshot):
            sole = entity.sole
            if sole is not None or not entity.containers:
                if (found := whole(entity)) is not None:
                    yield Series(_labels(snapshot, entity, sole), found)
                continue
            for container in entity.containers:
                if (found := entity.own(container, own)) is not None:
                    yield Series(_labels(snapshot, entity, container), found)

    return _family(name, help, read)


def _xid_rows(snapshot: Snapshot) -> Iterator[Series]:
    """0 where none was heard. Stands also while the GPU does not answer: then above all it is asked for.

    A code is of whom it hit, which need not be who holds the GPU now. Of several none is named: the row is the card's.
    """
    by_gpu = {xids.uuid: xids for xids in snapshot.xids}
    for card in cards(snapshot):
        xids = by_gpu.get(card.gpu.uuid)
        code = None if xids is None else xids.last_code if xids.counts else 0
        if code is not None:
            hit = _hit(snapshot, card, code)
            name = card.sole if code == 0 else next(iter(hit)) if len(hit) == 1 else None
            labels = _labels(snapshot, card, name)
            yield Series((*labels[:-2], str(code), *labels[-2:]), code)


def _hit(snapshot: Snapshot, card: Entity, code: int) -> set[ContainerName]:
    """The containers that were on the card, or on a part of it that was meant, when it had errors of a code."""
    devices = {card.gpu.uuid, *(leaf.uuid for leaf in card.leaves)}
    return {one.name for one in snapshot.container_xids if one.code == code and one.uuid in devices}


XIDS = Family(
    "DCGM_FI_DEV_XID_ERRORS",
    "gauge",
    "Value of the last XID error encountered.",
    _XID_LABELS,
    _xid_rows,
    optional_labels=_OPTIONAL,
)
