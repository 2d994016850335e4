"""The `gpumap` command: reads the command line and hands over. Whatever goes wrong is one line, and an exit code."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from gpumap import __version__
from gpumap.errors import FatalError, UsageError
from gpumap.logs import set_up_log
from gpumap.settings import Later, add_flags, resolve
from gpumap.terminal import printable

LATER_COMMANDS = ("inspect", "top", "waste", "bill", "doctor", "record")
"""Commands of the contract that are not built yet: known, and refused."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. 0: done, or stopped by a signal; 1: failed at run time; 2: a flag or file cannot be honoured."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, until the service has its own way to stop
    try:
        given = _parser().parse_args(arguments)
        return int(given.run(given))
    except UsageError as error:
        print(f"gpumap: {_one_line(error)}", file=sys.stderr)
        return 2
    except FatalError as error:
        print(f"gpumap: {_one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        return 0  # nobody reads on
    except Exception as error:
        print(f"gpumap: failed: {type(error).__name__}: {_one_line(error)}", file=sys.stderr)
        return 1
    finally:
        _flush()


def _flush() -> None:
    """Write what is left to write; where nobody reads on, let it go instead of failing at the very end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(error: Exception) -> str:
    return printable(" ".join(str(error).split()))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="gpumap", description="Which container holds which GPU, and what it really uses.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"gpumap {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)

    serve = commands.add_parser("serve", help="run the exporter on a GPU node", allow_abbrev=False)
    add_flags(serve)
    serve.set_defaults(run=_serve)

    show = commands.add_parser("map", help="show who holds and who uses each GPU", allow_abbrev=False)
    show.add_argument("-o", "--output", choices=("table", "wide", "json", "yaml"), default="table", help="form")
    show.add_argument("--watch", action="store_true", help="show it again at each interval, until stopped")
    show.add_argument("--url", metavar="URL", help="ask a running gpumap, such as http://127.0.0.1:9401")
    add_flags(show)
    show.set_defaults(run=_map)

    demo = commands.add_parser("demo", help="serve a simulated node: no GPU, no kubelet, no root", allow_abbrev=False)
    demo.add_argument("--scenario", metavar="FILE", help="your own node in YAML (docs/scenario.md)")
    demo.add_argument("--capture", nargs="?", action=Later, help=argparse.SUPPRESS)
    add_flags(demo)
    demo.set_defaults(run=_demo)

    for name in LATER_COMMANDS:
        later = commands.add_parser(name, add_help=False, prefix_chars="\0")
        later.add_argument("rest", nargs="*")
        later.set_defaults(run=_later(name))
    return parser


def _later(name: str) -> object:
    def refuse(_: argparse.Namespace) -> NoReturn:
        raise UsageError(f"{name} is not built yet")

    return refuse


def _serve(given: argparse.Namespace) -> int:
    settings = resolve(given, os.environ)
    set_up_log(settings.log_format, settings.log_level)
    from gpumap import service
    from gpumap.sources.nvml import worker_command

    with service.bind(settings.listen) as listener:
        asyncio.run(service.serve(settings, worker_command(settings.nvml_library or None), listener))
    return 0


def _demo(given: argparse.Namespace) -> int:
    from gpumap.demo.run import serve_demo
    from gpumap.demo.scenario import ScenarioError, default_scenario, load_scenario

    settings = resolve(given, os.environ)
    set_up_log(settings.log_format, settings.log_level)
    try:
        scenario = load_scenario(Path(given.scenario)) if given.scenario else default_scenario()
    except ScenarioError as error:
        raise UsageError(f"--scenario {error}") from error
    chosen = given.node_name or os.environ.get("GPUMAP_NODE_NAME")
    settings = settings if chosen else replace(settings, node_name=scenario.node)
    asyncio.run(serve_demo(settings, scenario))
    return 0


def _map(given: argparse.Namespace) -> int:
    from gpumap import show

    settings = resolve(given, os.environ)
    if not (given.log_level or os.environ.get("GPUMAP_LOG_LEVEL")):
        settings = replace(settings, log_level="error")
    set_up_log(settings.log_format, settings.log_level)
    here = given.url is None
    documents = show.from_node(settings) if here else show.from_agent(given.url, settings.interval_seconds)
    return asyncio.run(show.show(documents, form=given.output, watch=given.watch))


if __name__ == "__main__":
    sys.exit(main())
