"""When NVML is initialised anew to look for GPUs that are lost: one that was reset behind our back may be well. Pure.

It costs the GPUs that are well: nobody listens to them for a moment, and their GPM values begin anew. So it is done
after 1, 2, 4, … 64 minutes, and soon again when others are lost.
"""

LONGEST_TIMES = 64


class ReinitBackoff:
    """Times are of one monotonic clock."""

    def __init__(self, first_seconds: float) -> None:
        self._first = self._pause = first_seconds
        self._lost: frozenset[int] = frozenset()
        self._since = 0.0

    def is_due(self, lost: frozenset[int], now: float) -> bool:
        """Whether to do it now: who is due does it. `lost` are indices."""
        if lost != self._lost:
            self._lost, self._since, self._pause = lost, now, self._first
        if not lost or now - self._since < self._pause:
            return False
        self._since = now
        self._pause = min(2 * self._pause, LONGEST_TIMES * self._first)
        return True
