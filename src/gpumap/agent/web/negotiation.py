"""Reads a request's headers: format, compression, known version (RFC 9110 §8.8.3, §12.5)."""

from __future__ import annotations

import contextlib
from functools import lru_cache

OPENMETRICS_VERSION = "1.0.0"

_REMEMBERED = 128
"""There are few clients, and each sends the same at each scrape."""


@lru_cache(_REMEMBERED)
def prefers_openmetrics(accept: str) -> bool:
    """Return whether a client prefers OpenMetrics 1.0 to the text format."""
    wanted = quality(accept, "application/openmetrics-text")
    return wanted > 0 and wanted >= quality(accept, "text/plain")


@lru_cache(_REMEMBERED)
def accepts_gzip(accept_encoding: str) -> bool:
    return quality(accept_encoding, "gzip") > 0


def has_already(if_none_match: str, etag: str) -> bool:
    """Return whether an If-None-Match header names this version. Weak tags compare by the text in the quotes."""
    if not if_none_match:
        return False
    named = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return etag.removeprefix("W/") in named or named == ["*"]


def quality(header: str, token: str) -> float:
    """Return the weight of a token in an Accept or Accept-Encoding header; 0 if it is not named."""
    best = 0.0
    for choice in header.split(","):
        name, *parameters = (part.strip() for part in choice.split(";"))
        if name.lower() != token:
            continue
        pairs = (parameter.partition("=") for parameter in parameters)
        given = {key.strip().lower(): value.strip() for key, _, value in pairs}
        if (
            token.endswith("openmetrics-text")
            and given.get("version", OPENMETRICS_VERSION).strip('"') != OPENMETRICS_VERSION
        ):
            continue
        with contextlib.suppress(ValueError):
            best = max(best, float(given.get("q", "1")))
    return best
