from __future__ import annotations

import inspect
from collections.abc import Iterable

import pytest

from papa import errors


def error_classes() -> list[type[Exception]]:
    return [
        value
        for _, value in inspect.getmembers(errors, inspect.isclass)
        if issubclass(value, Exception) and not issubclass(value, Warning) and value.__module__ == errors.__name__
    ]


@pytest.mark.parametrize("error", error_classes())
def test_every_error_is_a_papa_error_and_is_in_the_tree_of_the_docstring(error: type[Exception]) -> None:
    assert issubclass(error, errors.PapaError)
    assert f" {error.__name__}" in errors.__doc__
    assert error.__doc__


@pytest.mark.parametrize("error", [errors.MixingError, errors.SoupError, errors.DataError, errors.ConfigError])
def test_errors_about_values_are_value_errors_too(error: type[Exception]) -> None:
    assert issubclass(error, ValueError)


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("pappa", ["independent", "papa"], "did you mean papa? Known: independent, papa"),
        ("zzz", iter(["independent", "papa"]), "known: independent, papa"),
        ("resnet", ["ResNet18"], "did you mean ResNet18? Known: ResNet18"),
    ],
)
def test_the_closest_name_is_offered_and_all_known_ones(name: str, known: Iterable[str], said: str) -> None:
    assert errors.did_you_mean(name, known) == said
