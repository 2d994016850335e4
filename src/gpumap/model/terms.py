"""The terms of sources, owners, pods and containers. Every command reads this file, so it imports next to nothing."""

from __future__ import annotations

import enum
from typing import NamedTuple


class PodName(NamedTuple):
    namespace: str
    pod: str


class ContainerName(NamedTuple):
    """A container of this node. `container` is empty if only the pod is known."""

    namespace: str
    pod: str
    container: str

    @property
    def pod_name(self) -> PodName:
        return PodName(self.namespace, self.pod)


class Source(enum.StrEnum):
    KUBELET = "kubelet"
    NVML = "nvml"
    PROCFS = "procfs"
    POD_IDENTITY = "pod_identity"


class Owner(enum.StrEnum):
    """The owner of a process, or of a part of a leaf's memory (label `owner`, docs/explanation/attribution.md)."""

    ASSIGNED = "assigned"
    UNASSIGNED = "unassigned"
    GONE = "gone"
    SCHEDULED = "scheduled"
    HOST = "host"
    MPS_SERVER = "mps_server"
    SIBLING = "sibling"
    UNKNOWN = "unknown"
    UNACCOUNTED = "unaccounted"


GPU_CONDITIONS = ("down", "row_remap_failure", "recovery_action", "ecc_uncorrected", "xid", "row_remap_pending")
"""Problems of a GPU that `gpumap check` reports, worst first. The names are those of the checks of `gpumap doctor`."""
