"""The window of a page of the soak: its truths, as `tests.laws` judges by them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

from gpumap.model.terms import ContainerName
from tests import laws
from tests.laws import LONG_AGO, NEVER, Span, Window
from tests.soak.node import BASE_BYTES, Truth

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def make_window(
    agent: str,
    span: Span,
    truths: Sequence[Truth],
    listed: Sequence[Truth],
    *,
    has_list: bool = True,
    recovering_counts: bool = True,
    earlier: set[tuple[ContainerName, str]] | None = None,
) -> Window:
    """Give the window of `truths`. `listed` begins with the last List that the page may show."""
    pods = {
        uid: laws.Pod(pod.namespace, pod.name, uid, ended) for uid, pod, _, ended in _lives(listed, lambda at: at.pods)
    }
    for at in listed:  # of pods that ended before, processes may be left over
        for one in at.processes.values():
            if one.pod is not None and one.pod.uid not in pods:
                pods[one.pod.uid] = laws.Pod(one.pod.namespace, one.pod.name, one.pod.uid, LONG_AGO)
    holdings = [
        laws.Holding(
            pods[pod.uid],
            pods[pod.uid].container(container),
            grant.leaf,
            {grant.sharing.resource: len(grant.slots)},
            needs=frozenset({"checkpoint", "nvml"} if grant.sharing.by_answer else ()),
            began=began,
        )
        for _, pod, began, _ in _lives(listed, lambda at: at.pods)
        for container, grant in pod.grants.items()
    ]
    processes = []
    for _, one, began, ended in _lives(listed, lambda at: {other.identity: other for other in at.processes.values()}):
        pod = pods[one.pod.uid] if one.pod else None
        name = pod.container(one.container) if pod else None
        processes.append(laws.Process(one.pid, pod, name, {one.leaf: one.memory_bytes}, began, ended))
    leaves = {leaf: gpu for at in truths for leaf, gpu in at.leaves.items()}
    broken = [at.broken(agent, or_recovering=recovering_counts) for at in truths]
    coming = {leaf for at in truths for leaf in leaves.keys() ^ at.leaves.keys()}
    return Window(
        span,
        [*pods.values()],
        holdings,
        processes,
        leaves,
        dict.fromkeys(leaves, BASE_BYTES),
        frozenset.intersection(*(at.broken(agent, or_recovering=False) for at in truths)),
        frozenset.union(*broken) | coming,
        listed[0].began,
        has_list,
        earlier=earlier,
    )


def _lives(listed: Sequence[Truth], read: Callable[[Truth], Mapping[K, T]]) -> Iterator[tuple[K, T, Span, Span]]:
    """Give each thing of these truths with the times at which it came and went."""
    there: dict[K, tuple[T, Span]] = {}
    for number, at in enumerate(listed):
        change = Span(at.began, at.ended) if number else LONG_AGO
        now = read(at)
        for key in there.keys() - now.keys():
            yield (key, *there.pop(key), change)
        there |= {key: (now[key], change) for key in now.keys() - there.keys()}
    yield from ((key, *one, NEVER) for key, one in there.items())
