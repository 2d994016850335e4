"""NVML's return codes (nvml.h, nvmlReturn_t) as words, and what each costs. Pure: both ends of the pipe import it."""

INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NOT_PERMITTED = 4
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
RESET_REQUIRED = 16
DRIVER_VERSION_MISMATCH = 18
UNKNOWN = 999

UNSUPPORTED = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND, 25, 26})
"""The GPU or its driver cannot tell: not asked again until NVML is initialised anew or MIG is switched."""
NO_DATA = frozenset({NOT_FOUND, 21, 27})
"""Nothing to tell just now."""
STALE = frozenset({INVALID_ARGUMENT, NOT_FOUND})
"""Of a MIG device's handle: it is no more."""
GONE = frozenset({15, RESET_REQUIRED, 28})
"""In any call: the GPU is lost or needs a reset, and no other call on it will do better."""
UNINITIALIZED = frozenset({1, 9, DRIVER_VERSION_MISMATCH})
"""In any call: the library has lost its driver and must be initialised anew."""
LOST_TOUCH = frozenset({17, 29, UNKNOWN})
"""Where every call says so: as UNINITIALIZED. One call that says so may only be an odd call."""

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
    """The fault reason (contract §9) of a GPU whose essential call was answered with this code."""
    return _FAULTS.get(code, "unknown")
