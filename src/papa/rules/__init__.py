"""Averaging rules: when members are averaged, and with which matrix.

A rule is a frozen value. It says after which steps it is due and which mixing matrix `A` to use in `W <- A W`; the
`Averager` applies it. Everything that differs between rules is a property or method of the rule. Random rules draw from
a stream that is a function of the step, so a resumed run draws what an unbroken run would have drawn.

- `base`: the interface.
- `push`, `merges`: the paper's rules.
- `sparse`: rules that act on a few columns.
- `anchored`: rules with rows of their own.
- `weighted`: rules whose matrix depends on the members.
"""

from papa.half_life import HALF_LIFE
from papa.rules.adaptive import AdaptivePush
from papa.rules.anchored import Elastic, Gossip, Lookahead, OuterStep
from papa.rules.base import AveragingContext, ExtraRow, Look, Probe, Rule
from papa.rules.merges import Independent, MergeAll, MergeMany, MergePairs, Mix
from papa.rules.push import MAX_ALPHA_16_BIT, Push
from papa.rules.sparse import Shuffle, SparseAverage
from papa.rules.weighted import GradientWeightedPush, PushPull, ScoreWeightedPush

__all__ = [
    "HALF_LIFE",
    "MAX_ALPHA_16_BIT",
    "AdaptivePush",
    "AveragingContext",
    "Elastic",
    "ExtraRow",
    "Gossip",
    "GradientWeightedPush",
    "Independent",
    "Look",
    "Lookahead",
    "MergeAll",
    "MergeMany",
    "MergePairs",
    "Mix",
    "OuterStep",
    "Probe",
    "Push",
    "PushPull",
    "Rule",
    "ScoreWeightedPush",
    "Shuffle",
    "SparseAverage",
]
