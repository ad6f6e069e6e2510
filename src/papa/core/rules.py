"""The interface of averaging rules, and the context they are given."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, SupportsFloat, cast

import torch
from torch import Tensor, nn

from papa.core import mixing
from papa.core.half_life import HALF_LIFE, half_life_in_steps
from papa.core.population import Population
from papa.errors import MixingError, PapaWarning
from papa.streams import stream


class Memory:
    """The tensors that a rule keeps between averagings, such as anchors: this one keeps none."""

    def start_(self) -> None:
        """Give them their first values, from members that are finite. All processes must call it."""

    def restart_(self, members: Collection[int]) -> None:
        """Give the tensors of members that were restarted their first values. All processes must call it."""

    def names_of(self, member: int) -> list[str]:
        """The names of what is saved with a member."""
        return []

    def templates(self) -> dict[str, Tensor]:
        """Tensors of the shapes and dtypes of all that may be saved with a member."""
        return {}

    def tensors_of(self, index: int) -> dict[str, Tensor]:
        """What is saved with a local member."""
        return {}

    def load_(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Restore the `tensors_of` each local member. All processes must call it."""


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
    """Each member's distance to the mean, if it was measured."""
    gradient_norms: tuple[float, ...] | None = None
    """The norm of each member's gradient, if the rule found it in `see`; NaN for dropped members."""
    losses: tuple[float, ...] | None = None
    """The loss of each member, if the rule found it in `see`; NaN for dropped members."""
    mean_loss: float | None = None
    """The loss of the mean of all active members, if the rule found it in `see`."""
    state: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """What the rule remembers; see `Rule.next_state`."""
    memory: Memory = field(default_factory=Memory, compare=False)
    """What `Rule.memory` returned for this population."""
    mask: Any = field(default=None, compare=False)
    """What `Rule.prepare` chose, for `Rule.apply_`."""
    columns: Mapping[torch.dtype, Tensor] | None = field(default=None, compare=False)
    """The columns of the local members that are about to change, which alone are checked; None for all."""
    matrix: Tensor | None = field(default=None, compare=False)
    """The rule's matrix for all members, if merge hooks were given it."""
    is_fresh: bool = False
    """Whether nothing has run since members were read and all processes met, so that neither is needed again."""

    def among(self, members: Sequence[int]) -> AveragingContext:
        """The context of a population of these members only."""

        def chosen(values: tuple[float, ...] | None) -> tuple[float, ...] | None:
            return None if values is None else tuple(values[member] for member in members)

        return replace(
            self,
            size=len(members),
            distances=chosen(self.distances),
            gradient_norms=chosen(self.gradient_norms),
            losses=chosen(self.losses),
        )

    def is_first_since(self, every_steps: int) -> bool:
        """Whether this is the first averaging at or after a multiple of `every_steps`."""
        return self.step // every_steps > self.previous // every_steps


@dataclass(frozen=True)
class Rule:
    """When to average, and with which matrix. Subclass it and write `matrix` to make your own rule.

    What else a rule may need has a default that does nothing: numbers about the population (`see`), a memory
    (`initial_state`), another way to change members than a matrix (`apply_`). A rule for some columns, or with rows of
    its own, is a `papa.couplings.Coupling`. The guide on rules explains them.

    At a step that `is_due`, the averager calls `prepare`, measures and checks the members, and calls `see`,
    `next_state` (if the rule has a state) and `apply_`, which asks for `keep` or else for `matrix`.
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
    def uses_lr(self) -> bool:
        """Whether the matrix depends on the learning rate."""
        return False

    @property
    def takes_hooks(self) -> bool:
        """Whether merge hooks may change members before and after; not if the rule has rows of its own."""
        return True

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

    def with_probe(self, probe: Callable[[nn.Module], float]) -> Rule:
        """The rule, which measures networks by `probe` if it has to and was given nothing else."""
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
        for earlier in range(step - 1, 0, -1):
            if self.is_due(earlier):
                return earlier
        return 0

    def memory(self, population: Population) -> Memory:
        """Make the tensors that the rule keeps for a population."""
        return Memory()

    def initial_state(self, size: int) -> dict[str, Any]:
        """What the rule remembers before the first averaging: numbers, strings and lists of them, by name.

        A rule is a frozen value. The averager keeps its state, and saves it with its own.
        """
        return {}

    def prepare(self, population: Population, context: AveragingContext) -> AveragingContext:
        """Called before members are measured, and again if some were restarted: choose the columns that will change."""
        return context

    def see(self, population: Population, context: AveragingContext) -> AveragingContext:
        """Called when all members are finite. May add what the rule wants to know, the same on all processes."""
        return context

    def next_state(self, context: AveragingContext) -> Mapping[str, Any]:
        """The state after what the rule saw; the names are those of `initial_state`.

        Called once for each averaging. `keep` and `matrix` then get the new state in `context.state`.
        """
        return context.state

    def keep(self, context: AveragingContext) -> float | None:
        """The share `a` of itself each member keeps, if the matrix is `a I + (1 - a)/p`; None for every other rule.

        Distances to the mean then shrink by exactly this factor, and are not measured again.
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

    def whole_matrix(self, context: AveragingContext, active: Sequence[int]) -> Tensor:
        """The matrix for all members; those that were dropped become the mean of the active ones."""
        if context.matrix is not None:
            return context.matrix
        if len(active) == context.size:
            return self.matrix(context)
        return mixing.among(self.matrix_among(context, active), active, context.size)

    def other_strength(self, factor: float, num_steps: int | None) -> str | None:
        """The option that makes averaging weaker by a factor, or stronger if it is below 1; None if there is none."""
        every_steps = max(1, round(self.every_steps * factor))
        return f"every_steps={every_steps}" if every_steps != self.every_steps else None

    def apply_(self, population: Population, context: AveragingContext) -> float | None:
        """Average the members, by `W <- A W`. All processes call it.

        Returns:
            The share of itself that each member kept, if this was a push toward the mean.
        """
        keep = self.keep(context)
        if keep is not None and 0.0 <= keep <= 1.0 and context.matrix is None and not population.dropped:
            population.push_(keep, fresh=context.is_fresh)
        else:
            matrix = self.whole_matrix(context, population.active)
            population.mix_(matrix, signed=self.is_signed, fresh=context.is_fresh)
        return keep


def check_steps(name: str, value: int, *, at_least: int) -> None:
    """Raise a `MixingError` unless a value is a whole number of steps."""
    try:
        is_valid = not isinstance(value, bool) and operator.index(value) >= at_least
    except TypeError:
        is_valid = False
    if not is_valid:
        raise MixingError(f"{name} is {value!r}, expected a whole number of steps, at least {at_least}")


MAX_HALF_LIFE = 0.1
"""With a longer half-life, members that start apart stay too far apart to be averaged: the longest that ever worked."""

MAX_EVERY_STEPS = 10
"""How often a push is due by default, in steps; more often if its half-life is shorter."""

MAX_ALPHA_16_BIT = 0.9
"""A weaker push on 16-bit weights moves most of them by less than half a unit in the last place: not at all."""


@dataclass(frozen=True)
class Push(Rule):
    """PAPA: every few steps, push each member a little toward the mean.

        w_j <- a w_j + (1 - a) mean,   1 - a = (1 - alpha) lr/lr0

    Example:
        >>> push = Push(half_life=0.003).for_length(3000)  # the averager does this
        >>> push.half_life_in_steps, push.every_steps
        (9.0, 9)
        >>> Push(alpha=0.99, every_steps=10).half_life_in_steps
        689.6...

    The right strength depends on the length of training. With a half-life of 690 steps, members come together many
    times over in 230,000 steps, and never in 3,000. A half-life of 0.003 (0.3%) of training is safe at any length; see
    the guide on strength. Give one of the first three:

    Args:
        half_life: the time in which the distance to the mean halves, if nothing else moves the members, as a share of
            training. The averager must know `num_steps`.
        half_life_steps: the same as a number of steps.
        alpha: the share of itself a member keeps at each push, at the highest learning rate.
        scale_by_lr: weaken the push with the learning rate, as the paper does.
        every_steps: by default every 10 steps, or once in a half-life if that is shorter.
    """

    _: KW_ONLY
    half_life: float | None = None
    half_life_steps: float | None = None
    alpha: float | None = None
    scale_by_lr: bool = True
    every_steps: int = cast(int, None)

    is_merge: ClassVar[bool] = False
    has_strength: ClassVar[bool] = True
    is_for_any_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check_strength()
        if cast(int | None, self.every_steps) is None:
            if self.half_life is not None:
                return  # it follows from the length of training
            steps = min(MAX_EVERY_STEPS, self.half_life_steps or MAX_EVERY_STEPS)
            object.__setattr__(self, "every_steps", max(1, round(steps)))
        super().__post_init__()

    def _check_strength(self) -> None:
        strengths = {"half_life": self.half_life, "half_life_steps": self.half_life_steps, "alpha": self.alpha}
        given = {name: value for name, value in strengths.items() if value is not None}
        if len(given) != 1:
            found = " and ".join(f"{name}={value}" for name, value in given.items()) or "no strength"
            raise MixingError(
                f"Push got {found}, expected one of {', '.join(strengths)}: half_life={HALF_LIFE} is {HALF_LIFE:.1%} "
                "of training, a good start"
            )
        if self.alpha is not None and not 0.0 <= self.alpha <= 1.0:
            raise MixingError(f"Push got alpha={self.alpha}, expected a number from 0 (merge) to 1 (never push)")
        if self.half_life is not None and not 0.0 < self.half_life <= 1.0:
            raise MixingError(
                f"Push got half_life={self.half_life}, expected a share of training, more than 0 and at most 1, such "
                f"as {HALF_LIFE}: give a number of steps as half_life_steps"
            )
        if self.half_life_steps is not None and not self.half_life_steps > 0.0:
            raise MixingError(f"Push got half_life_steps={self.half_life_steps}, expected a positive number of steps")

    def for_length(self, num_steps: int | None) -> Push:
        if self.half_life is None:
            return self
        if num_steps is None:
            raise MixingError(
                f"Push(half_life={self.half_life}) is a share of training, whose length is not known: pass num_steps "
                "to the averager, or give the strength as half_life_steps or alpha"
            )
        return replace(self, half_life=None, half_life_steps=self.half_life * max(1, num_steps))

    @functools.cached_property
    def effective_alpha(self) -> float:
        """`alpha`, whichever way the strength was given."""
        if self.alpha is not None:
            return self.alpha
        if self.half_life_steps is None:
            return self.for_length(None).effective_alpha  # raises
        return float(0.5 ** (self.every_steps / self.half_life_steps))

    @property
    def half_life_in_steps(self) -> float:
        """The half-life in steps, whichever way the strength was given."""
        return half_life_in_steps(self.effective_alpha, self.every_steps)

    def other_strength(self, factor: float, num_steps: int | None) -> str | None:
        steps = self.half_life_in_steps
        if num_steps is None:
            return f"half_life_steps={steps * factor:.2g}"
        share = steps / num_steps
        return None if factor > 1.0 and share >= MAX_HALF_LIFE else f"half_life={min(share * factor, 1.0):.1g}"

    @property
    def uses_lr(self) -> bool:
        return self.scale_by_lr

    def too_weak_for(self, num_steps: int) -> str | None:
        steps = self.half_life_in_steps
        if steps <= MAX_HALF_LIFE * num_steps or not 0.0 < self.effective_alpha < 1.0:
            return super().too_weak_for(num_steps)
        return f"the push has a half-life of {steps:.3g} steps, {steps / num_steps:.0%} of the training,"

    def check(self, size: int, dtypes: Collection[torch.dtype]) -> None:
        if self.effective_alpha > MAX_ALPHA_16_BIT and any(dtype.itemsize < 4 for dtype in dtypes):
            warnings.warn(
                f"a push that leaves members {self.effective_alpha:.3g} of themselves is lost in the rounding of "
                "bfloat16 and float16 weights: keep float32 weights and use autocast, or push more strongly and rarely",
                PapaWarning,
                stacklevel=3,
            )

    def is_due(self, step: int, num_steps: int | None = None) -> bool:
        if self.half_life is not None:
            return self.for_length(num_steps).is_due(step, num_steps)
        return super().is_due(step, num_steps)

    def keep(self, context: AveragingContext) -> float:
        """`a`: the share of itself each member keeps at this learning rate."""
        strength = (1.0 - self.effective_alpha) * (context.lr_ratio if self.scale_by_lr else 1.0)
        return min(max(1.0 - strength, 0.0), 1.0)

    def matrix(self, context: AveragingContext) -> Tensor:
        return mixing.push(context.size, self.keep(context))


@dataclass(frozen=True)
class Independent(Rule):
    """Never average: the baseline."""

    _: KW_ONLY
    every_steps: int = 1

    averages: ClassVar[bool] = False
    is_merge: ClassVar[bool] = False

    def is_due(self, step: int, num_steps: int | None = None) -> bool:
        return False

    def other_strength(self, factor: float, num_steps: int | None) -> str | None:
        return None

    def matrix(self, context: AveragingContext) -> Tensor:
        return mixing.identity(context.size)


@dataclass(frozen=True)
class MergeAll(Rule):
    """PAPA-all: every few epochs, replace every member by the mean of all.

    Example:
        >>> rule = MergeAll(every_steps=1000)
    """

    is_for_any_size: ClassVar[bool] = True

    def matrix(self, context: AveragingContext) -> Tensor:
        return mixing.merge_all(context.size)


@dataclass(frozen=True)
class MergePairs(Rule):
    """PAPA-2: every few epochs, replace every member by the mean of two distinct members drawn uniformly.

    Args:
        share: the weight of the first of the two: 1/2 in PAPA-2, 3/4 in the paper's pair-75.
        seed: the seed of the pairs, which are a function of seed and step.
    """

    share: float = 0.5
    seed: int = 0

    is_for_any_size: ClassVar[bool] = True
    shares = ("share",)

    def matrix(self, context: AveragingContext) -> Tensor:
        generator = stream(self.seed, "merge", position=context.step)
        return mixing.merge_pairs(context.size, generator, share=self.share)


@dataclass(frozen=True)
class MergeMany(Rule):
    """Every few epochs, each member keeps `share` of itself and takes the rest from all others (many-half, many-75)."""

    share: float = 0.5

    is_for_any_size: ClassVar[bool] = True
    shares = ("share",)

    def matrix(self, context: AveragingContext) -> Tensor:
        return mixing.merge_many(context.size, share=self.share)


@dataclass(frozen=True, eq=False)
class Mix(Rule):
    """Your own weights: a fixed matrix whose rows sum to 1, or a function that returns one.

    Example:
        >>> ring = Mix([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]], every_steps=100)

    Args:
        weights: anything `torch.as_tensor` takes, or a function from `AveragingContext` to that.
    """

    weights: Any | Callable[[AveragingContext], Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.weights):
            mixing.check_rows(self.weights)

    def check(self, size: int, dtypes: Collection[torch.dtype]) -> None:
        if not callable(self.weights):
            mixing.check_rows(self.weights, size)

    @property
    def uses_lr(self) -> bool:
        return callable(self.weights)

    def matrix(self, context: AveragingContext) -> Tensor:
        weights = self.weights(context) if callable(self.weights) else self.weights
        return mixing.check_rows(weights, context.size)
