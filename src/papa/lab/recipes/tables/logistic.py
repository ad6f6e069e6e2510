"""Logistic regression, which the paper reports in the text of its appendix `app:logit`: the mean of ten runs."""

from __future__ import annotations

from papa.lab.recipes.tables.main import TITLES
from papa.lab.recipes.tables.table import Row, Table

COLUMNS = ("mean", "average_soup")
NUMBERS = {"independent": (92.76, 93.62), "papa-all": (91.34, 90.37)}

TABLES = (
    Table(
        label="logistic",
        title="logistic regression on UCI's optical digits: members and their average soup",
        columns=COLUMNS,
        rows=tuple(
            Row(
                name=method,
                title=TITLES[method],
                recipe="optdigits-logistic",
                change={"method": method},
                paper=dict(zip(COLUMNS, numbers, strict=True)),
                num_runs=10,
            )
            for method, numbers in NUMBERS.items()
        ),
    ),
)
