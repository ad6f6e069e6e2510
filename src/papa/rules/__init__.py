"""Averaging rules: when members are averaged, and with which matrix.

A rule is a frozen value. It says after which steps it is due and which mixing matrix `A` to use in `W <- A W`; the
`Averager` applies it. Everything that differs between rules is a property or method of the rule. Random rules draw from
a stream that is a function of the step, so a resumed run draws what an unbroken run would have drawn.
"""

from papa.rules.base import AveragingContext, Look, Probe, Rule
from papa.rules.merges import Independent, MergeAll, MergeMany, MergePairs, Mix
from papa.rules.push import HALF_LIFE_SHARE, MAX_ALPHA_16_BIT, Push

__all__ = [
    "HALF_LIFE_SHARE",
    "MAX_ALPHA_16_BIT",
    "AveragingContext",
    "Independent",
    "Look",
    "MergeAll",
    "MergeMany",
    "MergePairs",
    "Mix",
    "Probe",
    "Push",
    "Rule",
]
