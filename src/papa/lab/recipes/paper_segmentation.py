"""The paper's own F1 scores on Vaihingen, as printed in its tables; nothing here was measured by papa."""

from __future__ import annotations

from collections.abc import Mapping

from papa.lab.recipes.recipe import PaperDetails, PaperScores

CLASSES = ("roads", "buildings", "vegetation", "trees", "cars", "clutter")
MEMBERS = 8

# By table, method and what was scored: F1 of each of CLASSES, then the average F1.
SCORES: dict[str, dict[str, dict[str, tuple[float, ...]]]] = {
    "image_seg1": {
        "independent": {
            "mean": (88.80, 91.27, 80.53, 87.85, 79.72, 29.15, 76.22),
            "average_soup": (43.32, 0.00, 0.00, 0.00, 0.00, 0.00, 7.22),
            "greedy_soup": (89.21, 91.75, 80.95, 87.84, 78.79, 29.01, 76.25),
        },
        "papa-all": {
            "mean": (88.58, 91.05, 80.64, 87.82, 79.28, 29.89, 76.21),
            "average_soup": (88.57, 91.05, 80.70, 87.85, 79.29, 29.90, 76.23),
            "greedy_soup": (88.64, 91.07, 80.75, 87.85, 79.43, 29.87, 76.27),
        },
        "papa-2": {
            "mean": (89.34, 91.91, 80.73, 87.89, 79.14, 29.50, 76.41),
            "average_soup": (89.36, 91.93, 80.79, 87.92, 79.17, 29.51, 76.45),
            "greedy_soup": (89.40, 92.03, 80.83, 87.90, 79.12, 29.37, 76.44),
        },
    },
    "image_seg2": {
        "independent": {
            "mean": (88.74, 91.43, 80.72, 87.93, 80.46, 25.48, 75.79),
            "average_soup": (43.32, 0.00, 0.00, 0.00, 0.00, 0.00, 7.22),
            "greedy_soup": (43.32, 0.00, 0.00, 0.00, 0.00, 0.00, 7.22),
        },
        "papa-all": {
            "mean": (88.71, 91.34, 80.85, 87.92, 79.36, 26.63, 75.80),
            "average_soup": (88.72, 91.33, 80.89, 87.94, 79.44, 29.14, 76.24),
            "greedy_soup": (88.83, 91.58, 80.94, 87.96, 79.53, 22.90, 75.29),
        },
        "papa-2": {
            "mean": (88.79, 91.30, 80.73, 87.97, 77.87, 27.12, 75.63),
            "average_soup": (88.78, 91.33, 80.83, 88.02, 77.95, 27.59, 75.75),
            "greedy_soup": (88.68, 91.29, 80.93, 88.03, 77.89, 28.66, 75.91),
        },
    },
}
GRIDS = {"image_seg1": "none", "image_seg2": "segmentation"}


def average_f1() -> Mapping[tuple[str, str, int], PaperScores]:
    """The average F1 of both tables, by (method, grid, members)."""
    return {
        (method, GRIDS[table], MEMBERS): {what: row[-1] for what, row in rows.items()}
        for table, methods in SCORES.items()
        for method, rows in methods.items()
    }


def details() -> Mapping[tuple[str, str, int], PaperDetails]:
    """The F1 of each class of both tables, by (method, grid, members)."""
    return {
        (method, GRIDS[table], MEMBERS): class_f1(table, method)
        for table, methods in SCORES.items()
        for method in methods
    }


def class_f1(table: str, method: str) -> dict[str, dict[str, float]]:
    """One method's F1 of each class, by what was scored, under the names that `result.json` has them under.

    Example:
        >>> class_f1("image_seg1", "papa-2")["average_soup"]["F1 cars"]
        79.17
    """
    names = [*(f"F1 {name}" for name in CLASSES), "average F1"]
    return {what: dict(zip(names, row, strict=True)) for what, row in SCORES[table][method].items()}
