"""The mutants of a module: each is the module with one small change that a test should notice.

Not changed are annotations, decorators, docstrings, assertions, and texts for people (with a space).
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
SKIPPED_FIELDS = {"annotation", "returns", "decorator_list", "type_params"}
SKIPPED_CALLS = {"NewType", "TypeVar", "cast", "field", "lru_cache"}
LONGEST = 100


class Mutant(NamedTuple):
    """A change of a module. `key` names it as long as the function keeps the changed expression."""

    key: str
    line: int
    ordinal: int


class _Change(NamedTuple):
    parent: ast.AST
    field: str
    position: int | None
    new: ast.AST | None
    place: str
    words: str
    line: int


def mutants_of(source: str) -> list[Mutant]:
    """Return every mutant of a module, in the order of its text."""
    found = []
    names = Counter[str]()
    for ordinal, change in enumerate(_changes(ast.parse(source))):
        name = f"{change.place}: {change.words}"
        names[name] += 1
        key = name if names[name] == 1 else f"{name} #{names[name]}"
        found.append(Mutant(key, change.line, ordinal))
    return found


def compile_mutant(source: str, path: str, ordinal: int | None) -> CodeType:
    """Compile a module with one of its changes, or without any."""
    tree = ast.parse(source)
    if ordinal is not None:
        change = next(change for number, change in enumerate(_changes(tree)) if number == ordinal)
        old = getattr(change.parent, change.field)
        new = change.new
        if change.position is None:
            setattr(change.parent, change.field, new)
        elif new is None:
            del old[change.position]
        else:
            old[change.position] = new
        ast.fix_missing_locations(tree)
    return compile(tree, path, "exec", dont_inherit=True)


def _changes(tree: ast.Module) -> Iterator[_Change]:
    yield from _walk(tree, "", 1)


def _walk(node: ast.AST, place: str, line: int) -> Iterator[_Change]:
    for field, value in ast.iter_fields(node):
        if field in SKIPPED_FIELDS:
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or _is_skipped(child):
                continue
            inner = place
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{place}.{child.name}" if place else child.name
            there = getattr(child, "lineno", line)
            for new, words in _replacements(child, node):
                yield _Change(node, field, index, new, inner or "the module", words, there)
            yield from _walk(child, inner, there)


def _is_skipped(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in SKIPPED_CALLS
        case ast.Expr(value=ast.Constant()):
            return True
    return False


def _replacements(node: ast.AST, parent: ast.AST) -> Iterator[tuple[ast.AST | None, str]]:
    """Yield what may replace a node, with words for people. `None` removes it from its list."""
    for new in _new_nodes(node, parent):
        if new is None or isinstance(new, ast.Pass):
            yield new, f"`{_text(node)}` removed"
        else:
            yield new, f"`{_text(node)}` → `{_text(new)}`"


def _new_nodes(node: ast.AST, parent: ast.AST) -> Iterator[ast.AST | None]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield _with(node, ops=[COMPARISONS[type(op)]()])
        case ast.BoolOp(op=op, values=values):
            yield _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
            for number in range(len(values)):
                left = values[:number] + values[number + 1 :]
                yield _with(node, values=left) if len(left) > 1 else left[0]
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            yield _with(node, op=ARITHMETIC[type(op)]())
            if isinstance(node, ast.AugAssign):
                yield ast.copy_location(ast.Pass(), node)
        case ast.Constant(value=bool() as value):
            yield _with(node, value=not value)
        case ast.Constant(value=int() | float() as value):
            yield _with(node, value=value + 1)
        case ast.Constant(value=str() as value) if value and " " not in value:
            yield _with(node, value=value + "X")
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            if not isinstance(test, ast.Compare | ast.BoolOp) and not _is_not(test):
                yield _with(node, test=ast.UnaryOp(ast.Not(), test))
            if isinstance(node, ast.IfExp):
                yield node.body
                yield node.orelse
        case ast.comprehension(ifs=[*ifs]) if ifs:
            for number in range(len(ifs)):
                yield _with(node, ifs=ifs[:number] + ifs[number + 1 :])
        case ast.Return(value=value) if value is not None and not _is_none(value):
            yield _with(node, value=ast.Constant(None))
        case ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()) | ast.Raise():
            yield ast.copy_location(ast.Pass(), node)
        case ast.Continue() if isinstance(parent, ast.For | ast.While | ast.If):
            yield ast.copy_location(ast.Break(), node)
        case ast.Break():
            yield ast.copy_location(ast.Continue(), node)
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
            yield _with(node, func=ast.Name(FUNCTIONS[name], ast.Load()))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _is_not(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.If | ast.While):
        return f"{'if' if isinstance(node, ast.If) else 'while'} {ast.unparse(node.test)}"
    text = " ".join(ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).split()).replace("`", "'")
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
