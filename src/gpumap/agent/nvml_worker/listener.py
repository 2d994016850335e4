"""Listens for XID events in its own thread, and sends them as they come.

Each GPU has its own event set: in a common set, one lost GPU would make every wait fail. An event counts for the
device that it names: NVIDIA's mock driver puts events of one GPU into the set of another. The thread empties the sets
every few seconds, and when a read begins. It never waits in a call: the driver keeps events until then, and NVML can
be shut down at any moment. A set that was found empty proves that every event was sent.
"""

import contextlib
import threading
import time
from collections import Counter
from ctypes import byref, c_ulonglong, c_void_p, cast
from typing import Any, NamedTuple

import pynvml
from msgspec import structs

from gpumap.agent.nvml_worker import wire
from gpumap.agent.nvml_worker.calls import RETRY_SECONDS, UNSUPPORTED
from gpumap.agent.nvml_worker.library import Handle, Library, RefusedError
from gpumap.agent.nvml_worker.processes import NO_ID
from gpumap.agent.nvml_worker.wire import Output
from gpumap.model.readings import GpuReading, Uuid

LISTEN_SECONDS = 10.0
"""Between reads that are farther apart: each read empties the sets first, and a wake-up costs as much as a read of a
GPU."""
PATIENCE_SECONDS = 0.05
"""How long a read waits for events of this moment. The next read sends later events."""
HUNG_SECONDS = 1.0
"""A call that did not return after this time is left to hang, and another thread listens to the other GPUs. Less than
any interval: the next read sends their events, as if nothing hung."""
MOST_EVENTS = 10_000
"""Events of one GPU at a time: many events of one GPU must not delay those of the others."""


EventSet = Any
"""nvmlEventSet_t, a pointer."""
XID: int = pynvml.nvmlEventTypeXidCriticalError


class Event(NamedTuple):
    """An event. One of another type than XID has no `xid`. Ids are `None` if the driver does not report them.

    `device` is the address in its handle; `None` if there is none.
    """

    device: int | None
    xid: int | None
    gpu_instance_id: int | None
    compute_instance_id: int | None


def _address(handle: Any) -> int | None:
    return cast(handle, c_void_p).value


class EventListener:
    """A GPU's event set. A thread that makes a call on it holds `in_call`, for ever if the call hangs.

    It is `closed` after it was freed, or after a refused call. It is `to_renew` if the GPU was not readable: the
    driver may have dropped the set when the GPU is readable again.
    """

    def __init__(self, uuid: Uuid, event_set: EventSet) -> None:
        self.uuid = uuid
        self.event_set = event_set
        self.since = self.until = time.monotonic()
        self.closed = False
        self.to_renew = False
        self.in_call = threading.Lock()


class Listener:
    """Threads that read GPUs call `attend` and `leave`, and their scheduler `report` and `stop`."""

    def __init__(self, library: Library, output: Output) -> None:
        self._library = library
        self._output = output
        self._listeners: dict[Uuid, EventListener] = {}
        self._uuids: dict[int | None, Uuid] = {}  # by the address in a GPU's handle
        self._unsupported: dict[Uuid, float] = {}  # end of the listening period, monotonic clock
        self._xids = Counter[Uuid]()
        self._changing = threading.Condition()  # protects everything below, and which thread listens to which GPU
        self._thread: threading.Thread | None = None
        self._in_call_since: float | None = None
        self._asked = self._begun = self._done = 0  # rounds over all GPUs

    def attend(self, reading: GpuReading, handle: Handle | None) -> GpuReading:
        """Listen to a GPU from its first reading on; add a refusal to it. May hang, as the reading itself may."""
        uuid = reading.uuid
        if uuid is None:
            return reading
        listener = self._listeners.get(uuid)
        if handle is None or reading.fault is not None:
            if listener is not None:
                listener.to_renew = True
            return reading
        self._uuids[_address(handle)] = uuid
        if listener is not None and (listener.closed or listener.to_renew) and self._release(listener):
            listener = None
        if listener is not None or time.monotonic() < self._unsupported.get(uuid, 0.0):
            return reading
        try:
            self._register(uuid, handle)
        except RefusedError as refused:
            if refused.code in UNSUPPORTED or refused.code == pynvml.NVML_ERROR_NO_PERMISSION:
                self._unsupported[uuid] = time.monotonic() + RETRY_SECONDS
            else:
                return structs.replace(reading, refusals=reading.refusals | {refused.call: refused.code})
        return reading

    def report(self) -> None:
        """Add the listening periods to the output. Before them, add all events until now, if that takes no time."""
        with self._changing:
            if self._listeners:
                number = self._ask_for_a_round()
                if not self._wait_for(number) and self._replace_if_hung():
                    self._wait_for(number)
            listeners = [listener for listener in self._listeners.values() if not listener.closed]
        self._report(listeners)

    def count_xids(self, uuid: Uuid) -> int:
        """Return how many XID events of a GPU came so far."""
        return self._xids[uuid]

    def leave(self, reading: GpuReading, handle: Handle | None) -> None:
        """Report that gpumap does not listen to a GPU that supports XID events. May hang, as a reading may."""
        if reading.uuid is None or reading.fault is not None or handle is None:
            return
        with contextlib.suppress(RefusedError):
            if self._tells_xids(handle):
                monotonic = time.monotonic()
                period = wire.ListeningPeriod(reading.uuid, monotonic, monotonic)
                self._output.add(wire.encode(wire.ListeningMessage((period,))))

    def stop(self) -> bool:
        """Release all GPUs before a shutdown of NVML. Return whether it succeeded: a call that hangs prevents it."""
        self._unsupported.clear()
        released = [self._release(listener) for listener in list(self._listeners.values())]
        self._output.flush()
        self._uuids.clear()
        return all(released)

    # --- a GPU; NVML's calls raise RefusedError ---

    def _tells_xids(self, handle: Handle) -> bool:
        types = c_ulonglong()
        self._library.ask("nvmlDeviceGetSupportedEventTypes", handle, byref(types))
        return bool(types.value & XID)

    def _register(self, uuid: Uuid, handle: Handle) -> None:
        """Begin to listen to a GPU."""
        if not self._tells_xids(handle):
            raise RefusedError("nvmlDeviceGetSupportedEventTypes", pynvml.NVML_ERROR_NOT_SUPPORTED)
        event_set = pynvml.c_nvmlEventSet_t()
        self._library.ask("nvmlEventSetCreate", byref(event_set))
        try:
            self._library.ask("nvmlDeviceRegisterEvents", handle, c_ulonglong(XID), event_set)
        except RefusedError:
            self._free(event_set)
            raise
        listener = EventListener(uuid, event_set)
        self._report([listener])
        with self._changing:
            self._listeners[uuid] = listener
            self._ask_for_a_round()
            if self._thread is None:
                self._start()

    def _release(self, listener: EventListener) -> bool:
        """Send the last events and free the event set, unless a call on it hangs."""
        if not listener.in_call.acquire(timeout=PATIENCE_SECONDS):
            return False
        try:
            self._take_out(listener)
            if not listener.closed:
                self._close(listener)
            self._free(listener.event_set)
        finally:
            listener.in_call.release()
        with self._changing:
            self._listeners.pop(listener.uuid, None)
        return True

    def _take_out(self, listener: EventListener) -> None:
        """Send the events that came, with equal ones in one line. The caller holds `in_call`."""
        if listener.closed:
            return
        events, until, refused = Counter[Event](), listener.until, False
        for _ in range(MOST_EVENTS):
            begun = time.monotonic()
            try:
                event = self._next_event(listener.event_set)
            except RefusedError:
                refused = True
                break
            if event is None:
                until = begun
                break
            events[event] += 1
        monotonic = time.monotonic()
        for event, times in events.items():
            uuid = self._uuid_of(event, listener)
            if event.xid is not None and uuid is not None:
                instances = event.gpu_instance_id, event.compute_instance_id
                message = wire.XidMessage(uuid, event.xid, *instances, monotonic, times)
                self._xids[uuid] += times
                self._output.add(wire.encode(message))
        listener.until = until  # not before its events are sent
        if refused:
            self._close(listener)
        if events or refused:
            self._output.flush()

    def _next_event(self, event_set: EventSet) -> Event | None:
        """Return the oldest event in the set; `None` if it is empty."""
        event = pynvml.c_nvmlEventData_t()
        try:
            self._library.ask("nvmlEventSetWait_v2", event_set, byref(event), 0)
        except RefusedError as refused:
            if refused.code == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise
        xid = event.eventData if event.eventType & XID else None
        instances = [None if id_ == NO_ID else id_ for id_ in (event.gpuInstanceId, event.computeInstanceId)]
        return Event(_address(event.device), xid, *instances)

    def _uuid_of(self, event: Event, listener: EventListener) -> Uuid | None:
        """Return the uuid of the GPU that the event names, by default of the registered one; `None` if unknown."""
        if event.device is None:
            return listener.uuid
        if event.device not in self._uuids:
            try:
                uuid = self._library.uuid(Handle(cast(event.device, pynvml.c_nvmlDevice_t))).once()
            except RefusedError:
                return None
            # The handle of a MIG device: the set of a GPU has no events of MIG devices of other GPUs.
            self._uuids[event.device] = listener.uuid if uuid.startswith("MIG-") else Uuid(uuid)
        return self._uuids[event.device]

    def _close(self, listener: EventListener) -> None:
        listener.closed = True
        self._report([listener])

    def _report(self, listeners: list[EventListener]) -> None:
        periods = tuple(wire.ListeningPeriod(listener.uuid, listener.since, listener.until) for listener in listeners)
        self._output.add(wire.encode(wire.ListeningMessage(periods)))

    def _free(self, event_set: EventSet) -> None:
        with contextlib.suppress(RefusedError):  # of a lost driver: what it held is gone
            self._library.ask("nvmlEventSetFree", event_set)

    # --- the thread ---

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._listen, name="listener", daemon=True)
        self._thread.start()

    def _replace_if_hung(self) -> bool:
        since = self._in_call_since
        if since is None or time.monotonic() - since < HUNG_SECONDS:
            return False
        self._in_call_since = None
        self._start()
        return True

    def _wait_for(self, number: int) -> bool:
        """Return whether that round ends soon. The caller holds `_changing`."""
        return self._changing.wait_for(lambda: self._done >= number, PATIENCE_SECONDS)

    def _ask_for_a_round(self) -> int:
        """Return the number of a round that begins after now."""
        self._asked = self._begun + 1
        self._changing.notify_all()
        return self._asked

    def _listen(self) -> None:
        """Listen until another thread takes over."""
        me = threading.current_thread()
        while True:
            with self._changing:
                pause = LISTEN_SECONDS if any(not listener.closed for listener in self._listeners.values()) else None
                self._changing.wait_for(lambda: self._asked > self._begun, pause)
                self._begun += 1
                number = self._begun
                listeners = [listener for listener in self._listeners.values() if not listener.closed]
            for listener in listeners:
                if not listener.in_call.acquire(blocking=False):
                    continue  # by the thread that releases it, or by one that hangs
                self._in_call_since = time.monotonic()
                try:
                    self._take_out(listener)
                finally:
                    listener.in_call.release()
                if self._thread is not me:
                    return
            with self._changing:
                self._in_call_since = None
                self._done = number
                self._changing.notify_all()
