"""Tables of scores: rows of runs and of comparisons, other kinds of soups, and how much of a gap a soup closes."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papa.lab.report.export import latex_text
from papa.lab.report.page import compare_page
from papa.lab.report.table import (
    cells_of,
    compare_rows,
    compare_table,
    gap_closed,
    mean_gap_closed,
    paper_cells,
    run_rows,
    runs_by_setting,
)
from papa.lab.runs import Run
from report_samples import make_full_result, make_result


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


def test_runs_that_differ_in_more_than_the_seed_are_not_averaged() -> None:
    few, many = make_result(seed=1), make_result(seed=2)
    many["config"] = {**many["config"], "members": 10}
    assert list(runs_by_setting([few, many, make_result("papa-all")])) == [
        "papa, members 2",
        "papa, members 10",
        "papa-all",
    ]


def test_runs_that_differ_in_unused_options_are_averaged() -> None:
    runs = []
    for method in ("papa", "papa-all"):
        for half_life in (0.02, 0.003):
            run = make_result(method)
            run["config"] = {**run["config"], "average": {"half_life": half_life}}
            runs.append(run)
    found = {label: len(group) for label, group in runs_by_setting(runs).items()}
    assert found == {"papa, average.half_life 0.02": 1, "papa, average.half_life 0.003": 1, "papa-all": 2}


def test_counts_of_one_are_singular() -> None:
    page = compare_page([make_result()])
    assert "digits: 1 run compared" in page
    assert "1 way to train a population, seed 1; scores" in page
    assert "2 ways to train a population, seeds 1, 2; scores" in compare_page([make_result(), make_result("x", seed=2)])


def test_runs_of_several_recipes_are_named_by_them() -> None:
    other = {**make_result(), "recipe": "cifar10-vgg11"}
    assert list(runs_by_setting([make_result(), other])) == ["digits papa", "cifar10-vgg11 papa"]


def test_scores_that_are_not_numbers_are_shown_as_not_finite() -> None:
    scores = {**make_result()["test"], "ensemble": None}
    assert cells_of(scores)[1] == "not finite"
    assert paper_cells({"ensemble": 78.7}) == ("", "78.70", "", "")
    broken = make_result(seed=2)
    broken["test"] = {**broken["test"], "average_soup": None}
    assert compare_rows([make_result(), broken])[0][3] == "not finite"


def test_rows_of_a_run_hold_its_other_soups_and_the_papers_test() -> None:
    names = [row[0] for row in run_rows(make_full_result())]
    assert names == [
        "test",
        "validation",
        "test, repaired",
        "test, aligned and repaired",
        "paper's test, in its full setting",
    ]


def test_the_best_average_soup_has_a_row() -> None:
    best = {"epoch": 12, "validation": {"score": 93.0}, "test": {"score": 92.0}}
    rows = {row[0]: row for row in run_rows({**make_result(), "best_soup": best})}
    assert rows["test, best average soup (epoch 12)"][3] == "92.00"
    assert rows["validation, best average soup (epoch 12)"][3] == "93.00"
    assert len(run_rows({**make_result(), "best_soup": None})) == 2


def test_the_papers_row_follows_its_method() -> None:
    results = [{**make_result("independent"), "paper": {"ensemble": 95.0}}, make_result("papa")]
    assert [row[0] for row in compare_table(results)[1]] == ["independent", "paper's independent", "papa"]


def test_unfinished_runs_are_left_out() -> None:
    begun = {key: make_result(seed=3)[key] for key in ("recipe", "method", "config")}
    results = [make_result(seed=1), make_result(seed=2, shift=1.0), begun]
    assert compare_rows(results) == compare_rows(results[:2])
    assert compare_rows([begun]) == [("papa", "not finished", "", "", "")]


def independent_result(**changes: Any) -> dict[str, Any]:
    scores = {"mean": 70.0, "min": 60.0, "max": 80.0, "ensemble": 85.0, "average_soup": 10.0, "greedy_soup": 80.0}
    repaired = {"test": {"average_soup": 20.0, "greedy_soup": 80.5}, "greedy_members": [0]}
    aligned = {"test": {"average_soup": 60.0, "greedy_soup": 81.0}, "greedy_members": [0]}
    return {
        "method": "independent",
        "test": scores,
        "validation": scores,
        "repaired": repaired,
        "aligned": aligned,
        "paper": {"average_soup": 9.5, "greedy_soup": 94.1},
        "paper_soups": "aligned",
        **changes,
    }


def test_a_run_shows_each_kind_of_soup_and_names_the_papers() -> None:
    assert run_rows(independent_result())[2:] == [
        ("test, repaired", "", "", "20.00", "80.50"),
        ("test, aligned and repaired", "", "", "60.00", "81.00"),
        ("paper's test, in its full setting, aligned and repaired", "", "", "9.50", "94.10"),
    ]
    plain = independent_result(repaired=None, aligned=None, paper_soups=None)
    assert [row[0] for row in run_rows(plain)] == ["test", "validation", "paper's test, in its full setting"]
    assert [row[0] for row in run_rows({**plain, "test": None, "paper": None})] == ["validation"]


def test_methods_side_by_side_show_them_too() -> None:
    merged = independent_result(method="papa-all", repaired=None, aligned=None, paper_soups=None)
    rows = compare_rows([independent_result(), merged])
    assert [row[0] for row in rows] == [
        "independent",
        "independent, repaired",
        "independent, aligned and repaired",
        "papa-all",
    ]
    assert rows[2] == ("independent, aligned and repaired", "", "", "60.00", "81.00")
    papers = [row[0] for row in compare_table([independent_result(), merged])[1] if row[0].startswith("paper's")]
    assert papers == ["paper's independent, aligned and repaired", "paper's papa-all"]


def test_several_seeds_have_a_mean_and_a_deviation() -> None:
    other = independent_result(aligned={"test": {"average_soup": 62.0, "greedy_soup": 81.0}})
    assert compare_rows([independent_result(), other])[2][3:] == ("61.00 (1.41)", "81.00 (0.00)")


def test_a_single_network_is_its_own_soup_and_has_no_rows_for_others() -> None:
    single = independent_result(method="longer", test={**independent_result()["test"], "members": [70.0]})
    assert [row[0] for row in compare_rows([single])] == ["longer"]
    assert not any("repaired" in row[0] for row in run_rows({**single, "paper": None}))


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
