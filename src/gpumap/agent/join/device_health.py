"""What device plugins say of the health of the devices that they gave to containers, as the Pods API passes it on."""

from __future__ import annotations

from collections.abc import Callable

from gpumap.model.observations import ContainerName, DeviceHealth, Failed, Observed, PodIdentity
from gpumap.model.plugins import DRA_DRIVER
from gpumap.model.snapshot import ReportedDeviceHealth


def told_health(
    identity: Observed[PodIdentity] | Failed, is_gpu_resource: Callable[[str], bool]
) -> tuple[ReportedDeviceHealth, ...] | None:
    """Of GPUs alone, and of this collection alone; `None` where nobody told in it."""
    pods = identity.value.pods if isinstance(identity, Observed) else None
    if pods is None:
        return None
    found = {
        ReportedDeviceHealth(ContainerName(pod.namespace, pod.pod, container.name), health)
        for pod in pods
        for container in pod.containers
        for health in container.health
        if is_gpu_resource(health.resource) or _is_gpu_claim(health)
    }
    return tuple(sorted(found))


def _is_gpu_claim(health: DeviceHealth) -> bool:
    """A claim's device has the name `<driver>/<pool>/<device>`, or that of CDI, which has the driver's in it
    (kubernetes/kubernetes, pkg/kubelet/cm/dra/manager.go, UpdateAllocatedResourcesStatus)."""
    return health.resource.startswith("claim:") and DRA_DRIVER in health.device_id
