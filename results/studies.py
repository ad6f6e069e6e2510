"""All studies, by the page that shows them."""

from __future__ import annotations

from results.evidence import EVIDENCE
from results.short import LONG_CIFAR10, MAIN_CIFAR10, SHORT
from results.study import Study

PAGES: dict[str, tuple[Study, ...]] = {"data-limited": EVIDENCE, "short": SHORT}
"""The pages in `docs/results/`, and their studies."""
STUDIES = tuple(study for studies in PAGES.values() for study in studies)
HEADLINE = "CIFAR-10, VGG-11", MAIN_CIFAR10, LONG_CIFAR10
"""The title of the README's table, the command of its populations, and that of one network trained longer."""
