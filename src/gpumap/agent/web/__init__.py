"""HTTP: the pages, their formats, access control, and the page for people. It reads no source."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator

_PACKAGE = "aiohttp"


@contextlib.contextmanager
def aiohttp_server_only() -> Iterator[None]:
    """Import `aiohttp.web` in the block, without the client that `import aiohttp` adds.

    The client reads the CA certificates of the machine: 4 MiB of memory and a sixth of the CPU time of a start. The
    agent sends no HTTP requests. After the block, `import aiohttp` works as usual, with the same modules of the server.
    """
    if _PACKAGE in sys.modules:
        yield
        return
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None:
        raise ModuleNotFoundError(f"No module named '{_PACKAGE}'", name=_PACKAGE)
    package = importlib.util.module_from_spec(spec)  # it has the path of the modules, and no names
    package.__version__ = ""  # type: ignore[attr-defined] # only for the `Server` header
    sys.modules[_PACKAGE] = package
    try:
        yield
    finally:
        del sys.modules[_PACKAGE]
