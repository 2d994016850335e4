"""How people write durations: as Prometheus does (`500ms`, `1m30s`)."""

import re

_DURATION = re.compile(
    r"(?:(\d{1,3})y)?(?:(\d{1,4})w)?(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m(?!s))?(?:(\d{1,9})s)?(?:(\d{1,9})ms)?",
    re.ASCII,
)
_SECONDS = (365 * 86400.0, 7 * 86400.0, 86400.0, 3600.0, 60.0, 1.0, 0.001)


def parse_duration(text: str) -> float:
    """Give a duration in seconds. Raises ValueError where `text` is none, or is zero."""
    match = _DURATION.fullmatch(text)
    if not text or match is None:
        raise ValueError(f'"{text}" is not a duration such as 500ms, 5s or 1m30s')
    seconds = sum(int(digits or 0) * unit for digits, unit in zip(match.groups(), _SECONDS, strict=True))
    if seconds == 0:
        raise ValueError("must be longer than zero")
    return seconds
