"""Mistakes that would pass in silence: found in the first steps of a training, and warned of once, with the remedy."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from papa.core.half_life import default_half_life
from papa.core.population import Population
from papa.core.rules import Rule
from papa.errors import PapaWarning
from papa.evaluation.inputs import tensors_in

NUM_STEPS_COMPARED = 20
"""After this many steps of the averager, those of the optimizers are compared with them."""
MIN_STEPS = 50
"""Shorter trainings are trials, whatever their strength."""
MAX_SHARE_SKIPPED = 0.25
"""The share of steps that optimizers may skip, such as the first ones with a gradient scaler."""
NUM_BATCHES_COMPARED = 3
NUM_AVERAGINGS_CHECKED = 3
SAMPLE_COLUMNS = 2**16
"""The number of columns of a member that are compared before and after averaging."""
APART = 0.3
"""Members farther from the mean than this share of its norm did not start from the same weights."""
EQUAL = 1e-6
"""Members this close to the mean, as a share of a member's norm, are equal up to the rounding of the mean."""
UNDONE = 0.5
"""A step undid a push if the weights are back within this share of it."""
NEAR_COPY = 0.1
"""Optimizer state that differs from a weight by less than this share of its norm is a copy or an average of it."""


class Diagnostics:
    """Watches a population during its first steps and averagings; every mistake is warned of once.

    With `watch_batches`, the first batches of members are compared, by hooks on their forward passes.
    """

    def __init__(
        self,
        population: Population,
        rule: Rule,
        optimizers: Sequence[Optimizer],
        num_steps: int | None,
        *,
        watch_batches: bool = True,
    ) -> None:
        self.population, self.rule, self.optimizers, self.num_steps = population, rule, optimizers, num_steps
        self._is_watching = rule.averages and population.size > 1
        self._warned: set[str] = set()
        self.counts = count_steps(self, optimizers)
        """The steps that each optimizer took."""
        self._num_steps = self._num_averagings = self._num_equal = self._num_undone = 0
        self._batches = FirstBatches(population) if watch_batches and self._is_watching else None
        self._schedule = FindSchedule(population) if rule.uses_lr and not optimizers else None
        self._before: Tensor | None = None
        self._after: Tensor | None = None
        """A sample of the first local member's weights before and after the last averaging."""
        self._check_optimizers()
        if num_steps is not None:
            self._check_strength(num_steps)

    def _warn(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, PapaWarning, stacklevel=5)

    def _check_optimizers(self) -> None:
        trained = {id(p) for one in self.optimizers for group in one.param_groups for p in group["params"]}
        members = zip(self.population.members, self.population, strict=True)
        left = [str(j) for j, net in members if trained and all(id(p) not in trained for p in net.parameters())]
        if left:
            self._warn(
                "optimizers",
                f"the averager has no optimizer of member {', '.join(left)}, only {len(self.optimizers)} of others: "
                "pass the optimizers of all members, which give the learning rate and are reset after a restart",
            )

    def _check_strength(self, num_steps: int) -> None:
        reason = self.rule.too_weak_for(num_steps)
        if reason is not None and self._is_watching and num_steps >= MIN_STEPS and are_apart(self.population):
            self._warn(
                "strength",
                f"{reason} in a training of {num_steps} steps: members may stay too far apart, and their average at "
                f"chance. Push more strongly: papa.Push(half_life={default_half_life(num_steps)}), a share of "
                "training, keeps them together, and papa.diagnose says whether it is too strong",
            )

    def before_soup(self) -> None:
        """Check the strength against the steps so far, if the length of training was not known."""
        if self.num_steps is None and self._num_steps and self._is_watching:
            self._check_strength(self._num_steps)

    def on_step(self, *, uses_optimizers: bool) -> None:
        """Called first in every step of the averager, with whether it reads the learning rate from the optimizers."""
        self._num_steps += 1
        taken = max(self.counts, default=0)
        if self._num_steps == NUM_STEPS_COMPARED and 0 < taken < (1.0 - MAX_SHARE_SKIPPED) * self._num_steps:
            self._warn(
                "steps",
                f"averager.step() was called {self._num_steps} times, while each optimizer took {taken} steps: call it "
                "once after all members took an optimizer step, outside of the loop over members, and not for batches "
                "whose gradients are accumulated",
            )
        if self._after is not None:
            self._check_if_undone()
        if self._schedule is not None and self._schedule.is_found and uses_optimizers:
            self._warn(
                "schedule",
                "members' learning rates change, but the averager has no optimizers to read them from, so pushes do "
                "not weaken: pass the optimizers to the averager, or make the push with scale_by_lr=False",
            )

    def before_averaging(self, distances: Sequence[float] | None) -> None:
        """Called before members are mixed, in all processes."""
        self._num_averagings += 1
        if not self._is_watching:
            return
        self._before = self._sample() if self._num_averagings <= NUM_AVERAGINGS_CHECKED else None
        if distances is not None and self._before is not None and any(self.counts):
            norm = float(torch.linalg.vector_norm(self._before))
            self._num_equal = self._num_equal + 1 if max(distances) <= EQUAL * norm else 0
            if self._num_equal == 2:
                self._warn(
                    "equal",
                    "all members are identical (at a distance of 0), so averaging does nothing: give each its own seed "
                    "and its own order of the data. If each has these, something averages their gradients, such as "
                    "DistributedDataParallel over the processes of several members",
                )
        if self._batches is not None and self._num_steps >= NUM_BATCHES_COMPARED:
            if self._batches.are_equal():
                self._warn(
                    "batches",
                    f"all members saw the same {NUM_BATCHES_COMPARED} first batches, which makes them alike: give each "
                    "its own order of the data, with papa.loaders for instance",
                )
            self._batches = None

    def after_averaging(self) -> None:
        """Called after members were mixed."""
        if self._before is not None:
            self._after = self._sample()
            if self._num_averagings == 1:
                self._check_copies()

    def _sample(self) -> Tensor:
        rows = self.population.rows[self.population.matrix.dtype]
        end = min(self.population.layout.num_parameter_columns[rows.dtype], SAMPLE_COLUMNS)
        return rows[0, :end].to(torch.promote_types(rows.dtype, torch.float32), copy=True)

    def _check_if_undone(self) -> None:
        """Whether a step brought the weights back to where they were before the averaging."""
        before, after, self._before, self._after = self._before, self._after, None, None
        assert before is not None
        assert after is not None
        self.population.refresh_()
        now = self._sample()
        if now.shape != before.shape:  # members were converted meanwhile
            return
        before, after = before.to(now), after.to(now)
        push, left = after - before, now - before
        self._num_undone += bool(left.norm() < UNDONE * push.norm())
        if self._num_undone == NUM_AVERAGINGS_CHECKED:
            self._warn(
                "undone",
                "the step after each averaging undid it: does the optimizer write its own copy of the weights back, as "
                "with master weights in another precision? Train the weights that papa averages",
            )

    def _check_copies(self) -> None:
        """Warn of optimizers that keep copies or averages of the weights, which averaging does not reach."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        parameters = [p for group in groups for p in group["params"] if p.dim() > 1]
        if not parameters:
            return
        largest = max(parameters, key=torch.numel)
        for optimizer in self.optimizers:
            for name, kept in optimizer.state.get(largest, {}).items():
                if isinstance(kept, Tensor) and kept.shape == largest.shape and _are_alike(kept, largest):
                    self._warn(
                        "copies",
                        f"{type(optimizer).__name__} keeps a copy or an average of the weights ('{name}'), which "
                        "averaging does not reach: members will be pulled back to it. Use another optimizer, or "
                        "average rarely",
                    )


def are_apart(population: Population) -> bool:
    """Whether members are too different to have started from the same weights. All processes must call it."""
    mean = population.mean()[: population.layout.num_parameter_columns[population.matrix.dtype]]
    return bool(population.distances().max() > APART * float(torch.linalg.vector_norm(mean.abs())))


def count_steps(owner: object, optimizers: Sequence[Optimizer]) -> list[int]:
    """The number of steps of each optimizer from now on, counted by hooks as long as `owner` lives."""
    counts = [0] * len(optimizers)

    def counting(index: int) -> Callable[..., None]:
        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            counts[index] += 1

        return hook

    for index, optimizer in enumerate(optimizers):
        weakref.finalize(owner, optimizer.register_step_post_hook(counting(index)).remove).atexit = False
    return counts


class FirstBatches:
    """Digests of the first batches that each local member trained on, taken by hooks that remove themselves."""

    def __init__(self, population: Population) -> None:
        self._population = population
        self._hooks = [_Digests() for _ in population]
        for model, hook in zip(population, self._hooks, strict=True):
            hook.handle = model.register_forward_pre_hook(hook, with_kwargs=True)
            weakref.finalize(self, hook.handle.remove).atexit = False

    def are_equal(self) -> bool:
        """Whether all members of all processes saw the same batches. All processes must call it."""
        everyone = self._population.group.all_gather([hook.digests for hook in self._hooks])
        return len(everyone[0]) == NUM_BATCHES_COMPARED and all(own == everyone[0] for own in everyone)


class _Digests:
    """A forward hook; an object, so that modules that have it can be pickled."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []
        self.handle: RemovableHandle | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training or torch.compiler.is_compiling():
            return
        found = [part for value in (*args, *kwargs.values()) for part in tensors_in(value)]
        first = next((part for part in found if type(part) is Tensor), None)
        # Under vmap and the like a tensor has no memory of its own.
        with contextlib.suppress(RuntimeError):
            if first is not None and first.numel():
                raw = first.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
                self.digests.append(hashlib.blake2b(raw, digest_size=16).digest())
        if len(self.digests) >= NUM_BATCHES_COMPARED and self.handle is not None:
            self.handle.remove()


class FindSchedule:
    """Whether the learning rate of an optimizer that trains a member of a population changes or has a scheduler."""

    def __init__(self, population: Population) -> None:
        self.is_found = False
        ours = {id(parameter) for model in population for parameter in model.parameters()}
        rates: dict[int, float] = {}
        this = weakref.ref(self)

        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            found, first = this(), optimizer.param_groups[0]
            if found is None or found.is_found or not any(id(p) in ours for p in first["params"]):
                return
            rate = float(first["lr"])
            found.is_found = "initial_lr" in first or rates.setdefault(id(optimizer), rate) != rate

        weakref.finalize(self, register_optimizer_step_post_hook(hook).remove).atexit = False


def _are_alike(first: Tensor, second: Tensor) -> bool:
    if not (first.is_floating_point() and second.is_floating_point()):
        return False
    return bool((first.detach().float() - second.detach().float()).norm() < NEAR_COPY * second.detach().float().norm())
