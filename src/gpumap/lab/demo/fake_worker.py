"""What the two fakes of the NVML worker share: the loop over stdin and stdout, and the groups of families.

Requests come on stdin; answers, and XID events that no request asked for, go to stdout.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol, get_type_hints

from msgspec import structs

from gpumap.agent.nvml_worker import wire
from gpumap.model.readings import CARD, GpuReading, MigInstance


class Driver(Protocol):
    """`patience_seconds`: in how long there may be lines that no request asked for; `None`: never."""

    @property
    def patience_seconds(self) -> float | None: ...
    def read(self, request: wire.Request, /) -> Iterable[bytes]: ...
    def unasked(self) -> Iterable[bytes]: ...


def serve(driver: Driver) -> None:
    """Answer each line of stdin until it ends."""
    received = b""
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], driver.patience_seconds)
        if readable:
            chunk = os.read(sys.stdin.fileno(), 65536)
            if not chunk:
                return
            received += chunk
        *lines, received = received.split(b"\n")
        _write(driver.unasked())
        for line in lines:
            _write(driver.read(wire.decode_request(line)))


def _write(lines: Iterable[bytes]) -> None:
    sys.stdout.buffer.write(b"".join(lines))
    sys.stdout.buffer.flush()


LISTENING_GROUP = "health"
"""The group for which the worker listens to XID events."""
_HINTS = get_type_hints(GpuReading, include_extras=True)
GROUP_FIELDS: Mapping[str, tuple[str, ...]] = {
    group: tuple(name for name, hint in _HINTS.items() if group in getattr(hint, "__metadata__", ()))
    for group in ("health", "links", "gpm", "codec", CARD)
}
_BLANK = GpuReading(index=-1)


def reading_for(gpu: GpuReading, groups: Collection[str], *, release: bool = False) -> GpuReading:
    """A reading without what these groups do not need: the NVML worker makes no calls for the others.

    With `release` it has nothing of GPM, which needs two samples, and no end of NVML between them.
    """
    if release:
        groups = [group for group in groups if group != "gpm"]
        gpu = structs.replace(gpu, pcie_source=None, pcie_transmit_bytes=None, pcie_receive_bytes=None)
    unasked = [group for group in GROUP_FIELDS if group not in groups]
    if not unasked:
        return gpu
    gpu = structs.replace(gpu, **{name: getattr(_BLANK, name) for group in unasked for name in GROUP_FIELDS[group]})
    return structs.replace(gpu, instances=tuple(map(_without_activity, gpu.instances))) if "gpm" in unasked else gpu


def _without_activity(instance: MigInstance) -> MigInstance:
    return structs.replace(instance, activity=None)
