"""Scores of candidates: by a command that prints a number, remembered so that an interrupted soup goes on."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from papa.checkpoint import write_json
from papa.errors import ConfigError, SoupError
from papa.evaluate import Evaluation
from papa.files.writing import read_json_file

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
TAIL_LINES = 10
FORMAT = 1


def split_command(command: str) -> list[str]:
    """The words of a score command; `{}` in it stands for the candidate's file."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"the score command '{command}' cannot be read: {error}") from error
    if not any("{}" in word for word in words):
        raise ConfigError(f"the score command '{command}' has no {{}}, which stands for the file to score")
    return words


def run_score_command(words: Sequence[str], candidate: Path) -> float:
    """The last number that a command prints about a file. No shell is involved."""
    command = [word.replace("{}", str(candidate)) for word in words]
    subject = f"the score command '{shlex.join(words)}'"
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise SoupError(f"{subject} cannot be run: {error.strerror or error}") from error
    if done.returncode:
        raise SoupError(f"{subject} ended with code {done.returncode}:\n{_tail(done.stderr or done.stdout)}")
    number = last_number(done.stdout)
    if number is None:
        raise SoupError(f"{subject} printed no number, expected a score, higher is better:\n{_tail(done.stdout)}")
    return number


def last_number(text: str) -> float | None:
    """The last number in a text.

    Example:
        >>> last_number("step 12, accuracy: 97.5%")
        97.5
    """
    found = NUMBER.findall(text)
    return float(found[-1]) if found and math.isfinite(float(found[-1])) else None


def _tail(text: str) -> str:
    lines = text.rstrip().splitlines()[-TAIL_LINES:]
    return "\n".join(f"  {line}" for line in lines) or "  (it printed nothing)"


class Memory:
    """Scores that were measured, in a file beside the output; written after each.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        held = read_json_file(path)
        if held is not None and (not isinstance(held, dict) or held.get("format") != FORMAT):
            raise SoupError(f"{path} holds no scores of papa: remove it to start anew")
        self._entries: dict[str, Any] = {} if held is None else dict(held["scores"])

    def get(self, key: str) -> Evaluation | None:
        """The score of a candidate, when it is known."""
        entry = self._entries.get(key)
        if entry is None or entry["score"] is None:  # JSON has no infinity: such a candidate is scored again
            return None
        return Evaluation(entry["score"], math.nan if entry["loss"] is None else entry["loss"])

    def put(self, key: str, value: Evaluation, files: Sequence[str]) -> None:
        """Remember a candidate's score."""
        self._entries[key] = {"files": list(files), "score": value.score, "loss": value.loss}
        write_json(self._path, {"format": FORMAT, "scores": self._entries})
