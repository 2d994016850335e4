"""The flags of commands that ask a Prometheus: its URL, timeout and series. `credentials.py` has the credentials.

An error about them is one line and never repeats a possible secret.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpumap.cli.command_line import Parser, one_of
from gpumap.cli.credentials import CREDENTIALS, add_credentials, credentials_of, is_host
from gpumap.model.errors import UsageError
from gpumap.model.formatting import parse_duration

if TYPE_CHECKING:
    from yarl import URL

    from gpumap.cli.prometheus import Server

MATCHER = r"""\b[a-zA-Z_][a-zA-Z0-9_]*+\s*+(=~|!~|!=|=)\s*+("([^"\\]|\\.)*+"|'([^'\\]|\\.)*+')"""
_MATCH = re.compile(rf"\s*+{MATCHER}(\s*+,\s*+{MATCHER})*+\s*+,?\s*+", re.ASCII)
_TIMEOUT = "1m"
OWN_JOBS = 'job=~".*gpumap.*"'
"""The jobs of gpumap, if `--match` names no job. Any target can expose series with gpumap's names, but no target can
choose its job."""
KUBE_STATE_METRICS_JOBS = 'job=~".*kube-state-metrics.*"'
"""The same for kube-state-metrics and `--label-match`."""
LABEL_MATCH_HELP = "Like --match, for series of jobs whose name contains kube-state-metrics. (default: --match)"
_DETAILS = ("match", "timeout")
"""Flags that require --prometheus."""


HOW_TO_ASK = "connection"
"""The group of flags that most users do not need."""


def add_server_flags(
    parser: Parser, group: argparse._ArgumentGroup, *, required: bool = False
) -> argparse._ArgumentGroup:
    """Add the flags to a command, and return their second group. Without `required`, the command has other sources
    too."""
    only = "" if required else "Show the whole cluster. "
    group.add_argument(
        "--prometheus",
        metavar="URL",
        required=required,
        help=f"{only}URL of the Prometheus, without /api/v1.",
    )
    how = parser.add_argument_group(HOW_TO_ASK)
    how.add_argument(
        "--match",
        metavar="MATCH",
        help="""Use only series with these labels, in PromQL syntax: 'cluster="a"'.""",
    )
    add_credentials(how)
    how.add_argument(
        "--timeout", metavar="DURATION", help=f"Timeout of each request to --prometheus. (default: {_TIMEOUT})"
    )
    return how


def add_by(group: argparse._ArgumentGroup, by: Sequence[str], *, cluster: bool = False) -> None:
    """Add the flag for sums instead of rows. `cluster`: the command has sums only of a cluster."""
    *first, last = by
    help_ = f"{'With --prometheus: show' if cluster else 'Show'} sums by {', by '.join(first)} or by {last}."
    group.add_argument("--by", metavar="WHAT", type=one_of(*by), help=help_)


def server_of(given: argparse.Namespace) -> Server:
    """Read the flags and their files. Requires --prometheus. Raises UsageError."""
    from gpumap.cli.prometheus import Server

    address = address_of("--prometheus", given.prometheus)
    path = address.path.rstrip("/").removesuffix("/api/v1/query").removesuffix("/api/v1")
    address = address.with_path(path, keep_query=True)
    who = credentials_of(given, os.environ, "--prometheus", address)
    return Server(
        url=str(address.with_user(None)),
        headers=who.headers,
        tls=who.tls,
        timeout_seconds=seconds_of("--timeout", given.timeout or _TIMEOUT),
        server_name=who.server_name,
    )


def refuse_details(given: argparse.Namespace) -> None:
    """Raise UsageError for a flag that needs a server, if there is none."""
    for name in _DETAILS:
        if getattr(given, name, None) is not None:
            raise UsageError(f"--{name.replace('_', '-')} requires --prometheus")
    for name in CREDENTIALS if given.url is None else ():
        if getattr(given, name) is not None:
            either = "--url or --prometheus" if hasattr(given, "prometheus") else "--url"
            raise UsageError(f"--{name.replace('_', '-')} requires {either}")


def matchers_of(flag: str, text: str, jobs: str = OWN_JOBS) -> str:
    """Return label matchers without their braces. Add `jobs` if no matcher is for `job`. Raises UsageError."""
    bare = text.strip()
    bare = bare[1:-1] if bare.startswith("{") and bare.endswith("}") else bare
    if bare.strip() and not _MATCH.fullmatch(bare):
        raise UsageError(f'{flag} {text}: must have the form \'cluster="a"\' or \'cluster="a",region=~"eu-.*"\'')
    given = bare.strip().rstrip(",").strip()
    names_jobs = any(label_of(one[0]) == "job" for one in re.finditer(MATCHER, given))
    return given if names_jobs else ",".join(one for one in (jobs, given) if one)


def kube_matchers(given: argparse.Namespace) -> str:
    """Return matchers for the series of kube-state-metrics: --label-match, else --match without its job."""
    if given.label_match is not None:
        return matchers_of("--label-match", given.label_match, KUBE_STATE_METRICS_JOBS)
    found = (one[0] for one in re.finditer(MATCHER, matchers_of("--match", given.match or "")))
    others = ",".join(one for one in found if label_of(one) != "job")
    return matchers_of("--match", others, KUBE_STATE_METRICS_JOBS)


def label_of(matcher: str) -> str:
    """Return the label that a matcher is about."""
    return re.split(r"[\s=!]", matcher, maxsplit=1)[0]


def seconds_of(flag: str, text: str) -> float:
    """Return a duration in seconds. Raises UsageError."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text}: {error}") from error


def without_password(url: str) -> str:
    """Return a URL for messages. Remove everything before the last @: the user and the password."""
    return re.sub(r"\A(\w+://)?.*@", r"\1", url, flags=re.DOTALL)


def address_of(flag: str, url: str) -> URL:
    """Return the URL of a flag. Raises UsageError."""
    from yarl import URL

    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{flag} {without_password(url)}: must start with http:// or https://")
    try:
        given = URL(url)
        known = is_host(given.raw_host) and given.port is not None
    except ValueError:
        known = False
    if not known:
        raise UsageError(f"{flag} {without_password(url)}: {_no_url(url)}")
    return given


def _no_url(url: str) -> str:
    """Return why a URL with http:// or https:// cannot be used."""
    if "@" in url:
        return "is not a URL (in a password, write %2F for / and %40 for @)"
    host, _, port = re.split(r"[/?#]", url.partition("://")[2])[0].rpartition("]")[2].partition(":")
    if port and not (port.isdecimal() and 0 < int(port[:6]) < 1 << 16):
        return "the port must be a number from 1 to 65535"
    return "is not a URL with the name or address of a host" if host or "[" in url else "has no host"
