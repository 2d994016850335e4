"""A played Prometheus, for what a real one does not do: one answer for whatever it is asked."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
Rows = list[dict[str, object]]


@asynccontextmanager
async def serving(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A server that gives this answer on every page. Gives its URL."""
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        yield f"http{'s' if tls else ''}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def answering(text: str, status: int = 200, **headers: str) -> Answer:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=text, status=status, headers=headers)

    return answer


def refusal(kind: str, error: str) -> str:
    return json.dumps({"status": "error", "errorType": kind, "error": error})


def api(vector: Rows | None = None, matrix: Rows | None = None, asked: list[web.Request] | None = None) -> Answer:
    """A server of the API, that has these rows for whatever it is asked."""

    async def answer(request: web.Request) -> web.Response:
        await request.post()
        if asked is not None:
            asked.append(request)
        data: object = []
        if request.path.endswith("/query"):
            data = {"resultType": "vector", "result": vector or []}
        elif request.path.endswith("/query_range"):
            data = {"resultType": "matrix", "result": matrix or []}
        return web.json_response({"status": "success", "data": data})

    return answer
