"""`gpumap doctor`: its flags, and how it is done: a document, the facts around it, and what both tell."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from gpumap.cli.command_line import Parser, add_command
from gpumap.cli.credentials import add_credentials
from gpumap.cli.output_flags import add_form, add_no_headers
from gpumap.cli.server_flags import refuse_details
from gpumap.cli.signals import until_stopped
from gpumap.cli.this_node import LOOK_SECONDS, add_node_flags, from_node, node_facts, prepare_elsewhere, prepare_here
from gpumap.cli.where import ELSEWHERE, add_url, maps_of_agent
from gpumap.model.errors import FatalError

if TYPE_CHECKING:
    from gpumap.cli.node_documents import Sights
    from gpumap.cli.tables import Shape
    from gpumap.model.node_facts import Facts

    Commands = argparse._SubParsersAction[Parser]


def add_doctor(commands: Commands) -> None:
    doctor = add_command(
        commands,
        "doctor",
        _doctor,
        says="check each source and each privilege: what works, what not, and the remedy",
        more="Exits with 1 if the kubelet or NVML does not work; everything else is optional.",
        examples=[
            (
                "in the agent's own pod, which has its mounts and rights",
                "kubectl exec -n NAMESPACE POD -- gpumap doctor",
            ),
            ("what a running agent can tell", "gpumap doctor --url http://127.0.0.1:9401"),
        ],
    )
    output = doctor.add_argument_group("output")
    add_form(output, ("table", "json"))
    add_no_headers(output)
    add_credentials(add_url(doctor))
    add_node_flags(doctor)


def _doctor(given: argparse.Namespace) -> int:
    from gpumap.cli.tables import Shape

    shape = Shape(headers=not given.no_headers)
    if given.url is not None:
        prepare_elsewhere(given, "--url", ELSEWHERE["--url"])
        sights = maps_of_agent(given, 0.0)
        return asyncio.run(until_stopped(_examine(sights, None, given.output, shape)))
    refuse_details(given)
    settings = prepare_here(given)
    sights = from_node(settings, LOOK_SECONDS)
    return asyncio.run(until_stopped(_examine(sights, lambda: node_facts(settings), given.output, shape)))


async def _examine(sights: Sights, look_around: Callable[[], Awaitable[Facts]] | None, form: str, shape: Shape) -> int:
    """Print what works and what not, by a document and the facts around. Gives 1 where something required fails."""
    from gpumap.cli import show
    from gpumap.cli.doctor.verdicts import as_values, examine, works
    from gpumap.cli.tables import doctor_table

    show.take_any_text()
    async with contextlib.aclosing(sights):
        seen = await anext(sights)
    if isinstance(seen, FatalError):
        raise seen
    (found,) = seen.documents
    facts = await look_around() if look_around else None
    with show.reading():
        checks = examine(found, facts)
        if form == "table":
            text = doctor_table(checks, replace(shape, screen=show.screen_of_stdout()))
        else:
            text = json.dumps(as_values(found, checks), indent=2, ensure_ascii=False) + "\n"
    print(end=text, flush=True)
    show.warn_if_stale(seen)
    return 0 if works(checks) else 1
