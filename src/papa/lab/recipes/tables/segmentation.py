"""Segmentation on Vaihingen: F1 of each class, without and with augmentation."""

from __future__ import annotations

from papa.lab.recipes.tables.main import TITLES
from papa.lab.recipes.tables.table import Row, Table

CLASSES = ("roads", "buildings", "vegetation", "trees", "cars", "clutter")

# By table, method and scored networks: F1 of each of CLASSES, then the average F1.
NUMBERS: dict[str, dict[str, dict[str, tuple[float, ...]]]] = {
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
KINDS = ("mean", "average_soup", "greedy_soup")
NAMES = (*(f"F1 {name}" for name in CLASSES), "average F1")
"""As in `result.json`."""


def _row(label: str, method: str) -> Row:
    numbers = NUMBERS[label].get(method, {})  # the paper has no PAPA row here; this one is ours
    return Row(
        name=method,
        title=TITLES[method],
        recipe="vaihingen-unet",
        change={"method": method, "diversity.grid": GRIDS[label]},
        paper={
            f"details.{kind}.{name}": value
            for kind, cells in numbers.items()
            for name, value in zip(NAMES, cells, strict=True)
        },
        part="repaired" if method == "independent" else "test",
    )


def _table(label: str) -> Table:
    what = "without augmentation" if GRIDS[label] == "none" else "with Mixup and label smoothing"
    columns = tuple(f"details.{kind}.{name}" for kind in KINDS for name in NAMES)
    rows = [_row(label, method) for method in ("independent", "papa-all", "papa-2", "papa")]
    return Table(label, f"F1 of each class on Vaihingen, {what}", columns, rows)


TABLES = (_table("image_seg1"), _table("image_seg2"))
