"""Values as people read them. What is not known is a dash, never 0."""

from __future__ import annotations

UNKNOWN = "-"
_TIB_FROM = 10 * 1024
"""Of GiB: sums of a cluster's."""


def size(value: int | None) -> str:
    """Bytes, as `41.3GiB`."""
    if value is None:
        return UNKNOWN
    amount = float(value)
    for unit in ("B", "KiB", "MiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f}{unit}" if value else "0"
        amount /= 1024
    return f"{amount:.1f}GiB" if abs(amount) < _TIB_FROM else f"{amount / 1024:.1f}TiB"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value * 100:.0f}%"


def ratio(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def number(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)
