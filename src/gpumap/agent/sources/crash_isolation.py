"""Which GPUs may have crashed the worker, and when to read them again: one GPU must not cost the others. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

LONGEST_PAUSE_READS = 64


@dataclass(slots=True)
class _Suspect:
    """`pause` is for how many reads it is left out after its next crash, `left` how many of them are still to come."""

    pause: int = 1
    left: int = 0


class CrashSuspects:
    """GPUs under suspicion are read after the others, one by one: if the worker crashes again, the GPU is known.

    That GPU is left out for 1, 2, 4, … 64 reads. Each answer halves the pause, and the last one clears the GPU.
    """

    def __init__(self) -> None:
        self._suspects: dict[int, _Suspect] = {}

    def plan(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Plan one more read: which GPUs come last, in this order, and which are left out."""
        skip = tuple(sorted(index for index, suspect in self._suspects.items() if suspect.left))
        last = sorted(index for index, suspect in self._suspects.items() if not suspect.left)
        for index in skip:
            self._suspects[index].left -= 1
        return tuple(sorted(last, key=lambda index: self._suspects[index].pause)), skip

    def answered(self, index: int) -> None:
        suspect = self._suspects.get(index)
        if suspect:
            suspect.pause //= 2
            if not suspect.pause:
                del self._suspects[index]

    def crashed(self, unanswered: Collection[int], last: Sequence[int]) -> int | None:
        """Note that the worker died in a read. `unanswered` did not answer; `last` of them came at the end.

        Returns the GPU that crashed it, if that is clear; it is left out from now on. Else all are suspects.
        """
        together = [index for index in unanswered if index not in last]
        if len(together) > 1:  # read at the same time: any of them may be it
            for index in together:
                self._suspects.setdefault(index, _Suspect())
            return None
        culprit = together[0] if together else next((index for index in last if index in unanswered), None)
        if culprit is not None:
            suspect = self._suspects.setdefault(culprit, _Suspect())
            suspect.left, suspect.pause = suspect.pause, min(suspect.pause * 2, LONGEST_PAUSE_READS)
        return culprit
