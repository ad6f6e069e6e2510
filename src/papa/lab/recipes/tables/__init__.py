"""Every table and figure of the paper by its name."""

from papa.errors import ConfigError, did_you_mean
from papa.lab.recipes.tables.table import Row, Table, number

IN_DETAIL = "in detail: with and without augmentation, three population sizes"
ORDERED = (
    Table("summary_table", "the main results: ensembles and soups of the largest populations, with augmentation"),
    Table("cifar100_gradual", f"cifar100-vgg16 {IN_DETAIL}"),
    Table("cifar100_res_gradual", f"cifar100-resnet18 {IN_DETAIL}"),
    Table("cifar10_gradual", f"cifar10-vgg11 {IN_DETAIL}"),
    Table("cifar10_res_gradual", f"cifar10-resnet18 {IN_DETAIL}"),
    Table("comparing_long", "ten members, or one network trained ten times longer"),
    Table("summary_table2", "how many members went into the independent members' greedy soups"),
    Table("ablation", "ways to average"),
    Table("ablation1", "changes to PAPA-all"),
    Table("ablation2", "changes to PAPA-2"),
    Table("ablation_gradual", "changes to PAPA"),
    Table("dart_replication", "average soups of PAPA and PAPA-all, step by step toward DART"),
    Table("cifar100_swa", "averages along each member's trajectory (SWA), with and without averaging the population"),
    Table("comparing2", "members in ESGD's setting"),
    Table("cosine", "cosine similarity of features between members, and with the soup", options={"analysis": True}),
    Table(
        "papa_acc1",
        "accuracy of members over epochs, and its change at each merge",
        kind="figure",
        options={"average.probes": True},
    ),
    Table("image_seg1", "F1 of each class on Vaihingen, without augmentation"),
    Table("image_seg2", "F1 of each class on Vaihingen, with Mixup and label smoothing"),
    Table("logistic", "logistic regression on UCI's optical digits: members and their average soup", num_runs=10),
)
TABLES: dict[str, Table] = {table.name: table for table in ORDERED}


def find_table(name: str) -> Table:
    """A table by its name (`table:ablation1`) or label (`ablation1`), or a `ConfigError` with the closest match."""
    labels = {table.label: table for table in TABLES.values()}
    found = TABLES.get(name) or labels.get(name.removeprefix("tab:").removeprefix("fig:"))
    if found is None:
        raise ConfigError(f"there is no table or figure {name}: {did_you_mean(name, [*TABLES, *labels])}")
    return found


__all__ = ["TABLES", "Row", "Table", "find_table", "number"]
