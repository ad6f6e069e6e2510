"""A push that sets its own strength."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from papa.core import mixing
from papa.core.population import Population
from papa.core.rules import AveragingContext, Rule, check_steps
from papa.couplings.observation import Probe, check_probe, loss_of_mean, losses_of_members
from papa.errors import MixingError

LEARNED = 0.9
"""Members have learned something once a loss is below this share of their first loss."""
CUT = 0.5
"""What the half-life is multiplied by when the average is worse than its members."""
LONGEST_START = 0.03
"""The longest half-life to begin with, as a share of training, if its length is known."""


@dataclass(frozen=True)
class AdaptivePush(Rule):
    """PAPA without a strength to choose: members go as far apart as their average allows.

    Every few pushes the loss of the average is compared with the mean loss of its members, on the same data:

        the average is better:  half_life <- half_life + growth * (steps since the last check)
        it is not:              half_life <- half_life / 2

    Only the sign of the difference counts, so that the scale of the loss does not matter. Until members have learned
    something, the half-life stays: networks near chance are all alike.

    Example:
        >>> import papa, torch
        >>> inputs, targets = torch.randn(64, 4), torch.randint(2, (64,))
        >>> probe = papa.loss_probe([(inputs, targets)], torch.nn.functional.cross_entropy)
        >>> rule = AdaptivePush(probe)

    Args:
        probe: from a network to its loss on a batch, the same batch for all networks of a check; see `loss_probe`. In
            `papa.train` by default the loss on a batch of training data.
        half_life_steps: the half-life to begin with, in steps; at most 3% of training, if its length is known. Stronger
            pushes would merge members before they have learned anything, which shrinks random weights.
        every_steps: steps between pushes.
        check_every: steps between checks. One costs a forward pass of every member and of their average.
        growth: by how many steps the half-life grows in a step.
        scale_by_lr: weaken the push with the learning rate, as the paper does. Then late pushes can no longer bring
            members together.
    """

    probe: Probe | None = None
    _: KW_ONLY
    half_life_steps: float = 20.0
    every_steps: int = 5
    check_every: int = 60
    growth: float = 0.2
    scale_by_lr: bool = False

    is_merge: ClassVar[bool] = False
    is_for_any_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_steps("check_every", self.check_every, at_least=1)
        for name in ("half_life_steps", "growth"):
            if not 0.0 < (value := getattr(self, name)) < math.inf:
                raise MixingError(f"AdaptivePush got {name}={value}, expected a positive number of steps")

    def other_strength(self, factor: float, num_steps: int | None) -> str | None:
        return f"growth={self.growth * factor:.2g}"

    def for_length(self, num_steps: int | None) -> AdaptivePush:
        """With a half-life to begin with that is short enough."""
        if num_steps is None:
            return self
        longest = max(LONGEST_START * num_steps, self.shortest)
        return replace(self, half_life_steps=min(self.half_life_steps, longest))

    @property
    def uses_lr(self) -> bool:
        return self.scale_by_lr

    @property
    def shortest(self) -> float:
        """The shortest half-life, in steps: a push then leaves a member 1/16 of its distance to the mean."""
        return self.every_steps / 4

    def with_probe(self, probe: Probe) -> AdaptivePush:
        return self if self.probe is not None else replace(self, probe=probe)

    def check(self, size: int, dtypes: Collection[torch.dtype]) -> None:
        check_probe(self, self.probe)

    def is_check(self, context: AveragingContext) -> bool:
        """Whether the average is compared with its members at this step."""
        return context.is_first_since(self.check_every)

    def see(self, population: Population, context: AveragingContext) -> AveragingContext:
        """The losses of members and average, at a check."""
        if self.probe is None or not self.is_check(context):
            return context
        losses = losses_of_members(population, self.probe)
        return replace(context, losses=losses, mean_loss=loss_of_mean(population, self.probe))

    def initial_state(self, size: int) -> dict[str, Any]:
        """The half-life in steps, and the losses of the last check."""
        losses = {"first_loss": None, "member_loss": None, "average_loss": None}
        return {"half_life": self.half_life_steps, "checked": 0, **losses}

    def next_state(self, context: AveragingContext) -> Mapping[str, Any]:
        """A longer or a shorter half-life after a check; the same otherwise."""
        state = context.state
        if context.losses is None or context.mean_loss is None:
            return state
        members = fmean(loss for loss in context.losses if not math.isnan(loss))  # NaN for dropped members
        average, half_life = context.mean_loss, state["half_life"]
        first = _finite(members) if state["first_loss"] is None else state["first_loss"]
        if not (math.isfinite(members) and math.isfinite(average)):
            half_life = max(CUT * half_life, self.shortest)
        elif first is not None and min(members, average) < LEARNED * first:
            grown = half_life + self.growth * (context.step - state["checked"])
            half_life = grown if average <= members else max(CUT * half_life, self.shortest)
        return {
            "half_life": half_life,
            "checked": context.step,
            "first_loss": first,
            "member_loss": _finite(members),
            "average_loss": _finite(average),
        }

    def keep(self, context: AveragingContext) -> float:
        half_life: float = context.state.get("half_life", self.half_life_steps)
        strength: float = 1.0 - 0.5 ** (self.every_steps / half_life)
        return 1.0 - strength * (context.lr_ratio if self.scale_by_lr else 1.0)

    def matrix(self, context: AveragingContext) -> Tensor:
        """`a I + (1 - a)/p`."""
        return mixing.push(context.size, self.keep(context))


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
