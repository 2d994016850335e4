"""When a worker that hangs is replaced, and which GPUs the next one leaves alone. Pure.

A process that hangs in the driver may survive SIGKILL. Their number must not grow without an end, so the time until the
next replacement doubles. If the driver is to be released between reads, no worker may hang for long. Then the GPUs that
hung are left out instead, twice as long each time.
"""

from collections.abc import Mapping

LONGEST_SECONDS = 600.0


class ReplacementPolicy:
    """The policy of one source, over all its workers. Times are of one monotonic clock."""

    def __init__(self, seconds: float, *, lets_rest: bool = False) -> None:
        self.resting: frozenset[int] = frozenset()
        """The indices of GPUs that are not read for now."""
        self._first = self._seconds = seconds
        self._lets_rest = lets_rest
        self._rest_ends = self._rest_ended = 0.0

    def is_over(self, now: float, unanswered: Mapping[int, float], started: float | None) -> bool:
        """Return whether to end the worker that started at `started`.

        `unanswered` has the GPUs that have not answered, by index, with the time since when.
        """
        if not unanswered:
            self._seconds = self._first
        if self.resting and (now >= self._rest_ends or not unanswered):
            self.resting, self._rest_ended = frozenset(), now
        waiting = [since for index, since in unanswered.items() if index not in self.resting]
        if started is None or not waiting:
            return False
        limit = self._first if self._lets_rest else self._seconds
        if now - max(started, self._rest_ended, min(waiting)) < limit:
            return False
        if self._lets_rest:
            self.resting, self._rest_ends = frozenset(unanswered), now + self._seconds
        self._seconds = min(2 * self._seconds, LONGEST_SECONDS)
        return True
