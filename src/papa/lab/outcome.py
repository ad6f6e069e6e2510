"""What a run ends with: the outcome of its training, and the additional soups and comparisons of the paper."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from papa.errors import PapaError
from papa.lab.analysis import Analysis, analyse
from papa.lab.config import Config
from papa.lab.independent_soups import Soups, aligned_and_repaired_soups, repaired_soups
from papa.lab.trajectory_scores import TrajectoryOutcome, score_trajectory_averages
from papa.repair import RepairReport, repair_plan
from papa.training import Outcome, Training, finalize


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a training, with the parts that only runs of the lab have."""

    training: Outcome
    repaired: Soups | None
    """For independent members, with REPAIR: the scores of repaired soups."""
    aligned: Soups | None
    """For independent members, with alignment: the scores of aligned and repaired soups."""
    analysis: Analysis | None
    """How similar members are, if the config asks for it."""
    repair: RepairReport | None
    """What REPAIR does to each layer, if it is used."""
    trajectory: TrajectoryOutcome | None
    """Averages along each member's trajectory (SWA, EMA) and their soups, if there are any."""

    def to_json(self) -> dict[str, Any]:
        """The part of `result.json` that training knows."""
        parts = {
            "repaired": self.repaired,
            "aligned": self.aligned,
            "repair": self.repair,
            "trajectory": self.trajectory,
        }
        return {
            **self.training.to_json(),
            **{name: None if part is None else part.to_json() for name, part in parts.items()},
            **({"similarity": None, "interpolation": None} if self.analysis is None else self.analysis.to_json()),
        }


def finalize_run(training: Training, config: Config) -> RunOutcome:
    """Make the soups and comparisons that a config asks for, and score everything."""
    num_align_batches = config.average.align_batches
    wants_repaired = bool(training.batches.num_repair_batches) and not training.averager.rule.averages
    wants_aligned = wants_repaired and config.average.align_soups
    # Before there are soups to keep: a process holds at most two networks besides its members.
    repaired = repaired_soups(training) if wants_repaired else None
    aligned = aligned_and_repaired_soups(training, num_align_batches) if wants_aligned else None
    analysis = _analysis(training, num_align_batches) if config.analysis else None
    trajectory = score_trajectory_averages(
        training,
        config.trajectory.batch_norm_batches,
        align_soups=wants_aligned,
        num_align_batches=num_align_batches,
    )
    return RunOutcome(
        training=finalize(training),
        repaired=repaired,
        aligned=aligned,
        analysis=analysis,
        repair=_repair_report(training),
        trajectory=trajectory,
    )


def _analysis(training: Training, num_align_batches: int | None) -> Analysis | None:
    """A finished training is not lost because its members cannot be compared."""
    try:
        return analyse(training, num_align_batches=num_align_batches)
    except PapaError as error:
        warnings.warn(f"members are not compared: {error}", stacklevel=3)
        return None


def _repair_report(training: Training) -> RepairReport | None:
    """What REPAIR rescales, if it follows merges or makes soups of independent members."""
    rule, repair = training.averager.rule, training.settings.averaging.repair
    if repair is None or not repair.num_batches or not (rule.is_merge or not rule.averages):
        return None
    if rule.averages and repair.scope == "batch-norm":
        return None
    scope = training.settings.averaging.repaired_layers
    return repair_plan(training.population[0], training.batches.plain_repair(), scope=scope)
