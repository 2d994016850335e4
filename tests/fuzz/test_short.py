"""A short pass over every target, with fixed seeds: old crashes, the examples, some mutations; and the table itself."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from tests.exposed import Page
from tests.fuzz import engine
from tests.fuzz.engine import CRASHES, crash_files, inputs, kind_of, tried
from tests.fuzz.mutators import Mutate, mutate_raw
from tests.fuzz.parsers import NOT_FOREIGN, parsing_modules
from tests.fuzz.table import TARGETS
from tests.fuzz.target import SOURCES, FoundError, Target, attempt, measured
from tests.promtool import accepted

SEED = 22
INPUTS, SLOW_INPUTS = 40, 3
MEASURED = 6
"""Examples and mutations. The test counts their work for each target."""
FAST = {name: target for name, target in TARGETS.items() if not target.slow}


@pytest.mark.parametrize("name", TARGETS)
def test_no_mutation_breaks_a_target(name: str) -> None:
    """Each declared error is fine; anything else, a second answer, or a broken law is not."""
    target = TARGETS[name]
    examples = () if target.slow else target.seeds()
    for data in (*examples, *itertools.islice(inputs(target, SEED), SLOW_INPUTS if target.slow else INPUTS)):
        crash = tried(target, data)
        assert crash is None, f"kept as {engine.keep(target, crash)}\n{crash}"


@pytest.mark.parametrize(
    ("name", "path"),
    [pytest.param(name, path, id=f"{name}/{path.name}") for name in TARGETS for path in crash_files(TARGETS[name])],
)
def test_an_input_that_once_broke_a_target_does_so_no_more(name: str, path: Path) -> None:
    attempt(TARGETS[name], path.read_bytes())
    if not TARGETS[name].slow:
        measured(TARGETS[name], path.read_bytes(), memory=True)


@pytest.mark.parametrize("name", FAST)
def test_a_target_reaches_the_parsers_that_it_names_with_little_work(name: str) -> None:
    """Its examples run code of each module in its row, and the work grows no faster than the input."""
    target = FAST[name]
    examples = sorted(target.seeds(), key=len)
    step = max(len(examples) // MEASURED, 1)
    reached: set[str] = set()
    for data in [*examples[::step], *itertools.islice(inputs(target, SEED + 1), MEASURED)]:
        reached |= measured(target, data, memory=True).modules
    assert set(target.modules) <= reached, set(target.modules) - reached


def test_every_crash_belongs_to_a_target() -> None:
    assert {path.name for path in CRASHES.iterdir() if path.is_dir()} <= TARGETS.keys()


def test_every_parser_is_a_target() -> None:
    """Each module that decodes something is in the row of a target, or listed with the reason why it is not."""
    reached = {module for target in TARGETS.values() for module in target.modules}
    found = set(parsing_modules())
    assert found - reached - NOT_FOREIGN.keys() == set(), "add a target, docs/dev/testing.md explains how"
    assert NOT_FOREIGN.keys() - found == set(), "no such parser"
    assert NOT_FOREIGN.keys() & reached == set(), "a target reaches it"


# --- the finders find -------------------------------------------------------------------------------------------------


def _target(run: Any, mutate: Mutate = mutate_raw) -> Target:
    return Target("test", run, lambda: [b'{"a": [1, "b"]}'], mutate, ())


def _undeclared(data: bytes) -> object:
    raise KeyError(data)


def _nested(data: bytes) -> object:
    return _nested(data)


_COUNT = itertools.count()


@pytest.mark.parametrize("run", [_undeclared, _nested, lambda data: next(_COUNT)])
def test_a_broken_parser_is_found(run: Any) -> None:
    """An undeclared error, endless recursion, and another answer for the same bytes."""
    target = _target(run)
    found = [crash for data in itertools.islice(inputs(target, 1), 40) if (crash := tried(target, data))]
    assert found
    assert len({kind_of(crash) for crash in found}) == 1


def test_work_beyond_the_limit_is_found(tmp_path: Path) -> None:
    """A parser with work that grows with the square of the input."""
    from gpumap.model import formatting

    target = _target(lambda data: [formatting.counted(1, "a") for _ in data for _ in data])
    assert measured(target, b"x" * 10).lines >= 100
    with pytest.raises(FoundError, match="lines for 2000 bytes"):
        measured(target, b"x" * 2000)


# --- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [
        "a 1\n",
        "# TYPE a gauge\na 1",
        '# TYPE a gauge\na{b="c} 1\n',
        '# TYPE a gauge\na{b="\\x"} 1\n',
        '# TYPE a gauge\na{b="1"} 1\na{b="1"} 2\n',
        "# TYPE a gauge\n# TYPE a gauge\na 1\n",
        "# TYPE a gauge\na 1\n# TYPE b gauge\nb 1\n# HELP a x\n",
        "# TYPE a gauge\nb 1\n",
        "# TYPE a gauge\na 1 2 3\n",
        "# TYPE gpumap_a gauge\ngpumap_a NaN\n",
        "# TYPE gpumap_a gauge\ngpumap_a +Inf\n",
    ],
)
def test_the_grammar_refuses_a_bad_page(page: str) -> None:
    with pytest.raises(AssertionError):
        Page(page)


def test_promtool_accepts_what_the_grammar_accepts() -> None:
    """Pages of nodes with names of any characters."""
    target = TARGETS["node"]
    for data in itertools.islice(inputs(target, SEED + 2), 6):
        try:
            pages = target.run(data)
        except ValueError:
            continue
        assert isinstance(pages, tuple)
        accepted("check", "metrics", page=pages[0].decode())


# --- regular expressions ----------------------------------------------------------------------------------------------


def test_no_expression_takes_for_ever() -> None:
    """No expression in gpumap's code repeats, without a limit, what itself repeats without a limit: such an expression
    can take exponential time."""
    patterns = list(_patterns())
    assert len(patterns) > 60
    assert {pattern for pattern in patterns if _repeats_repeats(pattern)} == _SEPARATED
    assert _repeats_repeats("(a+)+b")
    assert not _repeats_repeats("(?:a{1,9}b)*c+")


_SEPARATED = {
    r"(?:[a-z0-9-]+\.)*nvidia\.com/[A-Za-z0-9._-]{1,63}=[A-Za-z0-9._:-]{1,253}",
    r"([0-9]{1,10} )\((.*)\)( [A-Za-z](?: -?[0-9]+)*\s*)",
}
"""Each repetition of the outer one has a dot, a blank, a comma or a dash, which the inner one cannot match."""


def _patterns() -> list[str]:
    """Return the constant first arguments of re's functions. Parts of an f-string become a letter."""
    found = set()
    for path in Path(SOURCES).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.") and node.args:
                text = _constant(node.args[0])
                try:
                    re.compile(text or "")
                except re.error:
                    continue
                found.add(text or "")
    return sorted(found)


def _constant(node: ast.AST) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Constant(value=bytes(text)):
            return text.decode("latin-1")
        case ast.JoinedStr(values=parts):
            return "".join(_constant(part) or "x" for part in parts)
        case _:
            return None


def _repeats_repeats(pattern: str) -> bool:
    return _search(_parser.parse(pattern), inside=False)


def _search(parsed: Any, *, inside: bool) -> bool:
    for kind, argument in parsed:
        repeats = kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
        endless = repeats and argument[1] == _constants.MAXREPEAT
        if endless and inside:
            return True
        below = [argument[2]] if repeats else [one for one in _parts(argument) if isinstance(one, _parser.SubPattern)]
        if any(_search(one, inside=inside or endless) for one in below):
            return True
    return False


def _parts(argument: Any) -> list[Any]:
    if isinstance(argument, _parser.SubPattern):
        return [argument]
    if isinstance(argument, tuple | list):
        return [part for one in argument for part in _parts(one)]
    return []
