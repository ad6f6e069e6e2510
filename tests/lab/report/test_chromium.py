"""Reports as a browser shows them."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from browser import CHROMIUM, Page, open_browser
from papa.lab.report.draw import DARK, LIGHT
from papa.lab.report.page import compare_page, run_page
from report_samples import FULL_METRICS, METRICS, make_full_result, make_result

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

PAGES: dict[str, Callable[[], str]] = {
    "run": lambda: run_page(make_full_result(), FULL_METRICS),
    "compare": lambda: compare_page(
        [make_result(seed=1), make_result(seed=2, shift=1.0), make_full_result()], [METRICS, METRICS, FULL_METRICS]
    ),
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(params=PAGES, scope="module")
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param) / "report.html"
    path.write_text(PAGES[request.param]())
    return path


LOOKS = [(1280, "light", ""), (1280, "dark", ""), (360, "light", ""), (360, "dark", ""), (800, "dark", "print")]


@pytest.mark.parametrize(("width", "scheme", "media"), LOOKS)
def test_a_report_opens_without_errors_or_requests_and_shows_all_figures(
    browser: Page, report: Path, width: int, scheme: str, media: str
) -> None:
    browser.open(report, width=width, scheme=scheme, media=media)
    names = re.findall(r'<figure id="([^"]+)"', report.read_text())
    boxes = browser.evaluate(
        "[...document.querySelectorAll('figure')].map(figure => {"
        " const box = figure.querySelector('svg').getBoundingClientRect();"
        " return [figure.id, box.left, box.right, box.width, box.height] })"
    )
    assert [box[0] for box in boxes] == names
    assert len(names) >= 7
    for name, left, right, box_width, height in boxes:
        assert left >= 0, name
        assert right <= width, name
        assert box_width >= 250, name
        assert height >= 60, name
    assert browser.evaluate("document.documentElement.scrollWidth") <= width  # nothing sticks out of a phone
    paper = (LIGHT if scheme == "light" or media == "print" else DARK)["paper"]
    red, green, blue = (int(paper[index : index + 2], 16) for index in (1, 3, 5))
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == f"rgb({red}, {green}, {blue})"
    assert browser.errors() == []
    assert browser.requests() == [report.as_uri()]


def test_labels_of_figures_do_not_stick_out(browser: Page, report: Path) -> None:
    browser.open(report)
    out = browser.evaluate(
        "[...document.querySelectorAll('svg')].flatMap(svg => { const frame = svg.getBoundingClientRect();"
        " return [...svg.querySelectorAll('text')].filter(text => { const box = text.getBoundingClientRect();"
        "  return box.left < frame.left - 2 || box.right > frame.right + 2 || box.bottom > frame.bottom + 2 })"
        " .map(text => text.textContent) })"
    )
    assert out == []


def test_labels_of_figures_do_not_overlap(browser: Page, report: Path) -> None:
    browser.open(report)
    overlaps = browser.evaluate(
        "[...document.querySelectorAll('svg')].flatMap(svg => {"
        " const texts = [...svg.querySelectorAll('text')].map(text =>"
        "  [text.textContent, text.getBoundingClientRect()]);"
        " return texts.flatMap(([a, one], i) => texts.slice(i + 1).filter(([b, two]) =>"
        "  Math.min(one.right, two.right) - Math.max(one.left, two.left) > 1 &&"
        "  Math.min(one.bottom, two.bottom) - Math.max(one.top, two.top) > 4).map(([b]) => a + ' / ' + b)) })"
    )
    assert overlaps == []


def test_numbers_unfold(browser: Page, report: Path) -> None:
    browser.open(report)
    closed = browser.evaluate("document.querySelector('figure details').getBoundingClientRect().height")
    browser.evaluate("document.querySelector('figure summary').click()")
    assert browser.evaluate("document.querySelector('figure details').getBoundingClientRect().height") > closed + 20


def test_the_browser_reports_errors_and_requests(browser: Page, tmp_path: Path) -> None:
    """A page that does everything a report must not do."""
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='https://example.org/a.png'><script>console.error('oh no'); missing()</script>")
    browser.open(bad)
    assert "https://example.org/a.png" in browser.requests()
    errors = " ".join(browser.errors())
    assert "oh no" in errors
    assert "missing is not defined" in errors
