"""`gpumap bill` as a table for people, as CSV for spreadsheets, and as values for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from gpumap.cli.bill.lines import LABEL, Amounts, Bill, Line
from gpumap.cli.tables.layout import Row, Shape, aligned, joined, notes
from gpumap.cli.tables.layout import TextColumn as Column
from gpumap.cli.words import UNKNOWN, percent
from gpumap.model.document import Document
from gpumap.model.text import printable

VERSION = 1
NO_LABEL = "(none)"
"""Kubernetes lets no label have such a value; one that has it all the same is in quotes."""
TOTAL = "TOTAL"
_HOUR, _KWH, _GIB = 3600, 3_600_000, 1 << 30
_AMOUNTS = (
    *("held_gpu_hours", "used_gpu_hours", "idle_ratio", "held_use_unknown_gpu_hours"),
    *("energy_kwh", "energy_joules", "memory_gib_hours"),
)
_FORMULA = ("=", "+", "-", "@")


def bill_table(bill: Bill, shape: Shape) -> str:
    """Lines, their total, and below it what the lines do not hold."""
    titles = [name.upper() for name in bill.columns]
    columns = [
        *(Column(title, name=True) for title in titles),
        *(Column("GPU-HOURS HELD"), Column("GPU-HOURS USED"), Column("IDLE"), Column("KWH")),
        *([Column("COST")] if bill.price is not None else []),
    ]
    rows = [Row([*_names(line), *_cells(bill, line.amounts)]) for line in bill.lines]
    padding = [""] * (len(titles) - 1)
    rows.append(Row([TOTAL, *padding, *_cells(bill, bill.total)], "bold"))
    table = aligned(columns, rows, shape) if bill.lines else "No container held or used a GPU."
    return joined([table, notes(_foot(bill), shape.screen)])


def bill_csv(bill: Bill, *, headers: bool = True) -> str:
    """RFC 4180: a header, then a line each, numbers as they are; what is not known is empty. No line of totals."""
    priced = bill.price is not None
    head = ["from", "to", *_parts(bill), *_AMOUNTS, *(("price_per_gpu_hour", "cost") if priced else ())]
    lines = [head] if headers else []
    for line in bill.lines:
        values: list[Fraction | None] = [*_values(line.amounts)]
        values += [bill.price, bill.cost(line.amounts)] if priced else []
        names = map(_name, line.group)
        lines.append([bill.start, bill.end, *names, *("" if one is None else repr(float(one)) for one in values)])
    return "".join(",".join(map(_quoted, cells)) + "\r\n" for cells in lines)


def bill_values(bill: Bill) -> Document:
    """The same for scripts. What is not known is `null`."""
    rows = [dict(zip(_parts(bill), line.group, strict=True)) | _amounts(bill, line.amounts) for line in bill.lines]
    return {
        "version": VERSION,
        "server": bill.server,
        "from": bill.start,
        "to": bill.end,
        "resolution_seconds": bill.step_seconds,
        "match": bill.match,
        "by": bill.by,
        "label": bill.label,
        "price_per_gpu_hour": _float(bill.price),
        "rows": rows,
        "totals": _amounts(bill, bill.total),
        "unattributed": {
            "energy_kwh": _float(_in(bill.unattributed_energy, _KWH)),
            "energy_joules": _float(bill.unattributed_energy),
        },
        "gap_gpu_hours": _float(_in(bill.gap_seconds, _HOUR)),
        "not_charged_gpu_hours": _float(_in(bill.doubted_seconds, _HOUR)),
        "used_without_share_gpu_hours": _float(_in(bill.total.used_without_share, _HOUR)),
        "warnings": list(bill.warnings),
    }


def _parts(bill: Bill) -> tuple[str, ...]:
    """What a line is for, in words that no label can change."""
    return ("label_value",) if bill.by == LABEL else bill.columns


def _foot(bill: Bill) -> Iterator[str]:
    matching = f", of series with {bill.match}" if bill.match else ""
    yield f"From {bill.start} to {bill.end}, by {bill.server}{matching}. Energy is an estimate."
    total = bill.total
    if blind := total.held_blindly():
        yield (
            f"Of the GPU-hours held, {_hours(blind)} are on devices whose use is not known (MIG has no SM time): "
            "GPU-HOURS USED and IDLE are without them."
        )
    if total.used_without_share:
        yield (
            f"{_hours(total.used_without_share)} GPU-hours were used by containers that held no share of a GPU, or one "
            "that is not known: they are in GPU-HOURS USED, not in HELD and IDLE."
        )
    if bill.unattributed_energy is not None:
        yield f"{_number(_in(bill.unattributed_energy, _KWH))} kWh were charged to nobody."
    if bill.gap_seconds:
        yield f"{_hours(bill.gap_seconds)} hours of GPUs could not be measured, and were charged to nobody."
    if bill.doubted_seconds:
        yield (
            f"{_hours(bill.doubted_seconds)} GPU-hours had been counted before this server saw their counters first; "
            "when, nobody knows: they are not charged."
        )
    yield from bill.warnings


def _names(line: Line) -> list[str]:
    return [_name(part) or UNKNOWN for part in line.group]


def _name(part: str | None) -> str:
    if part is None:
        return NO_LABEL
    return f'"{part}"' if part == NO_LABEL else part


def _cells(bill: Bill, amounts: Amounts) -> list[str]:
    found = [
        _number(_in(amounts.held, _HOUR)),
        _number(_in(amounts.used, _HOUR)),
        percent(_float(amounts.idle())),
        _number(_in(amounts.energy, _KWH)),
    ]
    return found if bill.price is None else [*found, _number(bill.cost(amounts))]


def _values(amounts: Amounts) -> tuple[Fraction | None, ...]:
    """As in _AMOUNTS."""
    return (
        _in(amounts.held, _HOUR),
        _in(amounts.used, _HOUR),
        amounts.idle(),
        None if amounts.held is None else amounts.held_blindly() / _HOUR,
        _in(amounts.energy, _KWH),
        amounts.energy,
        _in(amounts.memory, _HOUR * _GIB),
    )


def _amounts(bill: Bill, amounts: Amounts) -> Document:
    found = dict(zip(_AMOUNTS, map(_float, _values(amounts)), strict=True))
    return found | {"cost": _float(bill.cost(amounts))}


def _in(value: Fraction | None, unit: int) -> Fraction | None:
    return None if value is None else value / unit


def _float(value: Fraction | None) -> float | None:
    return None if value is None else float(value)


def _hours(seconds: Fraction) -> str:
    return _number(seconds / _HOUR)


def _number(value: Fraction | None) -> str:
    """Two decimals, rounded half to even; what would look like nothing and is not is said so."""
    if value is None:
        return UNKNOWN
    hundredths = round(value * 100)
    return "<0.01" if value and not hundredths else f"{hundredths // 100}.{hundredths % 100:02}"


def _quoted(text: str) -> str:
    """A cell. A spreadsheet takes a name that begins like a formula for one: a ' keeps it a name."""
    text = printable(text)
    text = f"'{text}" if text.startswith(_FORMULA) else text
    return '"' + text.replace('"', '""') + '"' if "," in text or '"' in text else text
