"""Rules with rows of their own: anchors, and momenta of anchors."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from papa.core import mixing
from papa.core.layout import Layout
from papa.core.rules import AveragingContext, check_steps
from papa.couplings.coupling import Coupling, ExtraRow
from papa.couplings.masks import Mask, fragments
from papa.errors import MixingError
from papa.streams import stream

ANCHOR = ExtraRow("anchor")
MOMENTUM = ExtraRow("momentum", is_difference=True)


@dataclass(frozen=True)
class Elastic(Coupling):
    """EASGD: members and an anchor attract each other.

        w_j <- w_j + r (z - w_j),   z <- z + r sum_j (w_j - z),   r = moving_rate/p

    The anchor starts at the mean. The mean of members and anchor together stays the same, and all their distances to it
    shrink.

    Reference: Zhang, Choromanska, LeCun, Deep learning with elastic averaging SGD (arXiv 1412.6651); a moving rate of
    0.9, every 10 steps.

    Args:
        moving_rate: how far the anchor moves toward the mean of members.
    """

    moving_rate: float = 0.9
    _: KW_ONLY
    every_steps: int = 10

    is_merge: ClassVar[bool] = False
    has_strength: ClassVar[bool] = True
    is_for_any_size: ClassVar[bool] = True
    shares = ("moving_rate",)

    @property
    def extra_rows(self) -> tuple[ExtraRow, ...]:
        return (ANCHOR,)

    def matrix(self, context: AveragingContext) -> Tensor:
        """Of members and anchor; symmetric."""
        size, rate = context.size, self.moving_rate / context.size
        matrix = (1.0 - rate) * mixing.identity(size + 1)
        matrix[:size, size] = matrix[size, :size] = rate
        matrix[size, size] = 1.0 - self.moving_rate
        return matrix


@dataclass(frozen=True)
class Lookahead(Coupling):
    """Lookahead for a population: an anchor moves a part of the way to the mean, and all members restart from it.

        z <- z + slow_rate (mean - z),   w_j <- z

    With a `slow_rate` of 1 it is `MergeAll`. The anchor starts at the mean of members.

    Reference: Zhang et al., Lookahead optimizer: k steps forward, 1 step back (arXiv 1907.08610), for one network;
    every 5 steps, a rate of 0.5.

    Args:
        slow_rate: the part of the way that the anchor moves.
    """

    slow_rate: float = 0.5
    _: KW_ONLY
    every_steps: int = 5

    is_for_any_size: ClassVar[bool] = True
    shares = ("slow_rate",)

    @property
    def extra_rows(self) -> tuple[ExtraRow, ...]:
        return (ANCHOR,)

    def matrix(self, context: AveragingContext) -> Tensor:
        """The same row for members and anchor."""
        row = torch.full((context.size + 1,), self.slow_rate / context.size, dtype=torch.float64, device="cpu")
        row[-1] = 1.0 - self.slow_rate
        return row.repeat(context.size + 1, 1)


@dataclass(frozen=True)
class OuterStep(Coupling):
    """DiLoCo: every few hundred steps, a Nesterov step on the movement of the mean; all members restart from it.

        g = z - mean,   m <- momentum m + g,   z <- z - lr (g + momentum m),   w_j <- z

    Members should start from the same weights. With `lr=1` and `momentum=0` it is `MergeAll`.

    As in Streaming DiLoCo, `fragments` split the columns into parts of whole tensors, and every
    `every_steps / fragments` steps the next part takes its step, so that less is sent at a time.

    Reference: Douillard et al., DiLoCo: distributed low-communication training of language models (arXiv 2311.08105);
    every 500 steps, lr 0.7, momentum 0.9. Douillard et al., Streaming DiLoCo with overlapping communication (arXiv
    2501.18512), without its overlap.

    Args:
        lr: the outer learning rate.
        momentum: of the outer optimizer.
        fragments: the number of parts that take turns.
    """

    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    _: KW_ONLY
    every_steps: int = 500

    is_for_any_size: ClassVar[bool] = True
    is_signed: ClassVar[bool] = True
    shares = ("momentum",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_steps("fragments", self.fragments, at_least=1)
        if not self.lr > 0.0:
            raise MixingError(f"OuterStep got lr={self.lr}, expected a positive number")
        if self.every_steps % self.fragments:
            raise MixingError(
                f"OuterStep got every_steps={self.every_steps} and fragments={self.fragments}, expected a number of "
                "steps that the number of fragments divides"
            )

    @property
    def _cadence(self) -> int:
        return self.every_steps // self.fragments

    @property
    def extra_rows(self) -> tuple[ExtraRow, ...]:
        return (ANCHOR, MOMENTUM)

    def is_due(self, step: int, num_steps: int | None = None) -> bool:
        """Whenever a fragment is, but not on the last step of training."""
        if step < max(self.start, 1) or (self.stop is not None and step >= self.stop):
            return False
        if num_steps is not None and step >= num_steps:
            return False
        return step % self._cadence == 0

    def mask(self, context: AveragingContext, layout: Layout) -> Mask | None:
        """The fragment whose turn it is."""
        if self.fragments == 1:
            return None
        turn = (context.step // self._cadence - 1) % self.fragments
        return Mask(fragments(layout, self.fragments)[turn])

    def matrix(self, context: AveragingContext) -> Tensor:
        """Of members, anchor and momentum."""
        size, lr, momentum = context.size, self.lr, self.momentum
        rows = torch.zeros(size + 2, size + 2, dtype=torch.float64, device="cpu")
        gradient = torch.zeros(size + 2, dtype=torch.float64, device="cpu")
        gradient[:size], gradient[size] = -1.0 / size, 1.0
        rows[size + 1, size + 1] = momentum
        rows[size + 1] += gradient
        rows[size, size] = 1.0
        rows[size] -= lr * (gradient + momentum * rows[size + 1])
        rows[:size] = rows[size]
        return rows


@dataclass(frozen=True)
class Gossip(Coupling):
    """NoLoCo: an outer step with the mean of a random pair, without a mean of all.

        m_j <- momentum m_j + lr (mean of the pair - z_j),   z_j <- z_j + m_j,   w_j <- z_j

    Each member has its own anchor `z_j`, which starts at its weights, and its own momentum. Pairs are drawn again each
    time; with an odd number of members one is alone. Members come together through changing partners. Each sends
    its weights only.

    Reference: Kolehmainen et al., NoLoCo: no-all-reduce low communication training method for large models (arXiv
    2506.10911); every 50 steps, lr 0.7, momentum 0.5.

    Args:
        lr: the outer learning rate.
        momentum: of the outer optimizer.
        seed: of the pairs, which are a function of seed and step.
    """

    lr: float = 0.7
    momentum: float = 0.5
    seed: int = 0
    _: KW_ONLY
    every_steps: int = 50

    is_for_any_size: ClassVar[bool] = True
    shares = ("momentum",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lr > 0.0:
            raise MixingError(f"Gossip got lr={self.lr}, expected a positive number")

    @property
    def extra_rows(self) -> tuple[ExtraRow, ...]:
        """An anchor and a momentum for each member."""
        return (ExtraRow("anchor", per_member=True), ExtraRow("momentum", per_member=True, is_difference=True))

    def matrix(self, context: AveragingContext) -> Tensor:
        """The mean of each pair, for both."""
        order = torch.randperm(
            context.size, generator=stream(self.seed, "gossip", position=context.step), device="cpu"
        ).tolist()
        matrix = mixing.identity(context.size)
        for first, second in zip(order[0::2], order[1::2], strict=False):
            matrix[[first, second]] = mixing.soup_row(context.size, [first, second])
        return matrix

    def own_matrix(self, context: AveragingContext) -> Tensor:
        """Of the pair's mean, the member's anchor and its momentum."""
        new_momentum = torch.tensor([self.lr, -self.lr, self.momentum], dtype=torch.float64, device="cpu")
        anchor = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64, device="cpu") + new_momentum
        return torch.stack([anchor, anchor, new_momentum])
