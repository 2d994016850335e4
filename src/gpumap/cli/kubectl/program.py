"""The command line of `kubectl gpumap`: gpumap's tables of a whole cluster, with kubectl's own flags.

kubectl's flags select the cluster and the user. gpumap passes them on to kubectl as they are.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

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
    switches = (_TRUST_ANY, "--watch", "--all-namespaces")
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
    context = f" --context {name}" if (name := _value(args, "--context")) else ""
    head = f"{PROGRAM} {args.command}{node}{'' if args.command == 'inspect' else namespace}{order}{context}"
    view = read_view(args, report, shape, head, WATCH_INTERVAL)
    return run(ask_cluster(selection, view.interval_seconds), view)


def _namespace(args: argparse.Namespace) -> str:
    """Return the namespace to show, as kubectl chooses it; empty for all."""
    from gpumap.cli.sources.kubectl import current_namespace

    if args.all_namespaces:
        return ""
    return current_namespace(args.kubectl_words) if args.namespace is None else str(args.namespace)


def _read_selection(args: argparse.Namespace) -> AgentSelection:
    from gpumap.cli.sources.kubectl import SELECTOR, AgentSelection

    if "" in (args.only_node, args.node):
        raise UsageError("NODE: must not be empty")
    if args.only_node and args.node and args.only_node != args.node:
        raise UsageError(f"--node {args.node}: conflicts with NODE {args.only_node}; set only one")
    return AgentSelection(
        kubectl_flags=tuple(args.kubectl_words),
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
_TRUST_ANY = "--insecure-skip-tls-verify"
_FOR_EVER = re.compile(r"0+[smh]?", re.ASCII)


KUBECTL_FLAGS = (
    ("--context", "NAME", "Context of the kubeconfig. (default: its current context)"),
    ("--kubeconfig", "FILE", "The kubeconfig. (default: $KUBECONFIG or ~/.kube/config)"),
    ("--cluster", "NAME", "Cluster of the kubeconfig."),
    ("--user", "NAME", "User of the kubeconfig."),
    ("--server", "URL", "URL of the API server."),
    ("--token", "TOKEN", "Bearer token."),
    ("--as", "NAME", "User to impersonate."),
    ("--as-group", "NAME", "Group to impersonate; repeatable."),
    ("--as-uid", "UID", "UID to impersonate."),
    ("--certificate-authority", "FILE", "CA certificate of the API server."),
    ("--client-certificate", "FILE", "Client certificate."),
    ("--client-key", "FILE", "Key of the client certificate."),
    ("--tls-server-name", "NAME", "Name in the API server's certificate."),
    (_TRUST_ANY, "", "Trust any certificate."),
    ("--cache-dir", "DIR", "Directory of kubectl's cache."),
    ("--request-timeout", "DURATION", f"Timeout of each request, such as 30s; 0: none. (default: {_TIMEOUT})"),
)
"""Flags of `kubectl options`, the names of their values, and their help. A switch has no value."""


def add_kubectl_flags(parser: argparse.ArgumentParser) -> None:
    """Add kubectl's flags to a command. They become words for kubectl, which itself takes the last of equal flags."""
    group = parser.add_argument_group("flags passed to kubectl")
    parser.set_defaults(kubectl_words=[])
    for name, metavar, help_ in KUBECTL_FLAGS:
        names = ["-s", name] if name == "--server" else [name]
        if metavar:
            word = f"{name}={{}}".format
            group.add_argument(*names, dest="kubectl_words", action="append", type=word, metavar=metavar, help=help_)
        else:
            group.add_argument(*names, dest="kubectl_words", action="append_const", const=name, help=help_)


def _value(args: argparse.Namespace, name: str) -> str | None:
    """Return the value of one of kubectl's flags; None without the flag."""
    values = [word.removeprefix(f"{name}=") for word in args.kubectl_words if word.startswith(f"{name}=")]
    return values[-1] if values else None


def request_seconds(args: argparse.Namespace) -> float | None:
    """Return the deadline of each request; None without one. As in kubectl, seconds need no unit."""
    flag_text = _value(args, "--request-timeout")
    text = _TIMEOUT if flag_text is None else flag_text
    if _FOR_EVER.fullmatch(text):
        return None
    try:
        return parse_duration(f"{text}s" if text.isdecimal() else text)
    except ValueError as error:
        raise UsageError(f"--request-timeout {text}: {error}") from error
