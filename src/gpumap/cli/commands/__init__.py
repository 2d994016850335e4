"""The commands: a file for each. Those of `TABLES` show tables of nodes, alike in `gpumap` and `kubectl gpumap`.

A command's file has its flags, its columns and what it does. It is imported only if the command line has the command.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from gpumap.cli.parser import Parser, add_command

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

    def add_command(
        self,
        commands: Commands,
        name: str,
        run: Callable[[Program, argparse.Namespace], int],
        examples: Mapping[str, Sequence[tuple[str, str]]],
        *,
        details: str = "",
        usage: str = "",
    ) -> Parser:
        """Add a table to this program. `examples` are by the name of the program."""
        return add_command(
            commands,
            name,
            lambda args: run(self, args),
            summary=SUMMARIES[name],
            details=details,
            usage=usage or self.usage,
            examples=examples[self.name],
        )


SUMMARIES = {
    "map": "Show which containers hold and use each GPU.",
    "top": "Show which containers use GPU memory and SM time now, largest first.",
    "waste": "Show GPUs and GPU memory that are held but not used, or used but not held.",
    "inspect": "Show the granted memory of each GPU, with the columns of `kubectl inspect gpushare`.",
    "bill": "Charge namespaces, pods or teams for the GPU-hours that they held.",
    "doctor": "Show what each source and capability reports, and the remedy of each problem.",
    "check": "Check the GPUs of a running agent: one line, and exit code 0, 1 or 2.",
}
TABLES = ("map", "top", "waste", "inspect")


def add_commands(
    commands: Commands, names: Iterable[str], program: Program, words: Sequence[str] | None = None
) -> None:
    """Add commands to a program. Of those that are not among `words`, add only the name and the summary."""
    for name in names:
        if words is not None and name not in words:
            commands.add_parser(name, help=SUMMARIES[name])
        else:
            import_module(f"{__name__}.{name}").add(commands, program)
