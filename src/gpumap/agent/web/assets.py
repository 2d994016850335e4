"""Static files (the page `/`, the schema), read once, with their headers."""

from __future__ import annotations

import gzip
import hashlib
from importlib import resources
from typing import NamedTuple

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
_SCHEMA = "map.schema.json"


class Asset(NamedTuple):
    body: bytes
    gzipped: bytes
    etag: str
    headers: dict[str, str]


def read_assets() -> dict[str, Asset]:
    """Every file of the page, by name."""
    folder = resources.files("gpumap.agent.web") / "page"
    return {file.name: _asset(file.name, file.read_bytes()) for file in folder.iterdir() if file.is_file()}


def read_schema() -> Asset:
    """The JSON schema of /api/v1/map."""
    return _asset(_SCHEMA, (resources.files("gpumap.model") / _SCHEMA).read_bytes())


def _asset(name: str, body: bytes) -> Asset:
    etag = f'W/"{hashlib.sha256(body).hexdigest()[:16]}"'
    headers = {
        **(POLICY if name == INDEX else {}),
        "X-Content-Type-Options": "nosniff",
        "Content-Type": _TYPES[name.rpartition(".")[2]],
        "Cache-Control": "no-cache",
        "ETag": etag,
        "Vary": "Accept-Encoding",
    }
    return Asset(body, gzip.compress(body, mtime=0), etag, headers)
