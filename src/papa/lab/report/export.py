"""Results as CSV and LaTeX, for spreadsheets, scripts and papers."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from papa.lab.report.table import (
    COLUMNS,
    KEYS,
    SOUPS,
    compare_table,
    run_rows,
    scores_of,
)
from papa.lab.report.words import printable, text
from papa.lab.runs import Run

CSV_COLUMNS = (
    *("run", "recipe", "method", "seed", "members", "finished", "data", "soups"),
    *("mean", "min", "max", "ensemble", "average_soup", "greedy_soup", "seconds"),
)
LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "{}$&#_%"},
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}


def csv_text(runs: Sequence[Run]) -> str:
    """One line for each run, data set and kind of soups; cells without a number are empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for run in runs:
        result = run.result
        members = len(scores_of(result).get("members", ())) or result["config"].get("members")
        about = (str(run.path), result["recipe"], result["method"], result["seed"], members)
        seconds = result.get("seconds")
        for data, soups, scores in list(_score_parts(result)) or [("", "", {})]:
            cells = [scores.get(key) for key in ("mean", "min", "max", *list(KEYS)[1:])]
            finished = "yes" if run.is_finished else "no"
            total = sum(seconds.values()) if seconds else None
            row = (*about, finished, data, soups, *cells, total)
            # A quote before what a spreadsheet would read as a formula.
            is_formula = [isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r") for cell in row]
            writer.writerow(f"'{cell}" if quoted else cell for cell, quoted in zip(row, is_formula, strict=True))
    return printable(file.getvalue())


def _score_parts(result: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Data, kind of soups and scores of each part of a result that has scores."""
    for soups in ("plain", *SOUPS):
        part = result if soups == "plain" else result.get(soups) or {}
        for data in ("test", "validation"):
            if part.get(data):
                yield data, soups, part[data]


def latex_text(runs: Sequence[Run]) -> str:
    r"""A table for a paper, with booktabs lines; its preamble needs `\usepackage{booktabs}`."""
    results = [run.result for run in runs]
    head, rows = compare_table(results) if len(results) > 1 else (("data", *COLUMNS), run_rows(results[0]))
    name = ", ".join(dict.fromkeys(text(result["recipe"]) for result in results))
    caption = f"{text(results[0]['method'])}, seed {results[0]['seed']}."
    if len(results) > 1:
        data = "test" if all(result.get("test") for result in results) else "validation"
        seeds = ", ".join(dict.fromkeys(str(result["seed"]) for result in results))
        caption = f"{data} scores, mean (standard deviation) over seeds {seeds}."
    body = [" & ".join(map(latex_escaped, row)) + r" \\" for row in rows]
    body = ["{}" * line.startswith("[") + line for line in body]  # otherwise the \\ above takes the [ as its argument
    lines = [
        "% needs \\usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_escaped(name)}: {latex_escaped(caption)}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"\toprule",
        rf"{' & '.join(map(latex_escaped, head))} \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return printable("\n".join(lines) + "\n")


def latex_escaped(words: str) -> str:
    r"""Text that LaTeX prints unchanged.

    Example:
        >>> latex_escaped("50% of a_b")
        '50\\% of a\\_b'
    """
    one_line = re.sub(r"[\s\x00-\x1f\x7f]+", " ", words)
    return "".join(LATEX_ESCAPES.get(character, character) for character in one_line)
