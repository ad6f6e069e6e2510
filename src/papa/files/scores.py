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
from papa.evaluation import Evaluation
from papa.files.writing import read_json_file

NUMBER = re.compile(
    r"(?<![\w.,])[-+]?(?:nan|inf(?:inity)?|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)(?!\w|[.,]\d)", re.IGNORECASE
)
HINT = re.compile(r"\d|\bnan\b|\binf(?:inity)?\b", re.IGNORECASE)
"""What makes a line one that may tell a score."""
QUOTED = re.compile("'[^']*'|\"[^\"]*\"")
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
    """The last number that a command prints about a file, NaN included. No shell is involved."""
    command = [word.replace("{}", str(candidate)) for word in words]
    subject = f"the score command '{shlex.join(command)}'"
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise SoupError(f"{subject} cannot be run: {error.strerror or error}") from error
    if done.returncode:
        raise SoupError(f"{subject} ended with code {done.returncode}:\n{_tail(done.stderr or done.stdout)}")
    number = last_number(done.stdout)
    if number is None:
        raise SoupError(
            f"{subject} printed no number at the end, expected a score, higher is better:\n{_tail(done.stdout)}"
        )
    return number


def last_number(text: str) -> float | None:
    """The last number in the last line that has digits; None where that is not clear, or infinite upward.

    Example:
        >>> last_number("step 12, accuracy: 97.5%"), last_number("1000 images: loss nan"), last_number("top1 1,234.5")
        (97.5, nan, None)
    """
    lines = [line for line in (QUOTED.sub("", line) for line in text.splitlines()) if HINT.search(line)]
    found = list(NUMBER.finditer(lines[-1])) if lines else []
    if not found or HINT.search(lines[-1], found[-1].end()):  # digits after it are part of something else
        return None
    number = float(found[-1][0])
    return None if number == math.inf else number


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
        self._own: set[str] = set()
        self._used: set[str] = set()
        held = read_json_file(path)
        if held is not None and (not isinstance(held, dict) or held.get("format") != FORMAT):
            raise SoupError(f"{path} holds no scores of papa: remove it to start anew")
        self._entries: dict[str, Any] = {} if held is None else dict(held["scores"])

    @property
    def num_used(self) -> int:
        """How many scores of an earlier call were taken."""
        return len(self._used)

    def get(self, key: str) -> Evaluation | None:
        """The score of a candidate, when it is known."""
        entry = self._entries.get(key)
        if entry is None or entry["score"] is None:  # JSON has no infinity: such a candidate is scored again
            return None
        self._used |= {key} - self._own
        return Evaluation(entry["score"], math.nan if entry["loss"] is None else entry["loss"])

    def put(self, key: str, value: Evaluation, files: Sequence[str]) -> None:
        """Remember a candidate's score."""
        self._own.add(key)
        self._entries[key] = {"files": list(files), "score": value.score, "loss": value.loss}
        write_json(self._path, {"format": FORMAT, "scores": self._entries})

    def forget(self) -> None:
        """Remove the file: the soup is done, and what scores may change."""
        self._path.unlink(missing_ok=True)
