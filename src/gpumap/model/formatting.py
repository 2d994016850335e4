"""Values, names and text from outside as people read them: in cells of tables, sentences and lines of a log. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gpumap.model.grouping import grouped

ELLIPSIS = "…"
UNKNOWN = "-"
"""A value that is not known, never 0."""
_NODES_LISTED = 20
_TIB_FROM = 10 * 1024
"""In GiB. Only sums of a cluster are so large."""


def size(value: float | None) -> str:
    """Bytes, as `41.3GiB`."""
    if value is None:
        return UNKNOWN
    amount = float(value)
    for unit in ("B", "KiB", "MiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f}{unit}" if value else "0"
        amount /= 1024
    return f"{amount:.1f}GiB" if abs(amount) < _TIB_FROM else f"{amount / 1024:.1f}TiB"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value * 100:.0f}%"


def ratio(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def gpus(value: float | None) -> str:
    """A share of GPUs, as `1 GPU` and `0.25 GPUs`."""
    return ratio(value) + (f" GPU{'' if value == 1 else 's'}" if value else "")


def number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}"


def age(seconds: float) -> str:
    """A duration as kubectl writes it: its largest part or two, as `45s`, `5m30s`, `3h`, `2d4h`."""
    amount = int(max(seconds, 0))
    if amount < 120 and amount != 60:
        return f"{amount}s"
    for small, large, many in (("s", "m", 60), ("m", "h", 60)):
        large_count, small_count = divmod(amount, many)
        if large_count < (10 if large == "m" else 8) and small_count:
            return f"{large_count}{large}{small_count}{small}"
        if large_count < (60 if large == "m" else 48):
            return f"{large_count}{large}"
        amount = large_count
    days, hours = divmod(amount, 24)
    return f"{days}d{hours}h" if days < 8 and hours else f"{days}d"


def listed(names: Sequence[str], max_names: int = 3) -> str:
    """`a, b, c and 4 more`."""
    more_names = len(names) - max_names
    return ", ".join(names[:max_names]) + (f" and {more_names} more" if more_names > 0 else "")


def reason_sentences(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """Return a sentence for each reason, with the nodes that have it. Takes pairs of node and reason."""
    sentences = []
    for reason, names in grouped((reason, node) for node, reason in reasons).items():
        nodes = f"node {names[0]}" if len(names) == 1 else f"{len(names)} nodes, {listed(names, _NODES_LISTED)}"
        sentences.append(f"{nodes}: {reason}")
    return sentences


def and_more(first: str, number: int, singular: str, plural: str = "") -> str:
    """Return `the first, and 2 more rows`; only the first if there is only one."""
    return f"{first}, and {counted(number, singular, plural)}" if number else first


def counted(number: int, singular: str, plural: str = "") -> str:
    """`1 pod`, `2 pods`."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


# --- text from outside, made safe -------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """Replace every character that is not printable: controls, escapes, direction marks."""
    return text if text.isprintable() else "".join(character if character.isprintable() else "?" for character in text)


def one_line(text: str | Exception) -> str:
    """Return a text, or what an error says, printable and in one line."""
    return printable(" ".join(str(text).split()))


def cut_off(text: str, max_length: int) -> str:
    """Return the text in one line, cut after `max_length` characters."""
    text = " ".join(text.split())
    return text if len(text) <= max_length else f"{text[:max_length]}{ELLIPSIS}"


# --- durations and quantities, read -----------------------------------------------------------------------------------


_DURATION = re.compile(
    r"(?:(\d{1,3})y)?(?:(\d{1,4})w)?(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m(?!s))?(?:(\d{1,9})s)?(?:(\d{1,9})ms)?",
    re.ASCII,
)
_SECONDS = (365 * 86400.0, 7 * 86400.0, 86400.0, 3600.0, 60.0, 1.0, 0.001)


def parse_duration(text: str) -> float:
    """Give a duration in seconds. Raises ValueError where `text` is none, or is zero."""
    if text.strip("0") == "" != text:
        raise ValueError("must be longer than zero")
    match = _DURATION.fullmatch(text)
    if not text or match is None:
        raise ValueError(f'"{text}" is not a duration such as 500ms, 5s or 1m30s')
    seconds = sum(int(digits or 0) * unit for digits, unit in zip(match.groups(), _SECONDS, strict=True))
    if seconds == 0:
        raise ValueError("must be longer than zero")
    return seconds


_QUANTITY = re.compile(
    r"([0-9]{0,40})(?:\.([0-9]{0,40}))?(?:([KMGTPE])i|([numkMGTPE])|[eE]([+-]?[0-9]{1,2}))?", re.ASCII
)
_DECIMAL_EXPONENTS = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def parse_quantity(text: str) -> int:
    """Read an amount as Kubernetes writes it (`10Gi`, `500M`, `1e9`), exactly; a part of one counts as one.

    Raises ValueError where it is none, is below zero, or does not fit in 63 bits.
    """
    match = _QUANTITY.fullmatch(text.removeprefix("+"))
    if match is None or not (match[1] or match[2]):
        raise ValueError(f'"{text:.40}" is not a quantity such as 10Gi or 500M')
    integer, fraction, binary, decimal, exponent = match.groups(default="")
    amount = int(integer + fraction) << (10 * ("KMGTPE".index(binary) + 1) if binary else 0)
    tens = (_DECIMAL_EXPONENTS[decimal] if decimal else int(exponent or 0)) - len(fraction)
    scale: int = 10 ** abs(tens)
    amount = amount * scale if tens >= 0 else -(-amount // scale)
    if amount >> 63:
        raise ValueError(f'"{text:.40}" does not fit in 63 bits')
    return amount
