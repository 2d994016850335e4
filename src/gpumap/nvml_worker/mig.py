"""The MIG devices of a partitioned GPU, enumerated anew in each reading: a reconfiguration makes handles stale."""

import math
import re
from typing import NamedTuple

from gpumap.nvml_worker.asking import Asking
from gpumap.nvml_worker.library import Attributes, Handle, Library
from gpumap.nvml_worker.lists import Lists
from gpumap.nvml_worker.processes import Row, merge, read_rows
from gpumap.readings import DeviceMemory, GpuProcess, MigInstance, Uuid

GIB = 1 << 30
_PROFILE = re.compile(r"\bMIG (\S+)$")  # "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb"


class _Facts(NamedTuple):
    """What does not change while a MIG device has its uuid."""

    gpu_instance_id: int
    compute_instance_id: int
    profile: str
    compute_slices: int | None


class MigDevices:
    """The MIG devices of one GPU."""

    def __init__(self, library: Library, asking: Asking, lists: Lists, gpu: Handle) -> None:
        self._library = library
        self._asking = asking
        self._lists = lists
        self._gpu = gpu
        self._facts: dict[str, _Facts] = {}

    def read(self, slots: int, gpu_memory: DeviceMemory | None) -> tuple[MigInstance, ...]:
        """Of `slots` slots those that are taken, in NVML's order."""
        instances: list[MigInstance] = []
        known, self._facts = self._facts, {}
        parents = _ParentRows(self._asking, self._lists, self._gpu)
        for slot in range(slots):
            handle = self._asking.ask(self._library.mig_handle, self._gpu, slot)
            if handle is None:
                continue  # NOT_FOUND is a hole, after which more may follow
            uuid = self._asking.ask(self._library.uuid, handle, on="mig")
            facts = known.get(uuid) if uuid else None
            if uuid and (facts := facts or self._ask_facts(handle, gpu_memory)):
                self._facts[uuid] = facts
                instances.append(self._instance(uuid, handle, facts, parents))
        return tuple(instances)

    def _ask_facts(self, handle: Handle, gpu_memory: DeviceMemory | None) -> _Facts | None:
        gpu_instance = self._asking.ask(self._library.gpu_instance_id, handle, on="mig")
        compute_instance = self._asking.ask(self._library.compute_instance_id, handle, on="mig")
        if gpu_instance is None or compute_instance is None:
            return None  # it went in the middle of the asking
        name = self._asking.ask(self._library.model, handle, on="mig") or ""
        attributes = self._asking.ask(self._library.attributes, handle, on="mig")
        return _Facts(
            gpu_instance,
            compute_instance,
            profile_name(name, attributes, gpu_memory),
            attributes.compute_slices if attributes else None,
        )

    def _instance(self, uuid: str, handle: Handle, facts: _Facts, parents: "_ParentRows") -> MigInstance:
        memory = self._asking.ask_newest((self._library.memory, self._library.memory_v1), handle, on="mig")
        rows = read_rows(self._asking, self._lists, handle, on="mig")
        if rows is None:
            rows = parents.of_instances()
        return MigInstance(
            uuid=Uuid(uuid),
            gpu_instance_id=facts.gpu_instance_id,
            compute_instance_id=facts.compute_instance_id,
            profile=facts.profile,
            compute_slices=facts.compute_slices,
            memory=memory,
            processes=None if rows is None else _own(rows, facts),
        )


class _ParentRows:
    """The GPU's own lists, asked once a reading, and only where a MIG device's are refused (vGPU hosts)."""

    def __init__(self, asking: Asking, lists: Lists, gpu: Handle) -> None:
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


def _own(rows: list[Row], facts: _Facts) -> tuple[GpuProcess, ...]:
    """Those of one compute instance: a list may be that of the whole GPU instance."""
    return merge(
        row
        for row in rows
        if row.process.gpu_instance_id in (None, facts.gpu_instance_id)
        and row.process.compute_instance_id in (None, facts.compute_instance_id)
    )


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
