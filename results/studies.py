"""All studies, by the page that shows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from papa.lab.report.draw import Chart
from results import claims, couplings, pays
from results.evidence import CIFAR10, EVIDENCE
from results.short import SHORT
from results.study import Study, Table
from results.tables import Record

PAGES: dict[str, tuple[Study, ...]] = {
    "data-limited": (*EVIDENCE, claims.STUDY, pays.STUDY),
    "couplings": (couplings.STUDY,),
    "short": SHORT,
}
"""The pages in `docs/results/`, and their studies."""
STUDIES = tuple(study for studies in PAGES.values() for study in studies)
HEADLINE = "CIFAR-10, VGG-11", CIFAR10.main_command, CIFAR10.control_command("longer")
"""The title of the README's table, the command of its populations, and that of one network trained longer."""
PICTURES: dict[str, tuple[Table, Callable[[Sequence[Record]], Chart]]] = {
    "where-it-pays": (pays.STUDY.tables[-1], pays.picture_of_gains),
    "gap-closed": (pays.STUDY.tables[-1], pays.picture_of_shares),
    "couplings": (couplings.STUDY.tables[-1], couplings.picture),
}
"""Figures in `docs/assets/`: the table whose runs they show, and how they are made of these."""
