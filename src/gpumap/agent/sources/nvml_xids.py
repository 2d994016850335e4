"""What workers said of XID events since the last reading that was told. Bounded, whatever they say and for how long."""

from collections.abc import Iterable

from gpumap.agent.nvml_worker.wire import ListeningMessage, XidMessage
from gpumap.model.readings import Listening, Uuid, XidError

MOST_EVENTS = 1000
"""Beyond it equal events are told together, as if they had come with the last of them."""
MOST_STRETCHES = 4096
"""Beyond it the oldest are forgotten, and so that time is blind: for as many GPUs that are registered so often."""


class XidEvents:
    def __init__(self) -> None:
        self._events: list[XidMessage] = []
        self._most_events = MOST_EVENTS
        self._until: dict[tuple[Uuid, float], float] = {}  # by since when

    def hear(self, said: XidMessage | ListeningMessage) -> None:
        if isinstance(said, XidMessage):
            self._events.append(said)
            if len(self._events) > self._most_events:
                self._events = _together(self._events)
                self._most_events = max(MOST_EVENTS, 2 * len(self._events))
            return
        for uuid, since, until in said.heard:
            self._until[uuid, since] = max(until, self._until.get((uuid, since), since))
        while len(self._until) > MOST_STRETCHES:
            del self._until[next(iter(self._until))]

    def tell(self, now: float) -> tuple[tuple[XidError, ...], tuple[Listening, ...]]:
        """What was heard until now, monotonic, and forget it: a worker that still listens says so at each read."""
        events = tuple(XidError(*said[:4], now - said.at, said.times) for said in self._events)
        listening = tuple(Listening(uuid, now - since, now - until) for (uuid, since), until in self._until.items())
        self._events, self._until, self._most_events = [], {}, MOST_EVENTS
        return events, listening


def _together(events: Iterable[XidMessage]) -> list[XidMessage]:
    found: dict[tuple[object, ...], XidMessage] = {}
    for said in events:
        before = found.get(said[:4])
        found[said[:4]] = said if before is None else said._replace(times=before.times + said.times)
    return list(found.values())
