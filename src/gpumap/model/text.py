"""Text from outside made safe: printable in one line of a terminal or log, and valid in JSON. Pure."""

import json

import msgspec

ELLIPSIS = "…"


def printable(text: str) -> str:
    """Replace every character that is not printable: controls, escapes, direction marks."""
    return text if text.isprintable() else "".join(character if character.isprintable() else "?" for character in text)


def one_line(error: Exception) -> str:
    """Return what an error says, printable and in one line."""
    return printable(" ".join(str(error).split()))


def cut_off(text: str, most: int) -> str:
    """Return the text in one line, cut after `most` characters."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]}{ELLIPSIS}"


def json_bytes(document: msgspec.Struct) -> bytes:
    """Write compact JSON in UTF-8. Names that are no UTF-8 (lone surrogates, from file names) are escaped."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(document), ensure_ascii=False, separators=(",", ":"))
        return text.encode(errors="backslashreplace")
