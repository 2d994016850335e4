"""The fenced blocks of documents, by their language and the words after it."""

import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)(?P<words>[^\n]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    line: int
    words: frozenset[str]
    body: str


def read_blocks(text: str, language: str) -> Iterator[Block]:
    """Those of a language, in lists too, without their indent."""
    for match in _FENCE.finditer(text):
        if match["language"] == language:
            line = text.count("\n", 0, match.start()) + 1
            yield Block(line, frozenset(match["words"].split()), textwrap.dedent(match["body"]))
