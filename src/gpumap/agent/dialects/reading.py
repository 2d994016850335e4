"""What a card's reading tells under the driver's words: how each is read."""

from __future__ import annotations

from collections.abc import Callable

from gpumap.model.readings import GpuReading

Reading = Callable[[GpuReading], float | None]


def clock(domain: str) -> Reading:
    return lambda reading: dict(reading.clocks_hertz).get(domain)


def max_clock(domain: str) -> Reading:
    return lambda reading: dict(reading.max_clocks_hertz).get(domain)


def temperature(sensor: str) -> Reading:
    return lambda reading: dict(reading.temperatures_celsius).get(sensor)


def power_limit(kind: str) -> Reading:
    return lambda reading: dict(reading.power_limits_watts).get(kind)


def event_seconds(reason: str) -> Reading:
    """How long clocks were lowered for it."""
    return lambda reading: dict(reading.clock_event_seconds).get(reason)


def remapped_rows(cause: str) -> Reading:
    return lambda reading: dict(reading.remapped_rows).get(cause)


def retired_pages(cause: str) -> Reading:
    return lambda reading: dict(reading.retired_pages).get(cause)


def ecc_errors(kind: str, location: str) -> Reading:
    """Over the card's life."""
    return lambda reading: {row[:2]: row[2] for row in reading.ecc_errors}.get((kind, location))


def ecc_total(kind: str, since: str) -> Reading:
    return lambda reading: {row[:2]: row[2] for row in reading.ecc_totals}.get((kind, since))
