"""NVML's XID events: the five calls on them, answered in plain values.

Raises `RefusedError`. Safe to ask from any thread, but of one event set only one thread at a time.
"""

from ctypes import byref, c_ulonglong
from typing import NamedTuple, NewType

import pynvml

from gpumap.agent.nvml_worker.library import Handle, Library, RefusedError
from gpumap.agent.nvml_worker.lists import NO_ID

EventSet = NewType("EventSet", object)
"""nvmlEventSet_t, a pointer."""
XID: int = pynvml.nvmlEventTypeXidCriticalError


class Event(NamedTuple):
    """An event of a type that is not XID has no `xid`. Ids are `None` where the driver keeps them back, or has none."""

    xid: int | None
    gpu_instance_id: int | None
    compute_instance_id: int | None


class Events:
    """Of a library that is open by the time of the first question."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def tells_xids(self, device: Handle) -> bool:
        types = c_ulonglong()
        self._library.ask("nvmlDeviceGetSupportedEventTypes", device, byref(types))
        return bool(types.value & XID)

    def create(self) -> EventSet:
        event_set = pynvml.c_nvmlEventSet_t()
        self._library.ask("nvmlEventSetCreate", byref(event_set))
        return EventSet(event_set)

    def register(self, device: Handle, event_set: EventSet) -> None:
        self._library.ask("nvmlDeviceRegisterEvents", device, c_ulonglong(XID), event_set)

    def next(self, event_set: EventSet) -> Event | None:
        """The oldest event that waits to be told; `None` if there is none."""
        said = pynvml.c_nvmlEventData_t()
        try:
            self._library.ask("nvmlEventSetWait_v2", event_set, byref(said), 0)
        except RefusedError as refused:
            if refused.code == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise
        xid = said.eventData if said.eventType & XID else None
        return Event(xid, _id(said.gpuInstanceId), _id(said.computeInstanceId))

    def free(self, event_set: EventSet) -> None:
        self._library.ask("nvmlEventSetFree", event_set)


def _id(number: int) -> int | None:
    return None if number == NO_ID else number
