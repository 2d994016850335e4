"""`gpumap bill` as a table for people, as CSV for spreadsheets, and as JSON for scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from gpumap.cli.bill.counting import LABEL, Amounts, Bill, Line
from gpumap.cli.table import Column, Shape, join_blocks, notes, table
from gpumap.model.formatting import UNKNOWN, percent, printable

VERSION = 1
NO_LABEL = "(none)"
"""Kubernetes allows no label with this value. If one has it all the same, it is in quotes."""
TOTAL = "TOTAL"
_HOUR, _KWH, _GIB = 3600, 3_600_000, 1 << 30
_NONE = "There is nothing to charge."
"""Not that no GPU was used: the lines below may report use that is not charged."""
_FORMULA = ("=", "+", "-", "@")


def _decimals(value: float | None) -> str:
    """Two decimals, rounded half to even. A value that would round to 0 is `<0.01`."""
    if value is None:
        return UNKNOWN
    hundredths = round(value * 100)
    return "<0.01" if value and not hundredths else f"{hundredths // 100}.{hundredths % 100:02}"


def _units(unit: int, value: float | None) -> float | None:
    return None if value is None else value / unit


class _Amount(NamedTuple):
    """A value of a line: its name in CSV and JSON; its title, if the table has a column for it."""

    name: str
    read: Callable[[Amounts], float | None]
    title: str = ""
    show: Callable[[float | None], str] = _decimals


_AMOUNTS = (
    _Amount("held_gpu_hours", lambda amounts: _units(_HOUR, amounts.held_seconds), "GPU-HOURS HELD"),
    _Amount("used_gpu_hours", lambda amounts: _units(_HOUR, amounts.used), "GPU-HOURS USED"),
    _Amount("idle_ratio", Amounts.idle, "IDLE", percent),
    _Amount("held_use_unknown_gpu_hours", lambda amounts: _units(_HOUR, amounts.held_use_unknown())),
    _Amount("energy_kwh", lambda amounts: _units(_KWH, amounts.energy), "KWH"),
    _Amount("energy_joules", lambda amounts: amounts.energy),
    _Amount("memory_gib_hours", lambda amounts: _units(_HOUR * _GIB, amounts.memory)),
)
_WORK_AMOUNTS = (
    _Amount("present_gpu_hours", lambda amounts: _units(_HOUR, amounts.held_seconds), "GPU-HOURS PRESENT"),
    *_AMOUNTS[1:3],
    _Amount("use_unknown_gpu_hours", lambda amounts: _units(_HOUR, amounts.held_use_unknown())),
    _AMOUNTS[-1]._replace(title="GIB-HOURS"),
)
"""Of work outside pods: what it holds is not known, and its energy is not either."""


def _amount_columns(bill: Bill) -> tuple[_Amount, ...]:
    return _WORK_AMOUNTS if bill.is_of_work else _AMOUNTS


def bill_table(bill: Bill, shape: Shape) -> str:
    """The lines and their total. Below: what the lines do not contain."""
    total = Line((TOTAL, *([""] * (len(bill.columns) - 1))), bill.total)
    lines = table(_columns(bill), [*bill.lines, total], shape, lambda line: "bold" if line is total else "")
    return join_blocks([lines if bill.lines else _NONE, notes(_foot(bill), shape.screen)])


def _columns(bill: Bill) -> list[Column[Line]]:
    def name(place: int) -> Callable[[Line], str]:
        return lambda line: _name(line.group[place])

    def amount(column: _Amount) -> Callable[[Line], str]:
        return lambda line: column.show(column.read(line.amounts))

    columns = [Column(title.upper(), name(place), name=True) for place, title in enumerate(bill.columns)]
    columns += [Column(column.title, amount(column)) for column in _amount_columns(bill) if column.title]
    if bill.request.price is not None:
        columns.append(Column("COST", lambda line: _decimals(bill.cost(line.amounts))))
    return columns


def bill_csv(bill: Bill, *, headers: bool = True) -> str:
    """RFC 4180: a header and one row for each line, with all digits. An unknown value is empty. There is no total."""
    price = bill.request.price
    head = ["from", "to", *_parts(bill), *(column.name for column in _amount_columns(bill))]
    rows = [[*head, *(("price_per_gpu_hour", "cost") if price is not None else ())]] if headers else []
    for line in bill.lines:
        values = [column.read(line.amounts) for column in _amount_columns(bill)]
        values += [price, bill.cost(line.amounts)] if price is not None else []
        cells = ("" if value is None else repr(float(value)) for value in values)
        rows.append([bill.request.start, bill.request.end, *map(_name, line.group), *cells])
    return "".join(",".join(map(_quoted, cells)) + "\r\n" for cells in rows)


def bill_values(bill: Bill) -> dict[str, object]:
    """The JSON document. An unknown value is `null`."""
    return {
        "version": VERSION,
        "server": bill.server,
        "from": bill.request.start,
        "to": bill.request.end,
        "resolution_seconds": bill.request.step_seconds,
        "match": bill.request.match,
        "by": bill.request.grouping,
        "label": bill.request.label,
        "price_per_gpu_hour": bill.request.price,
        "rows": [
            {**dict(zip(_parts(bill), line.group, strict=True)), **_amounts(bill, line.amounts)} for line in bill.lines
        ],
        "totals": _amounts(bill, bill.total),
        "unattributed": {
            "energy_kwh": _units(_KWH, bill.unattributed_energy),
            "energy_joules": bill.unattributed_energy,
        },
        "gap_gpu_hours": _units(_HOUR, bill.not_measured_seconds),
        "not_charged_gpu_hours": _units(_HOUR, bill.uncharged_seconds),
        "used_without_share_gpu_hours": _units(_HOUR, bill.total.used_without_share),
        "warnings": list(bill.warnings),
    }


def _parts(bill: Bill) -> tuple[str, ...]:
    """The names of a group's cells for programs: a label's name must not change them."""
    return ("label_value",) if bill.request.grouping == LABEL else bill.columns


def _amounts(bill: Bill, amounts: Amounts) -> dict[str, float | None]:
    return {column.name: column.read(amounts) for column in _amount_columns(bill)} | {"cost": bill.cost(amounts)}


def _foot(bill: Bill) -> Iterator[str]:
    matching = f", of series with {bill.request.match}" if bill.request.match else ""
    window = f"From {bill.request.start} to {bill.request.end}, by {bill.server}{matching}."
    total = bill.total
    if bill.is_of_work:
        yield f"{window} GPU-HOURS PRESENT is time with a process on a GPU. All values are means of scraped samples."
        if (unknown := total.held_use_unknown()) and unknown >= 1:
            yield f"{_hours(unknown)} of these GPU-hours are without SM time. USED and IDLE do not contain them."
        yield from bill.warnings
        return
    yield f"{window} Energy is an estimate."
    if blind := total.held_use_unknown():
        yield (
            f"{_hours(blind)} of the held GPU-hours are on devices without SM time, such as MIG devices. "
            "GPU-HOURS USED and IDLE do not contain them."
        )
    if total.used_without_share:
        yield (
            f"Containers that held no share, or an unknown share, of a GPU used {_hours(total.used_without_share)} "
            "GPU-hours. They are in GPU-HOURS USED, not in HELD and IDLE."
        )
    if bill.unattributed_energy is not None:
        yield f"{_decimals(_units(_KWH, bill.unattributed_energy))} kWh are charged to no container."
    if bill.not_measured_seconds:
        yield f"gpumap could not measure {_hours(bill.not_measured_seconds)} GPU-hours. No container is charged."
    if bill.uncharged_seconds:
        yield (
            f"{_hours(bill.uncharged_seconds)} GPU-hours are older than the server's first sample of their counter. "
            "Their time is not known, so they are not charged."
        )
    yield from bill.warnings


def _name(label: str | None) -> str:
    if label is None:
        return NO_LABEL
    return f'"{label}"' if label == NO_LABEL else label


def _hours(seconds: float) -> str:
    return _decimals(seconds / _HOUR)


def _quoted(text: str) -> str:
    """A cell. A spreadsheet would evaluate a name that begins like a formula; a ' before it prevents that."""
    text = printable(text)
    text = f"'{text}" if text.startswith(_FORMULA) else text
    return '"' + text.replace('"', '""') + '"' if "," in text or '"' in text else text
