"""Asks a Prometheus for gpumap's series repeatedly, and returns the maps of all nodes.

All queries of an answer are for one moment, by the server's clock. It asks for families one by one, a few at a time.
It reads each answer when it arrives: all rows of a cluster at once would take a lot of memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from gpumap.cli.command_line import did_you_mean
from gpumap.cli.fleet import queries
from gpumap.cli.fleet.joins import (
    Answers,
    NodeSeries,
    duplicate_devices,
    faults_without_device,
    gaps,
    node_of,
    series_of_nodes,
)
from gpumap.cli.fleet.queries import AskedFamily, Selection, families_for, matchers_of_targets, question
from gpumap.cli.fleet.targets import (
    OWN_LABELS,
    Key,
    Name,
    Target,
    differ_in_own_labels,
    down_nodes,
    key_of,
    labels_by_key,
    names_of,
    nodes_of,
    selection_of,
    targets_by_key,
)
from gpumap.cli.fleet.values import ANY, FamilyValues, Limits, number, odd_row, read
from gpumap.cli.node_maps import NodeMaps, NodeMapStream
from gpumap.cli.prometheus import Prometheus, Row, Server, connect, together
from gpumap.model.errors import FatalError
from gpumap.model.formatting import age, listed, reason_sentences
from gpumap.model.grouping import grouped
from gpumap.model.node import Node

OLD_SECONDS = 60.0
"""A gpumap serves nothing older than its --stale-after, which is a minute by default."""
_ODD_SHOWN = 3
Ask = Callable[[Prometheus], Awaitable[NodeMaps]]


async def answers_of(server: Server, interval_seconds: float, ask: Ask) -> NodeMapStream:
    """Ask again and again. A failed attempt is returned in the place of an answer."""
    async with connect(server) as prometheus:
        while True:
            answer: NodeMaps | FatalError
            with _no_search_for_cycles():  # also while it is shown
                try:
                    answer = await ask(prometheus)
                except FatalError as error:
                    answer = error
                yield answer
            del answer
            await asyncio.sleep(interval_seconds)


@contextlib.contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """A million rows have no cycles, and the search for them takes longer than reading the rows."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    except GeneratorExit:
        gc.freeze()  # this was the last answer; do not search it when the process ends either
        raise
    finally:
        if was_on:
            gc.enable()


class Agents(NamedTuple):
    """The gpumaps that a server scrapes, or those of the node that was asked for; and targets that do not answer it.

    `odd` are gpumaps without a valid time of their collection.
    """

    selection: Selection
    targets: Mapping[Key, Target]
    names: Mapping[Key, Name]
    down: list[Mapping[str, str]]
    odd: list[str]


async def maps_of(
    server: Prometheus, match: str, parts: Collection[str], node: str = "", namespace: str = ""
) -> NodeMaps:
    """Ask once: for every node, or for the one named `node`; for containers in `namespace` only, if it is not empty."""
    moment = await now(server)
    agents = _only(node, await agents_of(server, match, moment), server.url)
    agents = agents._replace(selection=agents.selection._replace(namespace=namespace))
    answers = await _answers(server, agents, parts, moment)
    nodes, odd = series_of_nodes(answers)
    maps = [node_of(one) for one in nodes]
    slots_served = any(one.of(queries.SLOTS) for one in nodes)
    current = [(one, of) for one, of in zip(maps, nodes, strict=True) if not _is_old(one, moment)]
    missing = (
        *reason_sentences(
            (name, "Prometheus cannot scrape its gpumap (up is 0)") for name in _down(agents, nodes, node)
        ),
        *reason_sentences(
            (one.name, f"its gpumap has not collected for {age(moment - one.timestamp)}")
            for one in maps
            if _is_old(one, moment)
        ),
        *reason_sentences(
            (one.name, why) for one, of in current for why in gaps(of, one, parts, namespace, slots_served=slots_served)
        ),
        *(sentence for one in nodes for sentence in faults_without_device(one)),
        *_doubts(duplicate_devices(maps)),
        *left_out([*agents.odd, *(row for one in answers.values.values() for row in one.odd), *odd]),
    )
    is_one = node and len(current) == 1 and {*parts} != {queries.FINDINGS}  # of which the devices are not known
    return NodeMaps(tuple(one for one, _ in current), missing, fleet=not is_one)


# --- asking -----------------------------------------------------------------------------------------------------------


async def now(server: Prometheus) -> int:
    """Return the time by the server's clock: ours may differ."""
    rows = await server.instant("vector(time())")
    value = number_of(rows[0]) if rows else None
    if value is None:
        raise FatalError(f"{server.url} did not return its time")
    return int(value)


async def agents_of(server: Prometheus, match: str, moment: int, *, spaced: bool = True) -> Agents:
    """Ask for the gpumaps; if `spaced`, also for the time between their collections."""
    questions = [queries.targets_question(match), *([queries.spacings_question(match)] if spaced else [])]
    answers = [server.instant(one, moment) for one in questions]
    rows, *spacings_of, down = await together([*answers, _down_targets(server, match, moment)])
    if not rows:
        more = f"; {len(down)} gpumap targets do not answer it" if down else ""
        matching = f" matching {match}" if match else ""
        raise FatalError(f"no gpumap series at {server.url}{matching}{more}")
    selection = selection_of([row.labels for row in rows], match)
    collected = [(row.labels, value) for row in rows if (value := number_of(row)) is not None]
    odd = [odd_row(queries.SNAPSHOT, row.labels, row.points[0][1]) for row in rows if number_of(row) is None]
    spacings = {key_of(row.labels, selection): spacing for row in chain(*spacings_of) if (spacing := number_of(row))}
    targets = targets_by_key(collected, spacings, selection)
    infos = await values_of_family(server, queries.NODE_INFO, selection, moment)
    names = names_of(targets, infos.values)
    labels = [target.labels for target in targets.values()]
    selection = selection._replace(mixed=differ_in_own_labels(labels), targets=labels_by_key(targets, names))
    return Agents(selection, targets, names, [row.labels for row in down], odd)


async def _down_targets(server: Prometheus, match: str, moment: int) -> list[Row]:
    """Return gpumaps that do not answer. An hour of samples is read only if some target does not."""
    if not await server.instant(queries.unreachable_question(match), moment):
        return []
    return await server.instant(queries.down_question(match), moment)


async def _answers(server: Prometheus, agents: Agents, parts: Collection[str], moment: int) -> Answers:
    asked, selection = families_for(parts), agents.selection
    if len({name for name, _ in agents.names.values()}) < len(agents.targets):  # all of their GPUs show whose they are
        asked = [queries.DEVICE_INFO if one.name == queries.DEVICE_INFO.name else one for one in asked]
    values = await together([values_of_family(server, family, selection, moment) for family in asked])
    by_name = {family.name: one for family, one in zip(asked, values, strict=True)}
    return Answers(agents.targets, agents.names, asked, by_name)


async def values_of_family(server: Prometheus, family: AskedFamily, selection: Selection, moment: int) -> FamilyValues:
    return read(family, await server.vector(question(family, selection), moment), selection)


def number_of(row: Row, limits: Limits = ANY) -> float | None:
    return number(row.points[0][1], limits)


# --- one node ---------------------------------------------------------------------------------------------------------


def _only(node: str, agents: Agents, url: str) -> Agents:
    """Return the targets of a node, and select only their series. Raises FatalError if it has none."""
    if not node:
        return agents
    nodes = nodes_of(agents.targets, agents.names, {})
    keys = {key for one in nodes if node in (one.name, one.shown) for key in one.keys}
    if not keys:
        if any(node in down for down in down_nodes(agents.down, agents.targets, nodes)):
            raise FatalError(f"{url} cannot scrape the gpumap of {node} (up is 0)")
        known = [one.shown for one in nodes]
        raise FatalError(f'{url} has no gpumap series of a node "{node}"{did_you_mean(node, known)}')
    targets = {key: target for key, target in agents.targets.items() if key in keys}
    of_target = [name for name in agents.selection.key if name not in OWN_LABELS]
    matchers = matchers_of_targets([target.labels for target in targets.values()], of_target)
    match = ",".join(one for one in (agents.selection.match, *matchers) if one)
    return agents._replace(selection=agents.selection._replace(match=match), targets=targets)


# --- what is missing --------------------------------------------------------------------------------------------------


def _down(agents: Agents, nodes: Iterable[NodeSeries], node: str) -> list[str]:
    downs = down_nodes(agents.down, agents.targets, [one.node for one in nodes])
    return [down.shown for down in downs if not node or node in down]


def _is_old(node: Node, moment: int) -> bool:
    """Whether nothing was collected for so long that nothing is served. A wrong clock is no reason: fresh devices are
    served."""
    oldest = OLD_SECONDS + 2 * (node.interval_seconds or 0)
    return not (node.devices or node.judged) and moment - node.timestamp > oldest


def _doubts(duplicates: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for names, uuids in grouped((" and ".join(names), uuid) for uuid, names in duplicates.items()).items():
        yield f"{names} report the same GPU {listed(uuids)}; gpumap shows and counts it for each of them"


def left_out(rows: Sequence[str]) -> Iterator[str]:
    for row in rows[:_ODD_SHOWN]:
        yield f"left out, because it is not valid: {row}"
    if len(rows) > _ODD_SHOWN:
        yield f"{len(rows) - _ODD_SHOWN} more such series"
