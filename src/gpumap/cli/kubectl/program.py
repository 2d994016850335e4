"""The command line of `kubectl gpumap`: gpumap's tables of a whole cluster, with kubectl's own flags.

kubectl's flags select the cluster and the user. gpumap passes them on to kubectl as they are.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gpumap import __version__
from gpumap.cli.args import WATCH_INTERVAL, add_words
from gpumap.cli.commands import TABLES, Program, add_commands
from gpumap.cli.parser import Parser, parse, top_parser
from gpumap.model.errors import UsageError
from gpumap.model.formatting import parse_duration

if TYPE_CHECKING:
    from gpumap.cli.commands import Ask
    from gpumap.cli.screen import Report
    from gpumap.cli.sources.kubectl import AgentSelection
    from gpumap.cli.table import Shape

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
    words = _complete(arguments)
    args = parse(command_parser(words), words)
    if getattr(args, "words", None) and ":" not in args.words[0]:
        args.only_node = args.words.pop(0)
    from gpumap.cli import watch  # noqa: F401
    from gpumap.cli.sources import kubectl  # noqa: F401 # the command itself imports it again

    return lambda: int(args.run(args))


def command_parser(words: Sequence[str] | None = None) -> Parser:
    """Return the parser of all commands; of those that are not among `words` only with their summaries."""
    parser = top_parser(
        description="Show which container of the cluster holds which GPU, and what it uses.",
        epilog=_EPILOG,
        version=f"{PROGRAM} {__version__}",
        program=PROGRAM,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser, prog=PROGRAM)
    add_commands(commands, TABLES, KUBECTL, words)
    return parser


def _complete(arguments: Sequence[str]) -> list[str]:
    """Return the words with a command first. Accept switches as kubectl's users write them, such as --watch=true."""
    words = list(arguments)
    if not words or (words[0].startswith("-") and words[0] not in _HELP):
        words.insert(0, DEFAULT_COMMAND)
    switches = {flag.name for flag in KUBECTL_FLAGS if not flag.metavar} | {"--watch", "--all-namespaces"}
    return [word.removesuffix("=true") if word.removesuffix("=true") in switches else word for word in words]


def _add_source(parser: Parser, command: str) -> None:
    """Add the flags that select nodes, namespaces and agents, and the flags for kubectl."""
    selection = parser.add_argument_group("selection")
    if command == "inspect":
        help_ = "Has no effect: inspect always shows all namespaces."
    else:
        parser.set_defaults(only_node=None)
        add_words(parser)
        help_ = "Show containers of this namespace. (default: the context's)"
        selection.add_argument("-n", "--namespace", metavar="NAME", help=help_)
        help_ = "Show containers of all namespaces."
    selection.add_argument("-A", "--all-namespaces", action="store_true", help=help_)
    for flag, metavar, help_ in (
        ("--node", "NODE", "Show only this node, as NODE does."),
        ("--agent-namespace", "NAME", "Namespace of gpumap's agents. (default: any)"),
        ("--agent-selector", "LABELS", "Labels of gpumap's agents. (default: the chart's)"),
    ):
        selection.add_argument(flag, metavar=metavar, help=help_)
    add_kubectl_flags(parser)


# --- carrying them out ------------------------------------------------------------------------------------------------


def _show(args: argparse.Namespace, report: Report, shape: Shape, _: Ask | None) -> int:
    """Show the report of the cluster. Raises UsageError."""
    from gpumap.cli.sources.kubectl import ask_cluster
    from gpumap.cli.watch import read_view, run

    selection = _read_selection(args)
    node = "".join(f" {word}" for word in (selection.node, *shape.words) if word)
    namespace = f" -n {shape.namespace}" if shape.namespace else " -A"
    order = f" --sort-by {shape.order}" if shape.order else ""
    context = f" --context {args.kubectl_context}" if args.kubectl_context else ""
    head = f"{PROGRAM} {args.command}{node}{'' if args.command == 'inspect' else namespace}{order}{context}"
    view = read_view(args, report, shape, head, WATCH_INTERVAL)
    return run(ask_cluster(selection, view.interval_seconds), view)


def _namespace(args: argparse.Namespace) -> str:
    """Return the namespace to show, as kubectl chooses it; empty for all."""
    from gpumap.cli.sources.kubectl import current_namespace

    if args.all_namespaces:
        return ""
    return current_namespace(passed_on(args)) if args.namespace is None else str(args.namespace)


def _read_selection(args: argparse.Namespace) -> AgentSelection:
    from gpumap.cli.sources.kubectl import SELECTOR, AgentSelection

    if "" in (args.only_node, args.node):
        raise UsageError("NODE: must not be empty")
    if args.only_node and args.node and args.only_node != args.node:
        raise UsageError(f"--node {args.node}: conflicts with NODE {args.only_node}; set only one")
    return AgentSelection(
        kubectl_flags=passed_on(args),
        selector=args.agent_selector or SELECTOR,
        agent_namespace=args.agent_namespace or "",
        node=args.only_node or args.node or "",
        request_seconds=request_seconds(args),
    )


KUBECTL = Program(
    name=PROGRAM,
    usage="[NODE] [WORD ...] [flags]",
    interval_help=WATCH_INTERVAL,
    has_prometheus=False,
    add_source=_add_source,
    namespace=_namespace,
    show=_show,
)


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


def passed_on(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the words for kubectl."""
    words: list[str] = []
    for flag in KUBECTL_FLAGS:
        value = getattr(args, flag.variable)
        if value is True:
            words.append(flag.name)
        elif value not in (None, False):
            words += [f"{flag.name}={word}" for word in (value if flag.repeatable else (value,))]
    return tuple(words)


def request_seconds(args: argparse.Namespace) -> float | None:
    """Return the deadline of each request; None without one. As in kubectl, seconds need no unit."""
    text: str = _TIMEOUT if args.kubectl_request_timeout is None else args.kubectl_request_timeout
    if _FOR_EVER.fullmatch(text):
        return None
    try:
        return parse_duration(f"{text}s" if text.isdecimal() else text)
    except ValueError as error:
        raise UsageError(f"--request-timeout {text}: {error}") from error
