"""Every table and figure of the paper by its name."""

from papa.errors import ConfigError, did_you_mean
from papa.lab.recipes.tables import ablations, comparisons, logistic, main, segmentation
from papa.lab.recipes.tables.table import Row, Table, number

MODULES = (main, ablations, comparisons, segmentation, logistic)
"""The modules with tables, in the order of listings."""

TABLES: dict[str, Table] = {table.name: table for module in MODULES for table in module.TABLES}


def find_table(name: str) -> Table:
    """A table by its name (`table:ablation1`) or label (`ablation1`), or a `ConfigError` with the closest match."""
    labels = {table.label: table for table in TABLES.values()}
    found = TABLES.get(name) or labels.get(name.removeprefix("tab:").removeprefix("fig:"))
    if found is None:
        raise ConfigError(f"there is no table or figure {name}: {did_you_mean(name, [*TABLES, *labels])}")
    return found


__all__ = ["TABLES", "Row", "Table", "find_table", "number"]
