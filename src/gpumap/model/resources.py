"""Names of GPU resources and of namespaces. Every command line reads this file, so it imports nothing."""

DEFAULT_RESOURCE_PATTERN = (
    r"nvidia\.com/(?!.*(mps-control|imex)).+|aliyun\.com/gpu-mem|tencent\.com/vcuda-(core|memory)"
    r"|volcano\.sh/(gpu-memory|gpu-number|vgpu-number|vgpu-memory|vgpu-cores)|k8s\.amazonaws\.com/vgpu|gpu\.nvidia\.com"
)
"""The resources of every known GPU plugin; the whole name must match."""
DEFAULT_RESERVATION_NAMESPACES = "kai-resource-reservation|runai-reservation"
"""Where KAI-Scheduler since 0.6, and Run:ai, keep GPUs that they share; the whole name must match."""
