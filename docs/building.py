"""Hooks of the documentation: the help of all commands, and the examples of docstrings."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

import griffe

COMMANDS_MARK = "<!-- every command -->"


def on_page_markdown(markdown: str, **others: Any) -> str:
    """Insert the help of all commands into a page that contains the mark."""
    return markdown.replace(COMMANDS_MARK, _commands()) if COMMANDS_MARK in markdown else markdown


def _commands() -> str:
    from papa.cli.main import COMMANDS

    sections = []
    for name, summary in COMMANDS.items():
        sections.append(f"## papa {name}\n\n{summary[0].upper()}{summary[1:]}.\n\n```text\n{_help([name])}```\n")
        if name == "run":
            sections.append(f"All options, with the defaults of `digits`:\n\n```text\n{_help([name, 'digits'])}```\n")
    return "\n".join(sections)


def _help(arguments: list[str]) -> str:
    from papa.cli import main

    os.environ["COLUMNS"] = "82"
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main([*arguments, "--help"])
    return "\n".join(line.rstrip() for line in shown.getvalue().strip().splitlines()) + "\n"


class Examples(griffe.Extension):
    """Renders the section `Example:` of a docstring as code."""

    def on_instance(self, *, obj: griffe.Object, **others: Any) -> None:
        """Rename the section to what the docstring parser expects."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
