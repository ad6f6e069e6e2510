"""A push that sets its own strength."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from statistics import fmean
from typing import Any, ClassVar

from torch import Tensor

from papa import mixing
from papa.errors import MixingError
from papa.rules.base import AveragingContext, Look, Probe, Rule, check_steps

LEARNED = 0.9
"""The average has learned something once its loss is below this share of the members' first loss."""
CUT = 0.5
"""What the half-life is multiplied by when the average is worse than its members."""


@dataclass(frozen=True)
class AdaptivePush(Rule):
    """PAPA without a strength to choose: members go as far apart as their average allows.

    Every few pushes the loss of the average is compared with the mean loss of its members, on the same data:

        the average is better:  half_life <- half_life + growth * (steps since the last check)
        it is not:              half_life <- half_life / 2

    The first pushes nearly merge the members, which have learned nothing yet that could be lost. From then on their
    average is better than they are, and the push weakens until it no longer would be. Only the sign of the difference
    counts, so that neither the scale of the loss nor the length of training matters.

    Example:
        >>> import papa, torch
        >>> inputs, targets = torch.randn(64, 4), torch.randint(2, (64,))
        >>> probe = papa.loss_probe([(inputs, targets)], torch.nn.functional.cross_entropy)
        >>> rule = AdaptivePush(probe)

    Args:
        probe: from a network to its loss on a batch, the same batch for all networks of a check; see `loss_probe`.
        every_steps: steps between pushes.
        check_every: steps between checks. One costs a forward pass of every member and of their average.
        growth: by how many steps the half-life grows in a step.
        scale_by_lr: weaken the push with the learning rate, as the paper does. Then late pushes can no longer bring
            members together.
    """

    probe: Probe | None = None
    _: KW_ONLY
    every_steps: int = 5
    check_every: int = 50
    growth: float = 0.5
    scale_by_lr: bool = False

    is_merge: ClassVar[bool] = False
    is_for_any_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_steps("check_every", self.check_every, at_least=1)
        if not 0.0 < self.growth < math.inf:
            raise MixingError(f"AdaptivePush got growth={self.growth}, expected a positive number of steps per step")

    @property
    def uses_lr(self) -> bool:
        """Whether the push weakens with the learning rate."""
        return self.scale_by_lr

    @property
    def shortest(self) -> float:
        """The shortest half-life, in steps: a push then leaves a member 1/16 of its distance to the mean."""
        return self.every_steps / 4

    def looks_at(self, context: AveragingContext) -> tuple[Look, ...]:
        """The losses of members and average, at a check."""
        return ("members", "mean") if context.is_first_since(self.check_every) else ()

    def initial_state(self, size: int) -> dict[str, Any]:
        """The half-life in steps, and the losses of the last check."""
        return {"half_life": self.shortest, "checked": 0, "first_loss": None, "member_loss": None, "average_loss": None}

    def next_state(self, context: AveragingContext) -> Mapping[str, Any]:
        """A longer or a shorter half-life after a check; the same otherwise."""
        state = context.state
        if context.probed is None or context.probed_mean is None:
            return state
        member_loss = fmean(loss for loss in context.probed if not math.isnan(loss))  # NaN for dropped members
        average_loss = context.probed_mean
        first_loss = _finite(member_loss) if state["first_loss"] is None else state["first_loss"]
        has_learned = first_loss is not None and average_loss < LEARNED * first_loss
        if has_learned and average_loss <= member_loss:
            half_life = state["half_life"] + self.growth * (context.step - state["checked"])
        else:
            half_life = max(CUT * state["half_life"], self.shortest)
        return {
            "half_life": half_life,
            "checked": context.step,
            "first_loss": first_loss,
            "member_loss": _finite(member_loss),
            "average_loss": _finite(average_loss),
        }

    def keep(self, context: AveragingContext) -> float:
        """The share of itself each member keeps."""
        half_life: float = context.state.get("half_life", self.shortest)
        strength: float = 1.0 - 0.5 ** (self.every_steps / half_life)
        return 1.0 - strength * (context.lr_ratio if self.scale_by_lr else 1.0)

    def matrix(self, context: AveragingContext) -> Tensor:
        """`a I + (1 - a)/p`."""
        return mixing.push(context.size, self.keep(context))


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
