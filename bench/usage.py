"""What processes of this machine cost: CPU time, memory, children. Of any process of ours, read from outside."""

import os
import re
import resource
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_CPUCLOCK_SCHED = 2
MIB = 1 << 20


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    return [pid, *_descendants(pid)]


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            children = (task / "children").read_text()
        except FileNotFoundError:
            continue  # the thread has ended
        for child in map(int, children.split()):
            yield child
            yield from _descendants(child)


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time of processes since their start, threads that have ended included.

    The clock of a process, as clock_getcpuclockid(3) makes it: /proc/PID/stat counts in ticks of 10 ms.
    """
    return sum(time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED) for pid in pids)


def own_cpu_seconds() -> float:
    """CPU time of this process, and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def machine_cpu_seconds() -> float:
    """CPU time that all programs of this machine have used, as its kernel counts."""
    user, nice, system, _idle, _io, irq, soft, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pids: Iterable[int]) -> int:
    """Return the memory of these processes on a machine where nothing else runs: PSS as if they ran without others.

    The kernel's PSS divides pages of the interpreter among all Python programs of this machine, including the bench.
    This function adds up anonymous memory, and takes only the largest share of each file.
    """
    anonymous = 0
    of_files: dict[tuple[str, str], int] = {}
    for pid in pids:
        for name, offset, resident, own in _mappings(pid):
            anonymous += own
            of_files[name, offset] = max(of_files.get((name, offset), 0), resident - own)
    return anonymous + sum(of_files.values())


def threads(pids: Iterable[int]) -> int:
    return sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in pids)


_MAPPING = re.compile(
    r"^[0-9a-f]+-[0-9a-f]+ \S+ ([0-9a-f]+) \S+ \d+ *(.*)\n(?:(?!Rss:).*\n)*Rss: +(\d+) kB\n(?:(?!Anonymous:).*\n)*"
    r"Anonymous: +(\d+) kB$",
    re.MULTILINE,
)


def _mappings(pid: int) -> Iterator[tuple[str, str, int, int]]:
    """Name, offset, resident and anonymous bytes of each."""
    for offset, name, resident, anonymous in _MAPPING.findall(Path(f"/proc/{pid}/smaps").read_text()):
        yield name, offset, int(resident) * 1024, int(anonymous) * 1024
