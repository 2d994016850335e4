"""Typed reading of a YAML mapping, each mistake with its line and key.

Values are not repeated: they may be secrets.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator

import yaml

from gpumap.agent.web.config.values import WebConfigError
from gpumap.model.text import cut_off, printable

_NULLS = ("", "~", "null", "Null", "NULL")
_QUOTED = re.compile(r"""(?<!\S)(['"])[^'"<]{2,}\1(?!\S)""")
_BOOLEAN = "tag:yaml.org,2002:bool"
_KEY_CHARACTERS = 60


class Section:
    """A mapping at `place` whose keys are among `known`, or any where that is None. One that is not there is empty."""

    def __init__(self, node: yaml.Node | None, place: str, known: Collection[str] | None) -> None:
        self.place = place
        self.node = node = _said(node)
        self._values: dict[str, yaml.Node] = {}
        if node is None:
            return
        if not isinstance(node, yaml.MappingNode):
            raise mistake(node, place, "is no mapping of keys to values")
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or _said(key) is None:
                raise mistake(key, place, "has a key that is no word")
            _scalar(key, place)
            if key.value in self._values:
                raise mistake(key, self._at(key.value), "stands twice")
            if known is not None and key.value not in known:
                close = difflib.get_close_matches(key.value[:_KEY_CHARACTERS], known, n=1)
                hint = f'did you mean "{close[0]}"?' if close else f"known: {', '.join(known)}"
                raise mistake(key, self._at(key.value), f"is not known ({hint})")
            self._values[key.value] = value

    def __bool__(self) -> bool:
        return bool(self._values)

    def _at(self, key: str) -> str:
        shown = cut_off(printable(key), _KEY_CHARACTERS)
        return f"{self.place}.{shown}" if self.place else shown

    def wrong(self, key: str, why: str) -> WebConfigError:
        """A mistake in the value of this key, or in the section where that is not there."""
        return mistake(self._values.get(key, self.node), self._at(key), why)

    def has(self, key: str) -> bool:
        """Whether anything is said of it, be it that it is empty."""
        return _said(self._values.get(key)) is not None

    def section(self, key: str, known: Collection[str] | None) -> Section:
        return Section(self._values.get(key), self._at(key), known)

    def text(self, key: str, default: str = "") -> str:
        """A word or a text, as it is written; a number is one too."""
        node = _said(self._values.get(key))
        if node is None:
            return default
        return _scalar(node, self._at(key))

    def boolean(self, key: str, *, default: bool) -> bool:
        node = _said(self._values.get(key))
        if node is None:
            return default
        if node.tag != _BOOLEAN or not isinstance(node, yaml.ScalarNode):
            raise mistake(node, self._at(key), "is not true or false")
        return node.value.lower() in ("true", "yes", "on")

    def words(self, key: str) -> tuple[str, ...]:
        node = _said(self._values.get(key))
        if node is None:
            return ()
        if not isinstance(node, yaml.SequenceNode):
            raise mistake(node, self._at(key), "is no list")
        return tuple(_scalar(one, self._at(key)) for one in node.value)

    def entries(self) -> Iterator[tuple[str, str]]:
        """All keys with their texts."""
        for key in self._values:
            yield key, self.text(key)


def compose(text: str) -> yaml.Node | None:
    """The one document of a text; None where it is empty. Raises WebConfigError."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}: " if mark else ""
        # The problem quotes characters, kinds of tokens and names, which may be passwords: a * begins an alias.
        problem = _QUOTED.sub("(not shown)", printable(error.problem or "it breaks off"))
        raise WebConfigError(f"{place}is not YAML: {problem}") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise WebConfigError(f"is not YAML: {_first_line(error)}") from error


def mistake(node: yaml.Node | None, place: str, why: str) -> WebConfigError:
    line = f"line {node.start_mark.line + 1}: " if node is not None else ""
    return WebConfigError(f"{line}{place or 'the file'}: {why}")


def _said(node: yaml.Node | None) -> yaml.Node | None:
    """The node, or None where it is YAML's null, as it is written: what is only tagged as null says something."""
    return None if isinstance(node, yaml.ScalarNode) and not node.style and node.value in _NULLS else node


def _scalar(node: yaml.Node, place: str) -> str:
    if not isinstance(node, yaml.ScalarNode) or _said(node) is None:
        raise mistake(node, place, "is no word or text")
    if any("\ud800" <= character <= "\udfff" for character in node.value):  # YAML's escapes can make halves of one
        raise mistake(node, place, "has a character that is none")
    return str(node.value)


def _first_line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return printable(str(error).partition("\n")[0])
