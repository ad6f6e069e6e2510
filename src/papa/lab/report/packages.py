"""Packages that only some features need."""

from __future__ import annotations

import importlib.util

from papa.errors import ConfigError


def require(*packages: str, extra: str) -> None:
    """Raise a `ConfigError` that says what to install unless all packages are installed.

    Args:
        packages: names of modules to import.
        extra: the extra of papa that installs them.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(f"{' and '.join(missing)} {verb} not installed: pip install 'papa-torch[{extra}]'")
