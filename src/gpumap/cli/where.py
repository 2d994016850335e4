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
    LABEL_MATCH_HELP,
    add_by,
    add_server_flags,
    kube_matchers,
    matchers_of,
    refuse_details,
    server_of,
    without_password,
)
from gpumap.cli.sort_keys import CLUSTER_SUMS_BY, SUMS_BY, WORKLOAD
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
    from gpumap.cli.fleet.source import Ask
    from gpumap.cli.fleet.summary import Question
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
        add_url(parser)
        add_credentials(parser.add_argument_group(HOW_TO_ASK))
    else:
        by = CLUSTER_SUMS_BY if command in ("top", "waste") else ()
        what = parser.add_argument_group("selection")
        what.add_argument("-n", "--namespace", metavar="NAME", help="Show only rows of this namespace. (default: all)")
        what.add_argument(
            "-A", "--all-namespaces", action="store_true", help="Show rows of all namespaces, also with -n."
        )
        where = add_url(parser)
        how = add_server_flags(parser, where)
        if by:
            how.add_argument("--label-match", metavar="MATCH", help=LABEL_MATCH_HELP)
            add_by(where, by, cluster=command != "waste")
        where.add_argument("--node", metavar="NODE", help="With --prometheus: show the rows of one node.")
        if command != "waste":
            help_ = "With --prometheus: show the rows of every node instead of sums."
            where.add_argument("--all", action="store_const", const=True, help=help_)
    if command == "waste":
        help_ = "With --prometheus: show what part of its GPU each pod of the last week would fit."
        output.add_argument("--would-fit", action="store_true", help=help_)
    add_node_flags(parser)
    leave_to_help_all(parser, HOW_TO_ASK, *NODE_FLAGS)


def _show(given: argparse.Namespace) -> int:
    """Show the table of the command. Raises UsageError."""
    if given.command == "inspect":
        return _inspect(given)
    from gpumap.cli.reports import REPORTS

    namespace = "" if given.all_namespaces else given.namespace or ""
    if given.node == "":
        raise UsageError("--node: must not be empty")
    by = getattr(given, "by", None)
    if by and given.prometheus is None and (given.command == "top" or by == WORKLOAD):
        raise UsageError(f"--by{'' if given.command == 'top' else f' {by}'} requires --prometheus")
    if getattr(given, "label_match", None) is not None and given.prometheus is not None and by != WORKLOAD:
        raise UsageError(f"--label-match requires --by {WORKLOAD}")
    report = given.command
    if getattr(given, "would_fit", False):
        if given.prometheus is None:
            raise UsageError("--would-fit requires --prometheus")
        if given.sort_by or by:
            raise UsageError(f"--would-fit cannot be combined with {'--sort-by' if given.sort_by else '--by'}")
        report = f"{given.command} --would-fit"
    return _run(given, REPORTS[report], shape_of(given, namespace), given.node or "")


def _inspect(given: argparse.Namespace) -> int:
    from gpumap.cli.inspect import inspect_report
    from gpumap.cli.tables import Shape

    if given.only_node == "":
        raise UsageError("NODE: must not be empty")
    return _run(given, inspect_report(details=given.details, used=given.used, node=given.only_node), Shape())


def _run(given: argparse.Namespace, report: Report, shape: Shape, node: str = "") -> int:
    """Show the report; of one of a server's nodes if `node` names one."""
    from gpumap.cli import show
    from gpumap.cli.reports import summarized

    often = WATCH_INTERVAL if _server(given) is None else CLUSTER_INTERVAL
    if sums := _shows_sums(given, shape, node):
        report = summarized(report, given.command)
    view = view_of(given, report, shape, _head(given, shape), often, keys=not sums)
    return show.run(_node_maps(given, view, node), view)


def _node_maps(given: argparse.Namespace, view: View, node: str) -> NodeMapStream:
    if _server(given) is None:
        refuse_details(given)
    elif given.url is not None:
        raise UsageError("--prometheus: cannot be combined with --url")
    else:
        from gpumap.cli.fleet.source import answers_of

        prepare_elsewhere(given, "--prometheus")
        if view.shape.processes:
            raise UsageError("--processes: only an agent has processes (--url), not --prometheus")
        return answers_of(server_of(given), view.interval_seconds, _to_ask(given, view, node))
    if given.url is not None:
        prepare_elsewhere(given, "--url")
        return maps_of_agent(given, view.interval_seconds)
    settings = prepare_here(given)
    return from_node(settings, view.interval_seconds if view.watch else LOOK_SECONDS)


def _to_ask(given: argparse.Namespace, view: View, node: str) -> Ask:
    """Return what asks a server once. Raises UsageError."""
    match, namespace = matchers_of("--match", given.match or ""), view.shape.namespace
    if _shows_sums(given, view.shape, node):
        from gpumap.cli.fleet.summary import sums_of

        question = _question(given, view)
        return lambda server: sums_of(server, match, question)
    parts = view.report.parts("live" if view.live else view.form, view.shape)
    if getattr(given, "would_fit", False):
        from gpumap.cli.fleet.weeks import maps_with_weeks

        return lambda server: maps_with_weeks(server, match, parts, node, namespace)
    if view.shape.sums_by == WORKLOAD:
        from gpumap.cli.fleet.workloads import maps_with_workloads

        kube_match = kube_matchers(given)
        return lambda server: maps_with_workloads(server, match, parts, node, namespace, kube_match)
    from gpumap.cli.fleet.source import maps_of

    return lambda server: maps_of(server, match, parts, node, namespace)


def _shows_sums(given: argparse.Namespace, shape: Shape, node: str) -> bool:
    """Return whether sums of a cluster are shown, and no rows. Raises UsageError."""
    if _server(given) is None or given.command == "waste":
        return False
    rows = bool(node or shape.namespace or given.all or given.output == "name")
    by = getattr(given, "by", None)
    if by is not None and rows:
        raise UsageError(f"--by {by}: shows sums, but -n, --node, --all and -o name show rows")
    return not rows and not shape.processes


def _server(given: argparse.Namespace) -> str | None:
    """Return the Prometheus to ask. `inspect` has no such flag."""
    return getattr(given, "prometheus", None)


def _question(given: argparse.Namespace, view: View) -> Question:
    """Return what a server is asked to add up. Raises UsageError."""
    from gpumap.cli.fleet.summary import Question
    from gpumap.cli.tables.summary import OF_ALL, SUMMARIES, orders_of

    command = given.command
    by = getattr(given, "by", None) or (SUMS_BY[0] if hasattr(given, "by") else "node")
    orders, order = orders_of(command, by), view.shape.order
    if order and order not in orders:
        raise UsageError(
            f"--sort-by {order}: sorts only rows (-n, --node or --all); valid values for sums by {by}: "
            f"{', '.join(orders)}"
        )
    return Question(
        by=by,
        of_rows=SUMMARIES[command].names,
        of_all=OF_ALL.get(command, ()),
        parts=view.report.parts(view.form, view.shape),
        kube_match=kube_matchers(given) if by == WORKLOAD else "",
    )


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
            ("the whole cluster", f"gpumap map {_SERVER}"),
            ("for scripts: pods that use a device that they do not hold", _JQ),
        ],
        "top": [
            ("this node", "gpumap top"),
            ("the table once, by SM time", "gpumap top --sort-by sm --once"),
            ("one namespace in the whole cluster", f"gpumap top -n ml {_SERVER}"),
            ("one row for each process, as in nvidia-smi", "gpumap top --processes"),
        ],
        "waste": [("the whole cluster, one line for each Deployment, Job …", f"gpumap waste --by workload {_SERVER}")],
        "inspect": [
            ("this node", "gpumap inspect"),
            ("this node, container by container", "gpumap inspect -d"),
            ("who uses more than was granted", "gpumap inspect -d --used --url http://127.0.0.1:9401"),
        ],
    },
)
"""The tables of `gpumap`."""
