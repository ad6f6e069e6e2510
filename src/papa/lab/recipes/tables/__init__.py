"""Every table and figure of the paper by its name."""

from papa.errors import ConfigError, did_you_mean
from papa.lab.recipes.tables import ablations, comparisons, main, segmentation
from papa.lab.recipes.tables.table import Row, Table, number

ORDERED = (*main.TABLES, *ablations.TABLES, *comparisons.TABLES, *segmentation.TABLES, *main.LOGISTIC_TABLES)
TABLES: dict[str, Table] = {table.name: table for table in ORDERED}


def find_table(name: str) -> Table:
    """A table by its name (`table:ablation1`) or label (`ablation1`), or a `ConfigError` with the closest match."""
    labels = {table.label: table for table in TABLES.values()}
    found = TABLES.get(name) or labels.get(name.removeprefix("tab:").removeprefix("fig:"))
    if found is None:
        raise ConfigError(f"there is no table or figure {name}: {did_you_mean(name, [*TABLES, *labels])}")
    return found


__all__ = ["TABLES", "Row", "Table", "find_table", "number"]
