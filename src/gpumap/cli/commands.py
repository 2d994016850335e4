"""The commands that read and change nothing: `map`, `top` and `waste` here, the others in their own files.

Every command line imports the flags, so a command imports its other parts when it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpumap.cli.bill.command import add_bill
from gpumap.cli.check import add_check
from gpumap.cli.command_line import Parser, add_command, leave_to_help_all
from gpumap.cli.doctor.command import add_doctor
from gpumap.cli.inspect.command import add_inspect
from gpumap.cli.output_flags import add_output, add_processes, add_thresholds, add_would_fit, shape_of
from gpumap.cli.server_flags import HOW_TO_ASK, LABEL_MATCH_HELP, add_row_flags, add_server_flags
from gpumap.cli.sort_keys import (
    CLUSTER_SUMS_BY,
    MAP_ORDERS,
    MAP_SUMMARY,
    TOP_ORDERS,
    TOP_SUMMARY,
    WASTE_ORDERS,
    WASTE_SUMMARY,
    WORKLOAD,
)
from gpumap.cli.this_node import NODE_FLAGS, add_node_flags
from gpumap.cli.where import add_url, run
from gpumap.model.errors import UsageError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Parser]

_JQ = """gpumap map -o json | jq -r '.devices[].users[] | select(.unassigned) | .pod'"""
_SERVER = "--prometheus http://prom:9090"


def add_commands(commands: Commands) -> None:
    for add in (_add_map, _add_top, _add_waste, add_inspect, add_bill, add_doctor, add_check):
        add(commands)


def _add_map(commands: Commands) -> None:
    show = add_command(
        commands,
        "map",
        _show,
        summary=MAP_SUMMARY,
        examples=[
            ("this node, once", "gpumap map"),
            ("a running agent, updated every 2 seconds", "gpumap map --watch --url http://127.0.0.1:9401"),
            ("the largest users of memory first", "gpumap map --sort-by memory"),
            ("the whole cluster", f"gpumap map {_SERVER}"),
            ("for scripts: pods that use a device that they do not hold", _JQ),
        ],
    )
    _add_table_flags(show, MAP_ORDERS)
    add_node_flags(show)


def _add_top(commands: Commands) -> None:
    top = add_command(
        commands,
        "top",
        _show,
        summary=TOP_SUMMARY,
        more="There is one row for each container and device. Other rows show processes of the host, processes of\n"
        "deleted pods, and memory that no process explains.\n"
        "On a terminal, the table updates until you press q. Keys sort, filter and group the rows (press ?).\n"
        "There, only the line of the device shows memory that no process explains.",
        examples=[
            ("this node", "gpumap top"),
            ("the table once, by SM time", "gpumap top --sort-by sm --once"),
            ("one namespace in the whole cluster", f"gpumap top -n ml {_SERVER}"),
            ("one row for each process, as in nvidia-smi", "gpumap top --processes"),
        ],
    )
    add_processes(_add_table_flags(top, TOP_ORDERS, CLUSTER_SUMS_BY, cluster=True))
    add_node_flags(top)


def _add_waste(commands: Commands) -> None:
    waste = add_command(
        commands,
        "waste",
        _show,
        summary=WASTE_SUMMARY,
        more="Findings, worst first:\n"
        "  squatter   uses a device that it does not hold\n"
        "  leftover   a process of a pod that no longer exists\n"
        "  over       uses more memory than granted\n"
        "  idle       holds a device, but did no work on any of its engines for --idle-after\n"
        "  unused     even its peak left more of its grant unused than --unused-above, and more than 1 GiB\n"
        "  unmatched  holds slots that match no device\n"
        "gpumap reports only what it can prove. Below the table it lists what it could not check, with the reason.",
        examples=[
            ("the whole cluster, one line for each Deployment, Job …", f"gpumap waste --by workload {_SERVER}"),
        ],
    )
    output = _add_table_flags(waste, WASTE_ORDERS, CLUSTER_SUMS_BY)
    add_thresholds(output)
    add_would_fit(output)
    add_node_flags(waste)


def _add_table_flags(
    parser: Parser, orders: Sequence[str], by: Sequence[str] = (), *, cluster: bool = False
) -> argparse._ArgumentGroup:
    """Add the flags of all tables. Return the group for the flags of a single table.

    `cluster`: the command has sums only of a cluster.
    """
    output = add_output(parser, orders)
    what = parser.add_argument_group("selection")
    what.add_argument("-n", "--namespace", metavar="NAME", help="Show only rows of this namespace. (default: all)")
    what.add_argument("-A", "--all-namespaces", action="store_true", help="Show rows of all namespaces, also with -n.")
    where = add_url(parser)
    how = add_server_flags(parser, where)
    if by:
        how.add_argument("--label-match", metavar="MATCH", help=LABEL_MATCH_HELP)
    add_row_flags(where, by, cluster=cluster)
    leave_to_help_all(parser, HOW_TO_ASK, *NODE_FLAGS)
    return output


def _show(given: argparse.Namespace) -> int:
    from gpumap.cli.reports import REPORTS

    namespace = "" if given.all_namespaces else given.namespace or ""
    if given.node == "":
        raise UsageError("--node: must not be empty")
    by = getattr(given, "by", None)
    if by and given.prometheus is None and (given.command == "top" or by == WORKLOAD):
        raise UsageError(f"--by{'' if given.command == 'top' else f' {by}'} requires --prometheus")
    if getattr(given, "label_match", None) is not None and given.prometheus is not None and by != WORKLOAD:
        raise UsageError(f"--label-match requires --by {WORKLOAD}")
    report = given.command
    if getattr(given, "would_fit", False):
        if given.prometheus is None or not (namespace or given.node or given.all):
            raise UsageError("--would-fit requires --prometheus, with -n NAMESPACE, --node NODE or --all")
        if given.sort_by or by:
            raise UsageError(f"--would-fit cannot be combined with {'--sort-by' if given.sort_by else '--by'}")
        report = f"{given.command} --would-fit"
    return run(given, REPORTS[report], shape_of(given, namespace), given.node or "")
