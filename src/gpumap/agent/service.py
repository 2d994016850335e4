"""Put the parts of one node together from the settings, and run them until a signal.

`serve` and `collector` are the wiring: they read the settings and give plain values to all other parts. The start is
fast: the NVML worker starts while this process imports gRPC and aiohttp, which is why functions import them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import platform
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpumap import __version__
from gpumap.agent.collect import Collector, Sources, deadline_seconds, now
from gpumap.agent.dialects import DIALECTS
from gpumap.agent.join import JoinSettings
from gpumap.agent.join.settings import RESTART_AFTER_SECONDS
from gpumap.agent.metrics import GROUPS, native, self_families
from gpumap.agent.own_process import clients_max, release_by_signal, stop_by_signal
from gpumap.agent.settings import Listen, Settings
from gpumap.agent.sources.dra import DraSource
from gpumap.agent.sources.inotify import Watcher, places
from gpumap.agent.sources.nvml import NvmlSource
from gpumap.agent.sources.pci import PciSource
from gpumap.agent.sources.procfs import ProcfsSource
from gpumap.agent.web import aiohttp_server_only
from gpumap.agent.web.pages import Pages
from gpumap.model.errors import FatalError, UsageError
from gpumap.model.observations import Moment, PodIdentity, SourceAnswer
from gpumap.model.readings import CARD
from gpumap.model.snapshot import Snapshot

if TYPE_CHECKING:
    from gpumap.agent.sources.kubelet import KubeletSource
    from gpumap.agent.sources.pods_api import PodsApiSource
    from gpumap.agent.web.guard import Guard

GARBAGE_THRESHOLD = 10_000
PODS_PATIENCE_SECONDS = 1.0
SLOW_VALUES_SECONDS = 30.0
"""Highest age of values of a GPU that change slowly (`nvml_worker.slow_values`)."""
RELEASED = "SIGUSR1 released the driver; the next collection is one interval after the signal"

log = logging.getLogger("gpumap")


async def serve(
    settings: Settings,
    driver_command: Sequence[str],
    listener: socket.socket,
    stop: asyncio.Event | None = None,
    restart_after_seconds: float = RESTART_AFTER_SECONDS,
    clock: Callable[[], Moment] = now,
) -> None:
    """Collect and serve until `stop` is set, by default by a signal. Raises the error that ended the loop otherwise.

    Raises FatalError if only a new container makes MIG devices or the driver visible, for `restart_after_seconds`.
    """
    stop = stop or stop_by_signal()
    guard = _guard(settings.web_config)
    pages = _pages(settings, lambda: clock().monotonic)
    needs_restart = asyncio.Event()
    fault = ""

    def publish(snapshot: Snapshot) -> None:
        nonlocal fault
        pages.publish(snapshot)
        fault = fault or _why_restart(snapshot)
        if fault:
            needs_restart.set()

    async def collect() -> None:
        started = collector(settings, driver_command, publish, clock, restart_after_seconds)
        async with started as loop:
            pages.why_late = lambda: RELEASED if loop.is_released else ""
            release_by_signal(loop.release)
            await _until(needs_restart, loop.run())
        raise FatalError(fault)

    try:
        await _until(stop, collect(), _open(pages, listener, guard, settings))
        log.info("stopped")
    finally:
        pages.close()
        if guard is not None:
            guard.close()


def _pages(settings: Settings, monotonic: Callable[[], float]) -> Pages:
    chosen = [DIALECTS[name] for name in settings.dialects]
    native_families = native(settings.groups, settings.process_metrics) if settings.native else ()
    return Pages(
        (*native_families, *(family for dialect in chosen for family in dialect.families)),
        self_families(__version__, platform.python_version()),
        {path: families for dialect in chosen for path, families in dialect.pages(settings.node_name).items()},
        settings.stale_after_seconds,
        monotonic,
        settings.interval_seconds,
        settings.groups,
    )


@contextlib.asynccontextmanager
async def collector(
    settings: Settings,
    driver_command: Sequence[str],
    publish: Callable[[Snapshot], None],
    clock: Callable[[], Moment] = now,
    restart_after_seconds: float = RESTART_AFTER_SECONDS,
    pods_patience_seconds: float = PODS_PATIENCE_SECONDS,
) -> AsyncIterator[Collector]:
    """Put the sources and the loop together; close them at the end. It first waits for the Pods API, if it is used."""
    nvml = NvmlSource(
        driver_command,
        asked_groups(settings.groups, settings.dialects),
        release=settings.nvml_release,
        hold_seconds=min(SLOW_VALUES_SECONDS, settings.stale_after_seconds),
    )
    await nvml.start()
    kubelet, pods, read_identity = _kubelet_sources(settings, lambda: clock().monotonic)
    procfs = ProcfsSource(settings.proc, settings.own_entry, has_kubelet=settings.has_kubelet)
    claims = settings.dra_state, settings.dra_driver_checkpoint
    watched = places(settings.kubelet_socket, settings.checkpoint_candidates, claims, settings.pod_log_root)
    watcher = Watcher(watched if settings.push else ())
    rules = join_settings_of(settings, restart_after_seconds)
    pci = None if rules.why_not_on_pci else PciSource(settings.sys, lambda: clock().monotonic)
    loop = Collector(
        Sources(nvml, procfs, read_identity, kubelet, watcher, pci),
        rules,
        interval_seconds=settings.interval_seconds,
        publish=publish,
        clock=clock,
    )
    try:
        if pods is not None:
            await pods.start(pods_patience_seconds)
        yield loop
    finally:
        loop.close()
        if pods is not None:
            await pods.close()
        watcher.close()
        procfs.close()
        if pci is not None:
            pci.close()
        await asyncio.gather(*(source.close() for source in (nvml, kubelet) if source is not None))


def join_settings_of(settings: Settings, restart_after_seconds: float = RESTART_AFTER_SECONDS) -> JoinSettings:
    """Return the decisions of the user that a collection needs."""
    has_all_gpus = settings.visible_devices == "all"
    why_not_on_pci = "" if has_all_gpus else "NVIDIA_VISIBLE_DEVICES gives gpumap only some GPUs"
    if settings.nvml_release:
        why_not_on_pci = "with --nvml-release, a GPU may be unbound from the driver at any time"
    return JoinSettings(
        node_name=settings.node_name,
        internal_ip=settings.node_ip,
        is_gpu_resource=_matcher(settings.resource),
        stale_after_seconds=settings.stale_after_seconds,
        is_reserving=_matcher(settings.reservation_namespace),
        is_trusted=_matcher(settings.trust_namespace) if settings.trust_namespace else lambda _: False,
        idle_after_seconds=settings.idle_after_seconds,
        grace_seconds=settings.grace_seconds,
        restart_after_seconds=restart_after_seconds,
        why_not_on_pci=why_not_on_pci,
    )


def _matcher(pattern: re.Pattern[str]) -> Callable[[str], bool]:
    return lambda name: pattern.fullmatch(name) is not None


def asked_groups(groups: Iterable[str], dialects: Iterable[str]) -> tuple[str, ...]:
    """Return what gpumap asks NVML for: the chosen native groups, and what the dialects need."""
    needs = {*groups, *(group for name in dialects for group in DIALECTS[name].needs)}
    return tuple(group for group in (*GROUPS, CARD) if group in needs)


def _kubelet_sources(
    settings: Settings, monotonic: Callable[[], float]
) -> tuple[KubeletSource | None, PodsApiSource | None, Callable[[], SourceAnswer[PodIdentity]] | None]:
    """Return the kubelet's List, its Pods API if it is configured, and how to read pod identity."""
    if not settings.has_kubelet:
        return None, None, None
    from gpumap.agent.sources.checkpoint import CheckpointSource
    from gpumap.agent.sources.fractioning import FractioningSource
    from gpumap.agent.sources.identity import PodIdentitySource, PodLogsSource
    from gpumap.agent.sources.kubelet import KubeletSource

    pods = None
    if settings.pods_api_socket is not None:
        from gpumap.agent.sources.pods_api import PodsApiSource

        pods = PodsApiSource(settings.pods_api_socket, deadline_seconds(settings.interval_seconds), monotonic=monotonic)
    sharing_map = settings.gpu_fractioning_map
    identity = PodIdentitySource(
        CheckpointSource(settings.checkpoint_candidates),
        PodLogsSource(settings.pod_log_root),
        DraSource(settings.dra_state, settings.dra_driver_checkpoint),
        time.time,
        pods.read if pods is not None else None,
        FractioningSource(sharing_map).read if sharing_map is not None else None,
        lambda: pods.confirmed_at if pods is not None else 0.0,
    )
    return KubeletSource(settings.kubelet_socket), pods, identity.read


def _guard(web_config: Path | None) -> Guard | None:
    """Raises UsageError."""
    if web_config is None:
        return None
    with aiohttp_server_only():
        from gpumap.agent.web.guard import Guard

    return Guard(web_config)


# --- serving ----------------------------------------------------------------------------------------------------------


def _why_restart(snapshot: Snapshot) -> str:
    """Return the fault that only a new container solves; empty without one."""
    hidden = snapshot.hidden
    if snapshot.lost_driver or not hidden:
        return snapshot.lost_driver
    names = f"{hidden[0].uuid} and {len(hidden) - 1} more" if len(hidden) > 1 else hidden[0].uuid
    return (
        f"{names} appeared after gpumap's start, and this container does not have its device nodes: "
        "restarting to get them"
    )


async def _open(pages: Pages, listener: socket.socket, guard: Guard | None, settings: Settings) -> None:
    """Serve the pages for ever, with the web configuration if there is one."""
    with aiohttp_server_only():
        from gpumap.agent.web.app import application
        from gpumap.agent.web.port import MAX_CONNECTIONS, open_port

    # A collection makes thousands of values and no cycles. Python's garbage collector took a tenth of the CPU time: it
    # now runs less often, and skips what was imported.
    gc.set_threshold(GARBAGE_THRESHOLD)
    gc.freeze()
    gc.enable()
    app = application(pages)
    if guard is not None:
        app.middlewares.append(guard.check_request)
    async with open_port(
        app,
        listener,
        tls=guard.context if guard is not None else None,
        max_connections=min(MAX_CONNECTIONS, clients_max()),
    ) as close_idle:
        host, port = listener.getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        log.info("serving address=%s node=%s version=%s", address, settings.node_name, __version__)
        if guard is None:
            await asyncio.Event().wait()
        else:
            log.info("web config file=%s %s", settings.web_config, guard.words())
            await guard.apply_changes(close_idle)


async def _until(stop: asyncio.Event, *works: Coroutine[None, None, None]) -> None:
    """Run all works until `stop` is set. If one ends before, its error is raised."""
    working = [asyncio.create_task(work) for work in works]
    stopping = asyncio.create_task(stop.wait())
    tasks: tuple[asyncio.Task[object], ...] = (*working, stopping)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in working:
            if task.done():
                task.result()
    finally:
        for running in tasks:
            running.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def bind(listen: Listen) -> socket.socket:
    """Bind the socket. An empty host is every address, also of IPv6. Raises UsageError if it is not available."""
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
        advice = "; choose another address with --listen" if error.errno == errno.EADDRINUSE else ""
        raise UsageError(f"{listen.notation}: {reason}{advice}") from error
    except (UnicodeError, TypeError) as error:  # socket raises TypeError for a name that IDNA cannot encode
        raise UsageError(f"{listen.notation}: is not a host name") from error
