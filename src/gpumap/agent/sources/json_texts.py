"""JSON that other programs keep for themselves: read with no more trust than a stranger's. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeGuard

Object = Mapping[str, object]


def parse_object(text: bytes | str) -> Object:
    """Raises ValueError where it is no JSON object."""
    try:
        value: object = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not is_object(value):
        raise ValueError("no object in it")
    return value


def member(value: object, key: str) -> object:
    """A member of an object by its name in any case, as Go reads it; `None` where it has none, or is no object."""
    if not is_object(value):
        return None
    if key in value:
        return value[key]
    return next((found for name, found in value.items() if name.lower() == key.lower()), None)


def is_object(value: object) -> TypeGuard[Object]:
    return isinstance(value, dict)


def is_text(value: object) -> TypeGuard[str]:
    """A string that can be written out again: JSON can name half a character, which no page can hold."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)
