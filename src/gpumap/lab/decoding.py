"""Converts decoded YAML or JSON into declared types. A mistake is a ValueError of one line that names its place.

msgspec finds the mistakes. Its message is turned into words that a person understands, such as
`gpus[2].faults[0].kind: expected one of lost, hung, found "lst"`.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

T = TypeVar("T")
Hook = Callable[[type, object], object]
"""Converts a value to a type that msgspec does not know, or raises ValueError (msgspec's `dec_hook`)."""


def convert(value: object, kind: type[T], place: str = "", root: str = "", hook: Hook = lambda _, value: value) -> T:
    """Convert a value at `place`, or with the name `root`. Raises ValueError.

    If a place ends with a colon and a blank, the places in the value follow unchanged.
    """
    try:
        return msgspec.convert(value, kind, dec_hook=hook)
    except msgspec.ValidationError as error:
        raise ValueError(_describe_mistake(str(error), value, kind, place, root, hook)) from error


def decode_json(text: bytes, kind: type[T], name: str) -> T:
    """Convert a JSON object, of the file `name`. Raises ValueError."""
    try:
        value: object = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name}: is not a JSON object")
    return convert(value, kind, f"{name}: ")


def unknown_key(key: str, known: Collection[str], place: str) -> str:
    """Return the error for a key that is not among `known`."""
    close = difflib.get_close_matches(key, known, n=1)
    hint = f'did you mean "{close[0]}"?' if close else f"known: {', '.join(sorted(known))}"
    return f'{place}: unknown key "{key}" ({hint})'


_PLACE = re.compile(r" - at ((?:`key` in )?`\$[\w.\[\]]*`)\Z")
_STEP = re.compile(r"\.(?P<field>\w+)|\[(?P<index>\d+)\]|\[\.\.\.\]")


def _describe_mistake(message: str, value: object, kind: object, place: str, root: str, hook: Hook) -> str:
    """Return msgspec's message as a line that begins with the place of the mistake."""
    place_match = _PLACE.search(message)
    problem, path = (message[: place_match.start()], place_match[1]) if place_match else (message, "")
    for step in _STEP.finditer(path):
        name, value, kind = _step_into(step, value, kind, hook)
        place += name if name.startswith("[") or not place or place.endswith(": ") else f".{name}"
    place = place.removesuffix(": ") or root
    if path.startswith("`key` in "):
        key = next(typing.get_args(member)[0] for member in (*_members(kind), dict[str, object]) if _is(member, dict))
        return f"{place}: each key must be {_expectation(key)}"
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem, re.DOTALL):
        return unknown_key(unknown[1], [known.encode_name for known in _fields_of(kind)], place)
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        return f'{place}: "{missing[1]}" is missing'
    if long := re.fullmatch(r"Expected `array` of length <= (\d+)", problem):
        return f"{place}: has more than {long[1]} entries"
    if wrong_length := re.fullmatch(r"Expected `array` of length (\d+(?: to \d+)?), got (\d+)", problem):
        return f"{place}: expected a list of {wrong_length[1]} values, found {wrong_length[2]}"
    if problem.startswith(("Expected", "Invalid enum value")):
        problem = f"expected {_expectation(kind)}"
    if problem.startswith("."):  # a noun that checks itself names a place below it
        return f"{place}{problem}"
    received = f", found {_found(value)}" if problem.startswith("expected ") else ""
    return f"{place}: {problem}{received}"


def _step_into(step: re.Match[str], value: object, kind: object, hook: Hook) -> tuple[str, object, object]:
    """Return the name, the value and the type at a step of msgspec's path."""
    if step["field"]:
        name = step["field"]
        of_field = next(known.type for known in _fields_of(kind) if known.encode_name == name)
        return name, value[name] if isinstance(value, dict) else None, of_field
    if step["index"]:
        index = int(step["index"])
        items = (_item(member, index) for member in _members(kind))
        return f"[{index}]", value[index] if isinstance(value, list) else None, next(filter(None, items))
    # msgspec does not name the key of a dict: it is the first one with a value that cannot be converted.
    item = next(typing.get_args(member)[1] for member in _members(kind) if _is(member, dict))
    for key, entry in value.items() if isinstance(value, dict) else ():
        try:
            msgspec.convert(entry, item, dec_hook=hook)
        except msgspec.ValidationError:
            return str(key), entry, item
    raise AssertionError("one value of the mapping could not be converted")


def _item(kind: object, index: int) -> object:
    """Return the type of an item of a list or a NamedTuple; `None` for other types."""
    if isinstance(kind, type) and issubclass(kind, tuple):
        return [*typing.get_type_hints(kind, include_extras=True).values()][index]
    return typing.get_args(kind)[0] if _is(kind, tuple) else None


def _is(kind: object, origin: type) -> bool:
    return typing.get_origin(kind) is origin


def _members(kind: object) -> list[object]:
    """Return the types of a union, or a single type, without annotations."""
    if typing.get_origin(kind) is Annotated:
        return _members(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [member for argument in typing.get_args(kind) for member in _members(argument)]
    return [kind]


def _fields_of(kind: object) -> tuple[msgspec.structs.FieldInfo, ...]:
    structs = [member for member in _members(kind) if isinstance(member, type) and issubclass(member, Struct)]
    return msgspec.structs.fields(structs[0]) if structs else ()


def _expectation(kind: object) -> str:
    """Return the valid values in words."""
    if typing.get_origin(kind) is Annotated:
        plain, *notes = typing.get_args(kind)
        meta = next(note for note in notes if isinstance(note, Meta))
        if meta.description:
            return meta.description
        if meta.ge is not None:
            upper_limit = f" to {meta.le}" if meta.le is not None else " on"
            return f"a whole number from {meta.ge}{upper_limit}"
        return _expectation(plain)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        words = dict.fromkeys(
            _expectation(argument) for argument in typing.get_args(kind) if argument is not type(None)
        )
        return " or ".join(words)
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(typing.get_args(kind))}"
    if _is(kind, tuple) or (isinstance(kind, type) and issubclass(kind, tuple)):
        return "a list"
    return _WORDS.get(kind, "a mapping") if isinstance(kind, type) else "a mapping"


_WORDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text (in quotes, if it looks like a number)",
}


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
