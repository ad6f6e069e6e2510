"""Scores of candidates: by a command that prints a number, and remembered so that a greedy soup can be resumed."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from papa.errors import ConfigError, SoupError
from papa.evaluation.scores import Evaluation
from papa.storage import read_object, validated, write_json

NUMBER = re.compile(
    r"(?<![\w.,])[-+]?(?:nan|inf(?:inity)?|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)(?!\w|[.,]\d)", re.IGNORECASE
)
HINT = re.compile(r"\d|\bnan\b|\binf(?:inity)?\b", re.IGNORECASE)
"""What a line with a score must contain."""
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
    """The last number that a command prints for a file, possibly NaN. It is not run by a shell."""
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
        raise SoupError(f"{subject} printed no number at the end, expected a score:\n{_tail(done.stdout)}")
    return number


def last_number(text: str) -> float | None:
    """The last number in the last line that has digits; None if that is ambiguous, or infinity.

    Example:
        >>> last_number("step 12, accuracy: 97.5%"), last_number("1000 images: loss nan"), last_number("top1 1,234.5")
        (97.5, nan, None)
    """
    lines = [line for line in (QUOTED.sub("", line) for line in text.splitlines()) if HINT.search(line)]
    found = list(NUMBER.finditer(lines[-1])) if lines else []
    if not found or HINT.search(lines[-1], found[-1].end()):  # it is followed by digits that are no number
        return None
    number = float(found[-1][0])
    return None if number == math.inf else number


def _tail(text: str) -> str:
    lines = text.rstrip().splitlines()[-TAIL_LINES:]
    return "\n".join(f"  {line}" for line in lines) or "  (it printed nothing)"


class Entry(TypedDict):
    """One remembered score."""

    files: list[str]
    score: float | None
    loss: float | None


class Content(TypedDict):
    """What the file of scores holds."""

    format: int
    scores: dict[str, Entry]


class ScoreMemory:
    """Scores that were measured, in a file next to the output that is written after each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._own: set[str] = set()
        self._used: set[str] = set()
        self._entries: dict[str, Entry] = {}
        if path.exists():
            try:
                content = validated(read_object(path, error=SoupError), Content)
            except (SoupError, ValueError) as error:
                raise SoupError(f"{path} holds no scores of papa ({error}): remove it to start again") from error
            if content["format"] != FORMAT:
                raise SoupError(f"{path} has format {content['format']}, expected {FORMAT}: remove it to start again")
            self._entries = content["scores"]

    @property
    def num_used(self) -> int:
        """The number of scores of an earlier call that were used."""
        return len(self._used)

    def get(self, key: str) -> Evaluation | None:
        """The score of a candidate, if it is known."""
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
        """Remove the file: the soup is complete, and the score may be computed differently next time."""
        self._path.unlink(missing_ok=True)
