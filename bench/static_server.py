"""`python -m bench.static_server PORT FILE`: an aiohttp handler that serves a file's bytes. The limit of any page."""

import sys
from pathlib import Path

from aiohttp import web

from gpumap.agent.exposition import TEXT_TYPE


def main(port: int, body: bytes) -> None:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=body, headers={"Content-Type": TEXT_TYPE})

    application = web.Application()
    application.router.add_get("/metrics", metrics)
    web.run_app(application, host="127.0.0.1", port=port, access_log=None, print=None)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]).read_bytes())
