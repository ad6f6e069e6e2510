"""The error tree. Whatever papa refuses, it refuses with one of these.

    PapaError
    ├── MemberError     members that do not fit together, or that left the matrix
    ├── MixingError     a matrix, rule or cadence that makes no sense
    ├── SoupError       networks or state dicts that cannot be averaged, or a score that is not a number
    ├── DataError       data that is missing, empty or of the wrong shape
    ├── ConfigError     an unknown recipe, method or option, or values that contradict each other
    └── RunError        a run directory that cannot be written, read or continued
        ├── LostError     other processes that failed, were killed or cannot be reached
        └── StoppedError  a run that was asked to stop, and saved its state first

Every message says what it is about, what was found, what was expected and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PapaError(Exception):
    """The root of every error that papa raises on purpose."""


class MemberError(PapaError):
    """Members that do not share one architecture, or whose tensors left the population's matrix."""


class MixingError(PapaError, ValueError):
    """A mixing matrix, rule or cadence that makes no sense."""


class SoupError(PapaError, ValueError):
    """Networks or state dicts that cannot be averaged, or a score that is not a number."""


class DataError(PapaError, ValueError):
    """Data that is missing, empty or of the wrong shape."""


class ConfigError(PapaError, ValueError):
    """An unknown recipe, method or option, or values that contradict each other."""


class RunError(PapaError):
    """A run directory that cannot be written, read or continued."""


class LostError(RunError):
    """Other processes that failed, were killed or cannot be reached."""


class StoppedError(RunError):
    """A run that was asked to stop, and saved its state first."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that helps someone who mistyped `name`: the closest match, then all that is known.

    Example:
        >>> did_you_mean("papa-al", ["independent", "papa", "papa-all"])
        'did you mean papa-all? Known: independent, papa, papa-all'
    """
    known = list(known)
    closest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    listing = ", ".join(known)
    return f"did you mean {closest[0]}? Known: {listing}" if closest else f"known: {listing}"
