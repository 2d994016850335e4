"""The HTTP routes: /, /metrics, dialects' pages, /api/v1/map and its schema, /api/v1/history, /api/v1/check,
/healthz, /readyz.

They serve what is rendered. No request reads a source.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
from pathlib import Path

from aiohttp import web

from gpumap.agent.exposition import OPENMETRICS_TYPE, TEXT_TYPE
from gpumap.agent.web.pages import Format, Pages
from gpumap.agent.web.requests import Handler, accepts_gzip, has_already, prefers_openmetrics, refuse_foreign_hosts
from gpumap.model.check import short_line
from gpumap.model.terms import GPU_CONDITIONS

_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_PIECE_BYTES = 1 << 18
"""A larger page is written piece by piece: a client that does not read it costs no copy in memory."""
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


def application(pages: Pages) -> web.Application:
    """Make the application. The pages of dialects that are off return 404."""
    app = web.Application(middlewares=[refuse_foreign_hosts, _list_paths])
    app.on_response_prepare.append(_hide_versions)
    for file in _PAGE.iterdir():
        if file.is_file():
            app.router.add_get("/" if file.name == INDEX else f"/page/{file.name}", _asset(file))
    app.router.add_get("/metrics", _metrics(pages))
    app.router.add_get("/api/v1/map", _page(pages, "map", "application/json", versioned=True))
    app.router.add_get("/api/v1/map/schema.json", _asset(_SCHEMA))
    app.router.add_get("/api/v1/history", _page(pages, "history", "application/json", versioned=True))
    app.router.add_get("/api/v1/check", _check(pages))
    app.router.add_get("/healthz", _healthz)
    app.router.add_get("/readyz", _readyz(pages))
    for path in pages.paths:
        app.router.add_get(path, _page(pages, ("path", path), TEXT_TYPE))
    return app


@web.middleware
async def _list_paths(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer 404 with the paths that exist."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        paths = sorted(resource.canonical for resource in request.app.router.resources())
        text = "".join(f"{path}\n" for path in paths if not path.startswith("/page/"))
        return web.Response(status=404, text=f"no such path; the paths are:\n{text}", headers=_HEADERS)


async def _hide_versions(request: web.Request, response: web.StreamResponse) -> None:
    """Send no `Server` header: aiohttp would name its version and Python's."""
    response.headers.popall("Server", None)


def _metrics(pages: Pages) -> Handler:
    text, openmetrics = _page(pages, "text", TEXT_TYPE), _page(pages, "openmetrics", OPENMETRICS_TYPE)

    async def metrics(request: web.Request) -> web.StreamResponse:
        is_openmetrics = prefers_openmetrics(request.headers.get("Accept", ""))
        return await (openmetrics if is_openmetrics else text)(request)

    return metrics


def _page(pages: Pages, form: Format, content_type: str, *, versioned: bool = False) -> Handler:
    """Answer with a page. A client that already has this version does not get it again."""
    plain = {**_HEADERS, "Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    compressed = {**plain, "Content-Encoding": "gzip"}

    async def page(request: web.Request) -> web.StreamResponse:
        gzipped = accepts_gzip(request.headers.get("Accept-Encoding", ""))
        headers = compressed if gzipped else plain
        if versioned and (version := pages.version()) is not None:
            etag = f'W/"{version}"'
            if has_already(request.headers.get("If-None-Match", ""), etag):
                return web.Response(status=304, headers={**plain, "ETag": etag})
            headers = {**headers, "ETag": etag}
        body = await pages.page(form, gzipped=gzipped)
        if body is None:
            return web.Response(status=503, text="the first collection is not finished\n", headers=_HEADERS)
        if len(body) > _PIECE_BYTES:
            return await _send_pieces(request, body, headers)
        return web.Response(body=body, headers=headers)

    return page


async def _send_pieces(request: web.Request, body: bytes, headers: dict[str, str]) -> web.StreamResponse:
    response = web.StreamResponse(headers=headers)
    response.content_length = len(body)
    with contextlib.suppress(ConnectionError):  # the client is gone
        await response.prepare(request)
        if request.method != "HEAD":
            view = memoryview(body)
            for start in range(0, len(body), _PIECE_BYTES):
                await response.write(view[start : start + _PIECE_BYTES])
    return response


def _asset(file: Path) -> Handler:
    """Answer with a static file, which is read once."""
    body = file.read_bytes()
    compress = functools.cache(lambda: gzip.compress(body, mtime=0))
    etag = f'W/"{hashlib.sha256(body).hexdigest()[:16]}"'
    headers = {
        **(POLICY if file.name == INDEX else {}),
        "X-Content-Type-Options": "nosniff",
        "Content-Type": _TYPES[file.suffix[1:]],
        "Cache-Control": "no-cache",
        "ETag": etag,
        "Vary": "Accept-Encoding",
    }

    async def answer(request: web.Request) -> web.StreamResponse:
        if has_already(request.headers.get("If-None-Match", ""), etag):
            return web.Response(status=304, headers=headers)
        if accepts_gzip(request.headers.get("Accept-Encoding", "")):
            return web.Response(body=compress(), headers={**headers, "Content-Encoding": "gzip"})
        return web.Response(body=body, headers=headers)

    return answer


def _check(pages: Pages) -> Handler:
    """Answer with the exit code of `gpumap check`, a blank and its line, for scripts without JSON."""

    async def check(request: web.Request) -> web.StreamResponse:
        only = tuple(request.query.getall("only", ()))
        if unknown := set(only) - set(GPU_CONDITIONS):
            text = f"2 {short_line(f'unknown condition {min(unknown)}')}\n"
            return web.Response(status=400, text=text, headers=_HEADERS)
        verdict = await pages.check(only, request.query.get("node", ""))
        if verdict is None:
            return web.Response(status=503, text="2 the first collection is not finished\n", headers=_HEADERS)
        return web.Response(text=f"{verdict.code} {verdict.line}\n", headers=_HEADERS)

    return check


async def _healthz(request: web.Request) -> web.Response:
    return web.Response(text="ok\n", headers=_HEADERS)


def _readyz(pages: Pages) -> Handler:
    async def readyz(request: web.Request) -> web.StreamResponse:
        reason = pages.not_ready()
        if reason is None:
            return web.Response(text="ok\n", headers=_HEADERS)
        return web.Response(status=503, text=f"not ready: {reason}\n", headers=_HEADERS)

    return readyz
