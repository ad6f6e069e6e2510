"""The averaging rule that a config asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from papa.core.rules import Independent, MergeAll, MergeMany, MergePairs, Push, Rule
from papa.couplings.adaptive import AdaptivePush
from papa.couplings.anchored import Elastic, Gossip, Lookahead, OuterStep
from papa.couplings.sparse import Shuffle, SparseAverage
from papa.couplings.weighted import GradientWeightedPush, PushPull
from papa.errors import PapaError, did_you_mean
from papa.lab.config import NEVER_AVERAGED, Config
from papa.lab.selection import CandidateScorer, MergeElite, MergeGreedy, MergeTournament
from papa.training import Length

PAPER_ALPHA = 0.99

COUPLINGS: dict[str, type[Rule]] = {
    "papa-auto": AdaptivePush,
    "sparta": SparseAverage,
    "wash": Shuffle,
    "easgd": Elastic,
    "lookahead": Lookahead,
    "diloco": OuterStep,
    "noloco": Gossip,
    "dppf": PushPull,
    "grawa": GradientWeightedPush,
}
"""The rules whose fields are the options of `coupling`, by method."""


def rule_for(config: Config, length: Length, scorer: CandidateScorer | None = None) -> Rule:
    """The averaging rule of a config, with epochs converted to steps.

    Rules that select members need a `scorer`.
    """
    average, method = config.average, config.method
    window: dict[str, Any] = {
        "start": round(average.start * length.steps_per_epoch),
        "stop": None if average.stop is None else round(average.stop * length.steps_per_epoch),
    }
    if method in COUPLINGS:
        rule = COUPLINGS[method]
        seed = {"seed": config.seed} if any(field.name == "seed" for field in dataclasses.fields(rule)) else {}
        return rule(**config.coupling, **seed, **window)
    if method == "papa":
        half_life_steps = None if average.half_life is None else average.half_life * length.num_steps
        return Push(
            alpha=PAPER_ALPHA if average.alpha is None and half_life_steps is None else average.alpha,
            half_life_steps=half_life_steps,
            scale_by_lr=average.scale_by_lr,
            every_steps=average.every_steps,
            **window,
        )
    every_steps = max(1, round(average.every_epochs * length.steps_per_epoch))
    return _merge_for(config, scorer)(every_steps=every_steps, **window)


def _merge_for(config: Config, scorer: CandidateScorer | None) -> Callable[..., Rule]:
    """The rule that merges, without its cadence."""
    average, seed = config.average, config.seed
    if scorer is not None and config.method == "greedy-merge":
        return partial(MergeGreedy, scorer.greedy_members)
    if scorer is not None and average.elitist:
        return partial(MergeElite, scorer.candidate_losses, scorer.survivors, tournament=average.tournament, seed=seed)
    if scorer is not None and average.tournament:
        return partial(MergeTournament, scorer.losses, seed=seed)
    merges: dict[str, Callable[..., Rule]] = {
        **dict.fromkeys(NEVER_AVERAGED, Independent),
        "papa-all": MergeAll,
        "papa-2": partial(MergePairs, seed=seed),
        "pair-75": partial(MergePairs, share=0.75, seed=seed),
        "many-half": MergeMany,
        "many-75": partial(MergeMany, share=0.75),
    }
    return merges[config.method]


def coupling_options(method: str) -> tuple[str, ...]:
    """The options of `coupling` that a method has.

    Example:
        >>> coupling_options("sparta"), coupling_options("papa-all")
        (('every_steps', 'share', 'by_lines'), ())
    """
    rule = COUPLINGS.get(method)
    not_options = ("start", "stop", "seed", "probe")
    fields = () if rule is None else dataclasses.fields(rule)
    return tuple(field.name for field in fields if field.init and field.name not in not_options)


def problems_of_coupling(method: str, options: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the options of a method's rule."""
    known = coupling_options(method)
    unknown = [name for name in options if name not in known]
    for name in unknown:
        hint = did_you_mean(name, known) if known else "it has none"
        yield f"--coupling.{name.replace('_', '-')} is no option of --method {method}: {hint}"
    if not unknown:
        try:
            COUPLINGS[method](**options)
        except (PapaError, TypeError) as error:
            yield f"--coupling of --method {method}: {error}"
