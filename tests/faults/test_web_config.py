"""TLS and passwords: files that change under a running service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.agent import until
from tests.faults import files
from tests.faults.matrix import Fault, suffer
from tests.faults.site import Inject, Site, Sites, Start, injects

pytestmark = pytest.mark.asyncio(loop_scope="module")
PART = "TLS and passwords"
SECURED = Start(is_secured=True)
AS_BEFORE = (
    "gpumap_allocation_info unchanged",
    "gpumap_container_gpu_memory_used_bytes unchanged",
    "gpumap_container_unassigned_use unchanged",
    "/metrics 200",
)
"""Asked with the client certificate and the password of before."""
UP = ("gpumap_source_up 1",)


def file(name: str) -> Callable[[Site], Path]:
    return lambda site: site.node.directory / "web" / name


def stays(fault: str, inject: Inject, error: str) -> Fault:
    """The configuration of before stays active, and one line gives the reason."""
    log = f"web config not loaded, the previous one stays active: file=… error=…{error}"
    return Fault(PART, fault, logged(inject, "stays active"), AS_BEFORE, UP, (log,), start=SECURED)


@injects
async def logged(site: Site, inject: Inject, word: str) -> AsyncIterator[None]:
    """Return when the service has seen it."""
    before = site.agent.log.count(word)

    async def count() -> int:
        return site.agent.log.count(word)

    async with inject(site):
        await until(count, lambda found: found > before, "it is not noticed")
        yield


@injects
async def without_a_leak(site: Site, inject: Inject) -> AsyncIterator[None]:
    """While it lasts, gpumap opens no more files than it closes."""
    opened = Path(f"/proc/{site.agent.pid}/fd")
    async with inject(site):
        before = len(list(opened.iterdir()))  # noqa: ASYNC240 -- /proc never waits
        yield
        await asyncio.sleep(1.0)  # 20 reads of the configuration
        assert len(list(opened.iterdir())) < before + 10, "a read leaves a descriptor"  # noqa: ASYNC240


def config(change: Callable[[bytes], bytes]) -> Inject:
    return files.changed(file("web.yml"), change)


@contextlib.asynccontextmanager
async def of_another_key(site: Site) -> AsyncIterator[None]:
    """A renewal that is half done: the certificate is new, and the key is not."""
    new = file("server2.crt")(site).read_bytes()
    async with files.changed(file("server.crt"), lambda text: new)(site):
        yield


FAULTS = (
    stays("the configuration is gone", files.in_place_of(file("web.yml"), files.nothing), "No such file"),
    stays("the configuration is empty", config(lambda text: b""), "tls_server_config: is missing, perhaps cut off"),
    stays(
        "the configuration is cut off, and valid without passwords",
        config(lambda text: text.partition(b"  alice")[0]),
        "basic_auth_users: is missing, perhaps cut off",
    ),
    stays(
        "the key is a directory",
        without_a_leak(files.in_place_of(file("server.key"), files.directory)),
        "key_file server.key: Is a directory",
    ),
    stays(
        "the configuration is a pipe without a writer", files.in_place_of(file("web.yml"), files.pipe), "is not a file"
    ),
    stays("gpumap may not read the configuration", files.closed(file("web.yml")), "Permission denied"),
    stays("the configuration has 1 MiB", config(lambda text: text + b"#" * (1 << 20)), "is larger than 64 KiB"),
    stays("the certificate is cut off", files.changed(file("server.crt"), lambda text: text[:-80]), "cert_file"),
    stays("the certificate is of another key: a renewal half done", of_another_key, ""),
    stays("gpumap may not read the key", files.closed(file("server.key")), "key_file server.key: Permission denied"),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
async def test_the_web_config(fault: Fault, sites: Sites) -> None:
    """What was active stays active."""
    async with sites.borrow(fault.start) as site:
        await suffer(fault, site)
