"""Scores of candidates: by a command that prints a number, and remembered so that a greedy soup can be resumed."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
from collections.abc import Callable
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


def score_command(command: str) -> Callable[[Path], float]:
    """A function of a file: the last number that a command prints, possibly NaN; `{}` in it stands for the file.

    It is not run by a shell.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"the score command '{command}' cannot be read: {error}") from error
    if not any("{}" in word for word in words):
        raise ConfigError(f"the score command '{command}' has no {{}}, which stands for the file to score")

    def score(file: Path) -> float:
        filled = [word.replace("{}", str(file)) for word in words]
        subject = f"the score command '{shlex.join(filled)}'"
        try:
            done = subprocess.run(filled, capture_output=True, text=True, errors="replace", check=False)
        except OSError as error:
            raise SoupError(f"{subject} cannot be run: {error.strerror or error}") from error
        if done.returncode:
            raise SoupError(f"{subject} ended with code {done.returncode}:\n{_tail(done.stderr or done.stdout)}")
        number = last_number(done.stdout)
        if number is None:
            raise SoupError(f"{subject} printed no number at the end, expected a score:\n{_tail(done.stdout)}")
        return number

    return score


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


class Scores(TypedDict):
    """What the file of scores holds: the score and the loss of each candidate."""

    format: int
    scores: dict[str, list[float | None]]


class ScoreMemory:
    """Scores that were measured, in a file next to the output that is written after each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, list[float | None]] = {}
        self.num_used = 0
        """The number of scores of an earlier call that were used."""
        if path.exists():
            try:
                found = validated(read_object(path, error=SoupError), Scores)
                if found["format"] != FORMAT or any(len(pair) != 2 for pair in found["scores"].values()):
                    raise ValueError(f"expected format {FORMAT} with pairs of a score and a loss")
            except (SoupError, ValueError) as error:
                raise SoupError(f"{path} holds no scores of papa ({error}): remove it to start again") from error
            self._known = found["scores"]
        self._earlier = set(self._known)

    def score(self, key: str, measure: Callable[[], Evaluation]) -> Evaluation:
        """The score of a candidate, measured unless it is known."""
        score, loss = self._known.get(key, [None, None])
        if score is not None:  # JSON has no infinity: such a candidate is scored again
            self.num_used += key in self._earlier
            self._earlier.discard(key)
            return Evaluation(score, math.nan if loss is None else loss)
        found = measure()
        self._known[key] = [found.score, found.loss]
        write_json(self._path, {"format": FORMAT, "scores": self._known})
        return found
