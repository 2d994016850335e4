"""Reads the MIG devices of a partitioned GPU. Each reading starts from nothing.

A reconfiguration makes handles stale, or valid for another device, and that between any two calls. The uuid of a MIG
device comes from its GPU and its ids (RFC 9562, version 5). So a device of another profile may return with the same
uuid.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pynvml

from gpumap.agent.nvml_worker.calls import STALE, NvmlCalls
from gpumap.agent.nvml_worker.gpm import Activities, Measured
from gpumap.agent.nvml_worker.library import Attributes, Handle, Library
from gpumap.agent.nvml_worker.processes import Lists, Row, merge, read_rows
from gpumap.model.readings import DeviceMemory, MigInstance, Uuid

GIB = 1 << 30
_PROFILE = re.compile(r"\bMIG (\S+)$")  # "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb"


class MigDeviceReading(NamedTuple):
    """The answers of one MIG device, and the rows of the processes that may be its own."""

    instance: MigInstance
    rows: list[Row] | None


class MigDevices:
    """The MIG devices of one GPU."""

    def __init__(self, library: Library, calls: NvmlCalls, lists: Lists, gpu: Handle) -> None:
        self.complete = True
        """Whether the last reading has all of them: a refusal that does not identify a device does not remove it."""
        self._library = library
        self._calls = calls
        self._lists = lists
        self._gpu = gpu
        self._before: list[str] = []
        self._changing = False
        self._shared: frozenset[int] = frozenset()

    def read(
        self, slots: int | None, gpu_memory: DeviceMemory | None, activities: Activities | None = None
    ) -> tuple[MigInstance, ...]:
        """Return the used slots of `slots` slots in NVML's order, with their activity if it is wanted."""
        self._changing = False
        self.complete = slots is not None
        parents = _ParentRows(self._calls, self._lists, self._gpu)
        handles = (self._ask_handle(slot) for slot in range(slots or 0))
        asked = (self._read_device(handle, gpu_memory, parents, activities) for handle in handles if handle is not None)
        found = [reading for reading in asked if reading is not None]
        uuids = [reading.instance.uuid for reading in found]
        if self._changing or uuids != self._before:
            self._calls.forget()  # what a device did not support while it was removed, the next one may support
        elif not uuids:
            self._calls.forget_mig_devices()  # for the same reason
        if self._changing and activities:
            activities.free()  # a sample may be of another device
        self._before = [*uuids]
        in_each = Counter(reading.instance.gpu_instance_id for reading in found)
        shared = frozenset(gpu_instance for gpu_instance, devices in in_each.items() if devices > 1)
        self._shared = shared if self.complete else shared | self._shared
        most = gpu_memory.total_bytes if gpu_memory else None
        return tuple(_with_processes([self._without_shared_activity(reading) for reading in found], most))

    def _ask_handle(self, slot: int) -> Handle | None:
        """Return the handle. `None` also for a gap, after which more may follow: go-nvlib treats both codes alike."""
        handle = self._calls.ask(self._library.mig_handle, self._gpu, slot, on="mig")
        if handle is None and self._calls.refused_with not in STALE:
            self.complete = False
        return handle

    def _read_device(
        self, handle: Handle, gpu_memory: DeviceMemory | None, parents: "_ParentRows", activities: Activities | None
    ) -> MigDeviceReading | None:
        """Return the answers of the device at a handle. `None` if they are not reliable: the device is removed, or has
        changed."""
        refusals = self._calls.refusals
        uuid = self._calls.ask(self._library.uuid, handle, on="mig")
        reading = self._ask_device(uuid, handle, gpu_memory, parents) if uuid else None
        if reading and activities:
            reading = self._with_activity(reading, activities)
        still = self._calls.ask(self._library.uuid, handle, on="mig") if uuid else None
        if uuid and still == uuid:
            self.complete = self.complete and reading is not None
            return reading
        self._changing = True  # the answers may be of another device
        if still or self._calls.refused_with in STALE:
            self._calls.withdraw(refusals)
        else:
            self.complete = False
        return None

    def _with_activity(self, reading: MigDeviceReading, activities: Activities) -> MigDeviceReading:
        """Return the measured GPU instance. `profile` and place separate it from the next one with its id."""
        instance = reading.instance
        if instance.gpu_instance_id in self._shared:
            return reading
        being = instance.uuid, instance.profile, instance.profile_id, instance.placement_start
        activity = activities.read(Measured(instance.gpu_instance_id, being)).activity
        return reading._replace(instance=instance._replace(activity=activity))

    def _without_shared_activity(self, reading: MigDeviceReading) -> MigDeviceReading:
        """GPU instances with several compute instances. Their activity belongs to an unknown one of them, so it must
        not count."""
        if reading.instance.activity is None or reading.instance.gpu_instance_id not in self._shared:
            return reading
        return reading._replace(instance=reading.instance._replace(activity=None))

    def _ask_device(
        self, uuid: str, handle: Handle, gpu_memory: DeviceMemory | None, parents: "_ParentRows"
    ) -> MigDeviceReading | None:
        ask, library = self._calls.ask, self._library
        gpu_instance = ask(library.gpu_instance_id, handle, on="mig")
        compute_instance = ask(library.compute_instance_id, handle, on="mig")
        if gpu_instance is None or compute_instance is None:
            return None  # it was removed during the calls
        name = ask(library.model, handle, on="mig") or ""
        attributes = ask(library.attributes, handle, on="mig")
        place = ask(library.placement, self._gpu, gpu_instance, on=f"gpu instance {gpu_instance}", privileged=True)
        memory = self._calls.ask_newest((library.memory, library.memory_v1), handle, on="mig")
        denied = self._calls.refused_with == pynvml.NVML_ERROR_NO_PERMISSION
        rows = read_rows(self._calls, self._lists, handle, on="mig")
        rows = parents.of_instances() if rows is None else rows
        instance = MigInstance(
            uuid=Uuid(uuid),
            gpu_instance_id=gpu_instance,
            compute_instance_id=compute_instance,
            profile=profile_name(name, attributes, gpu_memory),
            compute_slices=attributes.compute_slices if attributes else None,
            memory=memory,
            processes=None,
            profile_id=place.profile_id if place else None,
            placement_start=place.start if place else None,
            placement_size=place.size if place else None,
            denied=denied,
        )
        return MigDeviceReading(instance, None if rows is None else _own(rows, instance))


class _ParentRows:
    """The GPU's own lists, read once in a reading, and only if those of a MIG device are refused (vGPU hosts)."""

    def __init__(self, calls: NvmlCalls, lists: Lists, gpu: Handle) -> None:
        self._calls = calls
        self._lists = lists
        self._gpu = gpu
        self._asked = False
        self._rows: list[Row] | None = None

    def of_instances(self) -> list[Row] | None:
        """Return the instance of a row; `None` also if NVML does not report it without privilege."""
        if not self._asked:
            self._asked = True
            rows = read_rows(self._calls, self._lists, self._gpu)
            if rows is not None and all(row.process.gpu_instance_id is not None for row in rows):
                self._rows = rows
        return self._rows


def _own(rows: list[Row], instance: MigInstance) -> list[Row]:
    """Return the rows of one compute instance: a list may be that of the whole GPU instance."""
    return [
        row
        for row in rows
        if row.process.gpu_instance_id in (None, instance.gpu_instance_id)
        and row.process.compute_instance_id in (None, instance.compute_instance_id)
    ]


def _with_processes(found: list[MigDeviceReading], most: int | None) -> Iterator[MigInstance]:
    """Give each device its processes.

    A row without ids may be in the lists of several devices of one GPU instance. It is unknown in which of them it
    runs, so it must not count in each.
    """
    seen = Counter(
        (reading.instance.gpu_instance_id, pid) for reading in found for pid in _pids_without_place(reading.rows or ())
    )
    for reading in found:
        gpu_instance = reading.instance.gpu_instance_id
        if reading.rows is None or any(seen[gpu_instance, pid] > 1 for pid in _pids_without_place(reading.rows)):
            yield reading.instance
        else:
            yield reading.instance._replace(processes=merge(reading.rows, most))


def _pids_without_place(rows: list[Row] | tuple[()]) -> set[int]:
    return {row.process.pid for row in rows if row.process.compute_instance_id is None}


def profile_name(name: str, attributes: Attributes | None, gpu_memory: DeviceMemory | None) -> str:
    """Return "1g.5gb" or "1c.3g.20gb" from the device's name, else from its attributes; empty if neither has it."""
    match = _PROFILE.search(name)
    if match:
        return match[1]
    if attributes is None:
        return ""
    profile = f"{attributes.gpu_slices}g.{_gigabytes(attributes.memory_mib << 20, gpu_memory)}gb"
    part = attributes.compute_slices < attributes.gpu_slices
    return f"{attributes.compute_slices}c.{profile}" if part else profile


def _gigabytes(memory_bytes: int, gpu_memory: DeviceMemory | None) -> int:
    """The number in the profile's name: eighths of the card (go-nvlib, pkg/nvlib/device/mig_profile.go)."""
    if not gpu_memory:
        return round(memory_bytes / GIB)
    eighths = math.ceil(memory_bytes / gpu_memory.total_bytes * 8) / 8
    return math.floor(eighths * math.ceil(gpu_memory.total_bytes / GIB) + 0.5)
