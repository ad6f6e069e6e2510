"""What files hold, on its way to a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""The text with control characters escaped, so that what a file holds cannot change what a terminal shows.

    Example:
        >>> print(printable("red: \x1b[31m"))
        red: \x1b[31m
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
