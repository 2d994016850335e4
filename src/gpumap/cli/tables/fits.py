"""`gpumap waste --would-fit`: pods that hold a whole GPU, and what part of it their last week would fit. A hint."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from gpumap.cli.node_maps import NodeMaps, Week
from gpumap.cli.rows import ContainerRow, rows
from gpumap.cli.tables.fleets import pods_in, values_of
from gpumap.cli.tables.layout import Column, Shape, amount, joined, name, notes, table, with_node
from gpumap.cli.tables.unknowns import few
from gpumap.model.formatting import UNKNOWN, counted, percent, ratio, size
from gpumap.model.names import PodName
from gpumap.model.would_fit import MARGIN, Fit, smallest_fit

_DAYS_MIN = 1.0
"""A shorter history is none: gpumap names no part for it."""


class Holding(NamedTuple):
    """A container that holds a whole GPU, its pod's last week there, and what that would fit."""

    row: ContainerRow
    week: Week | None
    fit: Fit | None

    @property
    def node(self) -> str:
        return self.row.node


_COLUMNS: tuple[Column[Holding], ...] = (
    name("NAMESPACE", lambda one: one.row.container.namespace),
    name("POD", lambda one: one.row.container.pod),
    name("CONTAINER", lambda one: one.row.container.container, spare=1),
    Column("DEVICE", lambda one: one.row.device.name),
    name("MODEL", lambda one: one.row.device.model),
    Column("DAYS SEEN", lambda one: UNKNOWN if one.week is None else f"{one.week.days:.1f}"),
    amount("PEAK", size, lambda one: one.week.memory_peak_bytes if one.week else None),
    Column("SM PEAK", lambda one: percent(one.week.sm_ratio if one.week else None)),
    Column("WOULD FIT", lambda one: one.fit.what if one.fit else UNKNOWN),
    amount("SAVES GPUS", ratio, lambda one: one.fit.saved_gpus if one.fit else None),
)


def fit_table(maps: NodeMaps, shape: Shape) -> str:
    """Return the holdings, the largest saving first, and what a hint is based on."""
    holdings = _holdings(maps, shape)
    saved = sum(one.fit.saved_gpus for one in holdings if one.fit)
    hint = (
        f"A hint for the owner, not a finding: the peak memory and the busiest ten minutes of the last 7 days, plus "
        f"{MARGIN - 1:.0%}. Sizes of MIG devices are estimates. Pods with several devices or less than a day of "
        "samples are not checked."
    )
    block = table(with_node(_COLUMNS, fleet=maps.fleet), holdings, shape) if holdings else "No pod holds a whole GPU."
    return joined(
        [
            block,
            notes([hint] if holdings else [], shape.screen),
            notes(few(maps.missing, maps.fleet), shape.screen, "red"),
            notes(
                [f"Sum: {ratio(saved)} of {counted(len(holdings), 'GPU')}."] if holdings else [], shape.screen, "bold"
            ),
        ]
    )


def fit_values(maps: NodeMaps, shape: Shape) -> dict[str, object]:
    """Return the same for scripts."""
    return values_of(maps, would_fit=[_value(one) for one in _holdings(maps, shape)])


def fit_names(maps: NodeMaps, shape: Shape) -> list[tuple[str, str]]:
    """Return the pods that would fit a part of their GPU."""
    return pods_in(one.row.container for one in _holdings(maps, shape) if one.fit)


def _value(one: Holding) -> dict[str, object]:
    return {
        "node": one.node,
        **one.row.container._asdict(),
        "uuid": one.row.device.uuid,
        "model": one.row.device.model,
        "days_seen": round(one.week.days, 2) if one.week else None,
        "memory_peak_bytes": one.week.memory_peak_bytes if one.week else None,
        "sm_peak_ratio": round(one.week.sm_ratio, 4) if one.week else None,
        "would_fit": one.fit.what if one.fit else None,
        "saved_gpus": round(one.fit.saved_gpus, 3) if one.fit else None,
    }


def _holdings(maps: NodeMaps, shape: Shape) -> list[Holding]:
    held = [row for node_map in maps.maps for _, found in rows(node_map) for row in found if row.holds]
    devices = {(row.container.pod_name, row.device.uuid) for row in held}
    several = Counter(pod for pod, _ in devices)
    whole = (
        row for row in held if row.gpus == 1 and row.device.is_gpu and shape.namespace in ("", row.container.namespace)
    )
    found = [_holding(row, maps, several) for row in whole]
    return sorted(
        found, key=lambda one: (-(one.fit.saved_gpus if one.fit else 0), one.row.container, one.row.device.uuid)
    )


def _holding(row: ContainerRow, maps: NodeMaps, several: Counter[PodName]) -> Holding:
    week = (maps.weeks or {}).get((*row.container.pod_name, row.device.uuid))
    fit = None
    if (
        week
        and week.days >= _DAYS_MIN
        and row.device.total_bytes
        and row.device.model
        and several[row.container.pod_name] == 1
    ):
        fit = smallest_fit(row.device.model, row.device.total_bytes, week.memory_peak_bytes, week.sm_ratio)
    return Holding(row, week, fit)
