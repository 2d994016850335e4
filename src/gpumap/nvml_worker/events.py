"""NVML's XID events: their structure and prototypes, and the five calls on them, answered in plain values.

Raises `RefusedError`. Safe to ask from any thread, but of one event set only one thread at a time.
"""

from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_uint, c_ulonglong, c_void_p
from typing import NamedTuple, NewType

from gpumap.nvml_worker.codes import FUNCTION_NOT_FOUND, TIMEOUT
from gpumap.nvml_worker.library import Handle, Library, RefusedError
from gpumap.nvml_worker.lists import NO_ID

EventSet = NewType("EventSet", int)
"""nvmlEventSet_t, a pointer."""
XID = 0x8  # nvml.h, nvmlEventTypeXidCriticalError


class EventData(Structure):
    """nvmlEventData_t."""

    _fields_ = (
        ("device", c_void_p),
        ("eventType", c_ulonglong),
        ("eventData", c_ulonglong),
        ("gpuInstanceId", c_uint),
        ("computeInstanceId", c_uint),
    )
    eventType: int  # noqa: N815 -- nvml.h's names
    eventData: int  # noqa: N815
    gpuInstanceId: int  # noqa: N815
    computeInstanceId: int  # noqa: N815


PROTOTYPES: dict[str, tuple[type, ...]] = {
    "nvmlEventSetCreate": (POINTER(c_void_p),),
    "nvmlEventSetFree": (c_void_p,),
    "nvmlDeviceGetSupportedEventTypes": (c_void_p, POINTER(c_ulonglong)),
    "nvmlDeviceRegisterEvents": (c_void_p, c_ulonglong, c_void_p),
    "nvmlEventSetWait_v2": (c_void_p, POINTER(EventData), c_uint),
}
"""As structs.PROTOTYPES."""


class Event(NamedTuple):
    """An event of a type that is not XID has no `xid`. Ids are `None` where the driver keeps them back, or has none."""

    xid: int | None
    gpu_instance_id: int | None
    compute_instance_id: int | None


class Events:
    """Of a library that is loaded by the time of the first question."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._functions: dict[str, Callable[..., int]] = {}

    def tells_xids(self, device: Handle) -> bool:
        types = c_ulonglong()
        self._ask("nvmlDeviceGetSupportedEventTypes", device, byref(types))
        return bool(types.value & XID)

    def create(self) -> EventSet:
        event_set = c_void_p()
        self._ask("nvmlEventSetCreate", byref(event_set))
        return EventSet(event_set.value or 0)

    def register(self, device: Handle, event_set: EventSet) -> None:
        self._ask("nvmlDeviceRegisterEvents", device, XID, event_set)

    def next(self, event_set: EventSet) -> Event | None:
        """The oldest event that waits to be told; `None` if there is none."""
        said = EventData()
        try:
            self._ask("nvmlEventSetWait_v2", event_set, byref(said), 0)
        except RefusedError as refused:
            if refused.code == TIMEOUT:
                return None
            raise
        xid = said.eventData if said.eventType & XID else None
        return Event(xid, _id(said.gpuInstanceId), _id(said.computeInstanceId))

    def free(self, event_set: EventSet) -> None:
        self._ask("nvmlEventSetFree", event_set)

    def _ask(self, call: str, *arguments: object) -> None:
        code = self._function(call)(*arguments)
        if code:
            raise RefusedError(call, code)

    def _function(self, call: str) -> Callable[..., int]:
        if call not in self._functions:
            try:
                function = self._library.loaded[call] if self._library.loaded is not None else None
            except AttributeError:
                function = None
            if function is None:
                raise RefusedError(call, FUNCTION_NOT_FOUND)
            function.argtypes = PROTOTYPES[call]
            self._functions[call] = function
        return self._functions[call]


def _id(number: int) -> int | None:
    return None if number == NO_ID else number
