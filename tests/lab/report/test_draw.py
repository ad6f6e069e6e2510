import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from papa.lab.report.draw import (
    DARK,
    LIGHT,
    SERIES_COLORS,
    Chart,
    Line,
    evenly_spaced,
    limits,
    line_chart,
    pdf_bytes,
    standalone_svg,
    svg,
)
from papa.lab.report.figures import compare_figures, members_to_soup
from report_samples import HOSTILE, make_epoch, make_result

finite = st.floats(min_value=-1e100, max_value=1e100)


def chart_of(*lines: Line, name: str = "f", **options: bool) -> Chart:
    (chart,) = line_chart(name, "Loss", "c", ("epoch", "loss"), lines, **options)
    return chart


def texts_of(picture: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=8))
def test_any_points_are_drawn_with_finite_coordinates(drawn: list[tuple[float, float]]) -> None:
    picture = svg(chart_of(Line("a", drawn), Line("mean", drawn, "c0")))
    assert picture.endswith("</svg>")
    assert not re.search(r"nan|inf", re.sub(r'aria-label="[^"]*"', "", picture))


@given(st.lists(finite, min_size=1))
def test_limits_contain_all_values_and_are_never_empty(values: list[float]) -> None:
    low, high = limits(values)
    assert low <= min(values) <= max(values) <= high
    assert low < high


def test_evenly_spaced_items_keep_order_and_ends() -> None:
    assert evenly_spaced(list(range(1000)), 5) == [0, 250, 500, 749, 999]
    assert evenly_spaced([1, 2], 5) == [1, 2]


def test_alt_text_and_table_give_the_numbers() -> None:
    chart = chart_of(Line("member 0", [(1, 0.5), (2, 0.25)], is_member=True), Line("mean", [(2, 0.3)]))
    assert chart.alt == "Loss. loss against epoch. At epoch 2: member 0 0.25; mean 0.3."
    assert chart.numbers == (["epoch", "member 0", "mean"], [["1", "0.5", ""], ["2", "0.25", "0.3"]])
    assert line_chart("f", "Loss", "c", ("epoch", "loss"), [Line("mean", [])]) == []
    story = members_to_soup([make_result(), make_result(seed=2, shift=1.0)])
    assert "papa: mean of members 91.5, ensemble 93.5, average soup 93, greedy soup 92.75." in story.alt
    assert story.numbers[1] == [["papa", "91, 92", "93, 94", "92.5, 93.5", "92.25, 93.25"]]


def test_lines_of_one_color_differ_in_their_dashes_and_all_are_labelled() -> None:
    lines = [Line(f"line {j}", [(1, j), (2, j), (3, j)], "c0") for j in range(3)]
    picture = svg(chart_of(*lines))
    assert {f"line {j}" for j in range(3)} <= set(texts_of(picture))
    strokes = re.findall(r'style="([^"]*stroke-width: 1.8[^"]*)"', picture)
    assert len(set(strokes)) == 3


def color_of(words: str, picture: str) -> str:
    """The color of a label in the comparison."""
    found = re.search(rf'<text style="[^"]*fill: ([^;"]+)[^"]*"[^>]*>{re.escape(words)}</text>', picture)
    assert found is not None
    return found[1]


def test_a_method_has_one_color_in_all_figures_of_a_page_and_independent_members_have_that_of_text() -> None:
    results = [make_result(method) for method in ("independent", "papa")]
    sections = compare_figures(results, [[make_epoch(1)], [make_epoch(1)]])
    story = svg(sections["scores"][0])
    assert color_of("independent", story) == "var(--ink)"
    assert color_of("papa", story) == "var(--c0)"
    for chart in sections["curves"]:
        assert "var(--c1)" not in svg(chart)
        assert "stroke: var(--c0)" in svg(chart)


def test_every_mean_is_drawn_inside_with_a_collapsed_soup_beyond_a_break() -> None:
    results = [make_result("independent"), make_result("papa", shift=1.0), make_result("papa-all")]
    results[0]["test"]["average_soup"] = 10.2
    chart = members_to_soup(results)
    assert "beyond a break of the axis" in chart.caption
    texts = texts_of(svg(chart))
    assert "▼ 10.2" in texts
    assert "▼ 93.5" in texts
    assert "10.2" in texts
    assert sorted(float(text) for text in texts if re.fullmatch(r"9\d(\.5)?", text))[0] >= 90
    assert "beyond a break" not in members_to_soup(results[1:]).caption


@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=6))
def test_no_mark_of_a_comparison_is_outside(soups: list[float]) -> None:
    results = [make_result(f"method {place}") for place in range(len(soups))]
    for result, soup in zip(results, soups, strict=True):
        result["test"]["average_soup"] = soup
    figure = Figure(figsize=(5, 5))
    members_to_soup(results).draw(figure)
    (axes,) = figure.axes
    xs = [x for line in axes.lines for x in line.get_xdata()]
    assert len(xs) >= 4 * len(soups)
    assert all(0 <= x <= 1 for x in xs)


def test_a_headline_has_its_spread() -> None:
    texts = texts_of(svg(members_to_soup([make_result(), make_result(seed=2, shift=1.0)])))
    assert "▼ 93.0 ± 0.7" in texts


def test_a_curve_that_stays_far_from_all_others_is_named_and_does_not_flatten_them() -> None:
    results = [make_result("independent"), make_result("papa")]
    curves = [
        [make_epoch(epoch) | {"validation_average_soup": soup + epoch / 100} for epoch in (1, 2, 3)]
        for soup in (0.1, 50)
    ]
    charts = {chart.name: chart for chart in compare_figures(results, curves)["curves"]}
    assert "independent ↓ 0.13" in texts_of(svg(charts["compare-validation-average-soup"]))


def test_runs_of_different_length_are_compared_at_the_same_share_of_training() -> None:
    short, long = make_result("papa"), make_result("longer")
    long["config"] = {**long["config"], "train": {"epochs": 4}}
    curves = [[make_epoch(epoch) for epoch in range(1, last + 1)] for last in (2, 4)]
    for chart in compare_figures([short, long], curves)["curves"]:
        assert chart.numbers[0][0] == "share of training, %"
        assert [row[0] for row in chart.numbers[1]] == ["25", "50", "75", "100"]
    for chart in compare_figures([short, make_result("longer")], [curves[0], curves[0]])["curves"]:
        assert chart.numbers[0][0] == "epoch"


def test_independent_members_come_first_and_single_seeds_are_drawn() -> None:
    results = [make_result("papa", 1), make_result("papa", 2, shift=1.0), make_result("independent")]
    chart = members_to_soup(results)
    assert [row[0] for row in chart.numbers[1]] == ["independent", "papa"]
    assert "Small marks are single seeds" in chart.caption
    assert "The shaded range is that of independent networks" in chart.caption
    assert len(svg(chart)) > len(svg(members_to_soup(results[1:])))
    assert members_to_soup([{"method": "papa"}]) is None


def test_many_lines_and_rows_are_drawn_within_limits() -> None:
    many = svg(chart_of(*(Line(f"line {j}", [(1, j)]) for j in range(200))))
    assert "and 188 more" in texts_of(many)
    chart = members_to_soup([make_result(f"method {number}") for number in range(500)])
    assert len(svg(chart)) < 200_000
    assert len(chart.numbers[1]) == 500


def test_long_noisy_lines_stay_small_and_keep_their_peaks() -> None:
    values = [math.sin(step * step) for step in range(40_000)]
    values[20_001] = 5.0
    (line,) = re.findall(
        r'<path d="([^"]*)" clip-path[^>]*stroke-width: 1.8', svg(chart_of(Line("a", list(enumerate(values)))))
    )
    heights = [float(point.split()[2]) for point in line.strip().splitlines()]
    assert len(heights) < 4000
    assert sorted(heights)[0] < sorted(heights)[1] - 50


def test_drawing_twice_gives_the_same_bytes_and_ids_differ_between_plots() -> None:
    chart = members_to_soup([make_result("independent"), make_result("papa")])
    for render in (svg, standalone_svg, pdf_bytes):
        assert render(chart) == render(chart)
    charts = [chart_of(Line("a", [(1, 2)]), name=name) for name in ("one", "two")]
    ids = [set(re.findall(r' id="([^"]+)"', svg(chart))) for chart in charts]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_names_are_drawn_as_text_and_never_as_markup_or_formulas() -> None:
    name = f"$x^2$ {HOSTILE}\ud800\x00\n道"
    for chart in (chart_of(Line(name, [(1, 5.0)]), Line("b", [(1, 5.0)])), members_to_soup([make_result(name)])):
        assert "<script" not in svg(chart)
        ElementTree.fromstring(standalone_svg(chart))
        assert pdf_bytes(chart).startswith(b"%PDF")
    assert "$x^2$" in texts_of(svg(chart_of(Line("$x^2$", [(1, 5.0)]), Line("b", [(1, 5.0)]))))


def test_a_standalone_file_has_both_color_schemes_and_a_background() -> None:
    alone = standalone_svg(chart_of(Line("a<b>", [(1, 5.0)])))
    assert 'xmlns="http://www.w3.org/2000/svg"' in alone
    assert "a&lt;b&gt;" in alone
    assert "prefers-color-scheme: dark" in alone
    assert LIGHT["ink"] in alone
    assert DARK["ink"] in alone
    assert 'style="fill: var(--paper)"' in alone


def luminance(color: str) -> float:
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear(color), strict=True))


def linear(color: str) -> list[float]:
    parts = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


SIGHT = {
    "full": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
"""How colors look with one kind of cone missing, in linear RGB (Machado, Oliveira and Fernandes 2009)."""


def lab(color: str, sight: str) -> tuple[float, float, float]:
    r, g, b = (
        min(1.0, max(0.0, sum(weight * part for weight, part in zip(row, linear(color), strict=True))))
        for row in SIGHT[sight]
    )
    x, y, z = (
        value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116
        for value in (
            (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047,
            0.2126 * r + 0.7152 * g + 0.0722 * b,
            (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883,
        )
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_colors_contrast_with_background_and_each_other_for_every_kind_of_sight(
    scheme: dict[str, str],
) -> None:
    lines = [scheme[name] for name in (*SERIES_COLORS, "ink")]
    assert min(contrast(color, scheme["paper"]) for color in lines) >= 3.0
    assert contrast(scheme["ink"], scheme["paper"]) >= 7.0
    for background in ("paper", "panel"):
        assert contrast(scheme["quiet"], scheme[background]) >= 4.5
    for sight in SIGHT:
        distances = [math.dist(lab(a, sight), lab(b, sight)) for a, b in itertools.combinations(lines, 2)]
        assert min(distances) >= 12.0, sight


def test_names_of_near_points_do_not_overlap() -> None:
    figure = Figure(figsize=(5, 4))
    lines = [Line(f"point {number}", [(1 + number / 20, 0.5)]) for number in range(4)]
    chart_of(*lines, Line("left", [(0.0, 0.0)]), Line("right", [(2.0, 1.0)]), names_points=True).draw(figure)
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 6
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
