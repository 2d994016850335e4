"""Values as people read them. What is not known is a dash, never 0."""

from __future__ import annotations

UNKNOWN = "-"


def size(value: int | None) -> str:
    """Bytes, as `41.3GiB`."""
    if value is None:
        return UNKNOWN
    amount = float(value)
    for unit in ("B", "KiB", "MiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f}{unit}" if value else "0"
        amount /= 1024
    return f"{amount:.1f}GiB"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value * 100:.0f}%"


def ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g}"


def number(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def age(seconds: float | None) -> str:
    """A duration as kubectl writes it: its largest part or two, as `45s`, `5m30s`, `3h`, `2d4h`."""
    if seconds is None:
        return UNKNOWN
    left = int(max(seconds, 0))
    if left < 120:
        return f"{left}s"
    for small, large, many in (("s", "m", 60), ("m", "h", 60)):
        whole, rest = divmod(left, many)
        if whole < (10 if large == "m" else 8) and rest:
            return f"{whole}{large}{rest}{small}"
        if whole < (180 if large == "m" else 48):
            return f"{whole}{large}"
        left = whole
    days, hours = divmod(left, 24)
    return f"{days}d{hours}h" if days < 8 and hours else f"{days}d"
