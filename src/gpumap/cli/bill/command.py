"""`gpumap bill`: its flags, and how a bill is made of what a server answers. Nothing is printed before it is whole."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from gpumap.cli.command_line import Parser, add_command, one_of
from gpumap.cli.output_flags import add_form, add_no_headers
from gpumap.cli.server_flags import add_server_flags, matchers_of, server_of
from gpumap.model.errors import FatalError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gpumap.cli.bill.increases import Accounts
    from gpumap.cli.bill.lines import Bill
    from gpumap.cli.bill.pod_labels import Labelling, Pod
    from gpumap.cli.bill.scrape_gaps import Hole
    from gpumap.cli.bill.window import Window
    from gpumap.cli.prometheus import Prometheus

    Commands = argparse._SubParsersAction[Parser]

_FORMS = ("table", "csv", "json")
_WAYS = ("namespace", "pod", "label")
_PRICE = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?", re.ASCII)
_SERVER = "--prometheus http://prom:9090"
_MORE = """\
Asks Prometheus, Thanos, Mimir or VictoriaMetrics for gpumap's group `accounting`. Restarts, pods
that left, and times in which nobody scraped are reckoned, not estimated (docs/bill.md).

TIME is a date (midnight, UTC), a time with its zone (2026-11-01T08:00:00Z, …T09:00:00+01:00),
Unix seconds, a duration ago (30d), or now, which is a minute ago."""
_PATIENCE_SECONDS = 3
"""Who waits for longer is told what for."""
_HOLES_SHOWN = 5


class Request(NamedTuple):
    """What is asked of a server."""

    by: str
    match: str
    labelling: Labelling | None
    price: Fraction | None
    window: Window


def add_bill(commands: Commands) -> None:
    bill = add_command(
        commands,
        "bill",
        _bill,
        says="charge namespaces, pods or teams for the GPU-hours that they held",
        more=_MORE,
        usage="--prometheus URL --from TIME [flags]",
        examples=[
            ("a month by namespace", f"gpumap bill {_SERVER} --from 2026-10-01 --to 2026-11-01"),
            ("by pod, with a price", f"gpumap bill {_SERVER} --from 30d --by pod --price-per-gpu-hour 2.5"),
            (
                "by team, for a spreadsheet",
                f"gpumap bill {_SERVER} --from 30d --by label --label team -o csv > bill.csv",
            ),
            ("one of several clusters", f"gpumap bill {_SERVER} --from 7d --match 'cluster=\"a\"'"),
            (
                "a tenant of Mimir's",
                "gpumap bill --prometheus http://mimir/prometheus --header 'X-Scope-OrgID: ml' --from 7d",
            ),
        ],
    )
    what = bill.add_argument_group("what is charged")
    what.add_argument("--from", dest="start", metavar="TIME", required=True, help="where the bill begins")
    what.add_argument("--to", dest="end", metavar="TIME", default="now", help="where it ends (default: now)")
    what.add_argument(
        "--by",
        metavar="WAY",
        type=one_of(*_WAYS),
        choices=_WAYS,
        default=_WAYS[0],
        help=f"{', '.join(_WAYS)} (default: {_WAYS[0]}); label needs kube-state-metrics' kube_pod_labels",
    )
    what.add_argument("--label", metavar="NAME", help="with --by label: the pods' label, such as team")
    what.add_argument("--price-per-gpu-hour", metavar="X", help="adds the cost of what was held, in X's currency")
    output = bill.add_argument_group("output")
    add_form(output, _FORMS)
    add_no_headers(output)
    where = bill.add_argument_group("where from")
    add_server_flags(where, required=True)
    where.add_argument(
        "--label-match", metavar="MATCH", help="the same for kube_pod_labels (default: what --match says)"
    )
    where.add_argument(
        "--resolution", metavar="DURATION", default="1m", help="the steps asked for, 1m to 10m (default: 1m)"
    )


# --- carrying it out --------------------------------------------------------------------------------------------------


def _bill(given: argparse.Namespace) -> int:
    from gpumap.cli import show
    from gpumap.cli.signals import until_stopped

    request = _request(given)
    asked = server_of(given)
    show.take_any_text()
    made: list[Bill] = []

    async def make() -> int:
        from gpumap.cli.prometheus import connect

        async with connect(asked) as server:
            waiting = asyncio.get_running_loop().call_later(_PATIENCE_SECONDS, _ask_for_patience, server.url)
            try:
                made.append(await _made(server, request))
            finally:
                waiting.cancel()
        return 0

    asyncio.run(until_stopped(make()))
    if not made:
        raise FatalError("stopped before the bill was whole")
    print(end=_text(made[0], given), flush=True)
    if given.output == "csv":
        for warning in made[0].warnings:
            print(f"gpumap: {warning}", file=sys.stderr)
    return 0


def _ask_for_patience(url: str) -> None:
    if sys.stderr.isatty():
        print(f"gpumap: asking {url}: a day of many GPUs takes seconds, a month minutes", file=sys.stderr, flush=True)


def _request(given: argparse.Namespace) -> Request:
    from gpumap.cli.bill.pod_labels import Labelling, read_label
    from gpumap.cli.bill.window import window_of

    if (given.by == "label") != (given.label is not None):
        raise UsageError(
            "--by label: needs --label NAME" if given.label is None else "--label: is of use with --by label"
        )
    match = matchers_of("--match", given.match or "")
    label_match = match if given.label_match is None else matchers_of("--label-match", given.label_match)
    if given.label_match is not None and given.label is None:
        raise UsageError("--label-match: is of use with --by label")
    price = given.price_per_gpu_hour
    if price is not None and not _PRICE.fullmatch(price):
        raise UsageError(f"--price-per-gpu-hour {price}: is not a price such as 2 or 2.75")
    return Request(
        by=given.by,
        match=match,
        labelling=Labelling(read_label(given.label), label_match) if given.label is not None else None,
        price=None if price is None else Fraction(price),
        window=window_of(given.start, given.end, given.resolution, time.time()),
    )


async def _made(server: Prometheus, request: Request) -> Bill:
    from gpumap.cli.bill.increases import account
    from gpumap.cli.bill.lines import pods_of
    from gpumap.cli.bill.pod_labels import label_values

    found = await account(server, request.match, request.window)
    values: Mapping[Pod, str] = {}
    if request.labelling is not None:
        values = await label_values(server, request.labelling, pods_of(found.gains), request.window)
    return bill_of(server.url, request, found, values)


def bill_of(server: str, request: Request, found: Accounts, values: Mapping[Pod, str]) -> Bill:
    """The bill that a server's answers make."""
    from gpumap.cli.bill import lines as bills
    from gpumap.cli.bill.window import written

    def group(key: tuple[str, ...]) -> tuple[str | None, ...]:
        match request.by:
            case "pod":
                return key[:2]
            case "label":
                return (values.get((key[0], key[1])),)
        return key[:1]

    gains = found.gains
    lines = bills.lines_of(gains, group)
    return bills.Bill(
        server=server,
        start=written(request.window.start),
        end=written(request.window.end),
        step_seconds=request.window.step_seconds,
        by=request.by,
        label=request.labelling.label if request.labelling else None,
        price=request.price,
        lines=lines,
        total=bills.total_of(line.amounts for line in lines),
        unattributed_energy=bills.energy_of_nobody(gains),
        gap_seconds=bills.gap_seconds(gains),
        doubted_seconds=bills.doubted_seconds(gains),
        match=request.match,
        warnings=tuple(_warnings(request, found.holes)),
    )


def _warnings(request: Request, holes: Sequence[Hole] | None) -> Iterator[str]:
    """What of the window the server does not hold."""
    from gpumap.cli.bill.window import written

    if holes is None:
        matching = f" that match {request.match}" if request.match else ""
        yield f"There are no counters of GPUs{matching}: whether the server holds all of this time is not known."
    for first, last in (holes or ())[:_HOLES_SHOWN]:
        yield (
            f"Nothing of gpumap's was seen from {written(first)} to {written(last)}: what began and ended in it is not "
            "charged."
        )
    if (more := len(holes or ()) - _HOLES_SHOWN) > 0:
        yield f"There are {more} more such times."


def _text(bill: Bill, given: argparse.Namespace) -> str:
    import json

    from gpumap.cli.show import screen_of_stdout
    from gpumap.cli.tables.bill import bill_csv, bill_table, bill_values
    from gpumap.cli.tables.layout import Shape
    from gpumap.cli.terminal import escape_terminal_controls

    match given.output:
        case "csv":
            return bill_csv(bill, headers=not given.no_headers)
        case "json":
            return escape_terminal_controls(json.dumps(bill_values(bill), indent=2, ensure_ascii=False)) + "\n"
    return bill_table(bill, Shape(headers=not given.no_headers, screen=screen_of_stdout()))
