"""Reads the MIG devices of a partitioned GPU. Each reading starts from nothing.

A reconfiguration makes handles stale, or valid for another device, and that between any two calls. The uuid of a MIG
device comes from its GPU and its ids (RFC 9562, version 5). So a device of another profile may return with the same
uuid.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from ctypes import byref, c_void_p
from functools import partial
from typing import NamedTuple

import pynvml
from msgspec import structs

from gpumap.agent.nvml_worker.calls import STALE, NvmlCalls
from gpumap.agent.nvml_worker.gpm import Activities, Measured
from gpumap.agent.nvml_worker.library import Handle, Library, PreparedCall, key_of
from gpumap.agent.nvml_worker.processes import Lists, ProcessRow, merge
from gpumap.model.readings import DeviceMemory, MigInstance, Uuid

GIB = 1 << 30
MOST_SLOTS = 64
"""GPUs have up to 7. A larger number is garbage, and a prepared call for each would fill the memory."""
_PROFILE = re.compile(r"\bMIG (\S+)$")  # "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb"


class MigDeviceReading(NamedTuple):
    """The answers of one MIG device, and the rows of the processes that may be its own."""

    instance: MigInstance
    rows: list[ProcessRow] | None


class Attributes(NamedTuple):
    """The part of nvmlDeviceAttributes_t of a MIG device that the name of its profile needs."""

    gpu_slices: int
    compute_slices: int
    memory_mib: int


ReadGpuRows = Callable[[], list[ProcessRow] | None]
"""Returns the rows of the GPU's own lists; `None` if NVML refuses them, or does not report the instance of each."""


class _Calls:
    """The calls on one handle of a MIG device."""

    def __init__(self, library: Library, lists: Lists, handle: Handle) -> None:
        self.uuid = library.uuid(handle, "mig")
        self.gpu_instance_id = library.number("nvmlDeviceGetGpuInstanceId", handle, read=int, subject="mig")
        self.compute_instance_id = library.number("nvmlDeviceGetComputeInstanceId", handle, read=int, subject="mig")
        self.model = library.model(handle, "mig")
        self.attributes = library.structure(
            "nvmlDeviceGetAttributes_v2",
            handle,
            out=pynvml.c_nvmlDeviceAttributes(),
            read=lambda info: Attributes(info.gpuInstanceSliceCount, info.computeInstanceSliceCount, info.memorySizeMB),
            subject="mig",
        )
        self.memory = library.memory(handle, "mig")
        self.lists = lists.prepare(handle, "mig")


class MigDevices:
    """The MIG devices of one GPU."""

    def __init__(self, library: Library, calls: NvmlCalls, lists: Lists, gpu: Handle) -> None:
        self.complete = True
        """Whether the last reading has all of them: a refusal that does not identify a device does not remove it."""
        self._library = library
        self._calls = calls
        self._lists = lists
        self._gpu_lists = lists.prepare(gpu)
        self._gpu = gpu
        self._slots: list[PreparedCall[int | None]] = []
        self._devices: dict[int, _Calls] = {}
        """By the handle. They serve another device with the same handle as well: they keep no answers."""
        self._last_uuids: list[str] = []
        self._changing = False
        self._shared: frozenset[int] = frozenset()

    def read(
        self, slots: int | None, gpu_memory: DeviceMemory | None, activities: Activities | None = None
    ) -> tuple[MigInstance, ...]:
        """Return the used slots of `slots` slots in NVML's order, with their activity if it is wanted."""
        self._changing = False
        self.complete = slots is not None and slots <= MOST_SLOTS
        slots = min(slots or 0, MOST_SLOTS)
        # Once in a reading, and only if the lists of a MIG device are refused (vGPU hosts).
        read_gpu_rows = functools.cache(self._read_gpu_rows)
        name = "nvmlDeviceGetMigDeviceHandleByIndex"
        for slot in range(len(self._slots), slots):
            address = self._library.number(
                name, self._gpu, slot, read=lambda address: address or 0, kind=c_void_p, subject="mig"
            )
            self._slots.append(address)
        known_devices, self._devices = self._devices, {}
        readings: list[MigDeviceReading] = []
        for call in self._slots[:slots]:
            handle = self._ask_handle(call)
            if handle is None:
                continue
            calls = known_devices.get(handle) or _Calls(self._library, self._lists, Handle(c_void_p(handle)))
            self._devices[handle] = calls
            if (reading := self._read_device(calls, gpu_memory, read_gpu_rows, activities)) is not None:
                readings.append(reading)
        uuids = [reading.instance.uuid for reading in readings]
        if self._changing or uuids != self._last_uuids:
            self._calls.forget()  # what a device did not support while it was removed, the next one may support
        elif not uuids:
            self._calls.forget_mig_devices()  # for the same reason
        if self._changing and activities:
            activities.free()  # a sample may be of another device
        self._last_uuids = [*uuids]
        device_counts = Counter(reading.instance.gpu_instance_id for reading in readings)
        shared = frozenset(gpu_instance for gpu_instance, count in device_counts.items() if count > 1)
        self._shared = shared if self.complete else shared | self._shared
        # The activity of a GPU instance with several compute instances belongs to an unknown one of them.
        readings = [
            reading._replace(instance=structs.replace(reading.instance, activity=None))
            if reading.instance.gpu_instance_id in self._shared
            else reading
            for reading in readings
        ]
        return tuple(_add_processes(readings, gpu_memory.total_bytes if gpu_memory else None))

    def _ask_handle(self, call: PreparedCall[int | None]) -> int | None:
        """Return the handle. `None` also for a gap, after which more may follow: go-nvlib treats both codes alike."""
        handle = self._calls.ask(call)
        if handle is None and self._calls.refused_with not in STALE:
            self.complete = False
        return handle

    def _read_device(
        self, calls: _Calls, gpu_memory: DeviceMemory | None, read_gpu_rows: ReadGpuRows, activities: Activities | None
    ) -> MigDeviceReading | None:
        """Return the answers of the device at a handle; `None` if it is removed or has changed meanwhile."""
        refusals = self._calls.refusals
        uuid = self._calls.ask(calls.uuid)
        reading = self._ask_device(uuid, calls, gpu_memory, read_gpu_rows) if uuid else None
        if reading and activities:
            reading = self._add_activity(reading, activities)
        uuid_afterwards = self._calls.ask(calls.uuid) if uuid else None
        if uuid and uuid_afterwards == uuid:
            self.complete = self.complete and reading is not None
            return reading
        self._changing = True  # the answers may be of another device
        if uuid_afterwards or self._calls.refused_with in STALE:
            self._calls.withdraw(refusals)
        else:
            self.complete = False
        return None

    def _add_activity(self, reading: MigDeviceReading, activities: Activities) -> MigDeviceReading:
        """Return the measured GPU instance. `profile` and place separate it from the next one with its id."""
        instance = reading.instance
        if instance.gpu_instance_id in self._shared:
            return reading
        identity = instance.uuid, instance.profile, instance.profile_id, instance.placement_start
        activity = activities.read(Measured(instance.gpu_instance_id, identity)).activity
        return reading._replace(instance=structs.replace(instance, activity=activity))

    def _ask_device(
        self, uuid: str, calls: _Calls, gpu_memory: DeviceMemory | None, read_gpu_rows: ReadGpuRows
    ) -> MigDeviceReading | None:
        ask = self._calls.ask
        gpu_instance, compute_instance = ask(calls.gpu_instance_id), ask(calls.compute_instance_id)
        if gpu_instance is None or compute_instance is None:
            return None  # it was removed during the calls
        name = ask(calls.model) or ""
        attributes = ask(calls.attributes)
        place_key, read_place = key_of("placement", f"gpu instance {gpu_instance}"), partial(self._place, gpu_instance)
        place = self._calls.attempt(place_key, read_place, privileged=True)
        profile_id, placement_start, placement_size = place or (None, None, None)
        memory = self._calls.ask_first(calls.memory)
        denied = self._calls.refused_with == pynvml.NVML_ERROR_NO_PERMISSION
        rows = calls.lists.read_rows(self._calls)
        rows = read_gpu_rows() if rows is None else rows
        instance = MigInstance(
            uuid=Uuid(uuid),
            gpu_instance_id=gpu_instance,
            compute_instance_id=compute_instance,
            profile=profile_name(name, attributes, gpu_memory),
            compute_slices=attributes.compute_slices if attributes else None,
            memory=memory,
            processes=None,
            profile_id=profile_id,
            placement_start=placement_start,
            placement_size=placement_size,
            denied=denied,
        )
        return MigDeviceReading(instance, None if rows is None else _own(rows, instance))

    def _place(self, gpu_instance_id: int) -> tuple[int, int, int]:
        """Return the id of a GPU instance's profile (as `nvidia-smi mig -lgip`), its start and its size.

        NVML refuses without the right to read instances of others (nvml.h, MIG monitor).
        """
        instance, info = pynvml.c_nvmlGpuInstance_t(), pynvml.c_nvmlGpuInstanceInfo_t()
        self._library.ask("nvmlDeviceGetGpuInstanceById", self._gpu, gpu_instance_id, byref(instance))
        self._library.ask("nvmlGpuInstanceGetInfo", instance, byref(info))
        return info.profileId, info.placement.start, info.placement.size

    def _read_gpu_rows(self) -> list[ProcessRow] | None:
        rows = self._gpu_lists.read_rows(self._calls)
        return None if rows is None or any(row.gpu_instance_id is None for row in rows) else rows


def _own(rows: list[ProcessRow], instance: MigInstance) -> list[ProcessRow]:
    """Return the rows of one compute instance: a list may be that of the whole GPU instance."""
    return [
        row
        for row in rows
        if row.gpu_instance_id in (None, instance.gpu_instance_id)
        and row.compute_instance_id in (None, instance.compute_instance_id)
    ]


def _add_processes(readings: list[MigDeviceReading], bytes_max: int | None) -> Iterator[MigInstance]:
    """Give each device its processes.

    A row without ids may be in the lists of several devices of one GPU instance. It is unknown in which of them it
    runs, so it must not count in each.
    """
    without_place = [
        {(instance.gpu_instance_id, row.pid) for row in rows or () if row.compute_instance_id is None}
        for instance, rows in readings
    ]
    listed = Counter(process for processes in without_place for process in processes)
    for (instance, rows), processes in zip(readings, without_place, strict=True):
        if rows is None or any(listed[process] > 1 for process in processes):
            yield instance
        else:
            yield structs.replace(instance, processes=merge([row[:3] for row in rows], bytes_max))


def profile_name(name: str, attributes: Attributes | None, gpu_memory: DeviceMemory | None) -> str:
    """Return "1g.5gb" or "1c.3g.20gb" from the device's name, else from its attributes; empty if neither has it."""
    match = _PROFILE.search(name)
    if match:
        return match[1]
    if attributes is None:
        return ""
    profile = f"{attributes.gpu_slices}g.{_gigabytes(attributes.memory_mib << 20, gpu_memory)}gb"
    is_whole = attributes.compute_slices >= attributes.gpu_slices
    return profile if is_whole else f"{attributes.compute_slices}c.{profile}"


def _gigabytes(memory_bytes: int, gpu_memory: DeviceMemory | None) -> int:
    """The number in the profile's name: eighths of the card (go-nvlib, pkg/nvlib/device/mig_profile.go)."""
    if not gpu_memory:
        return round(memory_bytes / GIB)
    eighths = math.ceil(memory_bytes / gpu_memory.total_bytes * 8) / 8
    return math.floor(eighths * math.ceil(gpu_memory.total_bytes / GIB) + 0.5)
