"""NVML's return codes (nvml.h, nvmlReturn_t) as words of gpumap's. Pure: both ends of the pipe import it.

The service has no nvidia-ml-py, whose numbers the worker compares with (`calls`).
"""

_WORDS = {
    0: "success",
    1: "uninitialized",
    2: "invalid_argument",
    3: "not_supported",
    4: "no_permission",
    5: "already_initialized",
    6: "not_found",
    7: "insufficient_size",
    8: "insufficient_power",
    9: "driver_not_loaded",
    10: "timeout",
    11: "irq_issue",
    12: "library_not_found",
    13: "function_not_found",
    14: "corrupted_inforom",
    15: "gpu_is_lost",
    16: "reset_required",
    17: "operating_system",
    18: "driver_version_mismatch",
    19: "in_use",
    20: "memory",
    21: "no_data",
    22: "vgpu_ecc_not_supported",
    23: "insufficient_resources",
    24: "freq_not_supported",
    25: "argument_version_mismatch",
    26: "deprecated",
    27: "not_ready",
    28: "gpu_not_found",
    29: "invalid_state",
    30: "reset_type_not_supported",
    999: "unknown",
}

_FAULTS = {4: "no_permission", 8: "insufficient_power", 11: "irq_issue", 15: "lost", 16: "reset_required", 28: "lost"}


def word(code: int) -> str:
    """A code's name as a label value."""
    return _WORDS.get(code, f"code_{code}")


def fault(code: int) -> str:
    """The fault reason (docs/how-to/troubleshoot.md) of a GPU whose essential call was answered with this code."""
    return _FAULTS.get(code, "unknown")
