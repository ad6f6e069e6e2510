"""The ablations: ways to average, cadences, periods of training, and additions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from papa.lab.recipes.tables.table import Row, Table, named

RECIPE = "cifar100-resnet18-ablation"
COLUMNS = ("mean", "min", "max", "average_soup", "greedy_soup")
WINDOWS = ((0, 75), (0, 150), (0, 225), (225, 300), (150, 300), (75, 300))

Cells = tuple[float, float, float, float, float]


def _row(name: str, title: str, change: Mapping[str, Any], cells: Cells, *, part: str = "test") -> Row:
    return Row(name=name, title=title, recipe=RECIPE, change=change, paper=named(COLUMNS, cells), part=part)


def _window_rows(method: str, cells: tuple[Cells, ...]) -> list[Row]:
    rows = []
    for (start, stop), numbers in zip(WINDOWS, cells, strict=True):
        change: dict[str, Any] = {"method": method}
        if start:
            change["average.start"] = float(start)
        if stop < 300:
            change["average.stop"] = float(stop)
        rows.append(_row(f"epochs-{start}-{stop}", f"only from epoch {start} to {stop}", change, numbers))
    return rows


PAPA_ALL: Cells = (80.21, 80.05, 80.46, 80.52, 80.24)
PAPA_2: Cells = (80.31, 80.12, 80.59, 80.57, 80.56)

ABLATION = (
    _row("papa-all", "the mean of all (PAPA-all)", {"method": "papa-all"}, PAPA_ALL),
    _row("papa-2", "the mean of two (PAPA-2)", {"method": "papa-2"}, PAPA_2),
    _row("pair-75", "3/4 and 1/4 of two", {"method": "pair-75"}, (79.58, 79.32, 80.02, 79.84, 79.32)),
    _row(
        "many-half", "1/2 of itself, the rest of others", {"method": "many-half"}, (79.92, 79.64, 80.05, 80.12, 79.94)
    ),
    _row("many-75", "3/4 of itself, the rest of others", {"method": "many-75"}, (68.62, 68.14, 69.22, 29.70, 69.22)),
    _row("greedy", "the greedy soup", {"method": "greedy-merge"}, (79.95, 79.61, 80.23, 80.24, 79.99)),
    _row("independent", "no averaging", {"method": "independent"}, (79.35, 78.97, 79.73, 9.26, 79.73), part="aligned"),
)

# Changes that the paper makes to both PAPA-all and PAPA-2.
CHANGES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "every-1": ("every epoch", {"average.every_epochs": 1.0}),
    "every-10": ("every 10 epochs", {"average.every_epochs": 10.0}),
    "same-init": ("same initial weights", {"diversity.same_init": True}),
    "repair-1": ("REPAIR on 1 batch", {"average.repair": 1}),
    "no-repair": ("no REPAIR", {"average.repair": 0}),
    "aligned": ("aligned by activations first", {"average.align": "activations"}),
    "mutations": ("mutations", {"average.mutation": 0.01}),
}


def _changed_rows(method: str, cells: tuple[Cells, ...]) -> list[Row]:
    return [
        _row(name, title, {"method": method, **change}, numbers)
        for (name, (title, change)), numbers in zip(CHANGES.items(), cells, strict=True)
    ]


ABLATION_1 = (
    _row("papa-all", "PAPA-all", {"method": "papa-all"}, PAPA_ALL),
    *_changed_rows(
        "papa-all",
        (
            (79.90, 79.72, 80.28, 80.16, 79.76),
            (80.44, 79.98, 80.67, 80.90, 80.72),
            (79.96, 79.57, 80.20, 80.32, 80.04),
            (79.98, 79.57, 80.40, 80.38, 80.40),
            (79.56, 79.29, 79.79, 79.71, 79.69),
            (79.30, 78.93, 79.48, 79.31, 79.35),
            (80.20, 79.84, 80.53, 80.41, 80.41),
        ),
    ),
    *_window_rows(
        "papa-all",
        (
            (79.55, 79.06, 80.07, 79.80, 79.89),
            (79.63, 79.14, 80.03, 80.99, 79.60),
            (79.80, 79.30, 80.15, 80.53, 80.35),
            (64.90, 64.31, 65.26, 66.32, 66.06),
            (74.73, 74.48, 74.97, 74.98, 74.96),
            (79.91, 79.63, 80.20, 80.25, 79.98),
        ),
    ),
)

TOURNAMENT = {"method": "papa-2", "average.tournament": True}
ELITIST = {**TOURNAMENT, "average.elitist": True}
MUTANT = {**ELITIST, "average.mutation": 0.01}

ABLATION_2 = (
    _row("papa-2", "PAPA-2", {"method": "papa-2"}, PAPA_2),
    *_changed_rows(
        "papa-2",
        (
            (79.72, 79.48, 79.79, 79.87, 79.74),
            (79.93, 79.59, 80.19, 80.18, 80.08),
            (79.92, 79.78, 80.09, 80.19, 80.16),
            (80.23, 79.89, 80.49, 80.38, 80.27),
            (80.02, 79.73, 80.45, 80.49, 79.73),
            (79.83, 79.41, 80.17, 80.27, 79.52),
            (80.00, 79.76, 80.29, 80.14, 80.29),
        ),
    ),
    _row("tournament", "tournament", TOURNAMENT, (79.71, 79.54, 80.00, 80.01, 79.95)),
    _row("elitist", "tournament, elitist", ELITIST, (79.39, 79.12, 79.59, 1.0, 79.59)),
    _row("elitist-mutations", "tournament, elitist, mutations", MUTANT, (79.49, 78.59, 80.01, 1.0, 80.01)),
    _row(
        "elitist-mutations-no-repair",
        "tournament, elitist, mutations, no REPAIR",
        {**MUTANT, "average.repair": 0},
        (79.44, 78.83, 79.91, 1.0, 79.30),
    ),
    *_window_rows(
        "papa-2",
        (
            (79.57, 79.18, 79.82, 79.50, 79.62),
            (79.64, 79.25, 80.11, 81.17, 80.04),
            (79.78, 79.29, 80.32, 80.36, 80.32),
            (76.12, 75.86, 76.40, 76.43, 76.33),
            (78.03, 77.80, 78.32, 78.01, 78.05),
            (80.20, 79.85, 80.36, 80.46, 80.54),
        ),
    ),
)

# Mean, min, max, average soup, greedy soup by (steps between pushes, alpha); not scaled by the learning rate.
STRENGTHS: dict[tuple[int, float], Cells] = {
    (1, 0.9999): (78.43, 77.56, 79.08, 1.00, 78.58),
    (1, 0.9995): (79.11, 78.10, 79.59, 79.76, 79.59),
    (1, 0.999): (79.22, 77.61, 80.02, 79.82, 79.95),
    (1, 0.995): (78.97, 77.60, 79.43, 79.67, 79.70),
    (1, 0.99): (78.07, 76.77, 78.66, 78.53, 78.46),
    (1, 0.95): (78.57, 77.37, 79.01, 78.92, 79.12),
    (1, 0.9): (78.87, 77.86, 79.21, 79.23, 79.35),
    (1, 0.5): (78.34, 77.82, 78.62, 78.61, 78.32),
    (1, 0.1): (78.35, 77.86, 78.69, 78.53, 78.59),
    (10, 0.999): (78.12, 76.96, 78.73, 1.00, 78.45),
    (10, 0.995): (79.36, 77.87, 79.97, 80.20, 80.13),
    (10, 0.99): (79.39, 78.38, 80.09, 79.99, 80.28),
    (10, 0.95): (78.72, 77.75, 79.43, 79.18, 79.48),
    (10, 0.9): (78.47, 77.39, 78.92, 78.83, 78.77),
    (10, 0.5): (78.71, 77.47, 79.17, 79.15, 79.13),
    (10, 0.1): (78.27, 77.13, 78.71, 78.63, 78.24),
    (50, 0.995): (78.38, 77.65, 79.09, 1.09, 79.09),
    (50, 0.99): (78.05, 77.01, 78.51, 71.12, 78.15),
    (50, 0.95): (79.12, 77.74, 79.67, 79.57, 78.88),
    (50, 0.9): (79.48, 78.42, 79.96, 79.94, 79.96),
    (50, 0.5): (78.29, 76.81, 78.80, 78.83, 79.03),
    (50, 0.1): (78.67, 77.41, 79.15, 79.03, 79.03),
}

PAPA = {"method": "papa"}
ABLATION_GRADUAL = (
    _row("papa", "PAPA", PAPA, (79.85, 78.71, 80.46, 80.30, 80.20)),
    _row("same-init", "same initial weights", {**PAPA, **CHANGES["same-init"][1]}, (79.81, 78.63, 80.33, 80.37, 80.57)),
    _row(
        "aligned",
        "aligned by activations every 5 epochs",
        {**PAPA, **CHANGES["aligned"][1]},
        (79.12, 78.17, 79.59, 79.78, 79.82),
    ),
    _row(
        "mutations",
        "mutations every 5 epochs",
        {**PAPA, **CHANGES["mutations"][1]},
        (79.70, 78.43, 80.26, 80.40, 79.84),
    ),
    *_window_rows(
        "papa",
        (
            (78.51, 77.73, 78.78, 79.28, 78.78),
            (78.91, 77.98, 79.41, 80.20, 79.92),
            (79.36, 77.98, 79.89, 80.16, 79.66),
            (77.61, 76.51, 78.47, 1.00, 78.47),
            (76.22, 75.58, 76.69, 1.06, 76.57),
            (78.99, 77.84, 79.52, 79.59, 79.63),
        ),
    ),
    *(
        _row(
            f"every-{steps}-alpha-{alpha}",
            f"alpha {alpha} every {'step' if steps == 1 else f'{steps} steps'}, not scaled",
            {"method": "papa", "average.alpha": alpha, "average.every_steps": steps, "average.scale_by_lr": False},
            cells,
        )
        for (steps, alpha), cells in STRENGTHS.items()
    ),
)

TABLES = (
    Table("ablation", "ways to average", COLUMNS, ABLATION),
    Table("ablation1", "changes to PAPA-all", COLUMNS, ABLATION_1),
    Table("ablation2", "changes to PAPA-2", COLUMNS, ABLATION_2),
    Table("ablation_gradual", "changes to PAPA", COLUMNS, ABLATION_GRADUAL),
)
