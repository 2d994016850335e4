"""A short pass over every target: old crashes, examples, changes of them; and the proof that each parser has one."""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import re
import sys
import threading
from pathlib import Path
from re import _constants, _parser  # type: ignore[attr-defined]
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.exposed import Page
from tests.fuzz.changes import edited
from tests.fuzz.parsers import NOT_FOREIGN, module_name, parsing_modules
from tests.fuzz.table import TARGETS
from tests.fuzz.target import CRASHES, SOURCES, BrokenRuleError, attempt, keep_crash, target
from tests.promtool import accepted

INPUTS, SLOW_INPUTS = 40, 3
EXAMPLES = 18
"""So many examples of a target show what it reaches. `tests/test_golden.py` replays all captures."""
SHORT = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("name", TARGETS)
def test_no_change_breaks_a_target(name: str) -> None:
    """Declared errors are fine. Other errors, a second answer, a broken law and too much work are not."""
    target = TARGETS[name]

    @settings(SHORT, max_examples=SLOW_INPUTS if target.slow else INPUTS)
    @given(data=target.inputs())
    def run(data: bytes) -> None:
        try:
            attempt(target, data)
        except Exception as error:
            keep_crash(target, data, error)
            raise

    run()


@pytest.mark.parametrize(
    ("name", "path"),
    [pytest.param(name, path, id=f"{name}/{path.name}") for name in TARGETS for path in TARGETS[name].crash_files()],
)
def test_an_input_that_once_broke_a_target_does_so_no_more(name: str, path: Path) -> None:
    """Each stored crash is refused, or read, with little work."""
    attempt(TARGETS[name], path.read_bytes(), measured=True)


def test_every_crash_belongs_to_a_target() -> None:
    """A target that is renamed keeps its crashes."""
    assert {path.name for path in CRASHES.iterdir()} <= TARGETS.keys()


def test_every_parser_has_a_target() -> None:
    """Each module that decodes something runs when the examples are read, or `NOT_FOREIGN` says why it need not."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function, not an import
            files.add(frame.f_code.co_filename)

    trace_before = sys.gettrace()
    threading.settrace(note)
    sys.settrace(note)
    try:
        for target in TARGETS.values():
            examples = [*target.examples()]
            for data in (*examples[:: -(-len(examples) // EXAMPLES)], examples[-1]):
                attempt(target, data, measured=False)
    finally:
        sys.settrace(trace_before)
        threading.settrace(None)
    modules = {module_name(Path(file)) for file in files if file.startswith(str(SOURCES))}
    modules |= {module for target in TARGETS.values() for module in target.modules}
    parsers = set(parsing_modules())
    assert parsers - modules - NOT_FOREIGN.keys() == set(), "add a target, docs/dev/testing.md explains how"
    assert NOT_FOREIGN.keys() - parsers == set(), "no such parser"


# --- the rules --------------------------------------------------------------------------------------------------------

_NUMBERS = itertools.count()


def _raise_undeclared(data: bytes) -> object:
    raise KeyError(data)


def _recurse(data: bytes) -> object:
    return _recurse(data)


@pytest.mark.parametrize("read", [_raise_undeclared, _recurse, lambda data: next(_NUMBERS)])
def test_a_broken_parser_breaks_a_rule(read: Any) -> None:
    """It raises an undeclared error, recurses without end, or gives another answer for the same bytes."""
    with pytest.raises((KeyError, RecursionError, BrokenRuleError)):
        attempt(target(lambda: [], edited)(read), b"{}", measured=True)


def test_work_beyond_the_limit_breaks_a_rule() -> None:
    """A parser with work that grows with the square of the input."""
    from gpumap.model import formatting

    square = target(lambda: [], edited)(lambda data: [formatting.counted(1, "a") for _ in data for _ in data])
    attempt(square, b"x" * 10, measured=True)
    with pytest.raises(BrokenRuleError, match=r"lines .* for 600 bytes"):
        attempt(square, b"x" * 600, measured=True)


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
    """Pages of nodes, one of them with names of any characters."""
    examples = [*TARGETS["node"].examples()]
    for data in (examples[-1], *examples[:: len(examples) // 5]):
        pages = TARGETS["node"].read(data)
        assert isinstance(pages, tuple)
        accepted("check", "metrics", page=pages[0].decode())


# --- regular expressions ----------------------------------------------------------------------------------------------


def test_no_expression_takes_for_ever() -> None:
    """No expression repeats without a limit what itself repeats without one: it could take exponential time."""
    patterns = _patterns()
    assert len(patterns) > 60
    assert {pattern for pattern in patterns if _repeats_repeats(pattern)} == _SEPARATED
    assert _repeats_repeats("(a+)+b")
    assert not _repeats_repeats("(?:a{1,9}b)*c+")


_SEPARATED = {
    r"(?:[a-z0-9-]+\.)*nvidia\.com/[A-Za-z0-9._-]{1,63}=[A-Za-z0-9._:-]{1,253}",
    r"([0-9]{1,10} )\((.*)\)( [A-Za-z](?: -?[0-9]+)*\s*)",
}
"""Each repetition of the outer one has a dot, a blank, a comma or a dash, which the inner one cannot match."""


def _patterns() -> set[str]:
    """Return the constant first arguments of re's functions. Parts of an f-string become a letter."""
    patterns = set()
    for node in itertools.chain.from_iterable(ast.walk(ast.parse(path.read_text())) for path in SOURCES.rglob("*.py")):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.") and node.args:
            with contextlib.suppress(re.error):
                patterns.add(re.compile(_constant(node.args[0]) or "").pattern)
    return patterns


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
    return _has_nested_repeat(_parser.parse(pattern), inside=False)


def _has_nested_repeat(parsed: Any, *, inside: bool) -> bool:
    """`parsed` is a part of a parsed expression: a list of operations, an operation with its arguments, or a value."""
    if isinstance(parsed, tuple) and parsed[:1] in ((_constants.MAX_REPEAT,), (_constants.MIN_REPEAT,)):
        _, maximum, repeated = parsed[1]
        is_endless = maximum == _constants.MAXREPEAT
        return (is_endless and inside) or _has_nested_repeat(repeated, inside=inside or is_endless)
    parts = parsed if isinstance(parsed, tuple | list | _parser.SubPattern) else ()
    return any(_has_nested_repeat(part, inside=inside) for part in parts)
