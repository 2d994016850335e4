"""The flags that several commands share, and how they are read: output, source, series of a Prometheus.

An error about them is one line and never repeats a possible secret.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpumap.cli.credentials import CREDENTIALS, URL_VARIABLE, add_credentials, address_of, credentials_of, url_of
from gpumap.cli.parser import Parser, one_of
from gpumap.model.errors import UsageError
from gpumap.model.formatting import parse_duration

if TYPE_CHECKING:
    from gpumap.cli.rows import NodeMapStream
    from gpumap.cli.sources.prometheus import Prometheus
    from gpumap.cli.table import Shape

MATCHER = r"""\b[a-zA-Z_][a-zA-Z0-9_]*+\s*+(=~|!~|!=|=)\s*+("([^"\\]|\\.)*+"|'([^'\\]|\\.)*+')"""
_MATCH = re.compile(rf"\s*+{MATCHER}(\s*+,\s*+{MATCHER})*+\s*+,?\s*+", re.ASCII)
_TIMEOUT = "1m"
OWN_JOBS = 'job=~".*gpumap.*"'
"""The jobs of gpumap, if `--match` names no job. Any target can expose series with gpumap's names, but no target can
choose its job."""
KUBE_STATE_METRICS_JOBS = 'job=~".*kube-state-metrics.*"'
"""The same for kube-state-metrics and `--label-match`."""
LABEL_MATCH_HELP = "Like --match, for series of jobs with kube-state-metrics in their name. (default: --match)"
_DETAILS = ("match", "timeout")
"""Flags that require --prometheus."""
HOW_TO_ASK = "connection"
"""The group of flags that most users do not need."""
WATCH_INTERVAL, CLUSTER_INTERVAL = "2s", "15s"
"""The second is for a cluster: a Prometheus rarely scrapes more often."""
_FORMS = ("table", "wide", "json", "yaml", "name")
SUMS_BY = ("namespace", "node")
"""What --by adds up by."""


def add_output(parser: Parser, orders: Sequence[str], interval_help: str) -> argparse._ArgumentGroup:
    """Add the flags of a table. Return the group for flags that only one table has. `interval_help`
    describes the default of --interval."""
    output = parser.add_argument_group("output")
    add_form(output, _FORMS)
    add_order(output, orders)
    add_no_headers(output)
    add_watch(output, interval_help)
    return output


def add_words(parser: Parser) -> None:
    """Add the words that select rows."""
    help_ = "Show only what matches: gpu:3, pod:greedy, ns:research, or a part of any name. All words must match."
    parser.add_argument("words", metavar="WORD", nargs="*", help=help_)


def add_order(output: argparse._ArgumentGroup, orders: Sequence[str]) -> None:
    """Add the flags of the order. The first one is the default."""
    output.add_argument(
        "--sort-by",
        metavar="COLUMN",
        type=one_of(*orders),
        help=f"Sort by {', '.join(orders)}. Largest numbers first, names from A to Z, unknown last. "
        f"(default: {orders[0]})",
    )
    output.add_argument("--reverse", action="store_true", help="Reverse the order.")


def add_form(output: argparse._ArgumentGroup, forms: Sequence[str]) -> None:
    """Add the flag of the form. The first one is the default."""
    help_ = f"Output format: {', '.join(forms)}. (default: {forms[0]})"
    output.add_argument("-o", "--output", metavar="FORM", type=one_of(*forms), default=forms[0], help=help_)


def add_no_headers(output: argparse._ArgumentGroup) -> None:
    output.add_argument("--no-headers", action="store_true", help="Omit the line with the column titles.")


def add_watch(output: argparse._ArgumentGroup, interval_help: str) -> None:
    output.add_argument("-w", "--watch", action="store_true", help="Update the output until q or Ctrl-C.")
    output.add_argument(
        "--interval", metavar="DURATION", help=f"With --watch: time between two updates. (default: {interval_help})"
    )


def add_url(parser: Parser) -> argparse._ArgumentGroup:
    """Add the flag of the agent to ask. Return the group for other flags of this kind."""
    source = parser.add_argument_group("source")
    help_ = f"A running gpumap, such as http://127.0.0.1:9401, or '' for this node. (default: ${URL_VARIABLE}, or '')"
    source.add_argument("--url", metavar="URL", help=help_)
    return source


def add_server_flags(
    parser: Parser, group: argparse._ArgumentGroup, *, required: bool = False
) -> argparse._ArgumentGroup:
    """Add the flags to a command, and return their second group. Without `required`, the command has other sources
    too."""
    scope = "" if required else "Show the whole cluster. "
    group.add_argument(
        "--prometheus",
        metavar="URL",
        required=required,
        help=f"{scope}URL of the Prometheus, without /api/v1.",
    )
    connection = parser.add_argument_group(HOW_TO_ASK)
    connection.add_argument(
        "--match",
        metavar="MATCH",
        help="""Use only series with these labels, in PromQL syntax: 'cluster="a"'.""",
    )
    add_credentials(connection)
    connection.add_argument(
        "--timeout", metavar="DURATION", help=f"Timeout of each request to --prometheus. (default: {_TIMEOUT})"
    )
    return connection


def add_by(group: argparse._ArgumentGroup, levels: Sequence[str], *, cluster: bool = False) -> None:
    """Add the flag for sums instead of rows. `cluster`: the command has sums only of a cluster."""
    condition = "With --prometheus: show" if cluster else "Show"
    help_ = f"{condition} sums by {' or by '.join(levels)}."
    group.add_argument("--by", metavar="WHAT", type=one_of(*levels), help=help_)


# --- reading them -----------------------------------------------------------------------------------------------------


def read_shape(args: argparse.Namespace, namespace: str = "", *, processes: bool = False) -> Shape:
    """Read the flags of `add_output`. Raises UsageError."""
    from gpumap.cli.table import Shape

    return Shape(
        wide=args.output == "wide",
        headers=not args.no_headers,
        order=args.sort_by or "",
        reverse=args.reverse,
        processes=processes,
        namespace=namespace,
        words=tuple(args.words),
    )


def server_of(args: argparse.Namespace) -> Prometheus:
    """Read the flags and their files. Requires --prometheus. Raises UsageError."""
    from gpumap.cli.sources.prometheus import Prometheus

    address = address_of("--prometheus", args.prometheus)
    path = address.path.rstrip("/").removesuffix("/api/v1/query").removesuffix("/api/v1")
    address = address.with_path(path, keep_query=True)
    credentials = credentials_of(args, os.environ, "--prometheus", address)
    return Prometheus(address, credentials, seconds_of("--timeout", args.timeout or _TIMEOUT))


def node_maps(args: argparse.Namespace, interval_seconds: float, *, watch_allocations: bool = False) -> NodeMapStream:
    """Ask the agent of --url or of its variable again and again, or collect on this node. Raises UsageError."""
    from gpumap.cli.sources import this_node

    for name in _DETAILS:
        if getattr(args, name, None) is not None:
            raise UsageError(f"--{name} requires --prometheus")
    flag, url = url_of(args)
    if not url:
        for name in CREDENTIALS:
            if getattr(args, name) is not None:
                flags = "--url or --prometheus" if hasattr(args, "prometheus") else "--url"
                raise UsageError(f"--{name.replace('_', '-')} requires {flags}")
        return this_node.maps_of_node(this_node.prepare(args), interval_seconds, watch_allocations=watch_allocations)
    from gpumap.cli.sources.agent import maps_of_agent

    this_node.prepare_elsewhere(args, flag)
    return maps_of_agent(args, interval_seconds)


def matchers_of(flag: str, text: str, jobs: str = OWN_JOBS) -> str:
    """Return label matchers without their braces. Add `jobs` if no matcher is for `job`. Raises UsageError."""
    bare = text.strip()
    bare = bare[1:-1] if bare.startswith("{") and bare.endswith("}") else bare
    if bare.strip() and not _MATCH.fullmatch(bare):
        raise UsageError(f'{flag} {text}: must have the form \'cluster="a"\' or \'cluster="a",region=~"eu-.*"\'')
    matchers = bare.strip().rstrip(",").strip()
    names_jobs = any(label_of(match[0]) == "job" for match in re.finditer(MATCHER, matchers))
    return matchers if names_jobs else ",".join(filter(None, (jobs, matchers)))


def kube_matchers(args: argparse.Namespace) -> str:
    """Return matchers for the series of kube-state-metrics: --label-match, else --match without its job."""
    if args.label_match is not None:
        return matchers_of("--label-match", args.label_match, KUBE_STATE_METRICS_JOBS)
    matches = re.finditer(MATCHER, matchers_of("--match", args.match or ""))
    other_matchers = ",".join(match[0] for match in matches if label_of(match[0]) != "job")
    return matchers_of("--match", other_matchers, KUBE_STATE_METRICS_JOBS)


def label_of(matcher: str) -> str:
    """Return the label that a matcher is about."""
    return re.split(r"[\s=!]", matcher, maxsplit=1)[0]


def seconds_of(flag: str, text: str) -> float:
    """Return a duration in seconds. Raises UsageError."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text}: {error}") from error
