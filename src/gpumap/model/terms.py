"""The terms of sources, owners, pods, containers and GPU resources.

Every command reads this file, so it imports next to nothing.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, NewType

NUMBER_MAX = 1e99
"""No number of gpumap's is larger. Sums, products and ratios of such numbers do not overflow."""
PodUid = NewType("PodUid", str)
"""As in cgroup paths and log directories. A static pod has a hash of 32 hex digits, not a UUID."""


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


KUBELET_AWAY_REASONS = frozenset({"socket_missing", "connection_refused", "unavailable"})
"""The kubelet was not running if a call failed for one of these. A slow or busy kubelet fails for others."""


class Owner(enum.StrEnum):
    """Owner of a process or of memory (docs/explanation/attribution.md). assigned: a container that holds the device.
    unassigned: a container of a live pod that does not hold it. gone: a pod that no longer exists. scheduled: a pod
    that a scheduler lets use the device beside the kubelet. host: no pod. mps_server: the MPS server. sibling:
    processes of another compute instance of the same GPU instance. unknown: no source can name it. unaccounted: memory
    that no process explains (negative if processes share memory)."""

    ASSIGNED = "assigned"
    UNASSIGNED = "unassigned"
    GONE = "gone"
    SCHEDULED = "scheduled"
    HOST = "host"
    MPS_SERVER = "mps_server"
    SIBLING = "sibling"
    UNKNOWN = "unknown"
    UNACCOUNTED = "unaccounted"

    @classmethod
    def _missing_(cls, value: object) -> Owner:
        """Return the owner for a word of a later version."""
        return cls.UNKNOWN


FINDINGS = (
    "fault",
    "not_offered",
    "squatter",
    "leftover",
    "unexplained",
    "over",
    "stalled",
    "idle",
    "maybe_idle",
    "unused",
    "unmatched",
)
"""Kinds of findings, worst first: a broken GPU; one that no container can be assigned; use without a grant takes from
others, an idle device only from its own budget."""
MEMORY_WITHOUT_PROCESS, BUSY_WITHOUT_PROCESS = "memory_without_process", "busy_without_process"
"""Reasons of `unexplained`."""
GPU_FINDINGS = ("fault", "not_offered")
"""Those of a GPU, not of a container or a device."""
UNJUDGED_REASONS = (
    "nvml_down",
    "gpu_down",
    "kubelet_down",
    "no_kubelet",
    "identity_down",
    "no_pid_visibility",
    "unknown_process",
    "unknown_assignment",
    "offers_unknown",
    "not_supported",
    "use_not_measured",
    "unknown_work",
    "idle_power_unknown",
    "just_started",
)
"""Why a GPU, leaf or holder cannot be judged. If several apply, the first one counts."""
GPU_CONDITIONS = (
    "down",
    "row_remap_failure",
    "recovery_action",
    "ecc_uncorrected",
    "xid",
    "row_remap_pending",
    "not_offered",
)
"""Problems of a GPU that `gpumap check` reports, worst first. The names are those of the checks of `gpumap doctor`."""


# --- names of GPU resources and of namespaces -------------------------------------------------------------------------


DEFAULT_RESOURCE_PATTERN = (
    r"nvidia\.com/(?!.*(mps-control|imex)).+|aliyun\.com/gpu-mem|tencent\.com/vcuda-(core|memory)"
    r"|volcano\.sh/(gpu-memory|gpu-number|vgpu-number|vgpu-memory|vgpu-cores)|k8s\.amazonaws\.com/vgpu|gpu\.nvidia\.com"
)
"""The resources of every known GPU plugin; the whole name must match."""
DEFAULT_RESERVATION_NAMESPACES = "kai-resource-reservation|runai-reservation"
"""Where KAI-Scheduler since 0.6, and Run:ai, keep GPUs that they share; the whole name must match."""
