"""Rules that act on a few random columns at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from papa.core import mixing
from papa.core.layout import Layout
from papa.core.rules import MAX_HALF_LIFE, AveragingContext
from papa.couplings.coupling import Coupling
from papa.couplings.masks import Mask, depths, draw_columns, draw_permutations
from papa.errors import MixingError, did_you_mean
from papa.streams import stream


@dataclass(frozen=True)
class SparseAverage(Coupling):
    """SPARTA: at every step, a few random weights are replaced by their mean over members.

        w_j[c] <- mean[c]   for each column c with probability `share`

    The mean of the population stays the same. In expectation the squared distance to it shrinks by `1 - share` at every
    step, so that of `share=0.005` halves in 139 steps. Averaged buffers stay with their member.

    Neighbours that share a line of 64 bytes in memory are chosen together, so that only the chosen part of the memory
    is read and written. With `by_lines=False` each weight is chosen on its own, as published.

    Reference: Baioumy, Cheema, SPARTA: sparse parameter averaging (EXO, 2025); 0.05% to 0.5% at every step.

    Args:
        share: the probability of each parameter.
        seed: of the masks, which are a function of seed and step.
        by_lines: whether neighbours are chosen together: 16 in float32, 32 in bfloat16.
    """

    share: float = 0.005
    seed: int = 0
    _: KW_ONLY
    by_lines: bool = True
    every_steps: int = 1

    is_merge: ClassVar[bool] = False
    is_for_any_size: ClassVar[bool] = True
    shares = ("share",)

    def other_strength(self, factor: float, num_steps: int | None) -> str | None:
        return f"share={min(self.share / factor, 1.0):.2g}"

    def too_weak_for(self, num_steps: int) -> str | None:
        """If the distance to the mean halves in a large share of training."""
        if not 0.0 < self.share < 1.0:
            return super().too_weak_for(num_steps)
        steps = self.every_steps * 2.0 * math.log(2.0) / -math.log1p(-self.share)
        if steps <= MAX_HALF_LIFE * num_steps:
            return super().too_weak_for(num_steps)
        return f"SparseAverage has a half-life of {steps:.3g} steps, {steps / num_steps:.0%} of the training,"

    def mask(self, context: AveragingContext, layout: Layout) -> Mask:
        """Each parameter with probability `share`."""
        shares = [self.share * slot.is_parameter for slot in layout.slots]
        generator = stream(self.seed, "sparse", position=context.step)
        return Mask(draw_columns(layout, shares, generator, by_lines=self.by_lines))

    def matrix(self, context: AveragingContext) -> Tensor:
        """`1/p` everywhere, in the columns of the mask."""
        return mixing.merge_all(context.size)


Depth = Literal["decreasing", "constant", "increasing"]


@dataclass(frozen=True)
class Shuffle(Coupling):
    """WASH: at every step, a few random weights are permuted among members, fewer of them in deeper layers.

        w_j[c] <- w_pi(j)[c]   for each column c with probability `share (1 - l/L)`, pi uniform for each column

    where `l` of `0..L` is the layer. A permutation keeps the mean of the population and the sum of squared distances to
    it: members stay as diverse as they were, and are kept in one basin by training.

    Neighbours in memory are chosen and permuted together, as in `SparseAverage`; with `by_lines=False` each weight on
    its own, as published.

    Reference: Fournier et al., WASH: train your ensemble with communication-efficient weight shuffling, then average
    (arXiv 2405.17517); 0.1% at every step, decreasing with depth.

    Args:
        share: the probability of each parameter of the first layer.
        depth: how the probability depends on the layer: to 0 in the last (`decreasing`), the same in all, or from 0 in
            the first (`increasing`).
        seed: of masks and permutations, which are a function of seed and step.
        by_lines: whether neighbours are chosen together: 16 in float32, 32 in bfloat16.
    """

    share: float = 0.001
    depth: Depth = "decreasing"
    seed: int = 0
    _: KW_ONLY
    by_lines: bool = True
    every_steps: int = 1

    is_merge: ClassVar[bool] = False
    shares = ("share",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth not in get_args(Depth):
            raise MixingError(f"Shuffle got depth={self.depth!r}: {did_you_mean(str(self.depth), get_args(Depth))}")

    def other_strength(self, factor: float, num_steps: int | None) -> str | None:
        return f"share={min(self.share / factor, 1.0):.2g}"

    def mask(self, context: AveragingContext, layout: Layout) -> Mask:
        """Random columns, and a permutation for each."""
        return self._mask(context, layout, range(context.size))

    def mask_among(self, context: AveragingContext, layout: Layout, members: Sequence[int]) -> Mask:
        """Dropped members keep their weights."""
        return self._mask(context, layout, members)

    def _mask(self, context: AveragingContext, layout: Layout, members: Sequence[int]) -> Mask:
        generator = stream(self.seed, "shuffle", position=context.step)
        columns = draw_columns(layout, self._shares(layout), generator, by_lines=self.by_lines)
        everyone = torch.arange(context.size, dtype=torch.int32, device="cpu")
        sources = {}
        for dtype, lines in columns.items():
            drawn = draw_permutations(len(members), len(lines.numbers), generator)
            if len(members) < context.size:
                whole = everyone.unsqueeze(1).repeat(1, len(lines.numbers))
                whole[list(members)] = everyone[list(members)][drawn.long()]
                drawn = whole
            sources[dtype] = drawn.to(layout.device)
        return Mask(columns, sources)

    def _shares(self, layout: Layout) -> list[float]:
        if self.depth == "constant":
            return [self.share * slot.is_parameter for slot in layout.slots]
        first, last = (1.0, 0.0) if self.depth == "decreasing" else (0.0, 1.0)
        return [
            self.share * slot.is_parameter * (first + (last - first) * depth)
            for slot, depth in zip(layout.slots, depths(layout), strict=True)
        ]

    def matrix(self, context: AveragingContext) -> Tensor:
        """The identity: members are permuted column by column, see `mask`."""
        return mixing.identity(context.size)
