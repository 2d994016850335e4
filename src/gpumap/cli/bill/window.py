"""The window of a bill: times as people write them, rounded down to the steps of a Prometheus query."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import NamedTuple

from gpumap.model.errors import UsageError
from gpumap.model.formatting import parse_duration

SETTLED_SECONDS = 60
"""Later samples may not have arrived yet: `now` means this long ago, and a duration counts from there."""
STEP_SECONDS_MIN = 60
"""In shorter steps, two scrapers whose clocks differ by a scrape look like counters that go back."""
STEP_SECONDS_MAX = 600
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)
_WITHOUT_OFFSET = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(:\d\d(\.\d+)?)?", re.ASCII)
_UNIX = re.compile(r"\d{9,10}(\.\d+)?", re.ASCII)
_EARLIEST = 1_262_304_000


class Window(NamedTuple):
    """From `start` (exclusive) to `end` (inclusive), in Unix seconds. Both are multiples of the step."""

    start: int
    end: int
    step_seconds: int


def window_of(start: str, end: str, resolution: str, now_seconds: float) -> Window:
    """Read --from, --to and --resolution. Raises UsageError."""
    step = _step(resolution)
    start_seconds, end_seconds = (_floor("--from", start, step, now_seconds), _floor("--to", end, step, now_seconds))
    if start_seconds >= end_seconds:
        relation = "the same moment as" if start_seconds == end_seconds else "later than"
        raise UsageError(f"--from {start}: is {relation} --to {end} ({rfc3339(end_seconds)}, in steps of {resolution})")
    return Window(start_seconds, end_seconds, step)


def parse_time(text: str, now_seconds: float) -> float:
    """Return Unix seconds for RFC 3339, a date (midnight, UTC), Unix seconds, `now`, or a duration before now.

    Raises ValueError.
    """
    if text == "now":
        return now_seconds - SETTLED_SECONDS
    if _UNIX.fullmatch(text):
        return float(text)
    if _DATE.fullmatch(text) or _TIME.fullmatch(text):
        try:
            moment = datetime.fromisoformat(text.upper())
        except ValueError as error:
            raise ValueError("this date or time does not exist") from error
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if _WITHOUT_OFFSET.fullmatch(text):
        raise ValueError("has no time zone: end it with Z for UTC, or with an offset such as +01:00")
    try:
        return now_seconds - SETTLED_SECONDS - parse_duration(text)
    except ValueError:
        raise ValueError("must be a time such as 2026-11-01, 2026-11-01T08:00:00Z, 30d (ago) or now") from None


def rfc3339(moment: int) -> str:
    """Write Unix seconds as RFC 3339, in UTC."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _step(resolution: str) -> int:
    try:
        seconds = parse_duration(resolution)
    except ValueError as error:
        raise UsageError(f"--resolution {resolution}: {error}") from error
    if seconds != int(seconds) or not STEP_SECONDS_MIN <= seconds <= STEP_SECONDS_MAX:
        least_minutes, most_minutes = STEP_SECONDS_MIN // 60, STEP_SECONDS_MAX // 60
        raise UsageError(f"--resolution {resolution}: must be whole seconds, from {least_minutes}m to {most_minutes}m")
    return int(seconds)


def _floor(flag: str, text: str, step: int, now_seconds: float) -> int:
    try:
        moment = parse_time(text, now_seconds)
    except ValueError as error:
        raise UsageError(f"{flag} {text}: {error}") from error
    if moment < _EARLIEST:
        raise UsageError(f"{flag} {text}: is before 2010, when Prometheus did not exist")
    if moment > now_seconds:
        raise UsageError(f"{flag} {text}: is in the future")
    return int(moment // step) * step
