"""All targets, by name."""

from __future__ import annotations

from tests.fuzz import agent_targets, command_targets, driver_targets, lab_targets, node_targets
from tests.fuzz.target import Target

_MODULES = (node_targets, agent_targets, driver_targets, lab_targets, command_targets)
TARGETS = {value.name: value for module in _MODULES for value in vars(module).values() if isinstance(value, Target)}
