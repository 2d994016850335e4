"""The HTTP face: /metrics, /metrics/nodes, /api/v1/map, /healthz, /readyz. It serves what is ready and asks nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from gpumap.exposition import OPENMETRICS_TYPE, TEXT_TYPE
from gpumap.pages import Form, Pages

INDEX = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>gpumap</title></head><body><h1>gpumap</h1>
<p>Which container holds which GPU, and what it really uses.</p>
<ul><li><a href="metrics">metrics</a>: Prometheus</li>
<li><a href="api/v1/map">api/v1/map</a>: JSON</li>
<li><a href="healthz">healthz</a>, <a href="readyz">readyz</a></li></ul></body></html>
"""
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_INDEX_HEADERS = {**_HEADERS, "Content-Security-Policy": "default-src 'none'"}


def application(pages: Pages, *, serve_nodes: bool) -> web.Application:
    """Make the application. `serve_nodes`: the dialect of /metrics/nodes is on; else it is 404."""
    app = web.Application()
    app.router.add_get("/", _index)
    app.router.add_get("/metrics", _metrics(pages))
    app.router.add_get("/api/v1/map", _page(pages, "map", "application/json"))
    app.router.add_get("/healthz", _healthz)
    app.router.add_get("/readyz", _readyz(pages))
    if serve_nodes:
        app.router.add_get("/metrics/nodes", _page(pages, "nodes", TEXT_TYPE))
    return app


Handler = Callable[[web.Request], Awaitable[web.Response]]


def _metrics(pages: Pages) -> Handler:
    async def metrics(request: web.Request) -> web.Response:
        if prefers_openmetrics(request.headers.get("Accept", "")):
            return await _respond(request, pages, "openmetrics", OPENMETRICS_TYPE)
        return await _respond(request, pages, "text", TEXT_TYPE)

    return metrics


def _page(pages: Pages, form: Form, content_type: str) -> Handler:
    async def page(request: web.Request) -> web.Response:
        return await _respond(request, pages, form, content_type)

    return page


async def _respond(request: web.Request, pages: Pages, form: Form, content_type: str) -> web.Response:
    gzipped = quality(request.headers.get("Accept-Encoding", ""), "gzip") > 0
    body = await pages.page(form, gzipped=gzipped)
    if body is None:
        return web.Response(status=503, text="the first collection is not finished\n", headers=_HEADERS)
    headers = {**_HEADERS, "Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    if gzipped:
        headers["Content-Encoding"] = "gzip"
    return web.Response(body=body, headers=headers)


async def _index(request: web.Request) -> web.Response:
    return web.Response(text=INDEX, content_type="text/html", headers=_INDEX_HEADERS)


async def _healthz(request: web.Request) -> web.Response:
    return web.Response(text="ok\n", headers=_HEADERS)


def _readyz(pages: Pages) -> Handler:
    async def readyz(request: web.Request) -> web.Response:
        reason = pages.not_ready()
        if reason is None:
            return web.Response(text="ok\n", headers=_HEADERS)
        return web.Response(status=503, text=f"not ready: {reason}\n", headers=_HEADERS)

    return readyz


def prefers_openmetrics(accept: str) -> bool:
    """Tell whether a client would rather have OpenMetrics 1.0 than the text format (RFC 9110 §12.5.1)."""
    wanted = quality(accept, "application/openmetrics-text")
    return wanted > 0 and wanted >= quality(accept, "text/plain")


def quality(header: str, token: str) -> float:
    """Give the weight that an Accept or Accept-Encoding header gives a token, 0 where it is not named."""
    best = 0.0
    for choice in header.split(","):
        name, *parameters = (part.strip() for part in choice.split(";"))
        if name.lower() != token:
            continue
        weight = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip().lower() == "q":
                try:
                    weight = float(value)
                except ValueError:
                    weight = 0.0
            elif key.strip().lower() == "version" and token.endswith("openmetrics-text"):
                weight = weight if value.strip().strip('"') == "1.0.0" else 0.0
        best = max(best, weight)
    return best
