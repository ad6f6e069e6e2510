"""Rows of repaired and aligned soups, and the paper's rows for the same soups."""

from typing import Any

from papa.lab.report.table import compare_rows, compare_table, run_rows


def result(**changes: Any) -> dict[str, Any]:
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
    assert run_rows(result())[2:] == [
        ("test, repaired", "", "", "20.00", "80.50"),
        ("test, aligned and repaired", "", "", "60.00", "81.00"),
        ("paper's test, in its full setting, aligned and repaired", "", "", "9.50", "94.10"),
    ]
    plain = result(repaired=None, aligned=None, paper_soups=None)
    assert [row[0] for row in run_rows(plain)] == ["test", "validation", "paper's test, in its full setting"]
    assert [row[0] for row in run_rows({**plain, "test": None, "paper": None})] == ["validation"]


def test_methods_side_by_side_show_them_too() -> None:
    merged = result(method="papa-all", repaired=None, aligned=None, paper_soups=None)
    rows = compare_rows([result(), merged])
    assert [row[0] for row in rows] == [
        "independent",
        "independent, repaired",
        "independent, aligned and repaired",
        "papa-all",
    ]
    assert rows[2] == ("independent, aligned and repaired", "", "", "60.00", "81.00")
    papers = [row[0] for row in compare_table([result(), merged])[1] if row[0].startswith("paper's")]
    assert papers == ["paper's independent, aligned and repaired", "paper's papa-all"]


def test_several_seeds_have_a_mean_and_a_deviation() -> None:
    other = result(aligned={"test": {"average_soup": 62.0, "greedy_soup": 81.0}})
    assert compare_rows([result(), other])[2][3:] == ("61.00 (1.41)", "81.00 (0.00)")


def test_a_single_network_is_its_own_soup_and_has_no_rows_for_others() -> None:
    single = result(method="longer", test={**result()["test"], "members": [70.0]})
    assert [row[0] for row in compare_rows([single])] == ["longer"]
    assert not any("repaired" in row[0] for row in run_rows({**single, "paper": None}))
