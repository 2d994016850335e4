"""All targets, by name."""

from __future__ import annotations

from tests.fuzz import agent_targets, command_targets, driver_targets, lab_targets, node_targets
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        *node_targets.TARGETS,
        *agent_targets.TARGETS,
        *driver_targets.TARGETS,
        *lab_targets.TARGETS,
        *command_targets.TARGETS,
    )
}
