"""The errors that papa raises on purpose.

    PapaError
    ├── MemberError       networks that do not share one architecture, or tensors that left the population's matrix
    ├── MixingError       an invalid mixing matrix, averaging rule or schedule of averaging
    ├── SoupError         networks or state dicts that cannot be averaged, or an invalid score
    ├── DataError         data that is missing, empty or of the wrong shape
    ├── ConfigError       an unknown recipe, method or option, or options that contradict each other
    └── RunError          a run directory that cannot be written, read or resumed
        ├── LostError     another process failed, was killed or cannot be reached
        └── StoppedError  the run was asked to stop and saved its state first

    PapaWarning           a training that will probably not give what was wanted

Every message names the subject, what was found, what was expected and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PapaError(Exception):
    """Base class of all errors that papa raises on purpose."""


class MemberError(PapaError):
    """Networks that do not share one architecture, or tensors that left the population's matrix."""


class MixingError(PapaError, ValueError):
    """An invalid mixing matrix, averaging rule or schedule of averaging."""


class SoupError(PapaError, ValueError):
    """Networks or state dicts that cannot be averaged, or an invalid score."""


class DataError(PapaError, ValueError):
    """Data that is missing, empty or of the wrong shape."""


class ConfigError(PapaError, ValueError):
    """An unknown recipe, method or option, or options that contradict each other."""


class RunError(PapaError):
    """A run directory that cannot be written, read or resumed."""


class LostError(RunError):
    """Another process failed, was killed or cannot be reached."""


class StoppedError(RunError):
    """The run was asked to stop and saved its state first."""


class PapaWarning(UserWarning):
    """A training that will probably not give what was wanted: what was seen, and what to do."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the closest known name for a mistyped one, and list all known names.

    Example:
        >>> did_you_mean("papa-al", ["independent", "papa", "papa-all"])
        'did you mean papa-all? Known: independent, papa, papa-all'
    """
    known = list(known)
    closest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    listing = ", ".join(known)
    return f"did you mean {closest[0]}? Known: {listing}" if closest else f"known: {listing}"
