"""The commands that show tables of nodes, alike in `gpumap` and `kubectl gpumap`: `map`, `top`, `waste` and `inspect`.

Every command line reads the flags, so a command imports its other parts when it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gpumap.cli.command_line import Parser, Run, add_command
from gpumap.cli.output_flags import add_inspect_output, add_output
from gpumap.cli.sort_keys import MAP_ORDERS, TOP_ORDERS, WASTE_ORDERS

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Parser]


class Place(NamedTuple):
    """How a program gets the nodes of a table.

    `often` describes the default of --interval. `add_flags` adds the flags that select nodes and rows to a command; the
    group has its own flags. `run` shows its report. `usage` and `examples` are by command.
    """

    often: str
    add_flags: Callable[[Parser, argparse._ArgumentGroup, str], None]
    run: Run
    usage: Mapping[str, str]
    examples: Mapping[str, Sequence[tuple[str, str]]]


_SUMMARIES = {
    "map": "Show which containers hold and use each GPU.",
    "top": "Show which containers use GPU memory and SM time now, largest first.",
    "waste": "Show GPUs and GPU memory that are held but not used, or used but not held.",
    "inspect": "Show the granted memory of each GPU, with the columns of `kubectl inspect gpushare`.",
}
_MORE = {
    "map": "",
    "top": "There is one row for each container and device. Other rows show processes of the host, processes of\n"
    "deleted pods, and memory that no process explains.\n"
    "On a terminal, the table updates until you press q. There, findings come first; keys sort and filter the rows,\n"
    "Enter opens the details of one (press ?). Only the GPUs above them show memory that no process explains.",
    "waste": "Findings, worst first:\n"
    "  squatter     uses a device that it does not hold\n"
    "  leftover     a process of a pod that no longer exists\n"
    "  unexplained  memory or load of a GPU without a process\n"
    "  over         uses more memory than granted\n"
    "  stalled      keeps its GPU busy, but the GPU draws next to no power: it may hang\n"
    "  idle         holds a device, but did no work for five minutes (--idle-after of serve)\n"
    "  unused       even its peak left more than 20% and 1 GiB of its grant unused\n"
    "  unmatched    holds slots that match no device\n"
    "gpumap reports only what it can prove. Below the table it lists what it could not check, with the reason.",
    "inspect": "For GPUs that gpushare shares, the columns and numbers are those of `kubectl inspect gpushare`\n"
    "and `kubectl inspect cgpu`. For other GPUs they show the granted memory in GiB.",
}


def add_tables(commands: Commands, place: Place) -> None:
    """Add the commands to a program."""
    orders = {"map": MAP_ORDERS, "top": TOP_ORDERS, "waste": WASTE_ORDERS}
    for command in _SUMMARIES:
        parser = add_command(
            commands,
            command,
            place.run,
            summary=_SUMMARIES[command],
            more=_MORE[command],
            usage=place.usage.get(command, "[flags]"),
            examples=place.examples[command],
        )
        if command == "inspect":
            output = add_inspect_output(parser, place.often)
        else:
            output = add_output(parser, orders[command], place.often)
        if command == "top":
            output.add_argument("--processes", action="store_true", help="Show one row for each process.")
            output.add_argument("--once", action="store_true", help="Print the table once, also on a terminal.")
        place.add_flags(parser, output, command)
