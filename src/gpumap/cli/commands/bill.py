"""`gpumap bill`: its flags, and the way from a Prometheus to a printed bill. It prints only a complete bill."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpumap.cli.args import (
    HOW_TO_ASK,
    LABEL_MATCH_HELP,
    add_form,
    add_no_headers,
    add_order,
    add_server_flags,
    kube_matchers,
    matchers_of,
    server_of,
)
from gpumap.cli.bill.counting import KINDS, ORDERS, Bill, Pod, Request, bill_of, pods_of
from gpumap.cli.bill.pod_labels import label_values, read_label
from gpumap.cli.bill.query import increases, work_increases
from gpumap.cli.bill.table import bill_csv, bill_table, bill_values
from gpumap.cli.bill.window import Window, rfc3339, window_of
from gpumap.cli.commands import SUMMARIES, Program
from gpumap.cli.main import print_notices, until_stopped
from gpumap.cli.parser import add_command, leave_to_help_all, one_of
from gpumap.cli.screen import screen_of_stdout, take_any_text
from gpumap.cli.table import Shape
from gpumap.cli.terminal import escape_terminal_controls
from gpumap.model.errors import FatalError, UsageError

if TYPE_CHECKING:
    from gpumap.cli.commands import Commands
    from gpumap.cli.sources.prometheus import Prometheus

_FORMS = ("table", "csv", "json")
_WAYS = ("namespace", "pod", "label", "workload", "job", "user")
_OF_WORK = ("job", "user")
_NAMED_BY_KUBE_STATE_METRICS = ("label", "workload")
_PRICE = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?", re.ASCII)
_SERVER = "--prometheus http://prom:9090"
_DETAILS = """\
The bill comes from gpumap's group `accounting` in Prometheus, Thanos, Mimir or VictoriaMetrics.
docs/explanation/accounting.md explains the rule, and its error at restarts and during gaps between scrapes.

TIME is a date (midnight, UTC), a time with its zone (2026-11-01T08:00:00Z, …T09:00:00+01:00), Unix seconds,
a duration ago (30d), or now (one minute ago)."""
_PATIENCE_SECONDS = 3
"""After this time, a line on a terminal says why it takes longer."""


def add(commands: Commands, _: Program) -> None:
    bill = add_command(
        commands,
        "bill",
        _bill,
        summary=SUMMARIES["bill"],
        details=_DETAILS,
        usage="--prometheus URL --from TIME [flags]",
        examples=[
            ("one month by namespace", f"gpumap bill {_SERVER} --from 2026-10-01 --to 2026-11-01"),
            ("by pod, with a price", f"gpumap bill {_SERVER} --from 30d --by pod --price-per-gpu-hour 2.5"),
            (
                "by team, for a spreadsheet",
                f"gpumap bill {_SERVER} --from 30d --by label --label team -o csv > bill.csv",
            ),
            ("one of several clusters", f"gpumap bill {_SERVER} --from 7d --match 'cluster=\"a\"'"),
        ],
    )
    group = bill.add_argument_group("bill")
    group.add_argument("--from", dest="start", metavar="TIME", required=True, help="Start of the bill.")
    group.add_argument("--to", dest="end", metavar="TIME", default="now", help="End of the bill. (default: now)")
    group.add_argument(
        "--by",
        metavar="WAY",
        type=one_of(*_WAYS),
        default=_WAYS[0],
        help=f"Group by {', '.join(_WAYS)}. label and workload require kube-state-metrics. job (Slurm, PBS, "
        f"HTCondor) and user charge work outside pods, by means of samples. (default: {_WAYS[0]})",
    )
    group.add_argument("--label", metavar="NAME", help="With --by label: the label of the pods, such as team.")
    group.add_argument(
        "--price-per-gpu-hour", metavar="X", help="Add the cost of the held GPU-hours, in the currency of X."
    )
    output = bill.add_argument_group("output")
    add_form(output, _FORMS)
    add_order(output, ORDERS)
    add_no_headers(output)
    where = bill.add_argument_group("source")
    add_server_flags(bill, where, required=True)
    leave_to_help_all(bill, HOW_TO_ASK)
    where.add_argument("--label-match", metavar="MATCH", help=LABEL_MATCH_HELP)
    where.add_argument(
        "--resolution", metavar="DURATION", default="1m", help="Step of the queries, 1m to 10m. (default: 1m)"
    )


# --- carrying it out --------------------------------------------------------------------------------------------------


def _bill(args: argparse.Namespace) -> int:
    request, window = read_request(args)
    server = server_of(args)
    take_any_text()
    bills: list[Bill] = []

    async def make() -> int:
        notices = [f"waiting for {server.url}; many GPUs take seconds for a day and minutes for a month"]
        notices = notices if sys.stderr is not None and sys.stderr.isatty() else []
        waiting = asyncio.get_running_loop().call_later(_PATIENCE_SECONDS, print_notices, notices)
        try:
            bills.append(await make_bill(server, request, window))
        finally:
            waiting.cancel()
        return 0

    asyncio.run(until_stopped(make()))
    if not bills:
        raise FatalError("stopped before the bill was complete")
    print(end=_output(bills[0], args), flush=True)
    if args.output == "csv":
        print_notices(bills[0].warnings)
    return 0


def read_request(args: argparse.Namespace) -> tuple[Request, Window]:
    """Read what the flags ask for. Raises UsageError."""
    if (args.by == "label") != (args.label is not None):
        raise UsageError("--by label requires --label NAME" if args.label is None else "--label requires --by label")
    match = matchers_of("--match", args.match or "")
    label_match = kube_matchers(args)
    if args.label_match is not None and args.by not in _NAMED_BY_KUBE_STATE_METRICS:
        raise UsageError("--label-match requires --by label or --by workload")
    price = args.price_per_gpu_hour
    if price is not None and args.by in _OF_WORK:
        raise UsageError(f"--price-per-gpu-hour: not with --by {args.by}, because gpumap does not know what it holds")
    if price is not None and not _PRICE.fullmatch(price):
        raise UsageError(f"--price-per-gpu-hour {price}: must be a price such as 2 or 2.75")
    window = window_of(args.start, args.end, args.resolution, time.time())
    request = Request(
        grouping=args.by,
        match=match,
        label=None if args.label is None else read_label(args.label),
        label_match=label_match,
        price=None if price is None else float(price),
        start=rfc3339(window.start),
        end=rfc3339(window.end),
        step_seconds=window.step_seconds,
        order=args.sort_by or ORDERS[0],
        reverse=args.reverse,
    )
    return request, window


async def make_bill(server: Prometheus, request: Request, window: Window) -> Bill:
    """Ask the server, and make the bill. Raises FatalError if an answer is missing or incomplete."""
    if request.grouping in KINDS:
        work = await work_increases(server, request.match, KINDS[request.grouping], window)
        return bill_of(server.url, request, work, {})
    growths = await increases(server, request.match, window)
    label_of: Mapping[Pod, str] = {}
    if request.grouping in _NAMED_BY_KUBE_STATE_METRICS:
        label_of = await label_values(server, request, pods_of(growths.growth), window)
    return bill_of(server.url, request, growths, label_of)


def _output(bill: Bill, args: argparse.Namespace) -> str:
    match args.output:
        case "csv":
            return bill_csv(bill, headers=not args.no_headers)
        case "json":
            return escape_terminal_controls(json.dumps(bill_values(bill), indent=2, ensure_ascii=False)) + "\n"
    return bill_table(bill, Shape(headers=not args.no_headers, screen=screen_of_stdout()))
