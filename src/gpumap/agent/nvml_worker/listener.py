"""Listens for XID events, in a thread of its own, and tells them as they come.

Each GPU has an event set to itself: with one for all, a GPU that is lost would make every wait fail, for all of them.
The thread takes out what has come every few seconds, and when a read begins, and never waits in a call: the driver
keeps events until then, and NVML can be shut down at any moment. A set that was found empty proves that all was told.
"""

import contextlib
import threading
import time
from collections import Counter

import pynvml

from gpumap.agent.nvml_worker import wire
from gpumap.agent.nvml_worker.calls import UNSUPPORTED
from gpumap.agent.nvml_worker.events import Event, Events, EventSet
from gpumap.agent.nvml_worker.library import Handle, Library, RefusedError
from gpumap.agent.nvml_worker.output import Output
from gpumap.model.readings import GpuReading, Uuid

LISTEN_SECONDS = 10.0
"""Between reads that are farther apart: each read hears first, and waking up costs as much as reading a GPU."""
PATIENCE_SECONDS = 0.05
"""How long a read waits for news of this moment; what came later is told with the next one."""
HUNG_SECONDS = 1.0
"""A call that has not returned after so long is left to hang, and another thread listens to the other GPUs. Less than
any interval: what has come for them is told by the next read, as if nothing hung."""
MOST_EVENTS = 10_000
"""Of one GPU at a time: a flood must not keep the others from being heard."""


class EventListener:
    """A GPU's event set. Who is in a call on it holds `in_call`, for ever if the call hangs.

    It is `deaf` once it was freed, or a call on it was refused. It is `to_renew` when the GPU could not be read: the
    driver may have forgotten it by the time when it can.
    """

    def __init__(self, uuid: Uuid, event_set: EventSet) -> None:
        self.uuid = uuid
        self.event_set = event_set
        self.since = self.until = time.monotonic()
        self.deaf = False
        self.to_renew = False
        self.in_call = threading.Lock()


class Listener:
    """`attend` is for the threads that read GPUs, `tell` and `stop` for the one that begins and ends their work."""

    def __init__(self, library: Library, output: Output) -> None:
        self._events = Events(library)
        self._output = output
        self._ears: dict[Uuid, EventListener] = {}
        self._unsupported: set[Uuid] = set()
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
        ear = self._ears.get(uuid)
        if handle is None or reading.fault is not None:
            if ear is not None:
                ear.to_renew = True
            return reading
        if ear is not None and (ear.deaf or ear.to_renew) and self._let_go(ear):
            ear = None
        if ear is not None or uuid in self._unsupported:
            return reading
        try:
            self._register(uuid, handle)
        except RefusedError as refused:
            if refused.code in UNSUPPORTED or refused.code == pynvml.NVML_ERROR_NO_PERMISSION:
                self._unsupported.add(uuid)
            else:
                return reading._replace(refusals=(*reading.refusals, (refused.call, refused.code)))
        return reading

    def tell(self) -> None:
        """Add to the output what is listened to; first every event until now, if that takes no time."""
        with self._changing:
            if self._ears:
                wanted = self._ask_for_a_round()
                if not self._wait_for(wanted) and self._replace_if_hung():
                    self._wait_for(wanted)
            ears = [ear for ear in self._ears.values() if not ear.deaf]
        self._say(ears)

    def leave(self, reading: GpuReading, handle: Handle | None) -> None:
        """Do not listen to a GPU, and tell whether there is something to listen to: a stretch of no length says so.

        May hang, as the reading itself may.
        """
        if reading.uuid is None or reading.fault is not None or handle is None:
            return
        with contextlib.suppress(RefusedError):
            if self._events.tells_xids(handle):
                now = time.monotonic()
                self._output.add(wire.encode_listening(wire.ListeningMessage((wire.Heard(reading.uuid, now, now),))))

    def stop(self) -> bool:
        """Before NVML is shut down: let go of all GPUs. Whether that is done; a call that hangs is in the way."""
        self._unsupported.clear()
        gone = [self._let_go(ear) for ear in list(self._ears.values())]
        self._output.flush()
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
        ear = EventListener(uuid, event_set)
        self._say([ear])
        with self._changing:
            self._ears[uuid] = ear
            self._ask_for_a_round()
            if self._thread is None:
                self._start()

    def _let_go(self, ear: EventListener) -> bool:
        """Tell the last of it and free its event set, unless a call on it hangs."""
        if not ear.in_call.acquire(timeout=PATIENCE_SECONDS):
            return False
        try:
            self._take_out(ear)
            if not ear.deaf:
                self._end(ear)
            self._free(ear.event_set)
        finally:
            ear.in_call.release()
        with self._changing:
            self._ears.pop(ear.uuid, None)
        return True

    def _take_out(self, ear: EventListener) -> None:
        """Tell the events that have come, equal ones in one line. `in_call` is held."""
        if ear.deaf:
            return
        heard, until, refused = Counter[Event](), ear.until, False
        for _ in range(MOST_EVENTS):
            begun = time.monotonic()
            try:
                event = self._events.next(ear.event_set)
            except RefusedError:
                refused = True
                break
            if event is None:
                until = begun
                break
            heard[event] += 1
        now = time.monotonic()
        for (xid, gpu_instance, compute_instance), times in heard.items():
            if xid is not None:
                said = wire.XidMessage(ear.uuid, xid, gpu_instance, compute_instance, now, times)
                self._output.add(wire.encode_xid(said))
        ear.until = until  # not before its events are on their way
        if refused:
            self._end(ear)
        if heard or refused:
            self._output.flush()

    def _end(self, ear: EventListener) -> None:
        ear.deaf = True
        self._say([ear])

    def _say(self, ears: list[EventListener]) -> None:
        heard = tuple(wire.Heard(ear.uuid, ear.since, ear.until) for ear in ears)
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
                pause = LISTEN_SECONDS if any(not ear.deaf for ear in self._ears.values()) else None
                self._changing.wait_for(lambda: self._asked > self._begun, pause)
                self._begun += 1
                number = self._begun
                ears = [ear for ear in self._ears.values() if not ear.deaf]
            for ear in ears:
                if not ear.in_call.acquire(blocking=False):
                    continue  # by who lets go of it, or hangs
                self._in_call_since = time.monotonic()
                try:
                    self._take_out(ear)
                finally:
                    ear.in_call.release()
                if self._thread is not me:
                    return
            with self._changing:
                self._in_call_since = None
                self._done = number
                self._changing.notify_all()
