"""Optional packages, and the extra of papa that installs each."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

from papa.errors import ConfigError

EXTRAS = {
    "rich": "cli",
    "tyro": "cli",
    "PIL": "lab",
    "sklearn": "lab",
    "timm": "lab",
    "torchvision": "lab",
    "jinja2": "report",
    "matplotlib": "report",
    **{name: name for name in ("accelerate", "lightning", "transformers")},
}


def missing_package(error: BaseException) -> ConfigError | None:
    """An error that says what to install; None if the given error is not about an optional package.

    Example:
        >>> str(missing_package(ModuleNotFoundError(name="sklearn.datasets")))
        "the package sklearn is not installed: pip install 'papa-torch[lab]'"
    """
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return _missing(package) if package in EXTRAS else None


def require(*packages: str) -> None:
    """Raise a `ConfigError` that says what to install, unless all packages are installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise _missing(package)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around the imports of optional packages: a missing one is an error that says what to install.

    Example:
        >>> with importing():
        ...     import json
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_package(error) or error from None


def _missing(package: str) -> ConfigError:
    return ConfigError(f"the package {package} is not installed: pip install 'papa-torch[{EXTRAS[package]}]'")
