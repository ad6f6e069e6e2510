"""The averaging rule that a config asks for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from papa.core.rules import Independent, MergeAll, MergeMany, MergePairs, Push, Rule
from papa.lab.config import NEVER_AVERAGED, Config
from papa.lab.recipes.couplings import COUPLINGS, coupling_for
from papa.lab.selection import CandidateScorer, MergeElite, MergeGreedy, MergeTournament
from papa.training import Length


def rule_for(config: Config, length: Length, scorer: CandidateScorer | None = None) -> Rule:
    """The averaging rule of a config, with epochs converted to steps.

    Rules that select members need a `scorer`.
    """
    average = config.average
    start, stop = round(average.start * length.steps_per_epoch), None
    if average.stop is not None:
        stop = round(average.stop * length.steps_per_epoch)
    if config.method in COUPLINGS:
        return coupling_for(config, start=start, stop=stop)
    if config.method == "papa":
        half_life_steps = None if average.half_life is None else average.half_life * length.num_steps
        alpha = PAPER_ALPHA if average.alpha is None and half_life_steps is None else average.alpha
        return Push(
            alpha=alpha,
            half_life_steps=half_life_steps,
            scale_by_lr=average.scale_by_lr,
            every_steps=average.every_steps,
            start=start,
            stop=stop,
        )
    every_steps = max(1, round(average.every_epochs * length.steps_per_epoch))
    make = _selecting_rule(config, scorer) if scorer is not None else None
    make = make or MERGES[config.method](config)
    return make(every_steps=every_steps, start=start, stop=stop)


PAPER_ALPHA = 0.99

MERGES: dict[str, Callable[[Config], Callable[..., Rule]]] = {
    **dict.fromkeys(NEVER_AVERAGED, lambda config: Independent),
    "papa-all": lambda config: MergeAll,
    "papa-2": lambda config: partial(MergePairs, seed=config.seed),
    "pair-75": lambda config: partial(MergePairs, share=0.75, seed=config.seed),
    "many-half": lambda config: MergeMany,
    "many-75": lambda config: partial(MergeMany, share=0.75),
}
"""The rules that merge, by method."""


def _selecting_rule(config: Config, scorer: CandidateScorer) -> Callable[..., Rule] | None:
    """The rule of a method that selects members by their scores; None for other methods."""
    if config.method == "greedy-merge":
        return partial(MergeGreedy, scorer.greedy_members)
    if config.average.elitist:
        return partial(
            MergeElite,
            scorer.candidate_losses,
            scorer.survivors,
            tournament=config.average.tournament,
            seed=config.seed,
        )
    if config.average.tournament:
        return partial(MergeTournament, scorer.losses, seed=config.seed)
    return None
