"""Segmentation on Vaihingen: F1 of each class, without and with augmentation."""

from __future__ import annotations

from papa.lab.recipes import paper_segmentation as paper
from papa.lab.recipes.tables.main import TITLES
from papa.lab.recipes.tables.table import Row, Table

KINDS = ("mean", "average_soup", "greedy_soup")


def _table(label: str) -> Table:
    names = paper.class_f1(label, "independent")["mean"]
    rows = [
        Row(
            name=method,
            title=TITLES[method],
            recipe="vaihingen-unet",
            change={"method": method, "diversity.grid": paper.GRIDS[label]},
            paper={
                f"details.{kind}.{name}": value
                for kind, scores in paper.class_f1(label, method).items()
                for name, value in scores.items()
            },
            part="repaired" if method == "independent" else "test",
        )
        for method in paper.SCORES[label]
    ]
    # The paper has no PAPA row here; this one is ours.
    change = {"method": "papa", "diversity.grid": paper.GRIDS[label]}
    rows.append(Row(name="papa", title=TITLES["papa"], recipe="vaihingen-unet", change=change))
    what = "without augmentation" if paper.GRIDS[label] == "none" else "with Mixup and label smoothing"
    return Table(
        label=label,
        title=f"F1 of each class on Vaihingen, {what}",
        columns=tuple(f"details.{kind}.{name}" for kind in KINDS for name in names),
        rows=tuple(rows),
    )


TABLES = (_table("image_seg1"), _table("image_seg2"))
