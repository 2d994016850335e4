"""Asks a Prometheus for gpumap's series again and again, and gives what was seen of all nodes.

A look is of one moment, by the server's clock. Families are asked for one by one, a few at a time, and each answer is
read as it comes: a cluster's rows all at once would take a lot of memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from gpumap.cli.command_line import did_you_mean
from gpumap.cli.fleet import families
from gpumap.cli.fleet.documents import faults_of_nameless
from gpumap.cli.fleet.families import ALL, Family, Selection, chosen, needed, question
from gpumap.cli.fleet.gaps import nowhere, untold
from gpumap.cli.fleet.node_results import Answers, Found, are_mixed, duplicate_devices, found_in
from gpumap.cli.fleet.target_matching import OWN, differ_in_own
from gpumap.cli.fleet.targets import (
    Key,
    Target,
    down_nodes,
    key_of,
    names_of,
    nodes_of,
    scraped_by_key,
    selection_of,
    targets_by_key,
)
from gpumap.cli.fleet.values import Told, read
from gpumap.cli.node_documents import Seen, Sights
from gpumap.cli.prometheus import Prometheus, Row, Server, connect, together
from gpumap.cli.words import age, by_reason, listed
from gpumap.model.document import Document
from gpumap.model.errors import FatalError

T = TypeVar("T")

_OLD_SECONDS = 60.0
"""A gpumap serves nothing that is older than its --stale-after, which is a minute by default."""
_ODD_SHOWN = 3


async def from_prometheus(
    server: Server,
    match: str,
    interval_seconds: float,
    parts: frozenset[str] = ALL,
    node: str = "",
    namespace: str = "",
) -> Sights:
    """What a server knows of every node, or of the one that is named so; of containers in this namespace alone, where
    one is named. One that fails is told in its place."""
    async with connect(server) as asked:
        while True:
            found: Seen | FatalError
            with _no_search_for_cycles():  # also while it is drawn
                try:
                    found = await _look(asked, match, parts, node, namespace)
                except FatalError as error:
                    found = error
                yield found
            del found
            await asyncio.sleep(interval_seconds)


@contextlib.contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """A million rows have no cycles, and looking for some takes longer than reading them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    except GeneratorExit:
        gc.freeze()  # nobody looks again: nor shall it be searched as the process ends
        raise
    finally:
        if was_on:
            gc.enable()


class _Scraped(NamedTuple):
    """The gpumaps that a server scrapes, those whose node was asked for; and what does not answer it."""

    selection: Selection
    targets: Mapping[Key, Target]
    names: Mapping[Key, tuple[str, str]]
    down: list[Mapping[str, str]]


async def _look(server: Prometheus, match: str, parts: Collection[str], node: str, namespace: str) -> Seen:
    moment = await _now(server)
    scraped = _only(node, await _scraped(server, match, moment), server.url)
    scraped = scraped._replace(selection=scraped.selection._replace(namespace=namespace))
    answers = await _answers(server, scraped, parts, moment)
    if are_mixed(answers):
        apart = scraped.selection._replace(by_target=True)
        answers = await _answers(server, scraped._replace(selection=apart), parts, moment)
    found = found_in(answers)
    silent = {one.node.shown for one in found if _is_old(one.document, moment)}
    missing = [
        *by_reason((name, "its gpumap cannot be scraped (up is 0)") for name in _down(scraped, found, node)),
        *by_reason(
            (one.node.shown, f"its gpumap has collected nothing for {age(moment - one.document['timestamp'])}")
            for one in found
            if one.node.shown in silent
        ),
        *by_reason(
            (one.node.shown, why)
            for one in found
            if one.node.shown not in silent
            for why in untold(one, parts, namespace)
        ),
        *(sentence for one in found for sentence in faults_of_nameless(one.node, one.cluster)),
        *_doubts(duplicate_devices(found)),
        *nowhere(found),
        *_odd([row for one in answers.told.values() for row in one.odd]),
    ]
    documents = tuple(one.document for one in found if one.node.shown not in silent)
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
    rows, spaced, down = await together(
        [
            server.instant(families.targets_question(match), moment),
            server.instant(families.spacings_question(match), moment),
            server.instant(families.down_question(match), moment),
        ]
    )
    if not rows:
        more = f"; {len(down)} that were there do not answer it" if down else ""
        matching = f" matching {match}" if match else ""
        raise FatalError(f"no gpumap series at {server.url}{matching}{more}")
    selection = selection_of([row.labels for row in rows], match)
    told = [(row.labels, found) for row in rows if (found := _float(row)) is not None]
    spacings = {key_of(row.labels, selection): spacing for row in spaced if (spacing := _float(row))}
    targets = targets_by_key(told, spacings, selection)
    names = names_of(targets, await _told(server, families.NODE_INFO, selection, moment))
    labels = [target.labels for target in targets.values()]
    selection = selection._replace(by_target=differ_in_own(labels), targets=scraped_by_key(targets, names))
    return _Scraped(selection, targets, names, [row.labels for row in down])


async def _answers(server: Prometheus, scraped: _Scraped, parts: Collection[str], moment: int) -> Answers:
    asked, selection = needed(parts), scraped.selection
    told = await together([_told(server, family, selection, moment) for family in asked])
    by_name = {family.name: one for family, one in zip(asked, told, strict=True)}
    return Answers(scraped.targets, scraped.names, asked, by_name, selection.by_target)


async def _told(server: Prometheus, family: Family, selection: Selection, moment: int) -> Told:
    return read(family, await server.vector(question(family, selection), moment), selection)


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
        if any(node in down for down in down_nodes(scraped.down, scraped.targets, nodes)):
            raise FatalError(f"{url} cannot scrape the gpumap of {node} (up is 0)")
        known = [one.shown for one in nodes]
        raise FatalError(f'{url} has no gpumap series of a node "{node}"{did_you_mean(node, known)}')
    targets = {key: target for key, target in scraped.targets.items() if key in keys}
    telling = [name for name in scraped.selection.key if name not in OWN]
    matchers = chosen([target.labels for target in targets.values()], telling)
    match = ",".join(one for one in (scraped.selection.match, *matchers) if one)
    return scraped._replace(selection=scraped.selection._replace(match=match), targets=targets)


def _down(scraped: _Scraped, found: Sequence[Found], node: str) -> list[str]:
    downs = down_nodes(scraped.down, scraped.targets, [one.node for one in found])
    return [down.shown for down in downs if not node or node in down]


# --- what is missing --------------------------------------------------------------------------------------------------


def _is_old(document: Document, moment: int) -> bool:
    """Nothing has been collected for long, so that nothing is served. A clock that is wrong is no reason: devices are
    served while they are fresh."""
    oldest = _OLD_SECONDS + 2 * (document["interval_seconds"] or 0)
    return not document["devices"] and moment - document["timestamp"] > oldest


def _doubts(several: Mapping[str, Sequence[str]]) -> Iterator[str]:
    by_nodes: dict[str, list[str]] = {}
    for uuid, names in several.items():
        by_nodes.setdefault(" and ".join(names), []).append(uuid)
    for names, uuids in by_nodes.items():
        yield f"{names} have {listed(uuids)}, as one machine alone can: it is shown, and counted, at each of them"


def _odd(rows: Sequence[str]) -> Iterator[str]:
    for row in rows[:_ODD_SHOWN]:
        yield f"not understood, and left out: {row}"
    if len(rows) > _ODD_SHOWN:
        yield f"{len(rows) - _ODD_SHOWN} more such series"
