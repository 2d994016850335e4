"""NVML's return codes (nvml.h, nvmlReturn_t) as gpumap's words. Pure: both ends of the pipe import it.

The service does not have nvidia-ml-py. The worker compares with its numbers (`calls`).
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
    """Return a code's name as a label value."""
    return _WORDS.get(code, f"code_{code}")


def fault(code: int) -> str:
    """Return the fault reason (docs/how-to/troubleshoot.md) of a GPU whose essential call returned this code."""
    return _FAULTS.get(code, "unknown")
