"""What several targets of one node tell, as one: of each device, what the newest says that knows it. Pure.

Two agents that see differently are not to be mixed: what one lays at a pod's door is another's unknown, and both
together are more than there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpumap.cli.fleet import families
from gpumap.cli.fleet.families import Family
from gpumap.cli.fleet.targets import Key, Node
from gpumap.cli.fleet.values import Told, Value

Labels = tuple[str, ...]
Rows = Mapping[str, Sequence[tuple[Labels, Value]]]
"""By family."""
_GIVEN, _USED, _BUILT = "given", "used", "built"
_OF_PARTS = {
    **dict.fromkeys((families.HOLDERS, families.SHARES, families.GRANTS, families.OFFERS), _GIVEN),
    **dict.fromkeys((families.USE, families.PEAKS, families.ACTIVITY, families.LAST_SEEN, families.OWNERS), _USED),
}
_KNOWERS = (
    *((families.DEVICE_INFO, _BUILT), (families.HOLDER_COUNT, _GIVEN)),
    *((families.OWNER_BYTES, _USED), (families.OWNER_PROCESSES, _USED)),
)
"""Which series stand for a device where anything of the kind is known of it."""


def rows_by_target(
    told: Mapping[str, Told], asked: Iterable[Family]
) -> dict[Key, dict[str, list[tuple[Labels, Value]]]]:
    """What each target tells, where all rows were asked for by target."""
    found: dict[Key, dict[str, list[tuple[Labels, Value]]]] = {}
    for family in asked:
        width = len(family.by)
        for row, value in told[family.name].values.items():
            found.setdefault(row[width:], {}).setdefault(family.name, []).append((row[:width], value))
    return found


def told_of_node(node: Node, rows: Mapping[Key, Rows], asked: Sequence[Family]) -> dict[str, Told]:
    """As if the node had one target."""
    leaders: dict[tuple[str, str], Key] = {}
    for family, kind in _KNOWERS:
        for key in node.keys:
            for labels, _ in rows.get(key, {}).get(family.name, ()):
                leaders.setdefault((kind, labels[0]), key)
                if family is families.DEVICE_INFO:
                    leaders.setdefault((kind, labels[1]), key)
    return {family.name: Told(_of_leaders(family, node, rows, leaders)) for family in asked}


def _of_leaders(
    family: Family, node: Node, rows: Mapping[Key, Rows], leaders: dict[tuple[str, str], Key]
) -> dict[Labels, Value]:
    kind = _OF_PARTS.get(family.part, _BUILT)
    place = family.by.index("uuid") if "uuid" in family.by and family.name != families.DEVICELESS.name else None
    values: dict[Labels, Value] = {}
    for key in node.keys:
        for labels, value in rows.get(key, {}).get(family.name, ()):
            if place is None or leaders.setdefault((kind, labels[place]), key) == key:
                values[(*labels, *key) if family.of_target else labels] = value
    return values
