"""The command `papa`: one module per command."""

from papa.cli.main import main

__all__ = ["main"]
