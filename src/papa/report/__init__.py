"""From results to tables, figures and pages."""

from papa.report.page import compare_page, run_page
from papa.report.table import COLUMNS, cells_of, compare_rows, paper_cells

__all__ = ["COLUMNS", "cells_of", "compare_page", "compare_rows", "paper_cells", "run_page"]
