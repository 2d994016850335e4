"""`make mutation`: which changes it makes, and that each change that no test noticed has a reason."""

from __future__ import annotations

import ast
from types import CodeType, FunctionType
from typing import Any

import pytest

from mutation.__main__ import order_of, rooms
from mutation.mutants import compile_mutant, mutants_of
from mutation.report import explained, results
from mutation.trial import ROOT, changed_functions, patch

SOURCE = """
LIMIT = 2

def first(rows: list[int], name: str = "a") -> int | None:
    '''A text for people: 1 < 2.'''
    assert rows is not None
    for row in rows:
        if row < LIMIT and not name:
            continue
        return row
    log("two words", "word")
    return None
"""
CHANGES = [
    "the module: `2` → `3`",
    "first: `'a'` → `'aX'`",
    "first: `row < LIMIT and (not name)` → `row < LIMIT or not name`",
    "first: `row < LIMIT and (not name)` → `not name`",
    "first: `row < LIMIT and (not name)` → `row < LIMIT`",
    "first: `row < LIMIT` → `row <= LIMIT`",
    "first: `not name` → `name`",
    "first: `continue` → `break`",
    "first: `return row` → `return None`",
    "first: `log('two words', 'word')` removed",
    "first: `'word'` → `'wordX'`",
]
MODULES = [module for modules, _ in rooms().values() for module in modules]


def test_changes() -> None:
    """Values, conditions, jumps and calls change; annotations, assertions and texts for people do not."""
    assert sorted(one.key for one in mutants_of(SOURCE)) == sorted(CHANGES)


@pytest.mark.parametrize("module", MODULES)
def test_each_change_of_a_module_has_a_name(module: str) -> None:
    """No two have the same name, and the sample is the same in each run."""
    mutants = mutants_of((ROOT / module).read_text(encoding="utf-8"))
    assert len({one.key for one in mutants}) == len(mutants)
    assert [*order_of(module, mutants)] == [*order_of(module, mutants)]


@pytest.mark.parametrize("key", CHANGES[2:9])
def test_a_changed_function_replaces_the_one_in_use(key: str) -> None:
    """A function that others imported already behaves as the mutant."""
    (mutant,) = [one for one in mutants_of(SOURCE) if one.key == key]
    first = function_of(compile_mutant(SOURCE, "room.py", None))
    changed, functions = changed_functions(SOURCE, "room.py", mutant)
    assert not patch([], functions), "then it is imported again"
    assert patch([first], functions)
    cases = [([1, 2, 3], ""), ([1, 2], "b"), ([2, 5], ""), ([1, 9], "")]

    def outcomes(function: FunctionType) -> list[object]:
        return [function(*case) for case in cases]

    assert outcomes(first) == outcomes(function_of(changed))
    assert outcomes(first) != outcomes(function_of(compile_mutant(SOURCE, "room.py", None)))


def function_of(code: CodeType) -> FunctionType:
    module: dict[str, Any] = {"log": lambda *_: None}
    exec(code, module)
    found: FunctionType = module["first"]
    return found


def test_each_survivor_is_explained() -> None:
    """A mutant that no test noticed has a reason; a reason is of a mutant that exists."""
    known = explained()
    for module, result in results().items():
        assert {*result["survivors"]} <= known.get(module, {}).keys(), module
    for module, reasons in known.items():
        keys = {one.key for one in mutants_of((ROOT / module).read_text(encoding="utf-8"))}
        assert reasons.keys() <= keys, module
        assert all(reason.strip().endswith(".") for reason in reasons.values())


def test_every_pure_room_is_mutated() -> None:
    """The modules that decide what gpumap reports are in a room, and each room's tests exist."""
    pure = {
        str(path.relative_to(ROOT))
        for folder in ("agent/join", "agent/metrics", "cli/bill")
        for path in (ROOT / "src/gpumap" / folder).glob("*.py")
    }
    assert pure - {*MODULES} == {
        f"src/gpumap/cli/bill/{name}.py" for name in ("__init__", "command", "pod_labels", "query")
    }, "these talk to a server, and no other module does"
    for _, tests in rooms().values():
        for test in tests:
            file, _, function = test.partition("::")
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            assert not function or function in {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
