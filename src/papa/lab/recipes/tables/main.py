"""The main table, its detailed versions, the longer training, the sizes of greedy soups, and logistic regression."""

from __future__ import annotations

from papa.lab.recipes.tables.table import Row, Table, named

TITLES = {"independent": "independent", "papa": "PAPA", "papa-all": "PAPA-all", "papa-2": "PAPA-2"}
GRIDS = {"none": "no augmentation", "default": "with augmentation"}
SCORES = ("ensemble", "average_soup", "greedy_soup")

# Two numbers for each method of TITLES: the ensemble's, and the greedy soup's of independent members or the average
# soup's of the others.
MAIN: dict[str, tuple[float, ...]] = {
    "cifar10-vgg11": (95.2, 94.0, 94.9, 94.8, 94.1, 94.1, 94.5, 94.4),
    "cifar10-resnet18": (97.5, 96.8, 97.4, 97.4, 97.3, 97.3, 97.1, 97.1),
    "cifar100-vgg16": (82.2, 77.8, 79.6, 79.4, 79.0, 78.9, 79.0, 78.9),
    "cifar100-resnet18": (84.3, 80.2, 82.2, 82.1, 81.8, 81.8, 81.3, 81.2),
    "imagenet-resnet50": (78.7, 76.8, 78.4, 78.4, 77.7, 77.7, 77.8, 77.8),
    "cifar100-finetune-effnetv2s": (91.7, 91.3, 91.6, 91.4, 91.4, 91.1, 91.3, 91.3),
    "cifar100-finetune-eva02": (90.6, 90.4, 90.7, 90.6, 90.7, 90.7, 90.5, 90.4),
    "cifar100-finetune-convit": (88.8, 87.9, 88.6, 88.4, 88.2, 88.1, 88.2, 88.2),
}
# Standard deviations over three seeds, in the same order; the ImageNet row is one run.
MAIN_SPREADS: dict[str, tuple[float, ...]] = {
    "cifar10-vgg11": (0.1, 0.1, 0.1, 0.0, 0.2, 0.2, 0.1, 0.1),
    "cifar10-resnet18": (0.0, 0.2, 0.1, 0.1, 0.1, 0.1, 0.0, 0.1),
    "cifar100-vgg16": (0.1, 0.1, 0.4, 0.3, 0.4, 0.4, 0.3, 0.3),
    "cifar100-resnet18": (0.3, 0.6, 0.1, 0.2, 0.0, 0.0, 0.3, 0.3),
    "cifar100-finetune-effnetv2s": (0.3, 0.4, 0.3, 0.5, 0.4, 0.4, 0.6, 0.6),
    "cifar100-finetune-eva02": (0.1, 0.1, 0.3, 0.2, 0.6, 0.5, 0.3, 0.3),
    "cifar100-finetune-convit": (0.2, 0.2, 0.2, 0.2, 0.2, 0.1, 0.2, 0.3),
}
# One row per (grid, members): ensemble, average soup and greedy soup of each method of TITLES.
DETAILED: dict[str, dict[tuple[str, int], tuple[float, ...]]] = {
    "cifar10_gradual": {
        ("none", 3): (93.32, 86.90, 92.10, 92.55, 92.55, 92.59, 92.97, 92.98, 93.03, 92.85, 92.86, 92.85),
        ("none", 5): (93.67, 82.94, 92.47, 93.06, 93.07, 93.09, 92.90, 92.90, 92.96, 92.89, 92.91, 92.91),
        ("none", 10): (93.80, 53.34, 92.11, 93.24, 93.26, 93.21, 92.80, 92.81, 92.86, 92.86, 92.85, 92.78),
        ("default", 3): (94.52, 85.94, 93.69, 94.61, 94.45, 94.45, 94.32, 94.35, 94.33, 94.15, 94.13, 94.10),
        ("default", 5): (94.96, 81.75, 93.98, 94.62, 94.78, 94.69, 94.51, 94.49, 94.27, 94.69, 94.64, 94.50),
        ("default", 10): (95.22, 9.49, 94.11, 94.95, 94.82, 94.61, 94.37, 94.35, 94.48, 94.61, 94.47, 94.48),
    },
    "cifar10_res_gradual": {
        ("none", 3): (96.00, 76.11, 95.47, 95.97, 95.97, 95.96, 95.75, 95.76, 95.70, 95.72, 95.72, 95.73),
        ("none", 5): (96.30, 30.98, 95.59, 96.16, 96.17, 96.14, 95.88, 95.88, 95.86, 95.85, 95.83, 95.86),
        ("none", 10): (96.41, 10.00, 95.28, 95.91, 95.90, 95.87, 95.74, 95.73, 95.78, 96.04, 96.04, 96.00),
        ("default", 3): (97.32, 59.91, 97.05, 97.31, 97.30, 97.16, 97.04, 96.98, 96.94, 97.14, 97.12, 97.17),
        ("default", 5): (97.44, 37.87, 97.02, 97.46, 97.37, 97.29, 97.17, 97.17, 97.09, 97.18, 97.15, 97.09),
        ("default", 10): (97.52, 11.20, 96.96, 97.45, 97.48, 97.14, 97.29, 97.32, 97.22, 97.12, 97.18, 97.23),
    },
    "cifar100_gradual": {
        ("none", 3): (77.72, 41.18, 74.00, 74.93, 74.90, 74.84, 74.41, 74.43, 74.39, 75.28, 75.29, 75.16),
        ("none", 5): (78.63, 4.58, 74.20, 75.97, 76.01, 76.07, 74.99, 75.00, 75.06, 75.25, 75.26, 75.29),
        ("none", 10): (79.24, 1.00, 73.77, 76.03, 76.04, 76.17, 75.12, 75.13, 75.06, 75.11, 75.10, 75.21),
        ("default", 3): (80.42, 29.41, 77.65, 78.90, 78.72, 78.54, 78.89, 78.74, 78.66, 78.56, 78.64, 78.62),
        ("default", 5): (80.98, 3.24, 77.26, 79.23, 79.06, 78.72, 78.71, 78.68, 78.28, 78.52, 78.50, 78.09),
        ("default", 10): (82.03, 0.97, 77.72, 79.88, 79.65, 79.08, 78.71, 78.60, 78.50, 79.22, 79.14, 78.79),
    },
    "cifar100_res_gradual": {
        ("none", 3): (79.36, 27.99, 76.49, 77.87, 77.89, 77.86, 77.48, 77.48, 77.50, 77.18, 77.19, 77.38),
        ("none", 5): (79.96, 7.10, 77.02, 77.67, 77.69, 77.71, 77.99, 78.01, 78.02, 77.71, 77.71, 77.80),
        ("none", 10): (80.54, 1.50, 76.78, 78.15, 78.11, 78.06, 78.56, 78.59, 78.40, 77.85, 77.90, 77.90),
        ("default", 3): (82.89, 24.69, 80.86, 81.99, 81.73, 81.46, 81.24, 81.29, 81.30, 81.77, 81.74, 81.74),
        ("default", 5): (83.08, 8.68, 80.69, 81.67, 81.52, 80.88, 81.19, 81.03, 81.50, 81.62, 81.59, 81.68),
        ("default", 10): (84.38, 1.00, 79.94, 82.28, 82.08, 81.76, 81.73, 81.81, 81.60, 81.51, 81.47, 81.05),
    },
}

GREEDY_SIZES = dict(zip(MAIN, (1, 1, 1, 1, 1, 2, 3, 3), strict=True))
DETAILED_RECIPES = {
    "cifar100_gradual": "cifar100-vgg16",
    "cifar100_res_gradual": "cifar100-resnet18",
    "cifar10_gradual": "cifar10-vgg11",
    "cifar10_res_gradual": "cifar10-resnet18",
}
# Average soups of ten members, and the mean of one network trained ten times longer; with standard deviations over
# three seeds, without for one run.
LONG_ROWS: dict[tuple[str, str], tuple[tuple[float, float | None], ...]] = {
    ("cifar100-vgg16", "none"): ((74.15, 0.1), (76.04, None), (75.13, None), (75.10, None)),
    ("cifar100-vgg16", "default"): ((77.44, 0.1), (79.36, 0.3), (78.89, 0.4), (78.91, 0.3)),
    ("cifar100-resnet18", "none"): ((78.23, 0.6), (78.11, None), (78.59, None), (77.90, None)),
    ("cifar100-resnet18", "default"): ((79.88, 0.5), (82.06, 0.2), (81.77, 0.0), (81.23, 0.3)),
}
LOGISTIC = {"independent": (92.76, 93.62), "papa-all": (91.34, 90.37)}
"""Members and average soup of logistic regression, which the text of the appendix `app:logit` reports: means of ten
runs."""


def _soups_of(method: str, recipe: str) -> str:
    """The paper's soups of independent members: aligned for VGG and ResNet-18 on CIFAR, and repaired for all."""
    if method != "independent":
        return "test"
    return "aligned" if recipe in DETAILED_RECIPES.values() else "repaired"


def _main_row(recipe: str, index: int, method: str) -> Row:
    columns = ("ensemble", "greedy_soup" if method == "independent" else "average_soup")
    cells = slice(2 * index, 2 * index + 2)
    return Row(
        name=f"{recipe}-{method}",
        title=f"{recipe}, {TITLES[method]}",
        recipe=recipe,
        change={"method": method},
        paper=named(columns, MAIN[recipe][cells]),
        spread=named(columns, MAIN_SPREADS[recipe][cells]) if recipe in MAIN_SPREADS else {},
        part=_soups_of(method, recipe),
    )


def _detailed(label: str, recipe: str) -> Table:
    rows = [
        Row(
            name=f"{method}-{grid}-p{members}",
            title=f"{TITLES[method]}, {GRIDS[grid]}, p = {members}",
            recipe=recipe,
            change={"method": method, "members": members, "diversity.grid": grid},
            paper=named(SCORES, cells[3 * index : 3 * index + 3]),
            part=_soups_of(method, recipe),
        )
        for (grid, members), cells in DETAILED[label].items()
        for index, method in enumerate(TITLES)
    ]
    return Table(label, f"{recipe} in detail: with and without augmentation, three population sizes", SCORES, rows)


def _long_row(recipe: str, grid: str, method: str, value: float, spread: float | None) -> Row:
    is_long = method == "independent"
    column = "mean" if is_long else "average_soup"
    title = "one network, ten times longer" if is_long else f"{TITLES[method]}, p = 10"
    return Row(
        name=f"{recipe}-{grid}-{'long' if is_long else method}",
        title=f"{recipe}, {GRIDS[grid]}: {title}",
        recipe=f"{recipe}-long" if is_long else recipe,
        change={"method": method, "diversity.grid": grid},
        paper={column: value},
        spread={} if spread is None else {column: spread},
    )


def _greedy_row(recipe: str, size: int) -> Row:
    part = _soups_of("independent", recipe)
    change = {"method": "independent"}
    return Row(name=recipe, title=recipe, recipe=recipe, change=change, paper={"greedy_size": size}, part=part)


def _logistic_row(method: str, cells: tuple[float, float]) -> Row:
    paper, change = named(("mean", "average_soup"), cells), {"method": method}
    return Row(name=method, title=TITLES[method], recipe="optdigits-logistic", change=change, paper=paper, num_runs=10)


TABLES = (
    Table(
        "summary_table",
        "the main results: ensembles and soups of the largest populations, with augmentation",
        ("ensemble", "average_soup", "greedy_soup"),
        [_main_row(recipe, index, method) for recipe in MAIN for index, method in enumerate(TITLES)],
    ),
    *(_detailed(label, recipe) for label, recipe in DETAILED_RECIPES.items()),
    Table(
        "comparing_long",
        "ten members, or one network trained ten times longer",
        ("mean", "average_soup"),
        [
            _long_row(recipe, grid, method, *cell)
            for (recipe, grid), cells in LONG_ROWS.items()
            for method, cell in zip(TITLES, cells, strict=True)
        ],
    ),
    Table(
        "summary_table2",
        "how many members went into the independent members' greedy soups",
        ("greedy_size",),
        [_greedy_row(recipe, size) for recipe, size in GREEDY_SIZES.items()],
    ),
)
LOGISTIC_TABLES = (
    Table(
        "logistic",
        "logistic regression on UCI's optical digits: members and their average soup",
        ("mean", "average_soup"),
        [_logistic_row(method, cells) for method, cells in LOGISTIC.items()],
    ),
)
