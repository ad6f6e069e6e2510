from papa.lab.report import cells_of, compare_page, compare_rows, paper_cells, run_rows
from papa.lab.report.groups import groups_of
from papa.lab.report.table import compare_rows_with_paper
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
    assert list(groups_of([few, many, make_result("papa-all")])) == ["papa, members 2", "papa, members 10", "papa-all"]


def test_options_that_a_method_does_not_look_at_keep_no_runs_apart() -> None:
    runs = []
    for method in ("papa", "papa-all"):
        for half_life in (0.02, 0.003):
            run = make_result(method)
            run["config"] = {**run["config"], "average": {"half_life": half_life}}
            runs.append(run)
    found = {label: len(group) for label, group in groups_of(runs).items()}
    assert found == {"papa, average.half_life 0.02": 1, "papa, average.half_life 0.003": 1, "papa-all": 2}


def test_one_run_is_told_as_one() -> None:
    page = compare_page([make_result()])
    assert "digits: 1 run compared" in page
    assert "1 way to train a population, seed 1; scores" in page
    assert "2 ways to train a population, seeds 1, 2; scores" in compare_page([make_result(), make_result("x", seed=2)])


def test_runs_of_several_recipes_are_named_by_them() -> None:
    other = {**make_result(), "recipe": "cifar10-vgg11"}
    assert list(groups_of([make_result(), other])) == ["digits papa", "cifar10-vgg11 papa"]


def test_scores_that_are_not_numbers_are_said_to_be_so() -> None:
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


def test_the_papers_row_follows_its_method() -> None:
    results = [{**make_result("independent"), "paper": {"ensemble": 95.0}}, make_result("papa")]
    assert [row[0] for row in compare_rows_with_paper(results)] == ["independent", "paper's independent", "papa"]


def test_runs_that_have_not_finished_count_for_nothing() -> None:
    begun = {key: make_result(seed=3)[key] for key in ("recipe", "method", "config")}
    results = [make_result(seed=1), make_result(seed=2, shift=1.0), begun]
    assert compare_rows(results) == compare_rows(results[:2])
    assert compare_rows([begun]) == [("papa", "not finished", "", "", "")]
