"""Logistic regression, which the paper reports in the text of an appendix."""

from __future__ import annotations

from papa.lab.recipes import paper
from papa.lab.recipes.tables.main import TITLES
from papa.lab.recipes.tables.table import Row, Table

TABLES = (
    Table(
        label="logistic",
        title="logistic regression on UCI's optical digits: members and their average soup",
        columns=("mean", "average_soup"),
        rows=tuple(
            Row(
                name=method,
                title=TITLES[method],
                recipe="optdigits-logistic",
                change={"method": method},
                paper=scores,
            )
            for (method, _, _), scores in paper.LOGISTIC.items()
        ),
        seeds=tuple(range(1, 11)),
    ),
)
