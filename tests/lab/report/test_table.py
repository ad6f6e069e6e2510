from papa.lab.report.page import compare_page
from papa.lab.report.table import (
    cells_of,
    compare_rows,
    compare_table,
    paper_cells,
    run_rows,
    runs_by_setting,
)
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
