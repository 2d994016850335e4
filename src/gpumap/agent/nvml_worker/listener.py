"""Listens for XID events, in a thread of its own, and sends them as they come.

Each GPU has an event set to itself: with one for all, a GPU that is lost would make every wait fail, for all of them.
An event is of the device that it names: NVIDIA's mock driver puts events of one GPU into the set of another one.
The thread empties the sets every few seconds, and when a read begins. It never waits in a call: the driver keeps events
until then, and NVML can be shut down at any moment. A set that was found empty proves that every event was sent.
"""

import contextlib
import threading
import time
from collections import Counter
from ctypes import byref, c_ulonglong, c_void_p, cast
from typing import Any, NamedTuple, NewType

import pynvml

from gpumap.agent.nvml_worker import wire
from gpumap.agent.nvml_worker.calls import RETRY_SECONDS, UNSUPPORTED
from gpumap.agent.nvml_worker.library import Handle, Library, RefusedError
from gpumap.agent.nvml_worker.output import Output
from gpumap.agent.nvml_worker.processes import NO_ID
from gpumap.model.readings import GpuReading, Uuid

LISTEN_SECONDS = 10.0
"""Between reads that are farther apart: each read hears first, and waking up costs as much as reading a GPU."""
PATIENCE_SECONDS = 0.05
"""How long a read waits for events of this moment. The next read sends those that came later."""
HUNG_SECONDS = 1.0
"""A call that has not returned after so long is left to hang, and another thread listens to the other GPUs. Less than
any interval: the next read sends their events, as if nothing hung."""
MOST_EVENTS = 10_000
"""Of one GPU at a time: a flood must not keep the others from being heard."""


EventSet = NewType("EventSet", object)
"""nvmlEventSet_t, a pointer."""
XID: int = pynvml.nvmlEventTypeXidCriticalError


class Event(NamedTuple):
    """An event of a type that is not XID has no `xid`. Ids are `None` where the driver keeps them back, or has none.

    `device` is the address in its handle, `None` if there is none.
    """

    device: int | None
    xid: int | None
    gpu_instance_id: int | None
    compute_instance_id: int | None


class Events:
    """NVML's calls on events, answered in plain values. Each raises `RefusedError`.

    Any thread may ask, but of one event set only one thread at a time.
    """

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
        """The oldest event in the set; `None` if it is empty."""
        event = pynvml.c_nvmlEventData_t()
        try:
            self._library.ask("nvmlEventSetWait_v2", event_set, byref(event), 0)
        except RefusedError as refused:
            if refused.code == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise
        xid = event.eventData if event.eventType & XID else None
        return Event(_address(event.device), xid, _id(event.gpuInstanceId), _id(event.computeInstanceId))

    def uuid(self, device: int) -> str:
        return self._library.uuid(Handle(cast(device, pynvml.c_nvmlDevice_t)))

    def free(self, event_set: EventSet) -> None:
        self._library.ask("nvmlEventSetFree", event_set)


def _address(handle: Any) -> int | None:
    return cast(handle, c_void_p).value


def _id(number: int) -> int | None:
    return None if number == NO_ID else number


class EventListener:
    """A GPU's event set. Who is in a call on it holds `in_call`, for ever if the call hangs.

    It is `closed` once it was freed, or a call on it was refused. It is `to_renew` when the GPU could not be read: the
    driver may have forgotten it by the time when it can.
    """

    def __init__(self, uuid: Uuid, event_set: EventSet) -> None:
        self.uuid = uuid
        self.event_set = event_set
        self.since = self.until = time.monotonic()
        self.closed = False
        self.to_renew = False
        self.in_call = threading.Lock()


class Listener:
    """`attend` is for the threads that read GPUs, `tell` and `stop` for the one that begins and ends their work."""

    def __init__(self, library: Library, output: Output) -> None:
        self._events = Events(library)
        self._output = output
        self._listeners: dict[Uuid, EventListener] = {}
        self._uuids: dict[int | None, Uuid] = {}  # by the address in a GPU's handle
        self._unsupported: dict[Uuid, float] = {}  # until when, on the monotonic clock
        self._changing = threading.Condition()  # of everything below, and who listens to whom
        self._thread: threading.Thread | None = None
        self._in_call_since: float | None = None
        self._asked = self._begun = self._done = 0  # rounds, of all GPUs each

    def attend(self, reading: GpuReading, handle: Handle | None) -> GpuReading:
        """Listen to a GPU from its first reading on. A refusal that is worth telling is added to the reading.

        May hang, as the reading itself may.
        """
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
                return reading._replace(refusals=(*reading.refusals, (refused.call, refused.code)))
        return reading

    def tell(self) -> None:
        """Add to the output what is listened to; first every event until now, if that takes no time."""
        with self._changing:
            if self._listeners:
                wanted = self._ask_for_a_round()
                if not self._wait_for(wanted) and self._replace_if_hung():
                    self._wait_for(wanted)
            listeners = [listener for listener in self._listeners.values() if not listener.closed]
        self._report(listeners)

    def leave(self, reading: GpuReading, handle: Handle | None) -> None:
        """Do not listen to a GPU, and tell whether there is something to listen to: a stretch of no length says so.

        May hang, as the reading itself may.
        """
        if reading.uuid is None or reading.fault is not None or handle is None:
            return
        with contextlib.suppress(RefusedError):
            if self._events.tells_xids(handle):
                now = time.monotonic()
                period = wire.ListeningPeriod(reading.uuid, now, now)
                self._output.add(wire.encode_listening(wire.ListeningMessage((period,))))

    def stop(self) -> bool:
        """Before NVML is shut down: let go of all GPUs. Whether that is done; a call that hangs is in the way."""
        self._unsupported.clear()
        gone = [self._release(listener) for listener in list(self._listeners.values())]
        self._output.flush()
        self._uuids.clear()
        return all(gone)

    # --- a GPU ---

    def _register(self, uuid: Uuid, handle: Handle) -> None:
        """Raises `RefusedError`."""
        if not self._events.tells_xids(handle):
            raise RefusedError("nvmlDeviceGetSupportedEventTypes", pynvml.NVML_ERROR_NOT_SUPPORTED)
        event_set = self._events.create()
        try:
            self._events.register(handle, event_set)
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
        """Tell the last of it and free its event set, unless a call on it hangs."""
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
        """Tell the events that have come, equal ones in one line. `in_call` is held."""
        if listener.closed:
            return
        heard, until, refused = Counter[Event](), listener.until, False
        for _ in range(MOST_EVENTS):
            begun = time.monotonic()
            try:
                event = self._events.next(listener.event_set)
            except RefusedError:
                refused = True
                break
            if event is None:
                until = begun
                break
            heard[event] += 1
        now = time.monotonic()
        for event, times in heard.items():
            uuid = self._uuid_of(event, listener)
            if event.xid is not None and uuid is not None:
                message = wire.XidMessage(uuid, event.xid, event.gpu_instance_id, event.compute_instance_id, now, times)
                self._output.add(wire.encode_xid(message))
        listener.until = until  # not before its events are on their way
        if refused:
            self._close(listener)
        if heard or refused:
            self._output.flush()

    def _uuid_of(self, event: Event, listener: EventListener) -> Uuid | None:
        """Of the GPU that the event names, by default of the one that was registered; `None` if it cannot be named."""
        if event.device is None:
            return listener.uuid
        if event.device not in self._uuids:
            try:
                uuid = self._events.uuid(event.device)
            except RefusedError:
                return None
            # A MIG device's own handle: a GPU's set has events of no other GPU's MIG devices.
            self._uuids[event.device] = listener.uuid if uuid.startswith("MIG-") else Uuid(uuid)
        return self._uuids[event.device]

    def _close(self, listener: EventListener) -> None:
        listener.closed = True
        self._report([listener])

    def _report(self, listeners: list[EventListener]) -> None:
        heard = tuple(wire.ListeningPeriod(listener.uuid, listener.since, listener.until) for listener in listeners)
        self._output.add(wire.encode_listening(wire.ListeningMessage(heard)))

    def _free(self, event_set: EventSet) -> None:
        try:
            self._events.free(event_set)
        except RefusedError:
            pass  # of a driver that is lost: what it held is gone with it

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
        """Whether that round ends soon. `_changing` is held."""
        return self._changing.wait_for(lambda: self._done >= number, PATIENCE_SECONDS)

    def _ask_for_a_round(self) -> int:
        """The number of one that begins after now."""
        self._asked = self._begun + 1
        self._changing.notify_all()
        return self._asked

    def _listen(self) -> None:
        """Until another thread has taken over."""
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
                    continue  # by who lets go of it, or hangs
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
