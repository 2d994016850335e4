"""`gpumap check`: whether the GPUs of a node work, as one line and an exit code, for health checks of nodes.

It asks a running agent and never the driver, so that a check every few seconds costs nothing and cannot hang on a GPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import TYPE_CHECKING

from gpumap.cli.args import HOW_TO_ASK
from gpumap.cli.commands import SUMMARIES, Program
from gpumap.cli.credentials import URL_VARIABLE, add_credentials
from gpumap.cli.main import handle_ending_signals
from gpumap.cli.parser import add_command, leave_to_help_all, one_of
from gpumap.model.errors import FatalError
from gpumap.model.terms import GPU_CONDITIONS

if TYPE_CHECKING:
    from gpumap.cli.commands import Commands

DEFAULT_URL = "http://127.0.0.1:9401"


def add(commands: Commands, _: Program) -> None:
    parser = add_command(
        commands,
        "check",
        _check,
        summary=SUMMARIES["check"],
        details="The exit code is 0 if the GPUs work, 1 if one has a problem, and 2 if that is unknown.\n"
        "The line has at most 80 bytes and names the worst GPU. Conditions, worst first:\n"
        "  down               the GPU does not answer, or NVML does not list it\n"
        "  row_remap_failure  it could not replace bad memory\n"
        "  recovery_action    the driver requests a reset or reboot\n"
        "  ecc_uncorrected    uncorrectable memory errors in the last hour\n"
        "  xid                a fatal XID error in the last hour, and no reset since\n"
        "  row_remap_pending  it replaces bad memory at its next reset\n"
        "  not_offered        no container can be assigned it (only with --only)",
        examples=[
            ("the agent of this node", "gpumap check"),
            ("one condition", "gpumap check --only row_remap_failure"),
            ("another node", "gpumap check --url http://gpu-1:9401"),
        ],
    )
    selection = parser.add_argument_group("selection")
    selection.add_argument(
        "--only",
        metavar="CONDITION",
        action="append",
        type=one_of(*GPU_CONDITIONS),
        default=[],
        help="Check only this condition; repeatable. Then an unknown value is exit code 2. (default: all conditions "
        "that the driver reports, without not_offered)",
    )
    where = parser.add_argument_group("source")
    url, help_ = os.environ.get(URL_VARIABLE), f"A running gpumap. (default: ${URL_VARIABLE}, or {DEFAULT_URL})"
    where.add_argument("--url", metavar="URL", default=url or DEFAULT_URL, help=help_)
    add_credentials(parser.add_argument_group(HOW_TO_ASK))
    leave_to_help_all(parser, HOW_TO_ASK)


def _check(args: argparse.Namespace) -> int:
    """Print the line. Raises UsageError."""
    handle_ending_signals(signal.SIG_DFL)  # elsewhere the exit code is 0, which means here that the GPUs work
    import asyncio

    from gpumap.cli.sources.agent import maps_of_agent
    from gpumap.model.check import check, short_line

    async def ask() -> tuple[int, str]:
        answers = maps_of_agent(args, 0.0)
        answer = await anext(answers)
        await answers.aclose()
        if isinstance(answer, FatalError):
            return 2, short_line(str(answer))
        return check(answer.maps[0], args.only)

    try:
        code, line = asyncio.run(ask())
    except OSError as error:  # such as too many open files
        code, line = 2, short_line(f"gpumap cannot ask: {error.strerror or error}")
    try:
        print(line, flush=True)
    except OSError:  # a closed pipe, or a full disk: neither is a problem of a GPU
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the line is still in the buffer
    return code
