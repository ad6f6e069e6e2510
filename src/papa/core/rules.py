"""The interface of averaging rules, and the context they are given."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, Literal, SupportsFloat, TypeAlias

import torch
from torch import Tensor, nn

from papa.core import mixing
from papa.core.layout import Layout
from papa.couplings.masks import Mask
from papa.errors import MixingError

Look: TypeAlias = Literal["distances", "gradient_norms", "members", "mean"]
"""What a rule may look at: each member's distance to the mean; the norm of each member's gradient; what the rule's
`probe` returns for each member; and what it returns for their mean network."""

Probe: TypeAlias = Callable[[nn.Module], float]
"""Maps a network to a number, such as its loss on a batch of validation data."""


@dataclass(frozen=True)
class AveragingContext:
    """What a rule and a merge hook know when members are averaged."""

    step: int
    """Optimizer steps taken so far, across epochs."""
    size: int
    """The number of members."""
    lr_ratio: float
    """The learning rate divided by its initial value, within [0, 1]."""
    generation: int = 1
    """The index of this averaging, starting at 1."""
    previous: int = 0
    """The step of the previous averaging; 0 if this is the first."""
    distances: tuple[float, ...] | None = None
    """Each member's distance to the mean, if the rule looks at `distances`."""
    gradient_norms: tuple[float, ...] | None = None
    """The norm of each member's gradient, if the rule looks at `gradient_norms`; NaN for dropped members."""
    probed: tuple[float, ...] | None = None
    """What `probe` returned for each member, if the rule looks at `members`; NaN for dropped members."""
    probed_mean: float | None = None
    """What `probe` returned for the mean of all active members, if the rule looks at `mean`."""
    state: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """What the rule remembers; see `Rule.next_state`."""

    def among(self, members: Sequence[int]) -> AveragingContext:
        """The context of a population of these members only."""

        def chosen(values: tuple[float, ...] | None) -> tuple[float, ...] | None:
            return None if values is None else tuple(values[member] for member in members)

        return replace(
            self,
            size=len(members),
            distances=chosen(self.distances),
            gradient_norms=chosen(self.gradient_norms),
            probed=chosen(self.probed),
        )

    def is_first_since(self, every_steps: int) -> bool:
        """Whether this is the first averaging at or after a multiple of `every_steps`."""
        return self.step // every_steps > self.previous // every_steps


@dataclass(frozen=True)
class ExtraRow:
    """A row that belongs to a rule: an anchor or a momentum. It is saved, resumed and distributed with the members."""

    name: str
    per_member: bool = False
    """One for each member, instead of one for the whole population."""
    is_difference: bool = False
    """A difference of weights, such as a momentum: it starts at zero. Others start at the mean, or at their member."""


@dataclass(frozen=True)
class Rule:
    """When to average, and with which matrix. Subclass it and write `matrix` to make your own rule.

    Everything else that a rule may need has a default: columns (`mask`), rows of its own (`extra_rows`), numbers about
    the population (`looks_at`) and a memory (`initial_state`). The guide on rules explains them.
    """

    _: KW_ONLY
    every_steps: int
    """Average after every this many optimizer steps, counted across epochs."""
    start: int = 0
    """The first step at which the rule may be due."""
    stop: int | None = None
    """The first step at which the rule is no longer due; None for no end."""

    averages: ClassVar[bool] = True
    """Whether the rule ever averages; False for `Independent`."""
    is_merge: ClassVar[bool] = True
    """Whether members are replaced rather than pushed. A merge is never due on the last step of training."""
    is_for_any_size: ClassVar[bool] = False
    """Whether `matrix` works for any `context.size`; otherwise the matrix of all members is reduced to active ones."""

    has_strength: ClassVar[bool] = False
    """Whether the user chose how strongly members are pushed together, and may want advice about it."""

    is_signed: ClassVar[bool] = False
    """Whether weights may be negative. The rows of `matrix` sum to 1 in any case."""

    shares: ClassVar[tuple[str, ...]] = ()
    """The names of fields that are numbers from 0 to 1; others are refused."""

    @property
    def extra_rows(self) -> tuple[ExtraRow, ...]:
        """Rows of the rule's own. `matrix` then has a row and a column for each member, followed by those of each extra
        row: one, or one for each member. Rows of members and anchors sum to 1 over members and anchors, rows of
        differences to 0.
        """
        return ()

    @property
    def uses_lr(self) -> bool:
        """Whether the matrix depends on the learning rate."""
        return False

    def __post_init__(self) -> None:
        check_steps("every_steps", self.every_steps, at_least=1)
        check_steps("start", self.start, at_least=0)
        if self.stop is not None:
            check_steps("stop", self.stop, at_least=self.start)
        for name in self.shares:
            share = getattr(self, name)
            if not isinstance(share, SupportsFloat) or not 0.0 <= float(share) <= 1.0:
                raise MixingError(f"{name} is {share}, expected a number from 0 to 1")

    def for_length(self, num_steps: int | None) -> Rule:
        """The rule for a training of `num_steps`, with shares of training converted to steps; None if not known."""
        return self

    def too_weak_for(self, num_steps: int) -> str | None:
        """Why members may stay apart in a training of this length; None if they should not."""
        if self.averages and self.every_steps > num_steps:
            return f"{type(self).__name__} averages every {self.every_steps} steps, so never"
        return None

    def check(self, size: int, dtypes: Collection[torch.dtype]) -> None:
        """Raise a `MixingError`, or warn, if the rule does not suit a population.

        Args:
            size: the number of members.
            dtypes: the dtypes of their averaged tensors.
        """

    def is_due(self, step: int, num_steps: int | None = None) -> bool:
        """Whether to average after optimizer step `step` (the first is 1) of `num_steps`."""
        if step < max(self.start, 1) or (self.stop is not None and step >= self.stop):
            return False
        if self.is_merge and step == num_steps:
            return False
        return step % self.every_steps == 0

    def previous(self, step: int) -> int:
        """The step before `step` at which the rule was last due; 0 if it never was."""
        return next((earlier for earlier in range(step - 1, 0, -1) if self.is_due(earlier)), 0)

    def looks_at(self, context: AveragingContext) -> tuple[Look, ...]:
        """What the rule needs to know about the population at this step.

        The averager finds it out before it calls `next_state`, `keep` and `matrix`, after non-finite members were
        restarted or dropped, and all processes get the same numbers. It is in the fields of the context. A rule that
        looks at `members` or `mean` has a field `probe`, a function from a network to a number.
        """
        return ()

    def initial_state(self, size: int) -> dict[str, Any]:
        """What the rule remembers before the first averaging: numbers, strings and lists of them, by name.

        A rule is a frozen value. The averager keeps its state, and saves it with its own.
        """
        return {}

    def next_state(self, context: AveragingContext) -> Mapping[str, Any]:
        """The state after what the rule sees in this context; the names are those of `initial_state`.

        Called once for each averaging. `keep` and `matrix` then get the new state in `context.state`.
        """
        return context.state

    def keep(self, context: AveragingContext) -> float | None:
        """The share `a` of itself each member keeps, if the matrix is `a I + (1 - a)/p`; None for every other rule.

        Distances to the mean then shrink by exactly this factor, and are not measured again.
        """
        return None

    def mask(self, context: AveragingContext, layout: Layout) -> Mask | None:
        """The columns to act on at this step; None for all.

        Must depend on its arguments and the rule's seed only: every process calls it for itself. Distances are then
        not measured, since that would read every column.
        """
        return None

    def mask_among(self, context: AveragingContext, layout: Layout, members: Sequence[int]) -> Mask | None:
        """The mask when only some members are still active; only a rule that permutes members needs its own."""
        return self.mask(context, layout)

    def own_matrix(self, context: AveragingContext) -> Tensor | None:
        """What each member does with its own rows after the members were mixed; None for nothing.

        For a rule whose extra rows are all `per_member`: `matrix` then mixes the members only, and this matrix is
        multiplied by each member and its extra rows, on its own process. Nothing but members travels.
        """
        return None

    def matrix(self, context: AveragingContext) -> Tensor:
        """The mixing matrix `A` for this step, `(size, size)`, with rows that sum to 1."""
        raise TypeError(f"{type(self).__name__} has no `matrix` method: a rule must return its mixing matrix")

    def matrix_among(self, context: AveragingContext, members: Sequence[int]) -> Tensor:
        """The mixing matrix when only some members are still active.

        A rule for any size is asked for a smaller matrix. Otherwise the rows and columns of these members are taken
        and divided by their sums; a member whose weights are all on inactive members stays unchanged.
        """
        if self.is_for_any_size:
            return self.matrix(context.among(members))
        part = self.matrix(context)[list(members)][:, list(members)]
        sums = part.sum(dim=1, keepdim=True)
        return torch.where(sums > 0, part / sums.clamp(min=1e-300), mixing.identity(len(members)))


def check_steps(name: str, value: int, *, at_least: int) -> None:
    """Raise a `MixingError` unless a value is a whole number of steps."""
    try:
        is_valid = not isinstance(value, bool) and operator.index(value) >= at_least
    except TypeError:
        is_valid = False
    if not is_valid:
        raise MixingError(f"{name} is {value!r}, expected a whole number of steps, at least {at_least}")
