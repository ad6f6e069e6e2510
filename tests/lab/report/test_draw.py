import dataclasses
import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from papa.lab.report import draw
from papa.lab.report.draw import DARK, LIGHT, SERIES_COLORS, pdf_bytes, png_bytes, standalone_svg, svg
from papa.lab.report.figures import compare_figures, members_to_soup
from papa.lab.report.plot import DotPlot, Line, LinePlot, evenly_spaced
from report_samples import HOSTILE, make_epoch, make_result

finite = st.floats(min_value=-1e100, max_value=1e100)


def line_plot(*lines: Line) -> LinePlot:
    return LinePlot(name="f", title="Loss", caption="c", x_label="epoch", y_label="loss", lines=lines)


def dot_plot(rows: dict) -> DotPlot:
    return DotPlot(name="f", title="t", caption="c", x_label="score", rows=rows)


def texts_of(picture: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=8))
def test_any_points_are_drawn_with_finite_coordinates(drawn: list[tuple[float, float]]) -> None:
    picture = svg(line_plot(Line("a", drawn), Line("mean", drawn, "c0")))
    assert picture.endswith("</svg>")
    assert not re.search(r"nan|inf", re.sub(r'aria-label="[^"]*"', "", picture))


@given(st.lists(finite, min_size=1))
def test_limits_contain_all_values_and_are_never_empty(values: list[float]) -> None:
    low, high = draw._limits(values)
    assert low <= min(values) <= max(values) <= high
    assert low < high


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_labels_are_moved_apart_in_their_order(wanted: list[float]) -> None:
    placed = draw._apart(wanted, 0.075)
    order = sorted(range(len(wanted)), key=lambda index: placed[index])
    assert [wanted[index] for index in order] == sorted(wanted)
    assert all(high - low >= 0.075 - 1e-9 for low, high in itertools.pairwise(sorted(placed)))
    assert max(placed) <= 1


def test_evenly_spaced_items_keep_order_and_ends() -> None:
    assert evenly_spaced(list(range(1000)), 5) == [0, 250, 500, 749, 999]
    assert evenly_spaced([1, 2], 5) == [1, 2]


def test_alt_text_and_table_give_the_numbers() -> None:
    plot = line_plot(Line("member 0", [(1, 0.5), (2, 0.25)], is_member=True), Line("mean", [(2, 0.3)]))
    assert plot.alt == "Loss. loss against epoch. At epoch 2: member 0 0.25; mean 0.3."
    assert plot.table() == (["epoch", "member 0", "mean"], [["1", "0.5", ""], ["2", "0.25", "0.3"]])
    dots = dot_plot({"papa": {"ensemble": [90.0, 92.0]}})
    assert dots.alt == "t. score. papa: ensemble 91."
    assert dots.table() == (["", "ensemble"], [["papa", "90, 92"]])


def test_lines_of_one_color_differ_in_their_dashes_and_all_are_labelled() -> None:
    lines = [Line(f"line {j}", [(1, j), (2, j), (3, j)], "c0") for j in range(3)]
    picture = svg(line_plot(*lines))
    assert {f"line {j}" for j in range(3)} <= set(texts_of(picture))
    strokes = re.findall(r'style="([^"]*stroke-width: 1.8[^"]*)"', picture)
    assert len(strokes) == len(set(strokes)) == 3


def test_a_method_has_one_color_in_all_plots_of_a_page_and_independent_members_have_that_of_text() -> None:
    results = [make_result(method) for method in ("independent", "papa")]
    merged = {"event": "merge", "epoch": 1, "before": [50.0], "after": [40.0]}
    sections = compare_figures(results, [[make_epoch(1)], [make_epoch(1), merged]])
    (story,) = sections["scores"]
    assert story.colors == {"independent": "ink", "papa": "c0"}
    for plot in sections["curves"]:
        assert {line.name: line.color for line in plot.lines}.items() <= story.colors.items()


def test_a_collapsed_soup_is_named_at_the_edge_and_does_not_flatten_the_rest() -> None:
    results = [make_result("independent"), make_result("papa", shift=1.0), make_result("papa-all")]
    results[0]["test"]["average_soup"] = 10.2
    picture = svg(members_to_soup(results))
    texts = texts_of(picture)
    assert "◂ average soup 10.2" in texts
    ticks = [float(text) for text in texts if re.fullmatch(r"\d\d(\.5)?", text)]
    assert min(ticks) >= 89
    curves = [
        [make_epoch(epoch) | {"validation_average_soup": soup + epoch / 100} for epoch in (1, 2, 3)]
        for soup in (0.1, 50)
    ]
    plots = {plot.name: plot for plot in compare_figures(results[:2], curves)["curves"]}
    assert "independent ↓ 0.13" in texts_of(svg(plots["compare-validation-average-soup"]))


def test_independent_members_come_first_and_single_seeds_are_drawn() -> None:
    results = [make_result("papa", 1), make_result("papa", 2, shift=1.0), make_result("independent")]
    plot = members_to_soup(results)
    assert list(plot.rows) == ["independent", "papa"]
    assert plot.rows["papa"]["average soup"] == [92.5, 93.5]
    assert plot.reference == "independent"
    assert "Small marks are single seeds" in plot.caption
    assert len(svg(plot)) > len(svg(members_to_soup(results[1:])))
    assert members_to_soup([{"method": "papa"}]) is None


def test_many_lines_and_rows_are_drawn_within_limits() -> None:
    many = svg(line_plot(*(Line(f"line {j}", [(1, j)]) for j in range(200))))
    assert "and 188 more" in texts_of(many)
    plot = dot_plot({f"layer {j}": {"a": [float(j)]} for j in range(2000)})
    assert len(svg(plot)) < 60_000
    assert len(plot.table()[1]) == 2000


def test_long_noisy_lines_stay_small_and_keep_their_peaks() -> None:
    values = [math.sin(step * step) for step in range(40_000)]
    values[20_001] = 5.0
    (line,) = re.findall(
        r'<path d="([^"]*)" clip-path[^>]*stroke-width: 1.8', svg(line_plot(Line("a", list(enumerate(values)))))
    )
    heights = [float(point.split()[2]) for point in line.strip().splitlines()]
    assert len(heights) < 4000
    assert sorted(heights)[0] < sorted(heights)[1] - 50


def test_drawing_twice_gives_the_same_bytes_and_ids_differ_between_plots() -> None:
    plot = members_to_soup([make_result("independent"), make_result("papa")])
    for render in (svg, standalone_svg, png_bytes, pdf_bytes):
        assert render(plot) == render(plot)
    plots = [dataclasses.replace(line_plot(Line("a", [(1, 2)])), name=name) for name in ("one", "two")]
    ids = [set(re.findall(r' id="([^"]+)"', svg(plot))) for plot in plots]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_names_are_drawn_as_text_and_never_as_markup_or_formulas() -> None:
    name = f"$x^2$ {HOSTILE}\ud800\x00\n道"
    for plot in (line_plot(Line(name, [(1, 5.0)])), dot_plot({name: {name: [1.0]}})):
        assert "<script" not in svg(plot)
        ElementTree.fromstring(standalone_svg(plot))
        assert pdf_bytes(plot).startswith(b"%PDF")
    assert "$x^2$" in texts_of(svg(line_plot(Line("$x^2$", [(1, 5.0)]))))


def test_a_standalone_file_has_both_color_schemes_and_a_background() -> None:
    alone = standalone_svg(line_plot(Line("a<b>", [(1, 5.0)])))
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
    figure = Figure()
    axes = figure.add_subplot()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    draw._name_points(axes, [Line(f"point {number}", [(0.5 + number / 100, 0.5)]) for number in range(4)])
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
