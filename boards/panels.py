"""The nouns of a board: its panels, what they ask and how they are shown. No JSON, no logic."""

from __future__ import annotations

from dataclasses import dataclass

GREEN, YELLOW, RED, BLUE, GREY = "green", "yellow", "red", "blue", "text"
UNKNOWN = "unknown"
"""What a panel shows where there is no sample: gpumap leaves out what it does not know, and never says 0 for it."""
NONE = "none"
"""The same for lists of what is wrong: nothing is."""

Steps = tuple[tuple[float, str], ...]
"""Colours from a value on, rising. Below the first one it is green."""


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""
    """Of labels that the answer has, as {{label}}, or the same word for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    about: str
    """What it shows, and what it means that something is absent."""
    width: int = 12
    height: int = 8
    unit: str = "short"
    decimals: int | None = None
    steps: Steps = ()
    absent: str = UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat(Panel):
    """One number, as of the end of the time range."""

    query: str
    width: int = 4
    height: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves(Panel):
    queries: tuple[Query, ...]
    stacked: bool = False
    most: float | None = None
    """The axis's upper end."""
    link: Link | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class States(Panel):
    """A line for each series, coloured by its value: 0 is bad, 1 is good."""

    query: Query
    good: str
    bad: str


@dataclass(frozen=True, slots=True)
class Link:
    """From a series or a row to another board, for what its labels name."""

    title: str
    board: str
    chosen: tuple[tuple[str, str], ...]
    """Variables of that board, each with the label that it takes its value from."""


@dataclass(frozen=True, slots=True)
class Key:
    """A column of a table that is a label."""

    label: str
    title: str
    link: Link | None = None
    words: tuple[tuple[str, str, str], ...] = ()
    """Values of the label, each with the words and the colour in which people see it."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table that is a value. Without a title it only says which rows there are."""

    expr: str
    title: str = ""
    unit: str = "short"
    decimals: int | None = None
    steps: Steps = ()
    gauge: bool = False
    """Shown as a bar from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Panel):
    """Rows for people: the answers of all columns, joined by the labels that they have in common."""

    keys: tuple[Key, ...]
    columns: tuple[Column, ...]
    sorted_by: str
    rising: bool = False
    width: int = 24
    height: int = 9


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading, laid out from left to right and from top to bottom."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """What can be chosen: values of a label. All of them at first."""

    name: str
    label: str
    query: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A variable that the reader writes himself."""

    name: str
    label: str
    about: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    uid: str
    title: str
    about: str
    variables: tuple[Variable, ...]
    choices: tuple[Choice, ...] = ()
    rows: tuple[Row, ...]
    since: str = "now-1h"
