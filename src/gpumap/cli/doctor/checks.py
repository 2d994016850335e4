"""What a check of `gpumap doctor` is. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One line. `state`: ok, degraded, missing, failed, warning (more rights than are needed; errors that were
    counted), not needed, unknown."""

    check: str
    state: str
    required: bool
    seen: str
    why: str | None = None
    remedy: str | None = None
