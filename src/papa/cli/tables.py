"""Tables and words for the terminal."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

FILE_WIDTH = 160
"""Width of a table that is not printed to a terminal."""


def printable(text: str) -> str:
    r"""The text with control characters escaped, so that what a file holds cannot change what a terminal shows.

    Example:
        >>> print(printable("red: \x1b[31m"))
        red: \x1b[31m
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def wrapped(text: str, width: int = 80) -> str:
    """Help text whose paragraphs fit a terminal; indented lines and paragraphs that are narrow enough stay.

    Example:
        >>> print(wrapped("a b c\\n\\n  papa run digits", width=4))
        a b
        c
        <BLANKLINE>
          papa run digits
    """
    paragraphs = []
    for is_indented, lines in itertools.groupby(text.split("\n"), key=lambda line: line[:1] in ("", " ")):
        found = list(lines)
        is_wide = not is_indented and max(map(len, found)) > width
        paragraphs.append(textwrap.fill(" ".join(found), width) if is_wide else "\n".join(found))
    return "\n".join(paragraphs)


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table without lines; only its last column wraps, and no cell is read as markup."""
    from rich.console import Console  # help does without
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(head, start=1):
        table.add_column(Text(printable(column)), no_wrap=number < len(head), overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(table)


def event_text(event: Mapping[str, Any]) -> str:
    """An event as one sentence."""
    if event["event"] == "checkpoint-failed":
        return f"the checkpoint of step {event['step']} could not be written, training continues: {event['error']}"
    if event["event"] == "nonfinite":
        return f"member {event['member']} is unhealthy at step {event['step']} ({event['reason']}): {event['action']}"
    return str(event.get("text", event["event"]))
