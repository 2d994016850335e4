"""Typed reading of YAML values. Every mistake is a `ScenarioError` of one line that names its place.

A reader takes a value and its place (`pods[2].name`) and returns the value typed, or raises. Knows YAML and units,
but not what a scenario is.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Hashable
from typing import TypeVar

import yaml

from gpumap.model.units import parse_duration

T = TypeVar("T")
D = TypeVar("D")
Reader = Callable[[object, str], T]

SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([KMGT]i)?B", re.ASCII)
UNITS = {None: 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
KUBERNETES_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)


class ScenarioError(ValueError):
    """A mistake in a scenario. Its message is one line for the person who wrote it."""


class _Loader(yaml.SafeLoader):
    """PyYAML takes the last of two equal keys without a word; here that is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise ScenarioError(f'line {key.start_mark.line + 1}: key "{key.value}" stands twice')
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


def found(value: object) -> str:
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


def expected(what: str, value: object, place: str) -> ScenarioError:
    return ScenarioError(f"{place}: expected {what}, found {found(value)}")


class Fields:
    """A mapping at `place` whose keys are among `known`."""

    def __init__(self, value: object, place: str, known: Collection[str]) -> None:
        if not isinstance(value, dict):
            raise expected("a mapping", value, place or "scenario")
        self.place = place
        self._values: dict[object, object] = value
        for key in value:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1)
                hint = f'did you mean "{close[0]}"?' if close else f"known: {', '.join(sorted(known))}"
                raise ScenarioError(f'{place or "scenario"}: unknown key "{key}" ({hint})')

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def at(self, key: str) -> str:
        """The place of a key."""
        return f"{self.place}.{key}" if self.place else key

    def need(self, key: str, reader: Reader[T]) -> T:
        if key not in self._values:
            raise ScenarioError(f'{self.place or "scenario"}: "{key}" is missing')
        return reader(self._values[key], self.at(key))

    def maybe(self, key: str, reader: Reader[T], default: D) -> T | D:
        return reader(self._values[key], self.at(key)) if key in self._values else default

    def each(self, key: str, reader: Reader[T]) -> tuple[T, ...]:
        """The entries of a list; none where the key is missing."""
        return self.maybe(key, list_of(reader), ())


def list_of(reader: Reader[T]) -> Reader[tuple[T, ...]]:
    def read(value: object, place: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise expected("a list", value, place)
        return tuple(reader(entry, f"{place}[{number}]") for number, entry in enumerate(value))

    return read


def one_or_list_of(reader: Reader[T]) -> Reader[tuple[T, ...]]:
    def read(value: object, place: str) -> tuple[T, ...]:
        return list_of(reader)(value, place) if isinstance(value, list) else (reader(value, place),)

    return read


def one_of(*choices: str) -> Reader[str]:
    def read(value: object, place: str) -> str:
        if value not in choices:
            raise expected("one of " + ", ".join(choices), value, place)
        return str(value)

    return read


def matching(pattern: str, what: str) -> Reader[str]:
    compiled = re.compile(pattern, re.ASCII)

    def read(value: object, place: str) -> str:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            raise expected(what, value, place)
        return value

    return read


def text(value: object, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise expected("text (in quotes, if it looks like a number)", value, place)
    return value


def name(value: object, place: str) -> str:
    """A name that Kubernetes accepts; "_" cannot stand in one, which log directories rely on."""
    if not isinstance(value, str) or not KUBERNETES_NAME.fullmatch(value):
        raise expected("a Kubernetes name (a-z, 0-9, - and .)", value, place)
    return value


def boolean(value: object, place: str) -> bool:
    if not isinstance(value, bool):
        raise expected("true or false", value, place)
    return value


def integer(least: int, most: int) -> Reader[int]:
    def read(value: object, place: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise expected(f"a whole number from {least} to {most}", value, place)
        return value

    return read


def instant(value: object, place: str) -> float:
    """A time since the play began: a duration, or 0."""
    if value in (0, "0", "0s") and not isinstance(value, bool):
        return 0.0
    try:
        return parse_duration(value if isinstance(value, str) else "")
    except ValueError as error:
        raise expected("a time such as 90s or 1m30s", value, place) from error


def duration(value: object, place: str) -> float:
    """A time that is not zero, as Prometheus writes it."""
    seconds = instant(value, place)
    if seconds <= 0:
        raise expected("a time longer than 0s", value, place)
    return seconds


def size(value: object, place: str) -> int:
    if isinstance(value, str) and (match := SIZE.fullmatch(value)):
        return int(float(match[1]) * UNITS[match[2]])
    raise expected("a size such as 20GiB or 512MiB", value, place)


def ratio(value: object, place: str) -> float:
    number = value
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?%", value, re.ASCII):
        number = float(value[:-1]) / 100
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= 1:
        raise expected("a ratio from 0 to 1, or a percentage such as 40%", value, place)
    return float(number)


def watts(value: object, place: str) -> float:
    if isinstance(value, str) and re.fullmatch(r"\d{1,5}W", value, re.ASCII) and int(value[:-1]):
        return float(value[:-1])
    raise expected("a power such as 700W", value, place)
