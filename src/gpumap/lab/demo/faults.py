"""Reads what goes wrong with a card of a scenario: faults, XID events, memory errors."""

from __future__ import annotations

from functools import partial

from gpumap.lab.demo.scenario_model import Fault, MemoryErrors, Xid
from gpumap.lab.demo.yaml_fields import Fields, ScenarioError, boolean, duration, instant, integer, one_of
from gpumap.model.readings import RECOVERY_ACTIONS

FAULTS = ("lost", "hung", "reset_required", "insufficient_power", "irq_issue", "no_permission", "unknown")
ECC_KEYS = ("corrected", "corrected_every", "uncorrected")
ROW_KEYS = ("correctable", "uncorrectable", "pending", "failure")
MOST_ERRORS = 2**31 - 1
MOST_ROWS = 512
"""As many as a card can remap."""


def read_faults(fields: Fields) -> tuple[Fault, ...]:
    return fields.each("faults", _fault)


def read_xids(fields: Fields, instances: int) -> tuple[Xid, ...]:
    """In the order of their times. The card has so many MIG devices."""
    return tuple(sorted(fields.each("xids", partial(_xid, instances=instances)), key=lambda xid: xid.at))


def read_wear(fields: Fields) -> MemoryErrors:
    nothing = Fields({}, "", ())
    ecc = fields.maybe("ecc", partial(Fields, known=ECC_KEYS), nothing)
    rows = fields.maybe("remapped_rows", partial(Fields, known=ROW_KEYS), nothing)
    errors, number = integer(0, MOST_ERRORS), integer(0, MOST_ROWS)
    return MemoryErrors(
        corrected=ecc.maybe("corrected", errors, 0),
        corrected_every_seconds=ecc.maybe("corrected_every", duration, None),
        uncorrected=ecc.maybe("uncorrected", errors, 0),
        remapped=(rows.maybe("correctable", number, 0), rows.maybe("uncorrectable", number, 0)),
        remap_pending=rows.maybe("pending", boolean, False),
        remap_failure=rows.maybe("failure", boolean, False),
    )


def _fault(value: object, place: str) -> Fault:
    fields = Fields(value, place, ("kind", "from", "until", "recovery"))
    kind = fields.need("kind", one_of(*FAULTS))
    start, end = fields.maybe("from", instant, 0.0), fields.need("until", duration)
    if end <= start:
        raise ScenarioError(f"{place}: ends before it begins")
    return Fault(kind, start, end, fields.maybe("recovery", one_of(*RECOVERY_ACTIONS), None))


def _xid(value: object, place: str, instances: int) -> Xid:
    fields = Fields(value, place, ("at", "code", "instance"))
    if "instance" in fields and not instances:
        raise ScenarioError(f"{fields.at('instance')}: the GPU has no MIG devices")
    instance = fields.maybe("instance", integer(0, instances - 1), None)
    return Xid(fields.need("at", instant), fields.need("code", integer(1, 999)), instance)
