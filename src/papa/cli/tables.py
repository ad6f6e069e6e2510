"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH_OF_FILES = 160
"""How wide a table may be where no terminal limits it."""


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table without lines; only its last column may wrap, and no cell is read as markup."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(head, start=1):
        table.add_column(Text(column), no_wrap=number < len(head), overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH_OF_FILES)
    console.print(table)
