"""From results to tables, figures and pages."""

from papa.lab.report.gap import GAP_COLUMN, gap_closed, gap_text, mean_gap_closed, with_gap_closed
from papa.lab.report.page import compare_page, run_page, table_page
from papa.lab.report.table import (
    COLUMNS,
    PAPER_ROW,
    cells_of,
    compare_rows,
    details_table,
    paper_cells,
    paper_rows,
    run_rows,
)

__all__ = [
    "COLUMNS",
    "GAP_COLUMN",
    "PAPER_ROW",
    "cells_of",
    "compare_page",
    "compare_rows",
    "details_table",
    "gap_closed",
    "gap_text",
    "mean_gap_closed",
    "paper_cells",
    "paper_rows",
    "run_page",
    "run_rows",
    "table_page",
    "with_gap_closed",
]
