"""Static files (the page `/`, the schema), read once, with their headers."""

from __future__ import annotations

import functools
import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "json": "application/schema+json",
}
POLICY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
}
"""Headers of the page. They also apply to what it loads."""
INDEX = "index.html"
_PAGE = Path(__file__).with_name("page")  # not importlib.resources: its import takes 3 % of the start
_SCHEMA = Path(__file__).parents[2] / "model" / "map.schema.json"


@dataclass(frozen=True)
class Asset:
    body: bytes
    etag: str
    headers: dict[str, str]

    @functools.cached_property
    def gzipped(self) -> bytes:
        return gzip.compress(self.body, mtime=0)


def read_assets() -> dict[str, Asset]:
    """Every file of the page, by name."""
    return {file.name: _asset(file) for file in _PAGE.iterdir() if file.is_file()}


def read_schema() -> Asset:
    """The JSON schema of /api/v1/map."""
    return _asset(_SCHEMA)


def _asset(file: Path) -> Asset:
    body = file.read_bytes()
    etag = f'W/"{hashlib.sha256(body).hexdigest()[:16]}"'
    headers = {
        **(POLICY if file.name == INDEX else {}),
        "X-Content-Type-Options": "nosniff",
        "Content-Type": _TYPES[file.suffix[1:]],
        "Cache-Control": "no-cache",
        "ETag": etag,
        "Vary": "Accept-Encoding",
    }
    return Asset(body, etag, headers)
