"""The MIG devices of a partitioned GPU, asked anew in each reading: nothing of one outlives it.

A reconfiguration makes handles stale, or good for another device, and that between any two calls. A MIG device's uuid
is made of its GPU and its ids (RFC 9562, version 5), so that one of another profile may come back under it.
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
from gpumap.agent.nvml_worker.lists import Lists
from gpumap.agent.nvml_worker.processes import Row, merge, read_rows
from gpumap.model.readings import DeviceMemory, MigInstance, Uuid

GIB = 1 << 30
_PROFILE = re.compile(r"\bMIG (\S+)$")  # "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb"


class _Told(NamedTuple):
    """What one MIG device said, and the rows of the processes that may be its own."""

    instance: MigInstance
    rows: list[Row] | None


class MigDevices:
    """The MIG devices of one GPU."""

    def __init__(self, library: Library, asking: NvmlCalls, lists: Lists, gpu: Handle) -> None:
        self._library = library
        self._asking = asking
        self._lists = lists
        self._gpu = gpu
        self._before: list[str] = []
        self._shared: frozenset[int] = frozenset()

    def read(
        self, slots: int, gpu_memory: DeviceMemory | None, activities: Activities | None = None
    ) -> tuple[MigInstance, ...]:
        """Of `slots` slots those that are taken, in NVML's order; with their activity where it is asked for."""
        found: list[_Told] = []
        parents = _ParentRows(self._asking, self._lists, self._gpu)
        changing = False
        for slot in range(slots):
            handle = self._asking.ask(self._library.mig_handle, self._gpu, slot, on="mig")
            if handle is None:
                continue  # NOT_FOUND is a hole, after which more may follow
            refusals = self._asking.refusals
            uuid = self._asking.ask(self._library.uuid, handle, on="mig")
            told = self._ask_device(uuid, handle, gpu_memory, parents) if uuid else None
            if told and activities:
                told = self._with_activity(told, activities)
            still = self._asking.ask(self._library.uuid, handle, on="mig") if uuid else None
            if uuid and still == uuid:
                found += [told] if told else []
                continue
            changing = True  # what it said may be another's
            if still or self._asking.refused_with in STALE:
                self._asking.withdraw(refusals)
        uuids = [told.instance.uuid for told in found]
        if changing or uuids != self._before:
            self._asking.forget()  # what a device in the midst of going did not support, the next one may
        elif not uuids:
            self._asking.forget_mig_devices()  # likewise
        if changing and activities:
            activities.free()  # a sample may be another's
        self._before = [*uuids]
        in_each = Counter(told.instance.gpu_instance_id for told in found)
        self._shared = frozenset(gpu_instance for gpu_instance, devices in in_each.items() if devices > 1)
        return tuple(_with_processes([self._without_shared_activity(told) for told in found]))

    def _with_activity(self, told: _Told, activities: Activities) -> _Told:
        """What is measured is the GPU instance, as `profile` and place tell it from the next one of its id."""
        instance = told.instance
        if instance.gpu_instance_id in self._shared:
            return told
        being = instance.uuid, instance.profile, instance.profile_id, instance.placement_start
        activity = activities.read(Measured(instance.gpu_instance_id, being))
        return told._replace(instance=instance._replace(activity=activity))

    def _without_shared_activity(self, told: _Told) -> _Told:
        """Of which of several compute instances a GPU instance's activity is, nobody knows; in each it counts twice."""
        if told.instance.activity is None or told.instance.gpu_instance_id not in self._shared:
            return told
        return told._replace(instance=told.instance._replace(activity=None))

    def _ask_device(
        self, uuid: str, handle: Handle, gpu_memory: DeviceMemory | None, parents: "_ParentRows"
    ) -> _Told | None:
        ask, library = self._asking.ask, self._library
        gpu_instance = ask(library.gpu_instance_id, handle, on="mig")
        compute_instance = ask(library.compute_instance_id, handle, on="mig")
        if gpu_instance is None or compute_instance is None:
            return None  # it went in the middle of the asking
        name = ask(library.model, handle, on="mig") or ""
        attributes = ask(library.attributes, handle, on="mig")
        place = ask(library.placement, self._gpu, gpu_instance, on=f"gpu instance {gpu_instance}", privileged=True)
        memory = self._asking.ask_newest((library.memory, library.memory_v1), handle, on="mig")
        denied = self._asking.refused_with == pynvml.NVML_ERROR_NO_PERMISSION
        rows = read_rows(self._asking, self._lists, handle, on="mig")
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
        return _Told(instance, None if rows is None else _own(rows, instance))


class _ParentRows:
    """The GPU's own lists, asked once a reading, and only where a MIG device's are refused (vGPU hosts)."""

    def __init__(self, asking: NvmlCalls, lists: Lists, gpu: Handle) -> None:
        self._asking = asking
        self._lists = lists
        self._gpu = gpu
        self._asked = False
        self._rows: list[Row] | None = None

    def of_instances(self) -> list[Row] | None:
        """`None` too where a row does not say its instance: without privilege NVML keeps that back."""
        if not self._asked:
            self._asked = True
            rows = read_rows(self._asking, self._lists, self._gpu)
            if rows is not None and all(row.process.gpu_instance_id is not None for row in rows):
                self._rows = rows
        return self._rows


def _own(rows: list[Row], instance: MigInstance) -> list[Row]:
    """Those of one compute instance: a list may be that of the whole GPU instance."""
    return [
        row
        for row in rows
        if row.process.gpu_instance_id in (None, instance.gpu_instance_id)
        and row.process.compute_instance_id in (None, instance.compute_instance_id)
    ]


def _with_processes(found: list[_Told]) -> Iterator[MigInstance]:
    """Give each its processes, but where a row without ids stands in the lists of several of one GPU instance:
    which of them it runs in, nobody knows, and it must not count in each."""
    seen = Counter(
        (told.instance.gpu_instance_id, pid) for told in found for pid in _pids_without_place(told.rows or ())
    )
    for told in found:
        gpu_instance = told.instance.gpu_instance_id
        if told.rows is None or any(seen[gpu_instance, pid] > 1 for pid in _pids_without_place(told.rows)):
            yield told.instance
        else:
            yield told.instance._replace(processes=merge(told.rows))


def _pids_without_place(rows: list[Row] | tuple[()]) -> set[int]:
    return {row.process.pid for row in rows if row.process.compute_instance_id is None}


def profile_name(name: str, attributes: Attributes | None, gpu_memory: DeviceMemory | None) -> str:
    """ "1g.5gb" or "1c.3g.20gb" from the device's name, else from its attributes; empty where neither tells."""
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
