"""Where a command gets its maps from: this node, the agent of --url, or the cluster that --prometheus scrapes.

Every command line reads the flags, so what asks is imported when it runs.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from gpumap.cli.command_line import Parser
from gpumap.cli.credentials import credentials_of
from gpumap.cli.output_flags import CLUSTER_INTERVAL, WATCH_INTERVAL, sorted_by, view_of
from gpumap.cli.server_flags import kube_matchers, matchers_of, refuse_details, server_of, without_password
from gpumap.cli.sort_keys import SUMS_BY, WORKLOAD
from gpumap.cli.this_node import LOOK_SECONDS, from_node, prepare_elsewhere, prepare_here
from gpumap.model.errors import UsageError

if TYPE_CHECKING:
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


def run(given: argparse.Namespace, report: Report, shape: Shape, node: str = "") -> int:
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
        from gpumap.cli.fleet.source import from_prometheus

        prepare_elsewhere(given, "--prometheus")
        server, match = server_of(given), matchers_of("--match", given.match or "")
        if view.shape.processes:
            raise UsageError("--processes: only an agent has processes (--url), not --prometheus")
        if _shows_sums(given, view.shape, node):
            from gpumap.cli.fleet.source import answers_of
            from gpumap.cli.fleet.summary import sums_of

            question = _question(given, view)
            return answers_of(server, view.interval_seconds, lambda prometheus: sums_of(prometheus, match, question))
        asked = view.report.parts("wide" if view.live else view.form, view.shape)
        if getattr(given, "would_fit", False):
            from gpumap.cli.fleet.source import answers_of
            from gpumap.cli.fleet.weeks import maps_with_weeks

            namespace = view.shape.namespace
            return answers_of(
                server,
                view.interval_seconds,
                lambda prometheus: maps_with_weeks(prometheus, match, asked, node, namespace),
            )
        return from_prometheus(server, match, view.interval_seconds, asked, node, view.shape.namespace)
    if given.url is not None:
        prepare_elsewhere(given, "--url")
        return maps_of_agent(given, view.interval_seconds)
    settings = prepare_here(given)
    return from_node(settings, view.interval_seconds if view.watch else LOOK_SECONDS)


def _shows_sums(given: argparse.Namespace, shape: Shape, node: str) -> bool:
    """Return whether sums of a cluster are shown, and no rows. Raises UsageError."""
    if _server(given) is None:
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
    if order and order not in orders and order != "severity":
        known = ", ".join(one for one in orders)
        raise UsageError(
            f"--sort-by {order}: sorts only rows (-n, --node or --all); valid values for sums by {by}: {known}"
        )
    return Question(
        by=by,
        of_rows=SUMMARIES[command].names,
        of_all=OF_ALL.get(command, ()),
        parts=view.report.parts(view.form, view.shape),
        idle_after_seconds=view.shape.thresholds.idle_after_seconds,
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
