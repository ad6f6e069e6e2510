"""The rules of methods that were published since the paper, with the options of a config."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from papa.core.rules import Rule
from papa.couplings.adaptive import AdaptivePush
from papa.couplings.anchored import Elastic, Gossip, Lookahead, OuterStep
from papa.couplings.sparse import Depth, Shuffle, SparseAverage
from papa.couplings.weighted import GradientWeightedPush, PushPull
from papa.lab.config import Config, CouplingConfig

COUPLINGS: dict[str, Callable[[CouplingConfig, int], Callable[..., Rule]]] = {
    "papa-auto": lambda options, seed: partial(AdaptivePush, **given(check_every=options.check_every)),
    "sparta": lambda options, seed: partial(
        SparseAverage, seed=seed, by_lines=options.by_lines, **given(share=options.share)
    ),
    "wash": lambda options, seed: partial(
        Shuffle,
        seed=seed,
        depth=cast(Depth, options.depth),
        by_lines=options.by_lines,
        **given(share=options.share),
    ),
    "easgd": lambda options, seed: partial(Elastic, **given(moving_rate=options.rate)),
    "lookahead": lambda options, seed: partial(Lookahead, **given(slow_rate=options.rate)),
    "diloco": lambda options, seed: partial(
        OuterStep,
        fragments=options.fragments,
        **given(lr=options.outer_lr, momentum=options.outer_momentum),
    ),
    "noloco": lambda options, seed: partial(
        Gossip, seed=seed, **given(lr=options.outer_lr, momentum=options.outer_momentum)
    ),
    "dppf": lambda options, seed: partial(PushPull, **given(spread=options.spread, pull=options.rate)),
    "grawa": lambda options, seed: partial(GradientWeightedPush, **given(alpha=options.alpha)),
}
"""From the options and the seed to the rule, which still takes its window."""


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None; the others are as published."""
    return {name: value for name, value in options.items() if value is not None}


def coupling_for(config: Config, *, start: int, stop: int | None) -> Rule:
    """The rule of a config whose method is in `COUPLINGS`."""
    options = config.coupling
    return COUPLINGS[config.method](options, config.seed)(
        start=start, stop=stop, **given(every_steps=options.every_steps)
    )
