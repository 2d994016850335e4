"""Text from outside, made safe to show: nothing in it may steer a terminal or begin a line of its own."""


def printable(text: str) -> str:
    """Give the text with every character that is not printable replaced."""
    return text if text.isprintable() else "".join(character if character.isprintable() else "?" for character in text)
