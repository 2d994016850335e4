"""Which regular expression a capture may bring as its `--resource`: captures come from strangers, and Python's `re` can
take for ever over a short one. What is refused is refused in words.
"""

from __future__ import annotations

import re

from gpumap.model.device_ids import DEFAULT_RESOURCE_PATTERN

MAX_CHARACTERS = 1024
MAX_CHOICES = 3
"""Groups and repetitions: each may make a name take as much longer as the name or the group is long."""

_LITERAL = re.compile(r"\\[^0-9A-Za-z]|\\[dDwWsSbB]|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:[aimsux-]*:|<?[=!])", re.DOTALL)
_DEFAULT = re.compile(rf"(?:(?<=\|)|^){re.escape(DEFAULT_RESOURCE_PATTERN)}(?=\||$)")
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_CHOICE = re.compile(r"\(|[*+?{]\??")


def refused(pattern: str) -> str | None:
    """Why a capture may not bring this expression; `None` where it may. The default's own alternatives are no risk."""
    if len(pattern) > MAX_CHARACTERS:
        return f"is longer than {MAX_CHARACTERS} characters"
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is not a regular expression: {error}"
    # What stands for one character becomes one, and a group's head a mere parenthesis.
    bare = _LITERAL.sub(lambda match: "(" if match[0].startswith("(") else "x", _DEFAULT.sub("x", pattern, count=1))
    if _REPEATED_GROUP.search(bare):
        return "repeats a group, which may take for ever"
    if "\\" in bare or "(?" in bare:
        return "refers to a group, or names a character in a way that a capture may not"
    if len(_CHOICE.findall(bare)) > MAX_CHOICES:
        return f"has more than {MAX_CHOICES} groups and repetitions, which may take for ever"
    return None
