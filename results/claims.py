"""The paper's claims where data runs out: for each, what is compared, and whether it shows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from papa.lab.config import flat
from papa.lab.report.metric import metric_of
from papa.storage import json_text
from results.evidence import DIGITS
from results.record import OF_THE_MACHINE, runs_of
from results.study import Study, Table
from results.tables import (
    Record,
    Score,
    along_trajectory,
    by_seed,
    markdown,
    mean_text,
    paired,
    score,
    shows,
    similarity,
)

SOUP = score("average_soup")


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Populations that differ from the recipe in some options; the recipe's own by default."""

    name: str = ""
    method: str = "papa"
    options: str = ""

    @property
    def command(self) -> str:
        """The command that makes them."""
        if not self.name:
            return DIGITS.main_command
        return DIGITS.command(DIGITS.recipe, self.method, DIGITS.seeds, f"claims/{self.name}", self.options)

    def of(self, records: Sequence[Record]) -> list[Record]:
        """Those among records."""
        wanted = [
            dict(flat(json.loads(json_text(config.to_json()))))
            for config in runs_of(self.command).values()
            if config.method == self.method
        ]
        return [record for record in records if any(_is_run_of(record, options) for options in wanted)]


def _is_run_of(record: Record, options: Mapping[str, Any]) -> bool:
    """Whether a run has these options; those that are newer than the run, or depend on the machine, do not count."""
    if record["seed"] != options["seed"] or record["method"] != options["method"]:
        return False  # at once, for speed
    found = dict(flat(record["config"]))
    return all(found[key] == value for key, value in options.items() if key in found and key not in OF_THE_MACHINE)


PAPA, ALL, PAIRS = (Runs(method=method) for method in ("papa", "papa-all", "papa-2"))
EIGHT, FIVE, THREE, TWO = (Runs(name=f"{size}-members", options=f"--members {size}") for size in (8, 5, 3, 2))
GRID = Runs(name="grid", options="--diversity.grid default --analysis")
EARLY = Runs(name="first-half", options="--average.stop 30")
LATE = Runs(name="second-half", options="--average.start 30")
SAME_START = Runs(name="same-init", options="--diversity.same-init")
REPAIRED = Runs(name="repair", method="papa-all", options="--average.repair 4")
FIFTH = Runs(name="every-5", method="papa-all", options="--average.every-epochs 5")
FIFTH_REPAIRED = Runs(name="every-5-repair", method="papa-all", options="--average.every-epochs 5 --average.repair 4")
SWA = Runs(name="swa", options="--trajectory.kind swa --trajectory.start 0.75")
IN_COLOUR = "--data.name cifar10 --data.image-size 16 --data.max-train 1000 --members 3 --diversity.grid dart"
"""DART's augmentations need colours, which digits do not have."""
DART = Runs(name="dart", method="papa-all", options=f"{IN_COLOUR} --average.start 30 --average.every-epochs 5")
NOT_DART = Runs(name="not-dart", method="papa-all", options=IN_COLOUR)
MUTATED = Runs(name="mutation", method="papa-all", options="--average.mutation 0.01")
TOURNAMENT = Runs(name="tournament", method="papa-2", options="--average.tournament")
ELITIST = Runs(name="elitist", method="papa-2", options="--average.tournament --average.elitist")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence of the paper, and two scores of which the first should be higher."""

    says: str
    compared: str
    ours: Runs
    theirs: Runs
    of: Score = SOUP
    of_theirs: Score = SOUP


CLAIMS = (
    Claim(says="more members help", compared="8 members, 2 members", ours=EIGHT, theirs=TWO),
    Claim(says="...", compared="5 members, 3 members", ours=FIVE, theirs=THREE),
    Claim(says="variety of augmentation helps", compared="with the grid, without", ours=GRID, theirs=PAPA),
    Claim(says="averaging throughout is best", compared="throughout, the first half only", ours=PAPA, theirs=EARLY),
    Claim(says="...", compared="throughout, the second half only", ours=PAPA, theirs=LATE),
    Claim(
        says="one initialisation for all members is no better",
        compared="own initial weights, the same",
        ours=PAPA,
        theirs=SAME_START,
    ),
    Claim(
        says="REPAIR helps merges", compared="PAPA-all, every 1.7% of training: with, not", ours=REPAIRED, theirs=ALL
    ),
    Claim(says="...", compared="PAPA-all, every 5 epochs: with, without", ours=FIFTH_REPAIRED, theirs=FIFTH),
    Claim(says="PAPA is better than its variants", compared="PAPA, PAPA-all", ours=PAPA, theirs=ALL),
    Claim(says="...", compared="PAPA, PAPA-2", ours=PAPA, theirs=PAIRS),
    Claim(
        says="averages along trajectories add to it",
        compared="PAPA with SWA, PAPA",
        ours=SWA,
        theirs=PAPA,
        of=along_trajectory("average_soup"),
    ),
    Claim(
        says="...", compared="PAPA with EMA, PAPA", ours=PAPA, theirs=PAPA, of=along_trajectory("average_soup")
    ),
    Claim(says="DART is no better", compared="CIFAR-10: PAPA-all with its images, DART", ours=NOT_DART, theirs=DART),
    Claim(says="mutation harms", compared="PAPA-all without, with", ours=ALL, theirs=MUTATED),
    Claim(says="selection is no gain", compared="PAPA-2, with tournaments", ours=PAIRS, theirs=TOURNAMENT),
    Claim(says="...", compared="PAPA-2, elitist", ours=PAIRS, theirs=ELITIST),
)  # fmt: skip


Cells = tuple[str, str, str, str]
"""Both scores of a claim, their difference, and whether it shows."""


def _cells(claim: Claim, records: Sequence[Record]) -> Cells:
    digits = metric_of(records).digits
    ours, theirs = claim.ours.of(records), claim.theirs.of(records)
    found = paired(by_seed(ours, claim.of), by_seed(theirs, claim.of_theirs))
    if found is None:
        return "", "", "", "not run yet"
    return (
        mean_text(list(map(claim.of, ours)), digits),
        mean_text(list(map(claim.of_theirs, theirs)), digits),
        mean_text(list(found.by_seed.values()), digits),
        shows(found),
    )


def claims(records: Sequence[Record]) -> str:
    """One row for each claim: both scores, their difference, and whether it shows."""
    rows = [(claim.says, claim.compared, *_cells(claim, records)) for claim in CLAIMS]
    return markdown(("the paper says", "compared", "the first", "the second", "difference", "here"), rows)


def claims_in_brief(records: Sequence[Record]) -> str:
    """A table of the claims that can be decided, and a list of the others."""
    rows = []
    others: dict[str, list[str]] = {}
    said = ""
    for claim in CLAIMS:
        said = said if claim.says == "..." else claim.says
        *_, difference, verdict = _cells(claim, records)
        if "shows" in verdict:
            rows.append((said, claim.compared, difference, verdict))
        elif difference:
            others.setdefault(said, []).append(f"{claim.compared} {difference}")
    table = markdown(("the paper says", "compared", "difference", "here"), rows) if rows else ""
    lines = [f"- {said}: {'; '.join(found)}" for said, found in others.items()]
    parts = (table, "Cannot be told:" if lines else "", "\n".join(lines))
    return "\n\n".join(part for part in parts if part)


def with_features(records: Sequence[Record]) -> str:
    """The claims, and how alike the features of members are."""
    return "\n\n".join(part for part in (claims(records), similarity(records)) if part)


STUDY = Study(
    name="claims",
    title="The paper's claims",
    tables=(
        Table(
            title=f"{DIGITS.title}, each claim with five seeds",
            shown_with=(DIGITS.main_command,),
            commands=tuple(
                dict.fromkeys(runs.command for claim in CLAIMS for runs in (claim.ours, claim.theirs) if runs.name)
            ),
            render=with_features,
        ),
    ),
)
