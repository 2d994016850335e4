"""Where `gpumap` gets nodes from: this node, the agent of --url, or the cluster that --prometheus scrapes.

Every command line reads the flags, so what asks is imported when it runs.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from gpumap.cli.command_line import Parser, leave_to_help_all
from gpumap.cli.commands import Place
from gpumap.cli.credentials import add_credentials, credentials_of
from gpumap.cli.output_flags import (
    CLUSTER_INTERVAL,
    OFTEN,
    WATCH_INTERVAL,
    shape_of,
    sorted_by,
    view_of,
)
from gpumap.cli.server_flags import (
    HOW_TO_ASK,
    add_by,
    add_server_flags,
    matchers_of,
    refuse_details,
    server_of,
    without_password,
)
from gpumap.cli.sort_keys import SUMS_BY
from gpumap.cli.this_node import (
    LOOK_SECONDS,
    NODE_FLAGS,
    add_node_flags,
    from_node,
    prepare_elsewhere,
    prepare_here,
)
from gpumap.model.errors import UsageError

if TYPE_CHECKING:
    from gpumap.cli.node_maps import NodeMapStream
    from gpumap.cli.painting import View
    from gpumap.cli.reports import Report
    from gpumap.cli.tables import Shape


def add_url(parser: Parser) -> argparse._ArgumentGroup:
    """Add the flag of the agent to ask. Return the group for other flags of this kind."""
    where = parser.add_argument_group("source")
    where.add_argument(
        "--url", metavar="URL", help="A running gpumap, such as http://127.0.0.1:9401. Default: this node."
    )
    return where


def _add_flags(parser: Parser, output: argparse._ArgumentGroup, command: str) -> None:
    """Add the flags that select rows, the source, and those about this node."""
    if command == "inspect":
        parser.add_argument("only_node", metavar="NODE", nargs="?", help="Show only this node.")
    else:
        what = parser.add_argument_group("selection")
        what.add_argument("-n", "--namespace", metavar="NAME", help="Show only rows of this namespace. (default: all)")
        what.add_argument(
            "-A", "--all-namespaces", action="store_true", help="Show rows of all namespaces, also with -n."
        )
    where = add_url(parser)
    if command in ("map", "waste"):
        add_server_flags(parser, where)
        add_by(where, SUMS_BY, cluster=command == "map")
    else:
        add_credentials(parser.add_argument_group(HOW_TO_ASK))
    add_node_flags(parser)
    leave_to_help_all(parser, HOW_TO_ASK, *NODE_FLAGS)


def _show(given: argparse.Namespace) -> int:
    """Show the table of the command. Raises UsageError."""
    from gpumap.cli import show

    report, shape = _report(given), _shape(given)
    often = WATCH_INTERVAL if _server(given) is None else CLUSTER_INTERVAL
    view = view_of(given, report, shape, _head(given, shape), often)
    return show.run(_node_maps(given, view), view)


def _report(given: argparse.Namespace) -> Report:
    if given.command == "inspect":
        from gpumap.cli.inspect import inspect_report

        if given.only_node == "":
            raise UsageError("NODE: must not be empty")
        return inspect_report(details=given.details, used=given.used, node=given.only_node)
    from gpumap.cli.reports import REPORTS

    return REPORTS["map --prometheus" if given.command == "map" and given.prometheus is not None else given.command]


def _shape(given: argparse.Namespace) -> Shape:
    """Read how the table is shown. Raises UsageError."""
    if given.command == "inspect":
        from gpumap.cli.tables import Shape

        return Shape()
    shape = shape_of(given, "" if given.all_namespaces else given.namespace or "")
    if given.command == "map" and given.prometheus is None and given.by:
        raise UsageError("--by requires --prometheus")
    if given.command == "map" and given.prometheus is not None:
        from gpumap.cli.fleet.sums import NODE, check_order

        if shape.namespace or given.output == "name":
            flag = "-o name" if given.output == "name" else f"--namespace {shape.namespace}"
            raise UsageError(f"{flag}: map --prometheus shows sums (--by namespace); kubectl gpumap map shows rows")
        check_order(given.by or NODE, shape.order)
    return shape


def _node_maps(given: argparse.Namespace, view: View) -> NodeMapStream:
    if _server(given) is None:
        refuse_details(given)
    elif given.url is not None:
        raise UsageError("--prometheus: cannot be combined with --url")
    else:
        return _cluster(given, view)
    if given.url is not None:
        prepare_elsewhere(given, "--url")
        return maps_of_agent(given, view.interval_seconds)
    settings = prepare_here(given)
    return from_node(settings, view.interval_seconds if view.watch else LOOK_SECONDS)


def _cluster(given: argparse.Namespace, view: View) -> NodeMapStream:
    """Ask the server of --prometheus again and again. Raises UsageError."""
    from gpumap.cli.fleet.findings import cluster_findings
    from gpumap.cli.fleet.sums import NODE, cluster_sums
    from gpumap.cli.prometheus import answers_of

    prepare_elsewhere(given, "--prometheus")
    server, match = server_of(given), matchers_of("--match", given.match or "")
    if given.command == "waste":
        return answers_of(server, view.interval_seconds, lambda asked: cluster_findings(asked, match))
    return answers_of(server, view.interval_seconds, lambda asked: cluster_sums(asked, match, given.by or NODE))


def _server(given: argparse.Namespace) -> str | None:
    """Return the Prometheus to ask. `top` and `inspect` have no such flag."""
    return getattr(given, "prometheus", None)


def maps_of_agent(given: argparse.Namespace, interval_seconds: float) -> NodeMapStream:
    """Ask the agent of --url again and again. Raises UsageError."""
    from gpumap.cli.agent_client import from_agent, map_address

    address = map_address(given.url)
    who = credentials_of(given, os.environ, "--url", address)
    return from_agent(address.with_user(None), interval_seconds, who)


def _head(given: argparse.Namespace, shape: Shape) -> str:
    """Return the head of a watch. Only the server gets a password in the URL."""
    places = {"--url": given.url, "--prometheus": _server(given)}
    asked = "".join(f" {flag} {without_password(url)}" for flag, url in places.items() if url)
    return f"gpumap {given.command}{sorted_by(shape)}{asked}"


_JQ = """gpumap map -o json | jq -r '.devices[].containers[] | select(.owner == "unassigned") | .pod'"""
_SERVER = "--prometheus http://prom:9090"
HERE = Place(
    often=OFTEN,
    add_flags=_add_flags,
    run=_show,
    usage={"inspect": "[NODE] [flags]"},
    examples={
        "map": [
            ("this node, once", "gpumap map"),
            ("a running agent, updated every 2 seconds", "gpumap map --watch --url http://127.0.0.1:9401"),
            ("the largest users of memory first", "gpumap map --sort-by memory"),
            ("sums of the whole cluster, by node", f"gpumap map {_SERVER}"),
            ("for scripts: pods that use a device that they do not hold", _JQ),
        ],
        "top": [
            ("this node", "gpumap top"),
            ("the table once, by SM time", "gpumap top --sort-by sm --once"),
            ("one row for each process, as in nvidia-smi", "gpumap top --processes"),
        ],
        "waste": [("the whole cluster, one line for each namespace", f"gpumap waste --by namespace {_SERVER}")],
        "inspect": [
            ("this node", "gpumap inspect"),
            ("this node, container by container", "gpumap inspect -d"),
            ("who uses more than was granted", "gpumap inspect -d --used --url http://127.0.0.1:9401"),
        ],
    },
)
"""The tables of `gpumap`."""
