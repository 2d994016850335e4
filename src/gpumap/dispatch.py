"""The commands of `gpumap`: reads the command line and runs the command.

Each command has its own function that adds it. A command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gpumap import __version__
from gpumap.agent.flags import FLAGS, add_flags
from gpumap.agent.logs import set_up_log
from gpumap.agent.settings import Settings, quiet, resolve, unknown_variables
from gpumap.cli.commands import SUMMARIES, add_commands
from gpumap.cli.credentials import VARIABLES
from gpumap.cli.gpumap import GPUMAP
from gpumap.cli.main import print_notices
from gpumap.cli.parser import Parser, add_command, parse, top_parser
from gpumap.model.errors import UsageError
from gpumap.model.formatting import parse_duration

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Parser]


T = TypeVar("T")
DEMO_ADDRESS = "127.0.0.1:9401"
"""A simulated node is for local tries, not for the network."""


def prepared(arguments: Sequence[str]) -> Callable[[], int]:
    """Parse the command line, and import what takes long. Raises UsageError and FatalError."""
    args = parse(command_parser(arguments), arguments)
    if getattr(args, "command", "bill") in {*SUMMARIES} - {"bill"}:
        from gpumap.cli import watch  # noqa: F401 # the command itself imports them again
        from gpumap.cli.sources import agent  # noqa: F401
    return lambda: int(args.run(args))


# --- the commands -----------------------------------------------------------------------------------------------------


def command_parser(words: Sequence[str] | None = None) -> Parser:
    """Return the parser of all commands; of those of `cli` that are not among `words` only with their summaries."""
    parser = top_parser(
        description="Show which container holds which GPU, and what it uses.",
        epilog="Try it without a GPU: run `gpumap demo`, and in another terminal `gpumap top --url http://127.0.0.1:9401`."
        "\nHelp for a command: gpumap COMMAND --help",
        version=f"gpumap {__version__}",
    )
    parser.set_defaults(run=lambda _: _print_all_help(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser, prog="gpumap")
    add_commands(commands, SUMMARIES, GPUMAP, words)
    for add in (_add_serve, _add_record, _add_demo):
        add(commands)
    return parser


def _add_serve(commands: Commands) -> None:
    serve = add_command(
        commands,
        "serve",
        _serve,
        summary="Run the exporter on a GPU node.",
        examples=[("with the defaults of the chart", "gpumap serve --listen :9401 --interval 5s")],
    )
    add_flags(serve)


def _add_demo(commands: Commands) -> None:
    demo = add_command(
        commands,
        "demo",
        _demo,
        summary="Run the exporter on a simulated node, without GPU, kubelet or root.",
        examples=[
            ("the default scenario", "gpumap demo"),
            ("every way to share a GPU", "gpumap demo --scenario sharing"),
            ("your own node", "gpumap demo --scenario node.yaml --listen 127.0.0.1:9401"),
            ("a recorded node", "gpumap demo --capture DIR"),
        ],
    )
    played = demo.add_argument_group("simulated node")
    played.add_argument(
        "--scenario",
        metavar="FILE",
        help="YAML file (docs/dev/scenario.md), or a built-in node: default, sharing, stalled, faults.",
    )
    played.add_argument("--capture", metavar="DIR", help="Directory that `gpumap record` wrote.")
    add_flags(demo, hidden=("sources",))  # accepted: the simulated node has its own sources
    for flag in demo._actions:
        if "--node-name" in flag.option_strings:
            flag.help = "Name of the node. Default: the name in the scenario. ($GPUMAP_NODE_NAME)"
        if "--listen" in flag.option_strings:
            flag.help = f"Address to serve on. :9401 is every address. (default: {DEMO_ADDRESS}; $GPUMAP_LISTEN)"


def _add_record(commands: Commands) -> None:
    record = add_command(
        commands,
        "record",
        _record,
        summary="Record the answers of all sources in a directory, for a bug report.",
        usage="DIR [flags]",
        examples=[
            ("this node, once", "gpumap record /tmp/node"),
            ("for a minute, with pseudonyms for names and UUIDs", "gpumap record /tmp/node --for 1m --anonymize"),
        ],
    )
    record.add_argument("folder", metavar="DIR", help="Directory to write to. It must be empty or not exist.")
    recording = record.add_argument_group("recording")
    recording.add_argument(
        "--for",
        dest="duration",
        metavar="DURATION",
        help="Time to record. (default: two collections, one second apart)",
    )
    recording.add_argument("--interval", metavar="DURATION", help="Time between two collections. (default: 5s)")
    recording.add_argument(
        "--anonymize", action="store_true", help="Replace names and UUIDs consistently by pseudonyms."
    )
    add_flags(record, ("sources", "log"))


def _run_loop(work: Coroutine[None, None, T]) -> T:
    import asyncio

    return asyncio.run(work)


# --- what they do -----------------------------------------------------------------------------------------------------


def _print_all_help(parser: Parser) -> int:
    """Print the help and return 2: a container without arguments must not look successful."""
    parser.print_help(sys.stderr)
    return 2


def _resolve_and_log(args: argparse.Namespace) -> Settings:
    """Return the settings of a service. Set up its log, and warn of unknown variables."""
    settings = resolve(args, os.environ)
    set_up_log(settings.log_format, settings.log_level)
    for name, nearest in unknown_variables(os.environ, (*(flag.variable for flag in FLAGS), *VARIABLES)):
        logging.getLogger("gpumap").warning("unknown variable ignored variable=%s nearest=%s", name, nearest)
    return settings


def _serve(args: argparse.Namespace) -> int:
    settings = _resolve_and_log(args)
    gc.disable()  # during the imports, which leave hardly any garbage; the service enables it again
    from gpumap.agent import service
    from gpumap.agent.own_process import check_limits, raise_limit
    from gpumap.agent.sources.nvml import worker_command

    raise_limit()
    check_limits()
    with service.bind(settings.listen) as listener:
        _run_loop(service.serve(settings, worker_command(settings.nvml_library or None), listener))
    return 0


def _demo(args: argparse.Namespace) -> int:
    if args.listen is None and "GPUMAP_LISTEN" not in os.environ:
        args.listen = DEMO_ADDRESS
    from gpumap.lab.demo.scenario import ScenarioError, default_scenario, load_scenario
    from gpumap.lab.node import serve_demo, serve_node

    if args.capture and args.scenario:
        raise UsageError("--capture: cannot be combined with --scenario")
    settings = _resolve_and_log(args)
    if args.capture:
        from gpumap.lab.capture.run import load_capture

        _run_loop(serve_node(replace(settings, node_ip=""), load_capture(Path(args.capture))))
        return 0
    try:
        scenario = load_scenario(Path(args.scenario)) if args.scenario else default_scenario()
    except ScenarioError as error:
        raise UsageError(f"--scenario {error}") from error
    if not (args.node_name or os.environ.get("GPUMAP_NODE_NAME")):
        settings = replace(settings, node_name=scenario.node)
    _run_loop(serve_demo(settings, scenario))
    return 0


def _record(args: argparse.Namespace) -> int:
    from gpumap.agent.sources.nvml import worker_command
    from gpumap.lab.capture.run import record_node

    try:
        seconds = parse_duration(args.duration) if args.duration else None
    except ValueError as error:
        raise UsageError(f"--for {args.duration}: {error}") from error
    args.stale_after = _longer_than_default(args.interval)
    settings = quiet(resolve(args, os.environ, ("sources", "log")), args, os.environ)
    set_up_log(settings.log_format, settings.log_level)
    command = worker_command(settings.nvml_library or None)
    recording = record_node(
        settings, command, Path(args.folder), print_notices, seconds=seconds, anonymous=args.anonymize
    )
    return _run_loop(recording)


def _longer_than_default(interval: str | None) -> str | None:
    """Return --stale-after for `record`, which has no such flag: the interval if it is longer than the default."""
    default = next(flag.default for flag in FLAGS if flag.name == "--stale-after")
    try:
        return interval if interval and parse_duration(interval) > parse_duration(default) else None
    except ValueError:
        return None  # reported later as a mistake in --interval
