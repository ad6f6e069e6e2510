"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text


def plain_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table without lines; the last column may wrap, and no cell is read as markup."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(head, start=1):
        table.add_column(Text(column), no_wrap=number < len(head))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
