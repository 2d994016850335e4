"""Where the commands that look get their documents: two collections here, or a running agent, again and again.

An agent that fails is told as a FatalError in the place of its document, so that a watch can go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import aiohttp
from yarl import URL

from gpumap.document import VERSION, Document, document
from gpumap.errors import FatalError, UsageError
from gpumap.settings import Settings

LOCAL_INTERVAL_SECONDS = 1.0
"""Between the two collections of a look at this node."""
UNHURRIED_SECONDS = 5.0
"""A source's deadline is the interval; the driver's first answer may take longer than a second."""
REQUEST_SECONDS = 10.0
_PARTS = frozenset({"devices", "gpus", "unmatched", "sources", "capabilities"})

Documents = AsyncGenerator[Document | FatalError, None]


async def from_node(settings: Settings, interval_seconds: float) -> Documents:
    """Collect here. The first collection is not shown: time on the SMs, and accusations, take two."""
    from gpumap import service
    from gpumap.sources.nvml import worker_command

    settings = replace(settings, interval_seconds=max(interval_seconds, UNHURRIED_SECONDS))
    command = worker_command(settings.nvml_library or None)
    async with service.collector(settings, command, lambda snapshot: None) as loop:
        await loop.collect()
        await asyncio.sleep(LOCAL_INTERVAL_SECONDS)
        while True:
            yield document(await loop.collect())
            await asyncio.sleep(interval_seconds)


async def from_agent(url: str, interval_seconds: float) -> Documents:
    """Ask a running gpumap again and again. Raises UsageError for what is no URL."""
    address = _address(url)
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            found: Document | FatalError
            try:
                found = await _ask(session, address)
            except aiohttp.InvalidURL as error:
                raise UsageError(f"--url {url}: is not a URL") from error
            except FatalError as error:
                found = error
            yield found
            await asyncio.sleep(interval_seconds)


def _address(url: str) -> URL:
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--url {url}: does not start with http:// or https://")
    try:
        given = URL(url)
    except ValueError:
        given = URL()
    if not given.host:
        raise UsageError(f"--url {url}: is not a URL")
    return given.with_path(given.path.rstrip("/").removesuffix("/api/v1/map") + "/api/v1/map")


async def _ask(session: aiohttp.ClientSession, url: URL) -> Document:
    address = url.with_user(None)  # a password is for the server alone
    try:
        async with session.get(url) as response:
            if response.status != 200:
                raise FatalError(f"{address} answered {response.status} {response.reason}")
            found = await response.json(content_type=None)
    except aiohttp.InvalidURL:
        raise
    except (aiohttp.ClientError, TimeoutError) as error:
        raise FatalError(f"{address} did not answer: {error or type(error).__name__}") from error
    except (ValueError, RecursionError) as error:
        raise FatalError(f"{address} did not answer with JSON") from error
    if not isinstance(found, dict) or found.get("version") != VERSION or not found.keys() >= _PARTS:
        raise FatalError(f"{address} is no gpumap of this version")
    return found
