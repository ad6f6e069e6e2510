"""Methods of recipes that were published since the paper: their rules, options and problems."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from papa.core.rules import Rule
from papa.couplings.adaptive import AdaptivePush
from papa.couplings.anchored import Elastic, Gossip, Lookahead, OuterStep
from papa.couplings.sparse import Shuffle, SparseAverage
from papa.couplings.weighted import GradientWeightedPush, PushPull
from papa.errors import ConfigError
from papa.lab.config import AverageConfig, Config
from papa.lab.recipes import find
from papa.lab.recipes.rules import COUPLINGS, coupling_options, rule_for
from papa.training import Length

LENGTH = Length(num_steps=1000, steps_per_epoch=100)

PUBLISHED: dict[str, Rule] = {
    "papa-auto": AdaptivePush(every_steps=5, check_every=60),
    "sparta": SparseAverage(share=0.005, seed=1, every_steps=1),
    "wash": Shuffle(share=0.001, depth="decreasing", seed=1, every_steps=1),
    "easgd": Elastic(moving_rate=0.9, every_steps=10),
    "lookahead": Lookahead(slow_rate=0.5, every_steps=5),
    "diloco": OuterStep(lr=0.7, momentum=0.9, every_steps=500),
    "noloco": Gossip(lr=0.7, momentum=0.5, seed=1, every_steps=50),
    "dppf": PushPull(spread=5.0, pull=0.1, every_steps=4),
    "grawa": GradientWeightedPush(alpha=0.5, smoothing=0.9**8, every_steps=32),
}

CHANGED: dict[str, tuple[dict[str, Any], Rule]] = {
    "papa-auto": ({"every_steps": 2, "check_every": 20}, AdaptivePush(every_steps=2, check_every=20)),
    "sparta": ({"share": 0.1, "every_steps": 3}, SparseAverage(share=0.1, seed=1, every_steps=3)),
    "wash": (
        {"share": 0.1, "depth": "constant"},
        Shuffle(share=0.1, depth="constant", seed=1),
    ),
    "easgd": ({"moving_rate": 0.5, "every_steps": 2}, Elastic(moving_rate=0.5, every_steps=2)),
    "lookahead": ({"slow_rate": 0.25}, Lookahead(slow_rate=0.25)),
    "diloco": (
        {"lr": 0.4, "momentum": 0.8, "fragments": 2, "every_steps": 100},
        OuterStep(lr=0.4, momentum=0.8, fragments=2, every_steps=100),
    ),
    "noloco": ({"lr": 0.4, "momentum": 0.8}, Gossip(lr=0.4, momentum=0.8, seed=1)),
    "dppf": ({"pull": 0.2, "spread": 2.0}, PushPull(spread=2.0, pull=0.2)),
    "grawa": ({"alpha": 0.9}, GradientWeightedPush(alpha=0.9)),
}


def config_of(method: str, **options: Any) -> Config:
    return replace(find("digits").config(), method=method, coupling=options)


@pytest.mark.parametrize("method", COUPLINGS)
def test_defaults_are_those_that_were_published(method: str) -> None:
    assert rule_for(config_of(method), LENGTH) == PUBLISHED[method]


@pytest.mark.parametrize("method", COUPLINGS)
def test_every_option_of_a_method_reaches_its_rule(method: str) -> None:
    options, expected = CHANGED[method]
    assert rule_for(config_of(method, **options), LENGTH) == expected
    assert set(options) <= set(coupling_options(method))
    with pytest.raises(ConfigError, match="is no option of --method papa: it has none"):
        replace(config_of(method, **options), method="papa")


def test_a_window_reaches_the_rule() -> None:
    config = config_of("easgd")
    config = replace(config, average=replace(config.average, start=2.0, stop=5.0))
    rule = rule_for(config, LENGTH)
    assert (rule.start, rule.stop) == (200, 500)


@pytest.mark.parametrize(
    ("method", "options", "average", "problem"),
    [
        ("sparta", {"share": 1.5}, {}, "--coupling of --method sparta: share is 1.5, expected"),
        ("wash", {"depht": "deep"}, {}, "--coupling.depht is no option of --method wash: did you mean depth"),
        ("easgd", {}, {"align": "weights"}, "--average.align is weights with --method easgd, which cannot be aligned"),
        ("noloco", {}, {"mutation": 0.1}, "--average.mutation is 0.1 with --method noloco, whose anchors"),
        ("diloco", {"fragments": 3}, {}, "--coupling of --method diloco: "),
    ],
)
def test_what_cannot_run_is_refused(
    method: str, options: dict[str, Any], average: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        replace(find("digits").config(), method=method, coupling=options, average=AverageConfig(**average))
