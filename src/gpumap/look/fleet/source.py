"""Asks a Prometheus for gpumap's series again and again, and gives what was seen of all nodes.

A look is of one moment, by the server's clock. Families are asked for one by one, a few at a time, and each answer is
read as it comes: a cluster's rows all at once would take a lot of memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from gpumap.command_line import did_you_mean
from gpumap.document import Document
from gpumap.errors import FatalError
from gpumap.look.fleet import families
from gpumap.look.fleet.cluster import knowers, sort_out, told_twice
from gpumap.look.fleet.documents import document_of, faults_of_nameless
from gpumap.look.fleet.families import ALL, Family, Selection, chosen, needed, question
from gpumap.look.fleet.targets import (
    Key,
    Node,
    Target,
    down_nodes,
    key_of,
    names_of,
    nodes_of,
    selection_of,
    targets_by_key,
)
from gpumap.look.fleet.values import Told, read
from gpumap.look.prometheus import Prometheus, Row, connect
from gpumap.look.seen import Seen, Sights
from gpumap.look.server_flags import ServerFlags
from gpumap.look.tables.amounts import age, listed, of_nodes

T = TypeVar("T")

_OLD_SECONDS = 60.0
"""A gpumap serves nothing that is older than its --stale-after, which is a minute by default."""
_ODD_SHOWN = 3


async def from_prometheus(
    server: ServerFlags, interval_seconds: float, parts: frozenset[str] = ALL, node: str = ""
) -> Sights:
    """What a server knows of every node, or of the one that is named so. One that fails is told in its place."""
    async with connect(server.url, server.headers, server.timeout_seconds, server.tls) as asked:
        while True:
            found: Seen | FatalError
            try:
                with _no_search_for_cycles():
                    found = await _look(asked, server.match, parts, node)
            except FatalError as error:
                found = error
            yield found
            await asyncio.sleep(interval_seconds)


@contextlib.contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """A million rows have no cycles, and looking for some takes longer than reading them; also later, in what stays."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


class _Scraped(NamedTuple):
    """The gpumaps that a server scrapes, those whose node was asked for; and what does not answer it."""

    selection: Selection
    targets: Mapping[Key, Target]
    names: Mapping[Key, tuple[str, str]]
    down: list[Mapping[str, str]]


async def _look(server: Prometheus, match: str, parts: Collection[str], node: str) -> Seen:
    moment = await _now(server)
    scraped = _only(node, await _scraped(server, match, moment), server.url)
    asked = needed(parts)
    told = await _together([_told(server, family, scraped.selection, moment) for family in asked])
    cluster = sort_out({family.name: one for family, one in zip(asked, told, strict=True)})
    nodes = nodes_of(scraped.targets, scraped.names, knowers(cluster))
    found = [(one, document_of(one, scraped.targets, cluster)) for one in nodes]
    silent = {one.shown for one, document in found if _is_old(document, moment)}
    missing = [
        *_grouped((name, "its gpumap cannot be scraped (up is 0)") for name in _down(scraped, nodes, node)),
        *_grouped(
            (one.shown, f"its gpumap has collected nothing for {age(moment - document['timestamp'])}")
            for one, document in found
            if one.shown in silent
        ),
        *(sentence for one in nodes for sentence in faults_of_nameless(one, cluster)),
        *_doubts(told_twice(cluster, nodes)),
        *_odd([row for one in told for row in one.odd]),
    ]
    documents = tuple(document for one, document in found if one.shown not in silent)
    return Seen(documents, tuple(missing), fleet=not node or len(documents) != 1)


# --- asking -----------------------------------------------------------------------------------------------------------


async def _now(server: Prometheus) -> int:
    """The server's clock: ours may differ."""
    rows = await server.instant("vector(time())")
    try:
        return int(float(rows[0].points[0][1]))
    except (IndexError, ValueError, OverflowError) as error:
        raise FatalError(f"{server.url} does not say what time it is") from error


async def _scraped(server: Prometheus, match: str, moment: int) -> _Scraped:
    rows, counts, down = await _together(
        [
            server.instant(families.targets_question(match), moment),
            server.instant(families.scrapes_question(match), moment),
            server.instant(families.down_question(match), moment),
        ]
    )
    if not rows:
        more = f"; {len(down)} that were there do not answer it" if down else ""
        matching = f" matching {match}" if match else ""
        raise FatalError(f"no gpumap series at {server.url}{matching}{more}")
    selection = selection_of([row.labels for row in rows], match)
    told = [(row.labels, found) for row in rows if (found := _float(row)) is not None]
    scrapes = {key_of(row.labels, selection): count for row in counts if (count := _float(row))}
    targets = targets_by_key(told, scrapes, selection)
    infos = await _told(server, families.NODE_INFO, selection, moment)
    return _Scraped(selection, targets, names_of(targets, infos), [row.labels for row in down])


async def _told(server: Prometheus, family: Family, selection: Selection, moment: int) -> Told:
    return read(family, await server.vector(question(family, selection), moment), selection)


async def _together(questions: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All of them; where one fails, the others are let go."""
    tasks = [asyncio.ensure_future(one) for one in questions]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _float(row: Row) -> float | None:
    try:
        value = float(row.points[0][1])
    except ValueError:
        return None
    return value if math.isfinite(value) else None


# --- one node alone ---------------------------------------------------------------------------------------------------


def _only(node: str, scraped: _Scraped, url: str) -> _Scraped:
    """Its targets, and only their series asked for. Raises FatalError where it has none."""
    if not node:
        return scraped
    nodes = nodes_of(scraped.targets, scraped.names, {})
    keys = {key for one in nodes if node in (one.name, one.shown) for key in one.keys}
    if not keys:
        if node in down_nodes(scraped.down, scraped.targets.values(), nodes):
            raise FatalError(f"{url} cannot scrape the gpumap of {node} (up is 0)")
        known = [one.shown for one in nodes]
        raise FatalError(f'{url} has no gpumap series of a node "{node}"{did_you_mean(node, known)}')
    targets = {key: target for key, target in scraped.targets.items() if key in keys}
    matchers = chosen([target.labels for target in targets.values()], scraped.selection.key)
    match = ",".join(one for one in (scraped.selection.match, *matchers) if one)
    return scraped._replace(selection=scraped.selection._replace(match=match), targets=targets)


def _down(scraped: _Scraped, nodes: Sequence[Node], node: str) -> list[str]:
    found = down_nodes(scraped.down, scraped.targets.values(), nodes)
    return [name for name in found if not node or name == node]


# --- what is missing --------------------------------------------------------------------------------------------------


def _is_old(document: Document, moment: int) -> bool:
    """Nothing has been collected for long, so that nothing is served. A clock that is wrong is no reason: devices are
    served while they are fresh."""
    oldest = _OLD_SECONDS + 2 * (document["interval_seconds"] or 0)
    return not document["devices"] and moment - document["timestamp"] > oldest


def _grouped(reasons: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A sentence for each reason, with the nodes that it is about."""
    by_reason: dict[str, list[str]] = {}
    for name, why in reasons:
        by_reason.setdefault(why, []).append(name)
    for why, names in by_reason.items():
        yield f"{of_nodes(names)}: {why}"


def _doubts(several: Mapping[str, Sequence[str]]) -> Iterator[str]:
    by_nodes: dict[str, list[str]] = {}
    for uuid, names in several.items():
        by_nodes.setdefault(" and ".join(names), []).append(uuid)
    for names, uuids in by_nodes.items():
        yield f"{names} both have {listed(uuids)}: what is shown of it is of one of them"


def _odd(rows: Sequence[str]) -> Iterator[str]:
    for row in rows[:_ODD_SHOWN]:
        yield f"not understood, and left out: {row}"
    if len(rows) > _ODD_SHOWN:
        yield f"{len(rows) - _ODD_SHOWN} more such series"
