"""The group `allocation`: which container holds which device, as the kubelet's List reports it."""

from __future__ import annotations

from collections.abc import Iterator

from gpumap.model.families import Family, Rows, Series
from gpumap.model.node import ContainerAccount, ContainerOnDevice
from gpumap.model.snapshot import Snapshot

CONTAINER_LABELS = ("namespace", "pod", "container", "uuid")
NODE = Rows((), lambda snapshot: (((), snapshot.node),))
DEVICES = Rows(("uuid",), lambda snapshot: (((device.uuid,), device) for device in snapshot.node.devices))


def container_labels(row: ContainerOnDevice | ContainerAccount) -> tuple[str, str, str, str]:
    return row.namespace, row.pod, row.container, row.uuid


_GRANTS = Rows(
    CONTAINER_LABELS,
    lambda snapshot: ((container_labels(row), row.grant) for row in snapshot.containers if row.grant is not None),
)


def _unhealthy_devices(snapshot: Snapshot) -> Iterator[Series]:
    rows = {(*row.name, row.resource, row.device_id) for row in snapshot.node.device_health or () if row.is_unhealthy}
    return (Series(labels, 1) for labels in sorted(rows))


ALLOCATION = (
    _GRANTS.gauge(
        "gpumap_allocation_info",
        "The kubelet assigned at least one slot of the device to the container, or a scheduler granted it a share.",
        lambda grant: 1,
    ),
    _GRANTS.by(
        "resource",
        "gpumap_allocation_slots",
        "Slots (device ids) of the device that the container holds, by resource.",
        lambda grant: grant.slots,
    ),
    DEVICES.by(
        "resource",
        "gpumap_device_slots_allocatable",
        "Slots that the kubelet offers on the device. 0: it should, but offers no slot of its GPU.",
        lambda device: device.allocatable,
    ),
    DEVICES.gauge(
        "gpumap_device_holders",
        "Containers that hold at least one slot of the device, or a share that a scheduler granted.",
        lambda device: None if device.may_have_more else device.holders,
    ),
    DEVICES.gauge(
        "gpumap_device_free_ratio",
        "The part of the device that a new pod could be given: 1, 0, or the free part of the slots of a shared device.",
        lambda device: device.free_ratio,
    ),
    Family(
        "gpumap_device_reserved_info",
        "gauge",
        "A reservation pod holds the device for a scheduler that shares it among other pods.",
        ("uuid", "namespace", "pod"),
        lambda snapshot: [
            Series(labels, 1)
            for labels in sorted({(row.uuid, row.namespace, row.pod) for row in snapshot.containers if row.reservation})
        ],
    ),
    Family(
        "gpumap_unmatched_slots",
        "gauge",
        "Slots of a GPU resource that match no device of NVML, by reason.",
        ("namespace", "pod", "container", "resource", "reason"),
        lambda snapshot: [Series((*row.name, row.resource, row.reason), row.slots) for row in snapshot.node.unmatched],
    ),
    _GRANTS.gauge(
        "gpumap_container_allocated_gpus",
        "Share of a physical GPU that the container holds. 1 is a whole GPU.",
        lambda grant: grant.gpus,
    ),
    _GRANTS.gauge(
        "gpumap_container_allocated_gpu_memory_bytes",
        "GPU memory granted to the container. Absent if its kind of sharing grants no memory.",
        lambda grant: grant.memory_bytes,
    ),
    Family(
        "gpumap_allocation_unhealthy_info",
        "gauge",
        "The device plugin reports this device of the container as unhealthy, or does not know it. Needs the Pods API.",
        ("namespace", "pod", "container", "resource", "device_id"),
        _unhealthy_devices,
    ),
    Family(
        "gpumap_pod_info",
        "gauge",
        "A pod that holds or uses a GPU.",
        ("namespace", "pod", "uid"),
        lambda snapshot: [Series((pod.namespace, pod.pod, pod.uid), 1) for pod in snapshot.node.pods],
    ),
    NODE.info(
        ("node", "internal_ip"),
        "gpumap_node_info",
        "The node that this gpumap serves.",
        lambda node: (node.name, node.internal_ip),
    ),
)
