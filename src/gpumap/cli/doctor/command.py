"""`gpumap doctor`: its flags. Every command line reads them, so what it does is in `run`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from gpumap.cli.args import HOW_TO_ASK, add_form, add_no_headers, add_url
from gpumap.cli.credentials import add_credentials
from gpumap.cli.parser import Parser, add_command, leave_to_help_all
from gpumap.cli.sources.this_node import NODE_FLAGS, add_node_flags

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Parser]


def add_doctor(commands: Commands) -> None:
    doctor = add_command(
        commands,
        "doctor",
        _doctor,
        summary="Check each source and each privilege, and print the remedy of each problem.",
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


def _doctor(given: argparse.Namespace) -> int:
    from gpumap.cli.doctor.run import run

    return run(given)
