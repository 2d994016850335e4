"""`gpumap doctor`: its flags, and what it does. `gpumap.cli.tables.doctor` has its lines."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from gpumap.cli.command_line import Parser, add_command, leave_to_help_all
from gpumap.cli.credentials import add_credentials
from gpumap.cli.output_flags import add_form, add_no_headers
from gpumap.cli.server_flags import HOW_TO_ASK, refuse_details
from gpumap.cli.this_node import LOOK_SECONDS, NODE_FLAGS, add_node_flags, from_node, prepare_elsewhere, prepare_here
from gpumap.cli.where import add_url, maps_of_agent
from gpumap.model.errors import FatalError

if TYPE_CHECKING:
    from gpumap.cli.node_maps import NodeMapStream

    Commands = argparse._SubParsersAction[Parser]


def add_doctor(commands: Commands) -> None:
    doctor = add_command(
        commands,
        "doctor",
        _doctor,
        summary="Show what each source and capability reports, and the remedy of each problem.",
        more="The exit code is 1 if NVML does not work, or the kubelet unless --no-kubelet is set. Everything else is "
        "optional.",
        examples=[
            (
                "in the agent's pod, with its mounts and rights",
                "kubectl exec -n NAMESPACE POD -- gpumap doctor",
            ),
            ("what a running agent can report", "gpumap doctor --url http://127.0.0.1:9401"),
        ],
    )
    output = doctor.add_argument_group("output")
    add_form(output, ("table", "json"))
    add_no_headers(output)
    add_url(doctor)
    add_credentials(doctor.add_argument_group(HOW_TO_ASK))
    add_node_flags(doctor)
    leave_to_help_all(doctor, HOW_TO_ASK, *NODE_FLAGS)


def _doctor(args: argparse.Namespace) -> int:
    """Examine the agent of --url, or this node. Raises UsageError and FatalError."""
    import asyncio

    from gpumap.cli.signals import until_stopped

    if args.url is not None:
        prepare_elsewhere(args, "--url")
        stream = maps_of_agent(args, 0.0)
    else:
        refuse_details(args)
        stream = from_node(prepare_here(args), LOOK_SECONDS, watch_allocations=True)
    return asyncio.run(until_stopped(_examine(stream, args)))


async def _examine(stream: NodeMapStream, args: argparse.Namespace) -> int:
    """Print what works and what does not. Returns 1 if something required fails."""
    import contextlib
    import json

    from gpumap.cli import painting
    from gpumap.cli.tables import Shape
    from gpumap.cli.tables.doctor import doctor_checks, doctor_table, doctor_values, works

    painting.take_any_text()
    async with contextlib.aclosing(stream):
        maps = await anext(stream)
    if isinstance(maps, FatalError):
        raise maps
    (node,) = maps.maps
    if args.output == "table":
        shape = Shape(headers=not args.no_headers)
        text = doctor_table(node, replace(shape, screen=painting.screen_of_stdout()))
    else:
        text = json.dumps(doctor_values(maps), indent=2, ensure_ascii=False) + "\n"
    print(end=text, flush=True)
    painting.warn_if_stale(maps)
    return 0 if works(doctor_checks(node)) else 1
