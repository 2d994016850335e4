"""Imports aiohttp's server without its client.

`import aiohttp` imports the client, which reads the CA certificates of the machine. The agent sends no HTTP requests:
for it, the client is 4 MiB of memory and a sixth of the CPU time of a start.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator

_PACKAGE = "aiohttp"


@contextlib.contextmanager
def without_client() -> Iterator[None]:
    """Import `aiohttp.web` in the block, and nothing that aiohttp's own `__init__` imports.

    After the block, `import aiohttp` runs that `__init__` as usual, with the same modules of the server.
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
