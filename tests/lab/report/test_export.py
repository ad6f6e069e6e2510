import csv
import io
from pathlib import Path

from papa.lab.report.draw import pdf_bytes
from papa.lab.report.export import CSV_COLUMNS, csv_text, latex_escaped, latex_text
from papa.lab.report.figures import run_figures
from papa.lab.runs import Run
from report_samples import FULL_METRICS, HOSTILE, METRICS, make_full_result, make_result


def make_run(result: dict, events: list | None = None) -> Run:
    return Run(Path("runs/a"), result, events or [], True)


RUNS = [make_run(make_result(seed=1), METRICS), make_run(make_result(seed=2, shift=1.0))]


def test_csv_has_a_line_for_each_run_data_and_kind_of_soups() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text([make_run(make_full_result())]))))
    assert tuple(rows[0]) == CSV_COLUMNS
    found = [(row["data"], row["soups"], row["mean"], row["average_soup"]) for row in rows]
    assert found == [
        ("test", "plain", "91.0", "92.5"),
        ("validation", "plain", "91.0", "92.5"),
        ("test", "repaired", "", "91.25"),
        ("test", "aligned", "", "90.75"),
    ]
    assert rows[0]["members"] == "2"
    assert rows[0]["seconds"] == "1.5"


def test_csv_names_runs_without_scores_and_hides_formulas() -> None:
    unfinished = Run(Path("runs/b"), {"recipe": "=1+1", "method": 'a,"b"', "seed": -3, "config": {}}, [], False)
    (row,) = csv.DictReader(io.StringIO(csv_text([unfinished])))
    assert (row["recipe"], row["method"], row["seed"], row["finished"]) == ("'=1+1", 'a,"b"', "-3", "no")


def test_latex_is_a_booktabs_table() -> None:
    lines = latex_text(RUNS).splitlines()
    assert [line for line in lines if "rule" in line] == [r"\toprule", r"\midrule", r"\bottomrule"]
    assert r"papa & 91.50 (0.71) [90.00, 93.00] & 93.50 (0.71) & 93.00 (0.71) & 92.75 (0.71) \\" in lines
    one = latex_text(RUNS[:1])
    assert r"test & 91.00 [90.00, 92.00] & 93.00 & 92.50 & 92.25 \\" in one.splitlines()


def test_latex_escapes_hostile_names() -> None:
    assert latex_escaped(r"\input{x}") == r"\textbackslash{}input\{x\}"
    text = latex_text([make_run({**make_result(), "recipe": HOSTILE, "method": "[b\nc"})])
    assert "\\{\\}\\%\\textbackslash{}" in text
    assert "[b c" in text
    two = latex_text([make_run(make_result("[5cm]")), make_run(make_result("papa"))])
    assert "\n{}[5cm] & " in two


def test_any_character_can_be_written() -> None:
    run = make_run({**make_result("\ud800\x00"), "recipe": "\udfff"})
    for text in (csv_text([run]), latex_text([run, run])):
        assert text.encode()


def test_figures_are_drawn_as_pdf() -> None:
    result = make_full_result()
    result["similarity"]["layers"][0] = "\x00\ud800<&"
    charts = [chart for section in run_figures(result, FULL_METRICS).values() for chart in section]
    assert len(charts) == 10
    for chart in charts:
        assert pdf_bytes(chart).startswith(b"%PDF")
