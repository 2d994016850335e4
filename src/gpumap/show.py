"""`gpumap map`: the document of a node, from a running agent or from two collections here, shown as people like it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sys
from collections.abc import AsyncGenerator
from dataclasses import replace

import aiohttp
import yaml
from yarl import URL

from gpumap.document import VERSION, Document, document
from gpumap.errors import FatalError, UsageError
from gpumap.settings import Settings
from gpumap.tables import map_table

LOCAL_INTERVAL_SECONDS = 1.0
REQUEST_SECONDS = 10.0
_CLEAR = "\x1b[H\x1b[2J"
_PARTS = frozenset({"devices", "gpus", "unmatched", "sources", "capabilities"})

Documents = AsyncGenerator[Document, None]


async def show(documents: Documents, *, form: str, watch: bool) -> int:
    """Print the first document, or each of them. Gives 1 where neither the kubelet nor NVML answered."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names come from outside, and not every terminal can write them
    code = 1
    async with contextlib.aclosing(documents):
        async for found in documents:
            if watch and sys.stdout.isatty() and form in ("table", "wide"):
                print(end=_CLEAR)
            text, up = _read(found, form)
            print(end=text, flush=True)
            code = 0 if up & {"kubelet", "nvml"} else 1
            if not watch:
                break
            print(end={"yaml": "---\n", "json": ""}.get(form, "\n"))
    return code


async def from_node(settings: Settings) -> Documents:
    """Collect here. The first collection is not shown: time on the SMs, and accusations, take two."""
    from gpumap import service
    from gpumap.sources.nvml import worker_command

    settings = replace(settings, interval_seconds=LOCAL_INTERVAL_SECONDS)
    command = worker_command(settings.nvml_library or None)
    async with service.collector(settings, command, lambda snapshot: None) as loop:
        await loop.collect()
        while True:
            await asyncio.sleep(LOCAL_INTERVAL_SECONDS)
            yield document(await loop.collect())


async def from_agent(url: str, interval_seconds: float) -> Documents:
    """Ask a running gpumap again and again. Raises FatalError, UsageError for what is no URL."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--url {url}: does not start with http:// or https://")
    try:
        given = URL(url)
    except ValueError:
        given = URL()
    if not given.host:
        raise UsageError(f"--url {url}: is not a URL")
    address = given.with_path(given.path.rstrip("/").removesuffix("/api/v1/map") + "/api/v1/map")
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            try:
                found = await _ask(session, address)
            except aiohttp.InvalidURL as error:
                raise UsageError(f"--url {url}: is not a URL") from error
            yield found
            await asyncio.sleep(interval_seconds)


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


def _read(found: Document, form: str) -> tuple[str, set[str]]:
    """The text to show, and which sources are up. Raises FatalError where the document is not what it says."""
    try:
        return _text(found, form), {source["source"] for source in found["sources"] if source["up"]}
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise FatalError(f"what was answered is no map of gpumap's: {type(error).__name__} {error}") from error


def _text(found: Document, form: str) -> str:
    if form == "json":
        return json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    if form == "yaml":
        return yaml.safe_dump(found, sort_keys=False, allow_unicode=True)
    return map_table(found, wide=form == "wide")
