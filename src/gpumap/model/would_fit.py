"""The smallest MIG profile, or part of a GPU, that the use of a whole GPU would fit. Pure.

A hint: SM time says how long kernels ran, not how many SMs they used. A MIG device has no peer-to-peer access.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MARGIN = 1.2
"""Peaks of the next week may be higher than those of the last one."""
_MIG_MEMORY = 0.9
"""A MIG device has at least this part of its memory slices: 16.0 of 17.5 GiB for 1g.18gb, 4.75 of 4.95 for 1g.5gb."""
_GIB = 1 << 30
_SLICES = ((1, 1), (1, 2), (2, 2), (3, 4), (4, 4))
"""Compute and memory slices of profiles, smallest first; of 7 and 8."""
_PARTS = (8, 4, 2)
"""Equal parts of a GPU, for software that shares it."""


class _Model(NamedTuple):
    """A model with MIG: its name, its memory in GiB from and to, and its profiles in the order of `_SLICES`."""

    name: str
    gib: tuple[int, int]
    profiles: tuple[str, ...]
    slices: tuple[tuple[int, int], ...] = _SLICES
    compute: int = 7
    memory: int = 8


_MODELS = (
    _Model(r"A100|A800", (38, 41), ("1g.5gb", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb")),
    _Model(r"A100|A800|H100|H800", (78, 81), ("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb")),
    _Model(r"H100|H800", (92, 95), ("1g.12gb", "1g.24gb", "2g.24gb", "3g.47gb", "4g.47gb")),
    _Model(r"H200", (139, 142), ("1g.18gb", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb")),
    _Model(r"B200", (177, 182), ("1g.23gb", "1g.45gb", "2g.45gb", "3g.90gb", "4g.90gb")),
    _Model(r"A30", (22, 25), ("1g.6gb", "2g.12gb"), ((1, 1), (2, 2)), 4, 4),
)
"""NVIDIA MIG User Guide, "Supported MIG Profiles"."""


_VGPU = re.compile(r"[0-9]+[ABCQ]")
"""The end of a vGPU's model, such as `NVIDIA A100-40C`. A virtual machine cannot partition its vGPU."""


class Fit(NamedTuple):
    """`what` is a MIG profile such as `1g.10gb`, or `1/4 GPU`; `saved_gpus` is the rest of the GPU, by memory or by
    SMs, whichever is less: four devices of 1g.20gb fill a GPU, not seven."""

    what: str
    saved_gpus: float


def smallest_fit(model: str, total_bytes: int, peak_bytes: float, sm_ratio: float) -> Fit | None:
    """Return what a use of this memory and SM time would fit; `None` if it needs the whole GPU.

    A model without known profiles is divided into equal parts.
    """
    memory, sm = peak_bytes * MARGIN, sm_ratio * MARGIN
    known = _known(model, total_bytes)
    if known is None:
        for parts in _PARTS:
            if memory <= total_bytes / parts and sm <= 1 / parts:
                return Fit(f"1/{parts} GPU", 1 - 1 / parts)
        return None
    for profile, (compute, slices) in zip(known.profiles, known.slices, strict=True):
        if memory <= total_bytes * slices / known.memory * _MIG_MEMORY and sm <= compute / known.compute:
            return Fit(profile, 1 - max(compute / known.compute, slices / known.memory))
    return None


def _known(model: str, total_bytes: int) -> _Model | None:
    words = re.split(r"[^A-Z0-9]+", model.upper())
    if "GRID" in words or _VGPU.fullmatch(words[-1]):
        return None
    for one in _MODELS:
        if any(re.fullmatch(one.name, word) for word in words) and one.gib[0] <= total_bytes / _GIB <= one.gib[1]:
            return one
    return None
