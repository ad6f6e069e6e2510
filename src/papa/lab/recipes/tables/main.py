"""The main table, its detailed versions, the longer training and the sizes of greedy soups."""

from __future__ import annotations

from papa.lab.recipes import paper
from papa.lab.recipes.tables.table import Row, Table

TITLES = {"independent": "independent", "papa": "PAPA", "papa-all": "PAPA-all", "papa-2": "PAPA-2"}
GRIDS = {"none": "no augmentation", "default": "with augmentation"}

# The recipes of the main table: population size and whether the paper's independent soups were aligned and repaired
# (VGG and ResNet-18 on CIFAR), or only repaired.
MAIN_ROWS: dict[str, tuple[int, bool]] = {
    "cifar10-vgg11": (10, True),
    "cifar10-resnet18": (10, True),
    "cifar100-vgg16": (10, True),
    "cifar100-resnet18": (10, True),
    "imagenet-resnet50": (3, False),
    "cifar100-finetune-effnetv2s": (2, False),
    "cifar100-finetune-eva02": (4, False),
    "cifar100-finetune-convit": (5, False),
}

# Standard deviations over three seeds, in the order of `paper.MAIN`; none for ImageNet.
MAIN_SPREADS: dict[str, tuple[float, ...]] = {
    "cifar10-vgg11": (0.1, 0.1, 0.1, 0.0, 0.2, 0.2, 0.1, 0.1),
    "cifar10-resnet18": (0.0, 0.2, 0.1, 0.1, 0.1, 0.1, 0.0, 0.1),
    "cifar100-vgg16": (0.1, 0.1, 0.4, 0.3, 0.4, 0.4, 0.3, 0.3),
    "cifar100-resnet18": (0.3, 0.6, 0.1, 0.2, 0.0, 0.0, 0.3, 0.3),
    "cifar100-finetune-effnetv2s": (0.3, 0.4, 0.3, 0.5, 0.4, 0.4, 0.6, 0.6),
    "cifar100-finetune-eva02": (0.1, 0.1, 0.3, 0.2, 0.6, 0.5, 0.3, 0.3),
    "cifar100-finetune-convit": (0.2, 0.2, 0.2, 0.2, 0.2, 0.1, 0.2, 0.3),
}
MAIN_CIFAR: dict[str, tuple[float, ...]] = {
    "cifar10-vgg11": (95.2, 94.0, 94.9, 94.8, 94.1, 94.1, 94.5, 94.4),
    "cifar10-resnet18": (97.5, 96.8, 97.4, 97.4, 97.3, 97.3, 97.1, 97.1),
    "cifar100-vgg16": (82.2, 77.8, 79.6, 79.4, 79.0, 78.9, 79.0, 78.9),
    "cifar100-resnet18": (84.3, 80.2, 82.2, 82.1, 81.8, 81.8, 81.3, 81.2),
}
GREEDY_SIZES: dict[str, int] = {
    "cifar10-vgg11": 1,
    "cifar10-resnet18": 1,
    "cifar100-vgg16": 1,
    "cifar100-resnet18": 1,
    "imagenet-resnet50": 1,
    "cifar100-finetune-effnetv2s": 2,
    "cifar100-finetune-eva02": 3,
    "cifar100-finetune-convit": 3,
}
DETAILED_RECIPES = {
    "cifar100_gradual": "cifar100-vgg16",
    "cifar100_res_gradual": "cifar100-resnet18",
    "cifar10_gradual": "cifar10-vgg11",
    "cifar10_res_gradual": "cifar10-resnet18",
}


def _part_for(method: str, recipe: str) -> str:
    if method != "independent":
        return "test"
    return "aligned" if MAIN_ROWS[recipe][1] else "repaired"


def _main_rows() -> list[Row]:
    rows = []
    numbers = {**paper.MAIN, **MAIN_CIFAR}
    for recipe in MAIN_ROWS:
        spreads = MAIN_SPREADS.get(recipe)
        for index, method in enumerate(paper.METHODS):
            soup = "greedy_soup" if method == "independent" else "average_soup"
            cells = slice(2 * index, 2 * index + 2)
            rows.append(
                Row(
                    name=f"{recipe}-{method}",
                    title=f"{recipe}, {TITLES[method]}",
                    recipe=recipe,
                    change={"method": method},
                    paper=dict(zip(("ensemble", soup), numbers[recipe][cells], strict=True)),
                    spread=dict(zip(("ensemble", soup), spreads[cells], strict=True)) if spreads else {},
                    part=_part_for(method, recipe),
                )
            )
    return rows


def _detailed(label: str, recipe: str) -> Table:
    rows = [
        Row(
            name=f"{method}-{grid}-p{members}",
            title=f"{TITLES[method]}, {GRIDS[grid]}, p = {members}",
            recipe=recipe,
            change={"method": method, "members": members, "diversity.grid": grid},
            paper=scores,
            part=_part_for(method, recipe),
        )
        for (method, grid, members), scores in paper.detailed(label).items()
    ]
    return Table(
        label=label,
        title=f"{recipe} in detail: with and without augmentation, three population sizes",
        columns=paper.SCORES,
        rows=tuple(rows),
    )


# Average soups of ten members, and the mean of one network trained ten times longer; some with standard deviations.
LONG_ROWS: dict[tuple[str, str], tuple[tuple[float, float | None], ...]] = {
    ("cifar100-vgg16", "none"): ((74.15, 0.1), (76.04, None), (75.13, None), (75.10, None)),
    ("cifar100-vgg16", "default"): ((77.44, 0.1), (79.36, 0.3), (78.89, 0.4), (78.91, 0.3)),
    ("cifar100-resnet18", "none"): ((78.23, 0.6), (78.11, None), (78.59, None), (77.90, None)),
    ("cifar100-resnet18", "default"): ((79.88, 0.5), (82.06, 0.2), (81.77, 0.0), (81.23, 0.3)),
}


def _long_rows() -> list[Row]:
    rows = []
    for (recipe, grid), cells in LONG_ROWS.items():
        for method, (value, spread) in zip(paper.METHODS, cells, strict=True):
            is_long = method == "independent"
            column = "mean" if is_long else "average_soup"
            title = "one network, ten times longer" if is_long else f"{TITLES[method]}, p = 10"
            rows.append(
                Row(
                    name=f"{recipe}-{grid}-{'long' if is_long else method}",
                    title=f"{recipe}, {GRIDS[grid]}: {title}",
                    recipe=f"{recipe}-long" if is_long else recipe,
                    change={"method": method, "diversity.grid": grid},
                    paper={column: value},
                    spread={} if spread is None else {column: spread},
                )
            )
    return rows


TABLES = (
    Table(
        label="summary_table",
        title="the main results: ensembles and soups of the largest populations, with augmentation",
        columns=("ensemble", "average_soup", "greedy_soup"),
        rows=tuple(_main_rows()),
        seeds=(1, 2, 3),
    ),
    *(_detailed(label, recipe) for label, recipe in DETAILED_RECIPES.items()),
    Table(
        label="comparing_long",
        title="ten members, or one network trained ten times longer",
        columns=("mean", "average_soup"),
        rows=tuple(_long_rows()),
        seeds=(1, 2, 3),
    ),
    Table(
        label="summary_table2",
        title="how many members went into the independent members' greedy soups",
        columns=("greedy_size",),
        rows=tuple(
            Row(
                name=recipe,
                title=recipe,
                recipe=recipe,
                change={"method": "independent"},
                paper={"greedy_size": size},
                part=_part_for("independent", recipe),
            )
            for recipe, size in GREEDY_SIZES.items()
        ),
    ),
)
