import itertools
import math
import re
from html.parser import HTMLParser

import pytest

from papa.report import cells_of, compare_page, compare_rows, details_table, paper_cells, run_page
from papa.report.chart import line_chart, ticks


def make_result(method: str = "papa", seed: int = 1, shift: float = 0.0) -> dict:
    scores = {
        "members": [90.0 + shift, 92.0 + shift],
        "mean": 91.0 + shift,
        "min": 90.0 + shift,
        "max": 92.0 + shift,
        "ensemble": 93.0 + shift,
        "average_soup": 92.5 + shift,
        "greedy_soup": 92.25 + shift,
    }
    return {
        "recipe": "digits",
        "method": method,
        "seed": seed,
        "config": {"data": {"root": "<script>alert(1)</script>"}},
        "environment": {"command": "papa run --out '</pre><img src=x>'"},
        "test": scores,
        "validation": scores,
        "greedy_members": [0, 1],
        "seconds": {"train": 1.0},
        "policies": [{"mixup": 0.5}, {"mixup": "<b>"}],
    }


METRICS = [
    {"event": "average", "step": 5, "distance_before": 2.0, "distance_after": 1.0},
    {
        "event": "epoch",
        "step": 10,
        "epoch": 1,
        "losses": [0.5, None],
        "validation": [50.0, 60.0],
        "validation_ensemble": 65.0,
        "distances": [1.0, 2.0],
    },
    {
        "event": "epoch",
        "step": 20,
        "epoch": 2,
        "losses": [0.4, 0.3],
        "validation": [70.0, 80.0],
        "validation_ensemble": 85.0,
        "distances": [0.5, 1.0],
    },
]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "line", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    "page", [run_page(make_result(), METRICS), compare_page([make_result(), make_result("papa-all", shift=1.0)])]
)
def test_pages_are_whole_stand_alone_and_escape_what_they_show(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert not {"script", "img", "b", "link", "iframe"} & set(tags.seen)
    assert "http" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_a_run_page_has_its_figures_with_numbers_behind_them() -> None:
    page = run_page(make_result(), METRICS)
    assert page.count("<svg") == page.count("<details><summary>numbers") == 4
    assert page.count('role="img" aria-label=') == 4
    assert "92.50" in page


def test_a_run_without_metrics_still_has_a_page() -> None:
    assert "<svg" not in run_page(make_result(), [])


def test_rows_of_several_seeds_show_mean_and_deviation() -> None:
    results = [make_result(seed=1), make_result(seed=2, shift=1.0), make_result("independent")]
    papa, independent = compare_rows(results)
    assert papa == (
        "papa",
        "91.50 (0.71) [90.00, 93.00]",
        "93.50 (0.71)",
        "93.00 (0.71)",
        "92.75 (0.71)",
    )
    assert independent == ("independent", *cells_of(results[2]["test"]))


def test_scores_that_are_not_numbers_are_said_to_be_so() -> None:
    scores = {**make_result()["test"], "ensemble": None}
    assert cells_of(scores)[1] == "not finite"
    assert paper_cells({"ensemble": 78.7}) == ("", "78.70", "", "")


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.2, 977.0), (1e-6, 2e-6), (99.1, 99.9), (0.0, 1e9)])
def test_ticks_are_few_round_and_within(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 12
    assert all(low - 1e-9 <= value <= high + 1e-9 for value in found)
    steps = {round((second - first) / (high - low), 6) for first, second in itertools.pairwise(found)}
    assert len(steps) == 1


def test_a_chart_of_nothing_is_nothing_and_one_point_is_drawn() -> None:
    assert line_chart("t", {"a": [(1.0, None), (2.0, math.nan)]}, x_label="x", y_label="y") == ""
    figure = line_chart("t", {"a": [(1.0, 5.0)]}, x_label="x", y_label="y")
    assert re.search(r'points="[\d.]+,[\d.]+"', figure)
    assert "nan" not in figure


def with_details(result: dict, road: float) -> dict:
    details = {"accuracy": 80.0, "F1 <road>": road}
    whats = ("mean", "ensemble", "average_soup", "greedy_soup")
    return {**result, "test": {**result["test"], "details": dict.fromkeys(whats, details)}}


def test_details_have_a_row_for_each_method_and_what_was_scored():
    results = [with_details(make_result("papa"), 10.0), with_details(make_result("papa", seed=2), 12.0)]
    results.append(with_details(make_result("papa-all"), 50.0))
    head, rows = details_table(results)
    assert head == ("", "accuracy", "F1 <road>")
    assert [row[0] for row in rows[:4]] == ["papa: mean", "papa: ensemble", "papa: average soup", "papa: greedy soup"]
    assert rows[0][1:] == ("80.00 (0.00)", "11.00 (1.41)")
    assert rows[4] == ("papa-all: mean", "80.00", "50.00")
    assert "F1 &lt;road&gt;" in compare_page(results)
    assert "F1 &lt;road&gt;" in run_page(results[0], METRICS)


def test_metrics_without_details_have_no_rows():
    assert details_table([make_result()]) == (("",), [])
