"""JSON values are checked against type hints."""

from __future__ import annotations

from typing import Any, TypedDict

import pytest

from papa.storage import matches, validated


class Base(TypedDict):
    name: str
    count: int


class Thing(Base, total=False):
    scores: list[float | None] | None
    inner: Base | None
    sizes: dict[str, int] | None
    anything: Any


def test_a_missing_optional_key_is_none_and_an_unknown_key_stays() -> None:
    found = validated({"name": "a", "count": 1, "inner": {"name": "b", "count": 2}, "extra": [1]}, Thing)
    assert found == {
        "name": "a",
        "count": 1,
        "scores": None,
        "inner": {"name": "b", "count": 2},
        "sizes": None,
        "anything": None,
        "extra": [1],
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "name is 3, expected text"),
        ({"count": True}, "count is True, expected an integer"),
        ({"count": 1.0}, r"count is 1\.0, expected an integer"),
        ({"scores": [1, None, "x"]}, r"scores\[2\] is 'x', expected a number"),
        ({"scores": [1e200]}, r"scores\[0\] is 1e\+200, expected a number"),
        ({"scores": {}}, "scores is {}, expected a list"),
        ({"inner": {"name": "b"}}, r"inner\.count is missing"),
        ({"inner": [1]}, r"inner is \[1\], expected an object"),
        ({"sizes": {"a": "b" * 100}}, r"sizes\.a is a str, expected an integer"),
    ],
)
def test_the_first_wrong_value_is_named(change: dict[str, Any], message: str) -> None:
    value = {"name": "a", "count": 1, **change}
    assert not matches(value, Thing)
    with pytest.raises(ValueError, match=message):
        validated(value, Thing)
