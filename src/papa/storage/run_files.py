"""What makes a directory the directory of a run."""

from __future__ import annotations

from pathlib import Path

from papa.errors import PapaError
from papa.storage.json_files import read_json

CONFIG, RESULT = "config.json", "result.json"


def is_run(path: Path) -> bool:
    """Whether a directory is of `papa run`: its config or result is an object that names a recipe and a method.

    Directories of model hubs have a `config.json` too, but neither key.
    """
    return any(_names_a_run(path / name) for name in (CONFIG, RESULT))


def _names_a_run(file: Path) -> bool:
    try:
        value = read_json(file)
    except PapaError:
        return False
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("recipe", "method"))
