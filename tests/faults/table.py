"""The rows that `make faults` prints: the parameters of the tests in this folder, in the order of files and lines.

A row that no test has as a parameter is not in the table, and pytest runs each parameter. So the table has no row
without a test.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tests.faults.matrix import Fault, Refusal, Row

FOLDER = Path(__file__).parent


def rows() -> list[Row]:
    """Every row of every test of the folder."""
    return [row for file in sorted(FOLDER.glob("test_*.py")) for row in rows_of(_module(file.stem))]


def rows_of(module: ModuleType) -> Iterator[Row]:
    """The rows that tests of one module have as parameters."""
    for name, test in vars(module).items():
        if name.startswith("test_"):
            for mark in getattr(test, "pytestmark", ()):
                if mark.name == "parametrize":
                    yield from (one for one in mark.args[1] if isinstance(one, Fault | Refusal))


def declared(module: ModuleType) -> list[Row]:
    """The rows that a module declares, also in tuples, whether or not a test has them."""
    values = [one for value in vars(module).values() for one in (value if isinstance(value, tuple) else (value,))]
    return [one for one in values if isinstance(one, Fault | Refusal)]


def modules() -> list[ModuleType]:
    return [_module(file.stem) for file in sorted(FOLDER.glob("test_*.py"))]


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"tests.faults.{name}")
