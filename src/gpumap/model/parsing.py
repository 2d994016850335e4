"""How durations are written, as Prometheus does (`500ms`, `1m30s`), and quantities, as Kubernetes does (`10Gi`)."""

import re

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
    whole, fraction, binary, decimal, exponent = match.groups(default="")
    amount = int(whole + fraction) << (10 * ("KMGTPE".index(binary) + 1) if binary else 0)
    tens = (_DECIMAL_EXPONENTS[decimal] if decimal else int(exponent or 0)) - len(fraction)
    scale: int = 10 ** abs(tens)
    amount = amount * scale if tens >= 0 else -(-amount // scale)
    if amount >> 63:
        raise ValueError(f'"{text:.40}" does not fit in 63 bits')
    return amount
