"""A study: a question, the commands whose runs answer it, and the tables that are made from these runs.

A command is what a user types, with DATA for the directory of the data. Its `--out` determines the directories of its
runs, and their names in its file of records, `records/NAME.jsonl`: `runs/main/cifar10-vgg11/papa-seed1` is
`main/cifar10-vgg11/papa-seed1` in `records/main.jsonl`. The text about a study is in `prose/NAME.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from results.tables import Record, side_by_side


@dataclass(frozen=True, kw_only=True)
class Table:
    """One or more tables made from the same runs."""

    title: str
    commands: tuple[str, ...] = ()
    """The commands of its runs."""
    shown_with: tuple[str, ...] = ()
    """Commands of other tables; their runs are shown first."""
    render: Callable[[Sequence[Record]], str] = side_by_side
    """From records to Markdown."""

    @property
    def all_commands(self) -> tuple[str, ...]:
        """The commands of all runs that it shows."""
        return (*self.shown_with, *self.commands)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question, and the tables that answer it."""

    name: str
    title: str
    tables: tuple[Table, ...]

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands of its runs."""
        return tuple(command for table in self.tables for command in table.commands)
