"""The share of the gap between independent members and their ensemble that a soup closes."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papa.lab.report.export import latex_text
from papa.lab.report.page import compare_page
from papa.lab.report.table import compare_rows, compare_table, gap_closed, mean_gap_closed
from papa.lab.runs import Run
from report_samples import make_result

scores = st.floats(0, 100)


@given(mean=scores, gap=st.floats(0.01, 100), shift=st.floats(-50, 50))
def test_the_ends_are_0_and_100_and_shifting_all_changes_nothing(mean: float, gap: float, shift: float) -> None:
    ensemble = mean + gap
    assert gap_closed(mean, mean, ensemble) == 0
    assert gap_closed(ensemble, mean, ensemble) == pytest.approx(100)
    soup = mean + gap / 4
    assert gap_closed(soup + shift, mean + shift, ensemble + shift) == pytest.approx(25, abs=1e-6)


@given(soup=scores, mean=scores, gap=scores)
def test_there_is_no_share_of_a_gap_that_is_not_positive(soup: float, mean: float, gap: float) -> None:
    assert gap_closed(soup, mean, mean - gap) is None


@given(soup=scores, mean=scores, gap=st.floats(0.01, 100))
def test_losses_close_the_same_gap_from_above(soup: float, mean: float, gap: float) -> None:
    expected = gap_closed(-soup, -mean, -mean + gap)
    assert gap_closed(soup, mean, mean - gap, higher_is_better=False) == pytest.approx(expected)
    assert gap_closed(soup, mean, mean + gap, higher_is_better=False) is None


def test_a_comparison_of_losses_has_the_gap_closed_and_more_digits() -> None:
    results = [make("independent", soup=9.0), make("papa", soup=1.25)]
    for result in results:
        result["config"]["data"] = {"name": "text"}
        result["test"].update(mean=1.5, ensemble=1.0)
    _, rows = compare_table(results)
    assert [row[-1] for row in rows] == ["below -100%", "50%"]
    assert rows[1][3] == "1.2500"
    assert "average soup of papa, one network, has 1.250 loss per token on test data, 0.250 better" in compare_page(
        results
    )


def make(method: str, seed: int = 1, *, soup: float = 0.0, members: int = 2, **average: Any) -> dict[str, Any]:
    result = make_result(method, seed)
    result["config"] = {**result["config"], "members": members, "average": average}
    result["test"] = {**result["test"], "mean": 90.0, "ensemble": 92.0, "average_soup": soup}
    return result


def test_it_is_taken_from_means_over_seeds_of_runs_that_have_an_independent_one_beside_them() -> None:
    independent = [make("independent", 1, soup=10.0), make("independent", 2, soup=10.0)]
    independent[1]["test"].update(mean=92.0, ensemble=96.0)
    papa = [make("papa", 1, soup=92.0), make("papa", 2, soup=93.0), make("papa", 3, soup=0.0)]
    assert mean_gap_closed(papa, [*independent, *papa]) == pytest.approx(100 * (92.5 - 91) / (94 - 91))
    assert mean_gap_closed(papa[2:], [*independent, *papa]) is None
    assert mean_gap_closed(papa, papa) is None


def test_independent_members_of_another_training_are_no_yardstick() -> None:
    few, many = make("independent", members=2), make("independent", members=5)
    many["test"].update(mean=80.0, ensemble=84.0)
    papa = make("papa", soup=91.0, members=5, half_life=0.1)
    assert mean_gap_closed([papa], [few, many]) == pytest.approx(275)
    assert mean_gap_closed([papa], [few]) is None
    assert mean_gap_closed([papa], [{**many, "recipe": "cifar10-vgg11"}]) is None


def test_options_of_a_coupling_do_not_matter_for_its_yardstick() -> None:
    independent, coupled = make("independent"), make("noloco", soup=91.0)
    independent["config"]["coupling"], coupled["config"]["coupling"] = {"every_steps": None}, {"every_steps": 2}
    assert mean_gap_closed([coupled], [independent]) == pytest.approx(50)


def test_a_comparison_with_independent_members_has_a_column_of_it() -> None:
    independent, papa = make("independent", soup=10.0), make("papa", soup=91.5)
    independent["aligned"] = {"test": {"average_soup": 90.5, "greedy_soup": 91.0}}
    head, rows = compare_table([independent, {**papa, "paper": {"ensemble": 95.0}}])
    assert head[-1] == "gap closed"
    assert {row[0]: row[-1] for row in rows} == {
        "independent": "below -100%",
        "independent, aligned and repaired": "25%",
        "papa": "75%",
        "paper's papa": "",
    }
    assert {len(row) for row in rows} == {len(head)}


def test_without_independent_members_there_is_none_and_without_a_gap_it_is_empty() -> None:
    papa, independent = make("papa", soup=91.0), make("independent", soup=10.0)
    head, rows = compare_table([papa])
    assert "gap closed" not in head
    assert rows == compare_rows([papa])
    independent["test"]["ensemble"] = 90.0
    head, rows = compare_table([papa, independent])
    assert head[-1] == "gap closed"
    assert [row[-1] for row in rows] == ["", ""]


def test_pages_and_latex_show_it() -> None:
    results = [make("independent", soup=10.0), make("papa", soup=91.5)]
    page = compare_page(results)
    assert '<td data-label="gap closed">75%</td>' in page
    assert "Gap closed: the position of the average soup" in page
    assert "gap closed" not in compare_page(results[1:])
    lines = latex_text([Run(Path("a"), result, [], True) for result in results]).splitlines()
    assert r"\begin{tabular}{lrrrrr}" in lines
    assert any(line.startswith("papa &") and line.endswith(r"& 75\% \\") for line in lines)
