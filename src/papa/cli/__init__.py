"""The command `papa`: one file per command."""

from papa.cli.main import main

__all__ = ["main"]
