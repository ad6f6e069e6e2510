import html
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papa.lab.report.page import POLICY, compare_page, run_page
from papa.lab.report.table import details_table
from papa.lab.result import as_stored, checked_result, parsed_event
from papa.storage import json_text
from report_samples import FULL_METRICS, HOSTILE, METRICS, make_averaging, make_epoch, make_full_result, make_result


class Tags(HTMLParser):
    """Checks that tags nest, and collects them with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tags_of(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    tags.close()
    return tags


KNOWN_TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "footer", "section", "h1", "h2", "h3", "p", "pre"),
    *("dl", "dt", "dd", "div", "figure", "figcaption", "details", "summary"),
    *("table", "thead", "tbody", "tr", "th", "td"),
    *("svg", "g", "text", "tspan", "path", "defs", "use", "clippath", "rect"),
}
KNOWN_ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "content", "name", "class", "id", "scope", "data-label", "role", "aria-label"),
    *("viewbox", "x", "y", "width", "height", "d", "transform", "style", "clip-path", "href"),
}

PAGES: dict[str, Callable[[], str]] = {
    "run": lambda: run_page(make_result(), METRICS),
    "full run": lambda: run_page(make_full_result(), FULL_METRICS),
    "compare": lambda: compare_page([make_result(), make_result("papa-all", shift=1.0)]),
    "compare with curves": lambda: compare_page([make_result(), make_full_result()], [METRICS, FULL_METRICS]),
}


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_whole_stand_alone_and_escape_what_they_show(name: str) -> None:
    page = PAGES[name]()
    tags = tags_of(page)
    assert tags.open == []
    assert set(tags.seen) <= KNOWN_TAGS
    assert set(tags.attributes) <= KNOWN_ATTRIBUTES
    assert not re.search(r"https?:|url\((?!#)|@import|src=|href=(?!\"#)", page.replace("src=x", ""))
    assert f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">' in page
    assert "&lt;script&gt;alert(1)" in page
    assert page.count("<h1>") == 1


def figures_in(page: str) -> list[str]:
    return re.findall(r'<figure id="([^"]+)"', page)


def test_a_run_page_has_its_figures_with_words_and_numbers_behind_them() -> None:
    page = run_page(make_full_result(), FULL_METRICS)
    assert figures_in(page) == [
        "validation-score",
        "test-score",
        "training-loss",
        "distance-to-mean",
        "half-life",
        "gain",
        "checks",
        "change-by-merging",
        "similarity",
        "interpolation-score",
    ]
    assert page.count("<svg") == page.count('role="img" aria-label="') == len(figures_in(page))
    assert len(re.findall(r"<svg [^>]*><title>", page)) == len(figures_in(page))
    assert len(re.findall(r"</svg>\s*<details><summary>numbers</summary>", page)) == len(figures_in(page))


@pytest.mark.parametrize(
    "words",
    [
        "Members in it: 0, 1.",
        "+ member 2",
        "left out",
        "Step 5: member 1 became non-finite (loss is not finite); left out.",
        "Step 20: writing a checkpoint failed: no space left on the device.",
        "2.5 MB communicated.",
        "3 steps later",
        "test, repaired",
        "test, aligned",
        "paper&#39;s test, in its full setting",
        "between members 0 and 1",
        "66.7%",
    ],
)
def test_a_run_page_says_what_the_result_holds(words: str) -> None:
    assert words in run_page(make_full_result(), FULL_METRICS)


def test_missing_parts_have_no_section() -> None:
    page = run_page(make_result(), [])
    assert "<svg" not in page
    for title in ("During training", "Effect of merging", "Similarity of members", "Between two members"):
        assert title not in page
    assert "Results" in page


def test_an_unfinished_run_says_how_many_epochs_are_done() -> None:
    result = {"recipe": "digits", "method": "papa", "seed": 1, "config": {"members": 2, "train": {"epochs": 20}}}
    page = run_page(result, METRICS)
    assert "This run is not finished: 2 of 20 epochs are done." in page
    assert "validation-score" in figures_in(page)
    assert "none of 20 epochs are done" in run_page(result, [])


def test_a_run_that_never_averaged_says_so() -> None:
    never = "Training ended before the first averaging"
    assert never in run_page({**make_result(), "num_averagings": 0}, [])
    assert never not in run_page({**make_result("independent"), "num_averagings": 0}, [])


def test_a_compare_page_shows_methods_single_runs_and_the_papers_numbers() -> None:
    results = [make_result(seed=1), make_result(seed=2, shift=1.0), {**make_full_result(), "method": "papa-all"}]
    page = compare_page(results, [METRICS, METRICS, FULL_METRICS])
    assert "91.50 (0.71) [90.00, 93.00]" in page
    assert page.index("papa-all</th>") < page.index("paper&#39;s papa-all</th>")
    for run in ("papa, seed 1", "papa, seed 2", "papa-all, seed 1"):
        assert run in page
    assert figures_in(page) == [
        "members-to-soup",
        "compare-validation-average-soup",
        "compare-validation-members",
        "compare-test-average-soup",
        "compare-test-members",
        "compare-training-loss",
        "compare-distance-to-mean",
        "compare-change-after-unrepaired",
        "compare-change-after",
        "compare-change-later",
    ]


def test_a_compare_page_names_runs_that_have_not_finished() -> None:
    unfinished = {"recipe": "digits", "method": "papa-2", "seed": 3, "config": {}}
    page = compare_page([make_result(), unfinished])
    assert "Not finished, and therefore without scores: papa-2, seed 3." in page


def test_a_compare_page_says_which_data_scores_are_of() -> None:
    untested = {**make_result("papa-2"), "test": None}
    assert "scores on test data" in compare_page([make_result()])
    assert "scores on validation data" in compare_page([untested])
    assert "do not compare them with the others" in compare_page([make_result(), untested])


def test_a_long_run_of_many_members_stays_small() -> None:
    events = [make_averaging(step) for step in range(10, 400_000, 10)]
    events += [make_epoch(epoch, num_members=20) for epoch in range(1, 601)]
    page = run_page(make_full_result(), events)
    assert len(page.encode()) < 1_000_000
    assert "Evenly spaced ones of many" in page


any_text = st.text(st.characters(exclude_categories=()), max_size=8)  # halves of characters too, as JSON can say them
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=8,
)


def check_pages_with_a_replaced_value(data: st.DataObject) -> None:
    """Some field of a result or of an event is replaced by any JSON value: the file is refused, or there is a page."""
    result, *events = json.loads(json.dumps([make_full_result(), *FULL_METRICS]))
    spoil(data.draw(st.sampled_from([result, *events])), data)
    try:
        result = checked_result(as_stored(result))
        events = [parsed_event(json_text(event).encode()) for event in events]
    except ValueError:
        return
    for page in (run_page(result, events), compare_page([result, make_result()], [events, METRICS])):
        assert page.encode()
        tags = tags_of(page)
        assert tags.open == []
        assert set(tags.seen) <= KNOWN_TAGS
        assert set(tags.attributes) <= KNOWN_ATTRIBUTES
        assert not re.search(r' (?:d|x|y|width|height)="[^"]*(?:nan|inf)', page)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_no_value_in_any_place_breaks_a_page(data: st.DataObject) -> None:
    check_pages_with_a_replaced_value(data)


@given(data=st.data())
def test_no_value_in_any_place_breaks_the_words_of_a_page(data: st.DataObject) -> None:
    """As above, with many more values, since drawing takes nearly all of the time."""
    with mock.patch("papa.lab.report.page.svg", lambda chart: f"<svg><title>{html.escape(chart.alt)}</title></svg>"):
        check_pages_with_a_replaced_value(data)


def test_half_a_character_in_a_command_loses_no_report() -> None:
    result = make_result("pa\ud800pa")
    result["environment"]["command"] = "papa run --out '\udcff\x00'"
    assert "papa run --out &#39;\ufffd\ufffd&#39;" in run_page(result, []).encode().decode()


def spoil(value: Any, data: st.DataObject) -> None:
    """Replace one part, anywhere within."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        if not isinstance(value[key], (dict, list)) or data.draw(st.booleans()):
            value[key] = data.draw(json_values)
            return
        value = value[key]


def test_the_hostile_name_is_hostile() -> None:
    with pytest.raises(AssertionError):
        tags_of(f"<p>{HOSTILE}</p>")


def with_details(result: dict, road: float) -> dict:
    details = {"accuracy": 80.0, "F1 <road>": road}
    whats = ("mean", "ensemble", "average_soup", "greedy_soup")
    return {**result, "test": {**result["test"], "details": dict.fromkeys(whats, details)}}


def test_details_have_a_row_for_each_method_and_what_was_scored() -> None:
    results = [with_details(make_result("papa"), 10.0), with_details(make_result("papa", seed=2), 12.0)]
    results.append(with_details(make_result("papa-all"), 50.0))
    head, rows = details_table(results)
    assert head == ("", "accuracy", "F1 <road>")
    assert [row[0] for row in rows[:4]] == ["papa: mean", "papa: ensemble", "papa: average soup", "papa: greedy soup"]
    assert rows[0][1:] == ("80.00 (0.00)", "11.00 (1.41)")
    assert rows[4] == ("papa-all: mean", "80.00", "50.00")
    assert "F1 &lt;road&gt;" in compare_page(results)
    assert "F1 &lt;road&gt;" in run_page(results[0], METRICS)


def test_the_papers_details_follow_ours() -> None:
    result = with_details(make_result("independent"), 10.0)
    result["paper_details"] = {"mean": {"F1 <road>": 88.8}, "average_soup": {"F1 <road>": 43.32}}
    result["paper_soups"] = "repaired"
    rows = {row[0]: row[1:] for row in details_table([result])[1]}
    assert list(rows)[:2] == ["independent: mean", "paper's independent: mean"]
    assert rows["independent: mean"] == ("80.00", "10.00")
    assert rows["paper's independent: mean"] == ("", "88.80")
    assert rows["paper's independent: average soup, repaired"] == ("", "43.32")
    assert "paper&#39;s independent: mean" in run_page(result, METRICS)
    result["paper_details"] = {"mean": {"F1 <road>": "high"}}  # altered by hand
    with pytest.raises(ValueError, match=r"paper_details.mean.F1 <road> is 'high', expected a number"):
        checked_result(result)


def test_the_details_of_a_single_network_have_one_row() -> None:
    single = with_details(make_result("longer"), 10.0)
    single["test"]["members"] = [91.0]
    assert details_table([single])[1] == [("longer", "80.00", "10.00")]


def test_metrics_without_details_have_no_rows() -> None:
    assert details_table([make_result()]) == (("",), [])
