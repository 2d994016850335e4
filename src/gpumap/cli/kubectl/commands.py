"""The command line of `kubectl gpumap`: gpumap's tables of a whole cluster, with kubectl's own flags.

kubectl's flags select the cluster and the user. gpumap passes them on to kubectl as they are.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gpumap import __version__
from gpumap.cli.command_line import Parser, parse, top_parser
from gpumap.cli.commands import Place, add_tables
from gpumap.cli.output_flags import WATCH_INTERVAL, shape_of, sorted_by, view_of
from gpumap.cli.server_flags import add_by
from gpumap.cli.sort_keys import SUMS_BY
from gpumap.model.errors import UsageError
from gpumap.model.formatting import parse_duration

if TYPE_CHECKING:
    from gpumap.cli.kubectl.source import Scope
    from gpumap.cli.reports import Report
    from gpumap.cli.tables import Shape

PROGRAM = "kubectl gpumap"
DEFAULT_COMMAND = "map"
_HELP = ("-h", "--help", "--version")
_EPILOG = f"""\
Default command: {DEFAULT_COMMAND}. Help for a command: {PROGRAM} COMMAND --help

It requires the rights to list pods and to get pods/proxy. It shows the containers of the context's namespace, or
those that -n or -A selects, and the devices of all nodes. Write flags after the command: kubectl accepts no flags
before the name of a plugin."""


def prepared(arguments: Sequence[str]) -> Callable[[], int]:
    """Parse the command line, and import what takes long. Raises UsageError and FatalError."""
    given = parse(command_parser(), _as_words(arguments))
    from gpumap.cli import show  # noqa: F401
    from gpumap.cli.kubectl import source  # noqa: F401 # the command itself imports it again

    return lambda: int(given.run(given))


def command_parser() -> Parser:
    """Return the parser of all commands."""
    parser = top_parser(
        description="Show which container of the cluster holds which GPU, and what it uses.",
        epilog=_EPILOG,
        version=f"{PROGRAM} {__version__}",
        program=PROGRAM,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser, prog=PROGRAM)
    add_tables(commands, CLUSTER)
    return parser


def _as_words(arguments: Sequence[str]) -> list[str]:
    """Return the words with a command first. Accept switches as kubectl's users write them, such as --watch=true."""
    words = list(arguments)
    if not words or (words[0].startswith("-") and words[0] not in _HELP):
        words.insert(0, DEFAULT_COMMAND)
    switches = {flag.name for flag in KUBECTL_FLAGS if not flag.metavar} | {"--watch", "--all-namespaces"}
    return [word.removesuffix("=true") if word.removesuffix("=true") in switches else word for word in words]


def _add_flags(parser: Parser, output: argparse._ArgumentGroup, command: str) -> None:
    """Add the flags that select nodes, namespaces and agents, and the flags for kubectl."""
    parser.add_argument("only_node", metavar="NODE", nargs="?", help="Show only this node.")
    if command == "waste":
        add_by(output, SUMS_BY)
    what = parser.add_argument_group("selection")
    if command == "inspect":
        what.add_argument(
            "-A", "--all-namespaces", action="store_true", help="Has no effect: inspect always shows all namespaces."
        )
    else:
        what.add_argument(
            "-n", "--namespace", metavar="NAME", help="Show containers of this namespace. (default: the context's)"
        )
        what.add_argument("-A", "--all-namespaces", action="store_true", help="Show containers of all namespaces.")
    what.add_argument("--node", metavar="NODE", help="Show only this node, as NODE does.")
    what.add_argument("--agent-namespace", metavar="NAME", help="Namespace of gpumap's agents. (default: any)")
    what.add_argument("--agent-selector", metavar="LABELS", help="Labels of gpumap's agents. (default: the chart's)")
    add_kubectl_flags(parser)


# --- carrying them out ------------------------------------------------------------------------------------------------


def _show(given: argparse.Namespace) -> int:
    if given.command == "inspect":
        from gpumap.cli.inspect import inspect_report
        from gpumap.cli.tables import Shape

        return _run(given, inspect_report(details=given.details, used=given.used), Shape())
    from gpumap.cli.reports import REPORTS

    namespace = _namespace(given)
    where = f" -n {namespace}" if namespace else " -A"
    return _run(given, REPORTS[given.command], shape_of(given, namespace), where)


def _run(given: argparse.Namespace, report: Report, shape: Shape, where: str = "") -> int:
    """Show the report of the cluster. `where` names the namespaces in the head of a watch."""
    from gpumap.cli.kubectl.source import from_cluster
    from gpumap.cli.show import run

    scope = _scope(given)
    node = f" {scope.node}" if scope.node else ""
    context = f" --context {given.kubectl_context}" if given.kubectl_context else ""
    view = view_of(given, report, shape, f"{PROGRAM} {given.command}{node}{where}{sorted_by(shape)}{context}")
    return run(from_cluster(scope, view.interval_seconds), view)


def _namespace(given: argparse.Namespace) -> str:
    """Return the namespace to show, as kubectl chooses it; empty for all."""
    from gpumap.cli.kubectl.proxy import current_namespace

    if given.all_namespaces:
        return ""
    return current_namespace(passed_on(given)) if given.namespace is None else str(given.namespace)


def _scope(given: argparse.Namespace) -> Scope:
    from gpumap.cli.kubectl.source import SELECTOR, Scope

    if "" in (given.only_node, given.node):
        raise UsageError("NODE: must not be empty")
    if given.only_node and given.node and given.only_node != given.node:
        raise UsageError(f"--node {given.node}: conflicts with NODE {given.only_node}; set only one")
    return Scope(
        kubectl_flags=passed_on(given),
        selector=given.agent_selector or SELECTOR,
        agent_namespace=given.agent_namespace or "",
        node=given.only_node or given.node or "",
        request_seconds=request_seconds(given),
    )


CLUSTER = Place(
    often=WATCH_INTERVAL,
    add_flags=_add_flags,
    run=_show,
    usage=dict.fromkeys(("map", "top", "waste", "inspect"), "[NODE] [flags]"),
    examples={
        "map": [
            ("the whole cluster, every namespace", f"{PROGRAM} map -A"),
            ("one node, updated every 2 seconds", f"{PROGRAM} map gpu-1 -A -w"),
            ("the pods of a namespace that hold or use a GPU", f"{PROGRAM} map -n ml-team -o name"),
        ],
        "top": [
            ("the whole cluster", f"{PROGRAM} top -A"),
            ("the context's namespace, by SM time", f"{PROGRAM} top --sort-by sm"),
            ("another cluster", f"{PROGRAM} top -A --context prod"),
        ],
        "waste": [
            ("the whole cluster", f"{PROGRAM} waste -A"),
            ("report holders as idle only after an hour", f"{PROGRAM} waste -n ml-team --idle-after 1h"),
        ],
        "inspect": [
            ("the whole cluster", f"{PROGRAM} inspect"),
            ("one node with its pods and their used memory", f"{PROGRAM} inspect gpu-1 -d --used"),
        ],
    },
)
"""The tables of `kubectl gpumap`."""


# --- kubectl's own flags ----------------------------------------------------------------------------------------------

_TIMEOUT = "30s"
_FOR_EVER = re.compile(r"0+[smh]?", re.ASCII)


class KubectlFlag(NamedTuple):
    """A flag of `kubectl options`. `metavar` is empty for a switch."""

    name: str
    metavar: str
    help: str
    short: str = ""
    repeatable: bool = False

    @property
    def variable(self) -> str:
        """Name of its value in a namespace, apart from gpumap's own flags."""
        return "kubectl_" + self.name.removeprefix("--").replace("-", "_")


KUBECTL_FLAGS = (
    KubectlFlag("--context", "NAME", "Context of the kubeconfig. (default: its current context)"),
    KubectlFlag("--kubeconfig", "FILE", "The kubeconfig. (default: $KUBECONFIG or ~/.kube/config)"),
    KubectlFlag("--cluster", "NAME", "Cluster of the kubeconfig."),
    KubectlFlag("--user", "NAME", "User of the kubeconfig."),
    KubectlFlag("--server", "URL", "URL of the API server.", short="-s"),
    KubectlFlag("--token", "TOKEN", "Bearer token."),
    KubectlFlag("--as", "NAME", "User to impersonate."),
    KubectlFlag("--as-group", "NAME", "Group to impersonate; repeatable.", repeatable=True),
    KubectlFlag("--as-uid", "UID", "UID to impersonate."),
    KubectlFlag("--certificate-authority", "FILE", "CA certificate of the API server."),
    KubectlFlag("--client-certificate", "FILE", "Client certificate."),
    KubectlFlag("--client-key", "FILE", "Key of the client certificate."),
    KubectlFlag("--tls-server-name", "NAME", "Name in the API server's certificate."),
    KubectlFlag("--insecure-skip-tls-verify", "", "Trust any certificate."),
    KubectlFlag("--cache-dir", "DIR", "Directory of kubectl's cache."),
    KubectlFlag(
        "--request-timeout", "DURATION", f"Timeout of each request, such as 30s; 0: none. (default: {_TIMEOUT})"
    ),
)


def add_kubectl_flags(parser: argparse.ArgumentParser) -> None:
    """Add kubectl's flags to a command."""
    group = parser.add_argument_group("flags passed to kubectl")
    for flag in KUBECTL_FLAGS:
        names = [flag.short, flag.name] if flag.short else [flag.name]
        if not flag.metavar:
            group.add_argument(*names, dest=flag.variable, action="store_true", help=flag.help)
        else:
            action = "append" if flag.repeatable else "store"
            group.add_argument(*names, dest=flag.variable, metavar=flag.metavar, action=action, help=flag.help)


def passed_on(given: argparse.Namespace) -> tuple[str, ...]:
    """Return the words for kubectl."""
    words: list[str] = []
    for flag in KUBECTL_FLAGS:
        value = getattr(given, flag.variable)
        if value is True:
            words.append(flag.name)
        elif value not in (None, False):
            words += [f"{flag.name}={one}" for one in (value if flag.repeatable else (value,))]
    return tuple(words)


def request_seconds(given: argparse.Namespace) -> float | None:
    """Return the deadline of each request; None without one. As in kubectl, seconds need no unit."""
    text: str = _TIMEOUT if given.kubectl_request_timeout is None else given.kubectl_request_timeout
    if _FOR_EVER.fullmatch(text):
        return None
    try:
        return parse_duration(f"{text}s" if text.isdecimal() else text)
    except ValueError as error:
        raise UsageError(f"--request-timeout {text}: {error}") from error
