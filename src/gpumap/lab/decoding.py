"""Converts decoded YAML or JSON into declared types. A mistake is a ValueError that names its place.

The message is msgspec's, behind the place: `gpus[2].faults[0].kind: Invalid enum value 'lst'`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")


def matching(pattern: str, description: str) -> Meta:
    """A text in this form. msgspec searches the pattern; `\\Z` is its end, before which no line ends.

    msgspec's message contains the pattern, and so the description: it must have no parenthesis.
    """
    return Meta(pattern=rf"^(?:{pattern})\Z(?#{description})")


def convert(value: object, kind: type[T], place: str = "", hook: Callable[[Any, object], object] | None = None) -> T:
    """Convert a value at `place`. `hook` converts to types that msgspec does not know. Raises ValueError."""
    try:
        return msgspec.convert(value, kind, dec_hook=hook)
    except msgspec.ValidationError as error:
        raise ValueError(place + _place_and_problem(str(error))) from error


def decode_json(text: bytes, kind: type[T], name: str) -> T:
    """Convert the JSON of the file `name`. Raises ValueError."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {_place_and_problem(str(error)).lstrip('.: ')}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: is not JSON: {error}") from error


def _place_and_problem(message: str) -> str:
    """Turn `problem - at `$.place`` into `.place: problem`. A noun that checks itself names a place below it."""
    problem, _, path = message.partition(" - at `")
    _, _, description = problem.partition("(?#")
    if description:
        problem = f"expected {description.rpartition(')')[0]}"
    place = path.removesuffix("`").rpartition("$")[2]
    return f"{place}{problem}" if problem.startswith(".") else f"{place}: {problem}"
