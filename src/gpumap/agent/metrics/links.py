"""The group `links`: what went over a GPU's PCIe and NVLink, as the driver counts."""

from __future__ import annotations

from gpumap.agent.metrics.measured import measured

LINKS = (
    measured(
        "gpumap_gpu_pcie_transmit_bytes_total",
        "Bytes that the GPU sent over PCIe.",
        lambda reading: reading.pcie_transmit_bytes,
        "counter",
    ),
    measured(
        "gpumap_gpu_pcie_receive_bytes_total",
        "Bytes that the GPU received over PCIe.",
        lambda reading: reading.pcie_receive_bytes,
        "counter",
    ),
    measured(
        "gpumap_gpu_nvlink_transmit_bytes_total",
        "Bytes that the GPU sent over all of its NVLinks.",
        lambda reading: reading.nvlink_transmit_bytes,
        "counter",
    ),
    measured(
        "gpumap_gpu_nvlink_receive_bytes_total",
        "Bytes that the GPU received over all of its NVLinks.",
        lambda reading: reading.nvlink_receive_bytes,
        "counter",
    ),
)
