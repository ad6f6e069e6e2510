from __future__ import annotations

import inspect

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


def test_did_you_mean_offers_the_closest_name_and_all_known_ones() -> None:
    assert errors.did_you_mean("pappa", ["independent", "papa"]) == "did you mean papa? Known: independent, papa"


def test_did_you_mean_lists_all_names_if_none_is_close() -> None:
    assert errors.did_you_mean("zzz", ["independent", "papa"]) == "known: independent, papa"


def test_did_you_mean_takes_any_iterable() -> None:
    assert errors.did_you_mean("papa", iter(["papa"])) == "did you mean papa? Known: papa"


def test_did_you_mean_keeps_the_case_of_names() -> None:
    assert errors.did_you_mean("resnet", ["ResNet18"]).endswith("Known: ResNet18")
