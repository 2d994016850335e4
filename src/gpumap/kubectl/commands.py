"""The command line of `kubectl gpumap`: gpumap's own tables of a whole cluster, with kubectl's flags and habits."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpumap import __version__
from gpumap.command_line import Parser, add_command, parse, top_parser
from gpumap.errors import UsageError
from gpumap.kubectl.flags import KUBECTL_FLAGS, add_kubectl_flags, passed_on, request_seconds
from gpumap.look.commands import add_idle_after, add_output, add_processes, run
from gpumap.look.inspect.command import add_details, run_inspect
from gpumap.look.orders import MAP_ORDERS, TOP_ORDERS, WASTE_ORDERS

if TYPE_CHECKING:
    from gpumap.kubectl.cluster import Asked
    from gpumap.look.seen import Sights

    Commands = argparse._SubParsersAction[Parser]

PROGRAM = "kubectl gpumap"
DEFAULT_COMMAND = "map"
_HELP = ("-h", "--help", "--version")
_EPILOG = f"""\
Without a command: {DEFAULT_COMMAND}. More about one: {PROGRAM} COMMAND --help

Needs the rights to list pods and to get pods/proxy. Rows are of one namespace, the context's unless -n or -A says
otherwise; the devices are those of all nodes. Flags follow the command: kubectl takes none before a plugin's name."""


def prepared(arguments: Sequence[str]) -> Callable[[], int]:
    """What the command line says, to be done, with what takes long to import. Raises UsageError and FatalError."""
    given = parse(command_parser(), _as_words(arguments))
    from gpumap.kubectl import cluster  # noqa: F401 # the look itself imports it again
    from gpumap.look import show  # noqa: F401

    return lambda: int(given.run(given))


def command_parser() -> Parser:
    """The whole grammar."""
    parser = top_parser(
        description="Which container of the cluster holds which GPU, and what it really uses.",
        epilog=_EPILOG,
        version=f"{PROGRAM} {__version__}",
        program=PROGRAM,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser, prog=PROGRAM)
    for add in (_add_map, _add_top, _add_waste, _add_inspect):
        add(commands)
    return parser


def _as_words(arguments: Sequence[str]) -> list[str]:
    """The words with a command before them, and switches as kubectl's users write them, such as --watch=true."""
    words = list(arguments)
    if not words or (words[0].startswith("-") and words[0] not in _HELP):
        words.insert(0, DEFAULT_COMMAND)
    switches = {flag.name for flag in KUBECTL_FLAGS if not flag.metavar} | {"--watch", "--all-namespaces"}
    return [word.removesuffix("=true") if word.removesuffix("=true") in switches else word for word in words]


def _add_map(commands: Commands) -> None:
    show = add_command(
        commands,
        "map",
        _map,
        says="show who holds and who uses each GPU",
        usage="[NODE] [flags]",
        examples=[
            ("the whole cluster, every namespace", f"{PROGRAM} map -A"),
            ("one node, again and again", f"{PROGRAM} map gpu-1 -A -w"),
            ("the pods of a namespace that hold or use a GPU", f"{PROGRAM} map -n ml-team -o name"),
        ],
    )
    add_output(show, MAP_ORDERS)
    _add_cluster(show)


def _add_top(commands: Commands) -> None:
    top = add_command(
        commands,
        "top",
        _top,
        says="show who uses GPU memory and SM time now, largest first",
        usage="[NODE] [flags]",
        examples=[
            ("the whole cluster", f"{PROGRAM} top -A"),
            ("the context's namespace, by SM time, as it changes", f"{PROGRAM} top --sort-by sm -w"),
            ("another cluster", f"{PROGRAM} top -A --context prod"),
        ],
    )
    add_processes(add_output(top, TOP_ORDERS))
    _add_cluster(top)


def _add_waste(commands: Commands) -> None:
    waste = add_command(
        commands,
        "waste",
        _waste,
        says="show what is held or granted and not used, and used without a grant",
        usage="[NODE] [flags]",
        examples=[
            ("the whole cluster", f"{PROGRAM} waste -A"),
            ("who of the namespace has computed nothing for an hour", f"{PROGRAM} waste -n ml-team --idle-after 1h"),
        ],
    )
    add_idle_after(add_output(waste, WASTE_ORDERS))
    _add_cluster(waste)


def _add_inspect(commands: Commands) -> None:
    inspect = add_command(
        commands,
        "inspect",
        _inspect,
        says="show how much of each GPU's memory is granted, as `kubectl inspect gpushare` does",
        more="Of all namespaces.",
        usage="[NODE] [flags]",
        examples=[
            ("the whole cluster", f"{PROGRAM} inspect"),
            ("one node, pod by pod, and what is really used", f"{PROGRAM} inspect gpu-1 -d --used"),
        ],
    )
    add_details(inspect)
    _add_cluster(inspect, of_namespaces=False)


def _add_cluster(parser: Parser, *, of_namespaces: bool = True) -> None:
    """Add what is looked at, and the flags for kubectl."""
    parser.add_argument("only_node", metavar="NODE", nargs="?", help="one node alone; else all")
    what = parser.add_argument_group("what is looked at")
    if of_namespaces:
        what.add_argument("-n", "--namespace", metavar="NAME", help="workloads of it (default: the context's)")
        what.add_argument("-A", "--all-namespaces", action="store_true", help="workloads of all namespaces")
    what.add_argument("--node", metavar="NODE", help="one node alone; the same as NODE")
    what.add_argument("--agent-namespace", metavar="NAME", help="where gpumap's agents run; else in any namespace")
    what.add_argument("--agent-selector", metavar="LABELS", help="their labels (default: the chart's)")
    add_kubectl_flags(parser)
    parser.set_defaults(url=None)


# --- carrying them out ------------------------------------------------------------------------------------------------


def _map(given: argparse.Namespace) -> int:
    from gpumap.look.tables import map_names, map_table, map_values

    return run(_within(given), map_table, map_values, _look, names=map_names)


def _top(given: argparse.Namespace) -> int:
    from gpumap.look.tables import top_names, top_table, top_values

    return run(_within(given), top_table, top_values, _look, names=top_names)


def _waste(given: argparse.Namespace) -> int:
    from gpumap.look.tables import waste_names, waste_table, waste_values

    return run(_within(given), waste_table, waste_values, _look, names=waste_names)


def _inspect(given: argparse.Namespace) -> int:
    return run_inspect(given, _look)


def _within(given: argparse.Namespace) -> argparse.Namespace:
    """With the namespace whose workloads are shown, as kubectl chooses it; empty for all."""
    from gpumap.kubectl.proxy import current_namespace

    if given.all_namespaces:
        given.namespace = ""
    elif given.namespace is None:
        given.namespace = current_namespace(passed_on(given))
    return given


def _look(given: argparse.Namespace, interval_seconds: float) -> Sights:
    from gpumap.kubectl.cluster import from_cluster

    return from_cluster(_asked(given), interval_seconds)


def _asked(given: argparse.Namespace) -> Asked:
    from gpumap.kubectl.cluster import SELECTOR, Asked

    if given.only_node and given.node and given.only_node != given.node:
        raise UsageError(f"--node {given.node}: NODE is {given.only_node}; say it once")
    return Asked(
        kubectl_flags=passed_on(given),
        selector=given.agent_selector or SELECTOR,
        agent_namespace=given.agent_namespace or "",
        node=given.only_node or given.node or "",
        request_seconds=request_seconds(given),
    )
