"""The commands that show tables of nodes, alike in `gpumap` and `kubectl gpumap`: a file for each.

A command's file has its flags, its columns and what it does. It is imported only if the command line has the command.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gpumap.cli.parser import Parser, Run

if TYPE_CHECKING:
    from gpumap.cli.rows import NodeMaps
    from gpumap.cli.screen import Report
    from gpumap.cli.sources.prometheus import Prometheus
    from gpumap.cli.table import Shape

    Commands = argparse._SubParsersAction[Parser]
    Ask = Callable[[Prometheus, str], Awaitable[NodeMaps]]


class Program(NamedTuple):
    """A program that has the tables. It knows where the nodes come from.

    `interval_help` describes the default of --interval. `add_source` adds the flags that select nodes and rows to a
    command. `namespace` reads the namespace of the rows; empty for all. `show` shows a report of the nodes, or what a
    Prometheus answers. `has_prometheus`: it can ask one.
    """

    name: str
    usage: str
    interval_help: str
    has_prometheus: bool
    add_source: Callable[[Parser, str], None]
    namespace: Callable[[argparse.Namespace], str]
    show: Callable[[argparse.Namespace, Report, Shape, Ask | None], int]

    def bind(self, run: Callable[[Program, argparse.Namespace], int]) -> Run:
        """Return what the command does in this program."""
        return lambda args: run(self, args)


SUMMARIES = {
    "map": "Show which containers hold and use each GPU.",
    "top": "Show which containers use GPU memory and SM time now, largest first.",
    "waste": "Show GPUs and GPU memory that are held but not used, or used but not held.",
    "inspect": "Show the granted memory of each GPU, with the columns of `kubectl inspect gpushare`.",
}


def add_tables(commands: Commands, program: Program, words: Sequence[str] | None = None) -> None:
    """Add the commands to a program. Of those that are not among `words`, add only the name and the summary."""
    for name, summary in SUMMARIES.items():
        if words is not None and name not in words:
            commands.add_parser(name, help=summary)
        elif name == "map":
            from gpumap.cli.commands.map import add_map

            add_map(commands, program)
        elif name == "top":
            from gpumap.cli.commands.top import add_top

            add_top(commands, program)
        elif name == "waste":
            from gpumap.cli.commands.waste import add_waste

            add_waste(commands, program)
        else:
            from gpumap.cli.commands.inspect import add_inspect

            add_inspect(commands, program)
