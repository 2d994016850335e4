"""The fields of a JSON object by type, of lines that another process wrote. What is of no such type is a ValueError."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
Row = Sequence[object]


class Fields:
    """A JSON object's fields by type. A missing or null one is told only by `optional` and `integers`."""

    def __init__(self, value: object) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"not an object: {value!r:.80}")
        self._fields: Mapping[str, object] = value

    def has(self, name: str) -> bool:
        return name in self._fields

    def value(self, name: str) -> object:
        if name not in self._fields:
            raise ValueError(f"no {name}")
        return self._fields[name]

    def optional(self, name: str, parse: Callable[[object], T]) -> T | None:
        value = self._fields.get(name)
        return None if value is None else parse(value)

    def integer(self, name: str) -> int:
        return integer(self.value(name))

    def number(self, name: str) -> float:
        return number(self.value(name))

    def text(self, name: str) -> str:
        return text(self.value(name))

    def integers(self, name: str) -> tuple[int, ...]:
        return self.optional(name, each(integer)) or ()


def integer(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"not an integer: {value!r:.80}")
    return value


def number(value: object) -> float:
    if type(value) is not int and type(value) is not float:
        raise ValueError(f"not a number: {value!r:.80}")
    if not abs(value) < 1e300:  # json.loads takes Infinity, NaN and integers that no float can hold
        raise ValueError("not a finite number")
    return float(value)


def text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"not a text: {value!r:.80}")
    return value


def flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"not true or false: {value!r:.80}")
    return value


def row(value: object, length: int) -> Row:
    if not isinstance(value, list) or len(value) < length:
        raise ValueError(f"not a row of {length}: {value!r:.80}")
    return value


def each(parse: Callable[[object], T]) -> Callable[[object], tuple[T, ...]]:
    return lambda value: tuple([parse(one) for one in row(value, 0)])


def optional_integer(value: object) -> int | None:
    return None if value is None else integer(value)
