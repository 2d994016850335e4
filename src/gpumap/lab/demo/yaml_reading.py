"""Reads YAML into declared types. Every mistake is a `ScenarioError` of one line that names its place.

msgspec finds the mistakes in the values; its message is turned into words that a person understands. This module knows
YAML and types, but not what a scenario is.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable, Collection, Hashable
from typing import Annotated, Literal, TypeVar

import msgspec
import yaml
from msgspec import Meta, Struct

T = TypeVar("T")
Hook = Callable[[type, object], object]
"""Converts a value to a type that msgspec does not know, or raises ValueError (msgspec's `dec_hook`)."""


class ScenarioError(ValueError):
    """A mistake in a scenario. Its message is one line for the person who wrote it."""


def decode(value: object, kind: type[T], place: str, hook: Hook) -> T:
    """Convert a value of YAML that is at `place`. Raises `ScenarioError`."""
    try:
        return msgspec.convert(value, kind, dec_hook=hook)
    except msgspec.ValidationError as error:
        raise ScenarioError(_in_words(str(error), value, kind, place, hook)) from error


class _Loader(yaml.SafeLoader):
    """PyYAML takes the last of two equal keys without a word; here that is a mistake, and so is a key without value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise ScenarioError(f'line {key.start_mark.line + 1}: key "{key.value}" stands twice')
                if value.tag == "tag:yaml.org,2002:null":
                    raise ScenarioError(f'line {key.start_mark.line + 1}: key "{key.value}" has no value')
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> object:
    """The one document in `text`."""
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}: " if mark else ""
        raise ScenarioError(f"{place}not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ScenarioError):
            raise
        raise ScenarioError(f"not YAML: {' '.join(str(error).split())}") from error
    finally:
        if loader is not None:
            loader.dispose()


# --- mistakes in words ------------------------------------------------------------------------------------------------

_PLACE = re.compile(r" - at ((?:`key` in )?`\$[\w.\[\]]*`)\Z")
_STEP = re.compile(r"\.(?P<field>\w+)|\[(?P<index>\d+)\]|\[\.\.\.\]")


def _in_words(message: str, value: object, kind: object, place: str, hook: Hook) -> str:
    """msgspec's message as a line that begins with the place of the mistake."""
    at = _PLACE.search(message)
    what, path = (message[: at.start()], at[1]) if at else (message, "")
    for step in _STEP.finditer(path):
        name, value, kind = _step_into(step, value, kind, hook)
        place = f"{place}{name}" if name.startswith("[") or not place else f"{place}.{name}"
    if path.startswith("`key` in "):
        return f"{place or 'scenario'}: each key must be text (in quotes, if it looks like a number)"
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL):
        return unknown_key(unknown[1], [known.encode_name for known in _fields_of(kind)], place)
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        return f'{place or "scenario"}: "{missing[1]}" is missing'
    if what.startswith(("Expected", "Invalid enum value")):
        what = f"expected {_expectation(kind)}"
    found = f", found {_found(value)}" if what.startswith("expected ") else ""
    return f"{place or 'scenario'}: {what}{found}"


def unknown_key(key: str, known: Collection[str], place: str) -> str:
    """The line of a mistake that is a key which is not among `known`."""
    close = difflib.get_close_matches(key, known, n=1)
    hint = f'did you mean "{close[0]}"?' if close else f"known: {', '.join(sorted(known))}"
    return f'{place or "scenario"}: unknown key "{key}" ({hint})'


def _step_into(step: re.Match[str], value: object, kind: object, hook: Hook) -> tuple[str, object, object]:
    """The name, the value and the type of what a step of msgspec's path leads to."""
    if step["field"]:
        name = step["field"]
        of_field = next(one.type for one in _fields_of(kind) if one.encode_name == name)
        return name, value[name] if isinstance(value, dict) else None, of_field
    if step["index"]:
        index = int(step["index"])
        item = next(typing.get_args(one)[0] for one in _members(kind) if typing.get_origin(one) is tuple)
        return f"[{index}]", value[index] if isinstance(value, list) else None, item
    # msgspec does not name the key of a dict: it is the first one with a value that cannot be converted.
    item = next(typing.get_args(one)[1] for one in _members(kind) if typing.get_origin(one) is dict)
    for key, entry in value.items() if isinstance(value, dict) else ():
        try:
            msgspec.convert(entry, item, dec_hook=hook)
        except msgspec.ValidationError:
            return str(key), entry, item
    raise AssertionError("one value of the mapping could not be converted")


def _members(kind: object) -> list[object]:
    """The types of a union, or a type alone, without annotations."""
    if typing.get_origin(kind) is Annotated:
        return _members(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [member for one in typing.get_args(kind) for member in _members(one)]
    return [kind]


def _fields_of(kind: object) -> tuple[msgspec.structs.FieldInfo, ...]:
    structs = [one for one in _members(kind) if isinstance(one, type) and issubclass(one, Struct)]
    return msgspec.structs.fields(structs[0]) if structs else ()


def _expectation(kind: object) -> str:
    """What a value must be, in words."""
    if typing.get_origin(kind) is Annotated:
        plain, *notes = typing.get_args(kind)
        meta = next(note for note in notes if isinstance(note, Meta))
        if meta.description:
            return meta.description
        if meta.ge is not None:
            most = f" to {meta.le}" if meta.le is not None else " on"
            return f"a whole number from {meta.ge}{most}"
        return _expectation(plain)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        words = dict.fromkeys(_expectation(one) for one in typing.get_args(kind) if one is not type(None))
        return " or ".join(words)
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(typing.get_args(kind))}"
    if typing.get_origin(kind) is tuple:
        return "a list"
    return "true or false" if kind is bool else "a mapping"


def _found(value: object) -> str:
    """A value in the words of an error message."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = str(value)
    return f'"{text[:40]}…"' if len(text) > 40 else f'"{text}"'
