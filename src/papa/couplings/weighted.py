"""Rules whose matrix depends on the members: on their distances, gradients or scores."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from papa.core import mixing
from papa.core.population import Population
from papa.core.rules import AveragingContext, Rule
from papa.couplings.observation import Probe, check_probe, gradient_norms, losses_of_members
from papa.errors import MixingError

MAX_STRETCH = 1000.0
"""A member may move away from the mean by at most this factor, beyond which float32 would mostly amplify rounding."""


@dataclass(frozen=True)
class PushPull(Rule):
    """DPPF: members are pulled toward the mean and pushed away from it, so that they keep a set distance.

        w_j <- w_j - pull (1 - spread/d_j) (w_j - mean),   d_j the distance of w_j to the mean

    The distance to the mean becomes `d_j + pull (spread - d_j)`: it approaches `spread` from both sides, by the factor
    `1 - pull`. Where a member is too close, its weights on the others are negative; rows still sum to 1. A member that
    is at the mean stays there.

    Reference: Dimlioglu, Choromanska, DPPF: communication-efficient distributed training with pull and push forces
    (arXiv 2507.20424), where `pull` is alpha, and `pull * spread` is lambda; every 4 steps. The right `spread` depends
    on the network.

    Args:
        spread: the distance to the mean that members keep.
        pull: how fast they approach it.
    """

    spread: float = 5.0
    pull: float = 0.1
    _: KW_ONLY
    every_steps: int = 4

    is_merge: ClassVar[bool] = False
    has_strength: ClassVar[bool] = True
    is_for_any_size: ClassVar[bool] = True
    is_signed: ClassVar[bool] = True
    shares = ("pull",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.spread < math.inf:
            raise MixingError(f"PushPull got spread={self.spread}, expected a distance, at least 0")

    def see(self, population: Population, context: AveragingContext) -> AveragingContext:
        """Distances to the mean, if the averager did not measure them."""
        if context.distances is not None:
            return context
        return replace(context, distances=tuple(population.distances().tolist()))

    def other_strength(self, factor: float, num_steps: int | None) -> str | None:
        return f"spread={self.spread * factor:.2g}"

    def matrix(self, context: AveragingContext) -> Tensor:
        """`a_j I + (1 - a_j)/p`, with a share of its own for each member."""
        distances = context.distances or (0.0,) * context.size
        keep = [1.0 - self.pull * (1.0 - self.spread / d) if d > 0.0 else 1.0 for d in distances]
        shares = torch.tensor(keep, dtype=torch.float64, device="cpu").clamp(max=MAX_STRETCH)[:, None]
        return shares * mixing.identity(context.size) + (1.0 - shares) * mixing.merge_all(context.size)


@dataclass(frozen=True)
class GradientWeightedPush(Rule):
    """GRAWA: push toward a mean in which members with small gradients weigh more, to favour flat regions.

        w_j <- alpha w_j + (1 - alpha) sum_i v_i w_i,   v_i proportional to 1/(norm of the gradient of i)

    Norms are those of the last training batch, smoothed over averagings. All distances between members shrink by
    `alpha`; the mean moves toward the weighted mean.

    Reference: Dimlioglu, Choromanska, GRAWA: gradient-based weighted averaging for distributed training of deep
    learning models (arXiv 2403.04206), its model-level form; every 32 steps, alpha 0.5, norms smoothed by 0.9^8.

    Args:
        alpha: the share of itself a member keeps.
        smoothing: the share of itself that the smoothed norm keeps at each averaging.
    """

    alpha: float = 0.5
    smoothing: float = 0.9**8
    _: KW_ONLY
    every_steps: int = 32

    is_merge: ClassVar[bool] = False
    has_strength: ClassVar[bool] = True
    shares = ("alpha", "smoothing")

    def see(self, population: Population, context: AveragingContext) -> AveragingContext:
        return replace(context, gradient_norms=gradient_norms(population))

    def initial_state(self, size: int) -> dict[str, Any]:
        """The smoothed norms, and the weight of what was seen so far in them."""
        return {"norms": [0.0] * size, "weights": [0.0] * size}

    def next_state(self, context: AveragingContext) -> Mapping[str, Any]:
        """Add the norms of this step; those of dropped members and non-finite ones are left out."""
        norms, weights = list(context.state["norms"]), list(context.state["weights"])
        for member, norm in enumerate(context.gradient_norms or ()):
            if math.isfinite(norm):
                norms[member] = self.smoothing * norms[member] + (1.0 - self.smoothing) * norm
                weights[member] = self.smoothing * weights[member] + (1.0 - self.smoothing)
        return {"norms": norms, "weights": weights}

    def matrix(self, context: AveragingContext) -> Tensor:
        """`alpha I + (1 - alpha) 1 v^T`."""
        return self.matrix_among(context, range(context.size))

    def matrix_among(self, context: AveragingContext, members: Sequence[int]) -> Tensor:
        """The weights of these members, which sum to 1."""
        state = context.state or self.initial_state(context.size)
        norms = [n / w if w else 1.0 for n, w in zip(state["norms"], state["weights"], strict=True)]
        inverse = torch.tensor(
            [1.0 / max(norms[member], 1e-12) for member in members], dtype=torch.float64, device="cpu"
        )
        return mixing.push_to(inverse / inverse.sum(), self.alpha)


@dataclass(frozen=True, eq=False)
class ScoreWeightedPush(Rule):
    """Push toward a mean in which members with a small loss weigh more.

        w_j <- alpha w_j + (1 - alpha) sum_i v_i w_i,   v_i proportional to 1/loss_i

    A member with a non-finite loss has weight 0. The paper names other weightings than the mean as future work.

    Example:
        >>> inputs, targets = torch.randn(64, 4), torch.randint(2, (64,))
        >>> def loss(network):
        ...     with torch.no_grad():
        ...         return torch.nn.functional.cross_entropy(network(inputs), targets).item()
        >>> rule = ScoreWeightedPush(loss, every_steps=10)

    Args:
        probe: a network's loss on validation data.
        alpha: the share of itself a member keeps.
    """

    probe: Probe
    alpha: float = 0.99
    _: KW_ONLY
    every_steps: int = 10

    is_merge: ClassVar[bool] = False
    has_strength: ClassVar[bool] = True
    is_for_any_size: ClassVar[bool] = True
    shares = ("alpha",)

    def check(self, size: int, dtypes: Collection[torch.dtype]) -> None:
        check_probe(self, self.probe)

    def see(self, population: Population, context: AveragingContext) -> AveragingContext:
        return replace(context, losses=losses_of_members(population, self.probe))

    def matrix(self, context: AveragingContext) -> Tensor:
        """`alpha I + (1 - alpha) 1 v^T`."""
        return mixing.push_to(mixing.fitness(context.losses or (1.0,) * context.size), self.alpha)
