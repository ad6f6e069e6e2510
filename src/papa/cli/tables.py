"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from papa.cli.escaping import printable

FILE_WIDTH = 160
"""Width of a table that is not printed to a terminal."""


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table without lines; only its last column wraps, and no cell is read as markup."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(head, start=1):
        table.add_column(Text(printable(column)), no_wrap=number < len(head), overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(table)
