"""Pages that threads serve over HTTP, for a neighbour that asks while the test does something else."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from gpumap.agent.exposition import TEXT_TYPE


class Page(NamedTuple):
    body: bytes
    content_type: str = TEXT_TYPE


@contextlib.contextmanager
def serving_pages(answer: Callable[[str], Page]) -> Iterator[str]:
    """Answer each path with a page. Gives the host and port."""

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = answer(self.path)
            self.send_response(200)
            self.send_header("Content-Type", page.content_type)
            self.send_header("Content-Length", str(len(page.body)))
            self.end_headers()
            self.wfile.write(page.body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with running(Pages) as address:
        yield address


@contextlib.contextmanager
def running(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve with this handler, in a thread. Gives the address, HOST:PORT."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
