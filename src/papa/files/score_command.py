"""Scores of candidates by a command that prints a number."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

from papa.errors import ConfigError, SoupError

NUMBER = re.compile(
    r"(?<![\w.,])[-+]?(?:nan|inf(?:inity)?|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)(?!\w|[.,]\d)", re.IGNORECASE
)
HINT = re.compile(r"\d|\bnan\b|\binf(?:inity)?\b", re.IGNORECASE)
"""What a line with a score must contain."""
QUOTED = re.compile("'[^']*'|\"[^\"]*\"")
TAIL_LINES = 10


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
