"""Where the tables of `gpumap` get nodes from: this node, the agent of --url, or the server of --prometheus.

Every command line reads the flags, so what asks is imported when it runs.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from gpumap.cli.args import (
    CLUSTER_INTERVAL,
    HOW_TO_ASK,
    WATCH_INTERVAL,
    add_server_flags,
    add_url,
    add_words,
    matchers_of,
    node_maps,
    server_of,
)
from gpumap.cli.commands import Program
from gpumap.cli.credentials import CREDENTIALS, add_credentials, hide_password
from gpumap.cli.parser import Parser, leave_to_help_all
from gpumap.cli.sources.this_node import LOOK_SECONDS, NODE_FLAGS, SOURCE_FLAGS, add_node_flags, prepare_elsewhere
from gpumap.model.errors import UsageError

if TYPE_CHECKING:
    from gpumap.cli.commands import Ask
    from gpumap.cli.rows import NodeMapStream
    from gpumap.cli.screen import Report, View
    from gpumap.cli.table import Shape


def _add_source(parser: Parser, command: str) -> None:
    """Add the flags that select rows, the source, and those about this node."""
    if command != "inspect":
        add_words(parser)
        selection = parser.add_argument_group("selection")
        help_ = "Show only rows of this namespace. (default: all)"
        selection.add_argument("-n", "--namespace", metavar="NAME", help=help_)
        help_ = "Show rows of all namespaces, also with -n."
        selection.add_argument("-A", "--all-namespaces", action="store_true", help=help_)
    source = add_url(parser)
    if command in ("map", "waste"):
        add_server_flags(parser, source)
    else:
        add_credentials(parser.add_argument_group(HOW_TO_ASK))
    add_node_flags(parser)
    leave_to_help_all(parser, HOW_TO_ASK, *NODE_FLAGS)


def _namespace(args: argparse.Namespace) -> str:
    return "" if args.all_namespaces else args.namespace or ""


def _show(args: argparse.Namespace, report: Report, shape: Shape, ask: Ask | None) -> int:
    """Show the report of the nodes, or what a Prometheus answers to `ask`. Raises UsageError."""
    from gpumap.cli.watch import read_view, run

    prometheus = getattr(args, "prometheus", None)
    words = "".join(f" {word}" for word in shape.words)
    order = f" --sort-by {shape.order}" if shape.order else ""
    interval = WATCH_INTERVAL if prometheus is None else CLUSTER_INTERVAL
    source = _source_flags(args) if prometheus is None else f" --prometheus {hide_password(prometheus)}"
    shape = replace(shape, source_flags=source if prometheus is None else "")
    view = read_view(args, report, shape, f"gpumap {args.command}{words}{order}{source}", interval)
    if ask is not None:
        return run(_server_answers(args, view, ask), view)
    return run(node_maps(args, view.interval_seconds if view.watch else LOOK_SECONDS), view)


def _source_flags(args: argparse.Namespace) -> str:
    """Return the flags of the source, for a command that asks it too. Without --header, which may be a secret."""
    names = ("--url", *(f"--{name.replace('_', '-')}" for name in CREDENTIALS if name != "header"), *SOURCE_FLAGS)
    values = {name: getattr(args, name.removeprefix("--").replace("-", "_"), None) for name in names}
    values["--url"] = hide_password(args.url or "")
    return "".join(
        f" {name}{'' if value == 'true' else f' {shlex.quote(value)}'}" for name, value in values.items() if value
    )


def _server_answers(args: argparse.Namespace, view: View, ask: Ask) -> NodeMapStream:
    from gpumap.cli.sources.http_client import ask_repeatedly

    if args.url is not None:
        raise UsageError("--prometheus: cannot be combined with --url")
    prepare_elsewhere(args, "--prometheus")
    server, match = server_of(args), matchers_of("--match", args.match or "")
    return ask_repeatedly(lambda: ask(server, match), view.interval_seconds)


GPUMAP = Program(
    name="gpumap",
    usage="[WORD ...] [flags]",
    interval_help=f"{WATCH_INTERVAL}; {CLUSTER_INTERVAL} with --prometheus",
    has_prometheus=True,
    add_source=_add_source,
    namespace=_namespace,
    show=_show,
)
