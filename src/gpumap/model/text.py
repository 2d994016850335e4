"""Text from outside made safe: printable in one line of a terminal or log. Pure."""

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
