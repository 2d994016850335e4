"""One node's pipeline put together, and its life: started, serving, stopped by a signal.

Starts fast: the driver's worker comes up while this process imports gRPC and aiohttp, within functions for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import platform
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpumap import __version__
from gpumap.agent.collect import Collector, now
from gpumap.agent.dialects import DIALECTS, Dialect
from gpumap.agent.join import Rules
from gpumap.agent.join.hidden import RESTART_AFTER_SECONDS
from gpumap.agent.metrics import GROUPS, native, self_families
from gpumap.agent.settings import Listen, Settings
from gpumap.agent.signals import release_by_signal, stop_by_signal
from gpumap.agent.sources.dra import DraSource
from gpumap.agent.sources.inotify import Place, Watcher, places
from gpumap.agent.sources.nvml import NvmlSource
from gpumap.agent.sources.procfs import ProcfsSource
from gpumap.agent.web.pages import Pages
from gpumap.model.errors import FatalError, UsageError
from gpumap.model.families import Family, Numbered
from gpumap.model.observations import Moment
from gpumap.model.readings import CARD
from gpumap.model.snapshot import HiddenDevice, Node, Snapshot

if TYPE_CHECKING:
    from gpumap.agent.sources.pods_api import PodsApiSource
    from gpumap.agent.state_file import StateFile
    from gpumap.agent.web.config.watch import Watch

SHUTDOWN_SECONDS = 1.0
GARBAGE_THRESHOLD = 10_000
LET_GO = "the driver was let go of by SIGUSR1; the next collection is an interval after the signal"

log = logging.getLogger("gpumap")


@contextlib.asynccontextmanager
async def collector(
    settings: Settings,
    driver_command: Sequence[str],
    publish: Callable[[Snapshot], None],
    clock: Callable[[], Moment] = now,
    restart_after_seconds: float = RESTART_AFTER_SECONDS,
) -> AsyncIterator[Collector]:
    """Put the sources and the loop together; close them at the end."""
    state = _state_file(settings)
    memory = await state.load(clock()) if state is not None else None
    nvml = NvmlSource(driver_command, asked_groups(settings), release=settings.nvml_release)
    await nvml.start()
    from gpumap.agent.sources.checkpoint import CheckpointSource
    from gpumap.agent.sources.identity import PodIdentitySource, PodLogsSource, not_asked
    from gpumap.agent.sources.kubelet import KubeletSource

    kubelet = KubeletSource(settings.kubelet_socket)
    pods = _pods_api(settings)
    identity = PodIdentitySource(
        CheckpointSource(settings.checkpoint_candidates),
        PodLogsSource(settings.pod_log_root),
        DraSource(settings.dra_state, settings.dra_driver_checkpoint),
        time.time,
        pods.read if pods is not None else not_asked,
    )
    resource = settings.resource
    rules = Rules(
        node=Node(settings.node_name, settings.node_ip),
        is_gpu_resource=lambda name: resource.fullmatch(name) is not None,
        stale_after_seconds=settings.stale_after_seconds,
        restart_after_seconds=restart_after_seconds,
    )
    procfs = ProcfsSource(settings.proc, settings.own)
    news = Watcher(watched(settings)) if settings.push else None
    keep = state.save if state is not None else None
    interval = settings.interval_seconds
    loop = Collector(nvml, procfs, identity.read, kubelet, rules, interval, publish, clock, news, memory, keep)
    try:
        if pods is not None:
            await pods.start()
        yield loop
    finally:
        loop.close()
        if pods is not None:
            await pods.close()
        if news is not None:
            news.close()
        procfs.close()
        await asyncio.gather(nvml.close(), kubelet.close(), *([state.close()] if state is not None else []))


def _pods_api(settings: Settings) -> PodsApiSource | None:
    if settings.pods_api_socket is None:
        return None
    from gpumap.agent.sources.pods_api import PodsApiSource

    return PodsApiSource(settings.pods_api_socket)


def _state_file(settings: Settings) -> StateFile | None:
    if settings.state_file is None:
        return None
    from gpumap.agent.state_file import StateFile

    return StateFile(settings.state_file)


def watched(settings: Settings) -> tuple[Place, ...]:
    """Where an allocation shows at once."""
    claims = settings.dra_state, settings.dra_driver_checkpoint
    return places(settings.kubelet_socket, settings.checkpoint_candidates, claims, settings.pod_log_root)


def families(settings: Settings) -> tuple[Family | Numbered, ...]:
    """The families of the main page, besides those on gpumap itself."""
    chosen = native(settings.groups, settings.process_metrics) if "native" in settings.dialects else ()
    return (*chosen, *(family for dialect in _spoken(settings) for family in dialect.families))


def pages_by_path(settings: Settings) -> dict[str, tuple[Family, ...]]:
    """The pages that dialects have besides."""
    found = [dialect.pages(settings.node_name) for dialect in _spoken(settings)]
    return {path: families for pages in found for path, families in pages.items()}


def asked_groups(settings: Settings) -> tuple[str, ...]:
    """What NVML is asked for: the native groups that were chosen, and what a dialect needs."""
    wanted = {*settings.groups, *(group for dialect in _spoken(settings) for group in dialect.needs)}
    return tuple(group for group in (*GROUPS, CARD) if group in wanted)


def with_everything(settings: Settings) -> Settings:
    """Settings for a capture: NVML is asked for all that any group and dialect shows."""
    return replace(settings, groups=tuple(GROUPS), dialects=tuple(DIALECTS))


def _spoken(settings: Settings) -> list[Dialect]:
    return [DIALECTS[name] for name in settings.dialects if name in DIALECTS]


async def serve(
    settings: Settings,
    driver_command: Sequence[str],
    listener: socket.socket,
    stop: asyncio.Event | None = None,
    restart_after_seconds: float = RESTART_AFTER_SECONDS,
) -> None:
    """Collect and serve until `stop` is set, by default by a signal. Raises what else ended the loop.

    Raises FatalError where for so long only a new container could see MIG devices, or the driver.
    """
    stop = stop or stop_by_signal()
    watch = _web_config(settings)
    pages = Pages(
        families(settings),
        self_families(__version__, platform.python_version()),
        pages_by_path(settings),
        settings.stale_after_seconds,
        time.monotonic,
        settings.interval_seconds,
        settings.groups,
    )
    try:
        await _until(
            stop,
            _collect(settings, driver_command, pages, restart_after_seconds),
            _open(settings, pages, listener, watch),
        )
        log.info("stopped")
    finally:
        pages.close()
        if watch is not None:
            watch.close()


async def _collect(
    settings: Settings, driver_command: Sequence[str], pages: Pages, restart_after_seconds: float
) -> None:
    """Collect until only a new container helps, which is an error to raise."""
    blind = asyncio.Event()
    why = ""

    def publish(snapshot: Snapshot) -> None:
        nonlocal why
        pages.publish(snapshot)
        why = why or snapshot.lost_driver or (_hidden_line(snapshot.hidden) if snapshot.hidden else "")
        if why:
            blind.set()

    async with collector(settings, driver_command, publish, restart_after_seconds=restart_after_seconds) as loop:
        pages.why_late = lambda: LET_GO if loop.has_let_go else ""
        release_by_signal(loop.release)
        await _until(blind, loop.run())
    raise FatalError(why)


def _hidden_line(hidden: tuple[HiddenDevice, ...]) -> str:
    others = f" and {len(hidden) - 1} more" if len(hidden) > 1 else ""
    return (
        f"{hidden[0].uuid}{others} came after gpumap's start, and the container runtime has not given gpumap its "
        "device nodes: restarting to get them"
    )


def _web_config(settings: Settings) -> Watch | None:
    """Raises UsageError."""
    if settings.web_config is None:
        return None
    from gpumap.agent.web.config.watch import Watch

    return Watch(settings.web_config)


async def _open(settings: Settings, pages: Pages, listener: socket.socket, watch: Watch | None) -> None:
    """Serve the pages for ever, to whom the web configuration lets have them."""
    from gpumap.agent.web.app import application
    from gpumap.agent.web.port import open_port

    # A collection makes thousands of values and no cycles: Python's collector, which took a tenth of the CPU time,
    # shall look less often, and not at what was imported.
    gc.set_threshold(GARBAGE_THRESHOLD)
    gc.freeze()
    app = application(pages)
    if watch is None:
        served = open_port(app, listener, shutdown_seconds=SHUTDOWN_SECONDS)
    else:
        watch.guard.watch_over(app)
        served = open_port(app, listener, tls=watch.guard.context, shutdown_seconds=SHUTDOWN_SECONDS)
    async with served as close_others:
        host, port = listener.getsockname()[:2]
        log.info("serving address=%s node=%s version=%s", _address(host, port), settings.node_name, __version__)
        if watch is None:
            await asyncio.Event().wait()
        else:
            log.info("web config file=%s %s", settings.web_config, watch.words())
            await watch.follow(close_others)


async def _until(stop: asyncio.Event, *works: Coroutine[None, None, None]) -> None:
    """Let every work go on until `stop` is set; an end of its own is an error to raise."""
    working = [asyncio.create_task(work) for work in works]
    stopping = asyncio.create_task(stop.wait())
    tasks: tuple[asyncio.Task[object], ...] = (*working, stopping)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in working:
            if task.done():
                task.result()
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def bind(listen: Listen) -> socket.socket:
    """Bind the listening socket; an empty host is every address, IPv6 too where the machine has it.

    Raises UsageError where the address cannot be had.
    """
    try:
        if listen.host:
            family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
            return socket.create_server((listen.host, listen.port), family=family, backlog=128)
        if socket.has_dualstack_ipv6():
            try:
                return socket.create_server(("", listen.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    raise
        return socket.create_server(("", listen.port), backlog=128)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while attempting")[0]  # asyncio's and socket's own words
        raise UsageError(f"{listen.given}: {reason}") from error
    except UnicodeError as error:
        raise UsageError(f"{listen.given}: is not a host's name") from error


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
