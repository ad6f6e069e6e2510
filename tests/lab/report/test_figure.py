import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papa.lab.report.figure import DotFigure, Line, LineFigure, padded, spread, thinned, ticks
from papa.lab.report.figures import compare_figures
from papa.lab.report.svg import DARK, LIGHT, NUM_COLOURS, standalone_svg, svg
from report_samples import make_epoch, make_result

finite = st.floats(min_value=-1e100, max_value=1e100)


def line_figure(*lines: Line) -> LineFigure:
    return LineFigure(name="f", title="Loss", caption="c", x_label="epoch", y_label="loss", lines=lines)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.2, 977.0), (1e-6, 2e-6), (99.1, 99.9), (0.0, 1e9)])
def test_ticks_are_few_round_and_within(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 12
    assert all(low - 1e-9 <= value <= high + 1e-9 for value in found)
    steps = {round((second - first) / (high - low), 6) for first, second in itertools.pairwise(found)}
    assert len(steps) == 1


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=8))
def test_any_points_are_drawn_with_finite_coordinates(drawn: list[tuple[float, float]]) -> None:
    picture = svg(line_figure(Line("a", drawn), Line("mean", drawn, "mean")))
    for path in re.findall(r'points="([^"]*)"', picture):
        assert all(math.isfinite(float(number)) for number in re.split(r"[ ,]", path))


@given(st.lists(finite, min_size=1))
def test_a_padded_range_is_never_empty(values: list[float]) -> None:
    low, high = padded(values, 0.05)
    assert low <= min(values) <= max(values) <= high
    assert low < high


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(4, 50))
def test_thinning_keeps_ends_lowest_and_highest(values: list[float], count: int) -> None:
    line = list(enumerate(values))
    kept = thinned(line, count)
    assert len(kept) <= count
    assert [kept[0], kept[-1]] == [line[0], line[-1]]
    assert {min(values), max(values)} <= {value for _, value in kept}
    assert kept == sorted(kept, key=lambda point: point[0])


def test_spreading_keeps_order_and_ends() -> None:
    assert spread(list(range(1000)), 5) == [0, 250, 500, 749, 999]
    assert spread([1, 2], 5) == [1, 2]


def test_alt_text_and_table_tell_the_numbers() -> None:
    figure = line_figure(Line("member 0", [(1, 0.5), (2, 0.25)]), Line("mean", [(2, 0.3)], "mean"))
    assert figure.alt == "Loss. loss against epoch. At epoch 2: member 0 0.25; mean 0.3."
    assert figure.table() == (["epoch", "member 0", "mean"], [["1", "0.5", ""], ["2", "0.25", "0.3"]])


def test_lines_differ_in_more_than_colour() -> None:
    lines = [Line(f"member {j}", [(1, 1), (2, 2)]) for j in range(18)]
    drawn = re.findall(r'<polyline class="line (dash\d)".*?/><path class="\w+" (.*?)/></g>', svg(line_figure(*lines)))
    assert len(drawn) == len(set(drawn)) == 18


def test_a_method_has_one_colour_in_all_figures_of_a_page() -> None:
    results = [make_result(method) for method in ("independent", "papa")]
    merged = {"event": "merge", "epoch": 1, "before": [50.0], "after": [40.0]}
    figures = compare_figures(results, [[make_epoch(1)], [make_epoch(1), merged]])["curves"]
    scores, change = (
        next(figure for figure in figures if figure.name == name)
        for name in ("compare-validation-score", "compare-change-after")
    )
    drawn = {figure.name: re.findall(r'<g class="(c\d)"><title>([\w-]+)<', svg(figure)) for figure in (scores, change)}
    assert drawn == {
        "compare-validation-score": [("c0", "independent"), ("c1", "papa")],
        "compare-change-after": [("c1", "papa")],
    }


def test_values_far_from_all_others_are_written_at_the_edge() -> None:
    rows = {"independent": {"mean": [10.2]}} | {f"m{j}": {"mean": [97.0 + j / 10]} for j in range(5)}
    picture = svg(DotFigure(name="f", title="t", caption="c", x_label="score", rows=rows))
    assert "← mean 10.2" in picture
    assert re.findall(r'text-anchor="middle">([\d.]+)</text>', picture)[0].startswith("97")


def test_many_lines_and_rows_are_drawn_within_limits() -> None:
    many = svg(line_figure(*(Line(f"member {j}", [(1, j)]) for j in range(200))))
    assert "and 186 more, see the numbers" in many
    rows = {f"layer {j}": {"a": [float(j)]} for j in range(2000)}
    figure = DotFigure(name="f", title="t", caption="c", x_label="x", rows=rows)
    assert len(svg(figure)) < 40_000
    assert figure.is_thinned
    assert len(figure.table()[1]) == 100


def test_a_file_of_its_own_needs_no_page() -> None:
    alone = standalone_svg(line_figure(Line("a<b>", [(1, 5.0)])))
    assert "var(--" not in alone
    assert 'xmlns="http://www.w3.org/2000/svg"' in alone
    assert "a&lt;b&gt;" in alone


def luminance(colour: str) -> float:
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def linear(colour: str) -> list[float]:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
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
"""How colours look with one kind of cone missing, in linear RGB (Machado, Oliveira and Fernandes 2009)."""


def lab(colour: str, sight: str) -> tuple[float, float, float]:
    r, g, b = (
        min(1.0, max(0.0, sum(weight * part for weight, part in zip(row, linear(colour), strict=True))))
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
def test_colours_stand_out_from_the_paper_and_from_each_other_for_every_kind_of_sight(scheme: dict[str, str]) -> None:
    lines = [scheme[f"c{number}"] for number in range(NUM_COLOURS)]
    assert min(contrast(colour, scheme["paper"]) for colour in lines) >= 3.0
    assert contrast(scheme["ink"], scheme["paper"]) >= 7.0
    for background in ("paper", "panel"):
        assert contrast(scheme["quiet"], scheme[background]) >= 4.5
    for sight in SIGHT:
        distances = [math.dist(lab(a, sight), lab(b, sight)) for a, b in itertools.combinations(lines, 2)]
        assert min(distances) >= 12.0, sight
