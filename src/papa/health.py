"""Sick members: found before they poison the mean, then restarted, dropped, or a reason to stop."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from papa import mixing
from papa.errors import MemberError, MixingError, did_you_mean
from papa.layout import named_tensors
from papa.population import Population

POLICIES = {
    "restart": "a sick member starts again from the mean of the healthy ones, with fresh optimizer state",
    "drop": "a sick member takes no further part: not in averages, soups and ensembles",
    "stop": "a sick member ends training",
}

NOT_FINITE = "its weights are not finite"

ACTIONS = {"restart": "restarted from the mean of the healthy", "drop": "dropped"}


@dataclass(frozen=True)
class NonFiniteMember:
    """A member that was found sick, and what was done about it."""

    step: int
    """Optimizer steps taken."""
    member: int
    """Its index in the whole population."""
    reason: str
    """What was wrong."""
    action: str
    """What was done."""

    def to_json(self) -> dict[str, Any]:
        """As a line of `metrics.jsonl`."""
        return {"event": "nonfinite", **asdict(self)}


class Health:
    """Looks after a population: finds members whose numbers are not finite, and treats them. All processes agree.

    Args:
        population: whose members are looked at.
        optimizers: theirs; what they keep of a restarted member is forgotten.
        policy: one of `POLICIES`.
        unhealthy_reason: what else is wrong with a member held here, by its index; None when nothing is.
    """

    def __init__(
        self,
        population: Population,
        optimizers: Sequence[Optimizer] = (),
        *,
        policy: str = "restart",
        unhealthy_reason: Callable[[int], str | None] | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise MemberError(f"there is no policy {policy} for sick members: {did_you_mean(policy, POLICIES)}")
        self.population, self.optimizers, self.policy, self.unhealthy_reason = (
            population,
            optimizers,
            policy,
            unhealthy_reason,
        )

    def check_(self, step: int, distances: Tensor | None = None, lr_ratio: float = 1.0) -> tuple[NonFiniteMember, ...]:
        """Find and treat sick members; the healthy ones' numbers are not touched.

        Args:
            step: for the record.
            distances: the members' distances to the mean, where they are known: one number that is not finite makes all
                of them not finite, so as long as they are finite no weight needs to be read again.
            lr_ratio: which all processes must share, and is compared on the way.
        """
        population = self.population
        population.refresh_()
        are_finite = distances is not None and bool(torch.isfinite(distances).all())
        here = [self._reason(index, are_finite) for index in range(len(population))]
        anyone, *ratios = population.group.all_max(float(any(here)), lr_ratio, -lr_ratio)
        check_one_ratio(*ratios)
        if not anyone and not population.dropped:
            return ()
        reasons = population.group.all_gather(self._of_all_shards(here))
        found = {member: reason for member, reason in enumerate(reasons) if reason is not None}
        if found:
            self._treat_(step, sorted(found), "; ".join(f"member {m}: {reason}" for m, reason in found.items()))
        if found or population.dropped:
            self._mend_(sorted(found))
        action = ACTIONS.get(self.policy, "")
        return tuple(NonFiniteMember(step, member, reason, action) for member, reason in found.items())

    def _reason(self, index: int, are_parameters_finite: bool) -> str | None:
        if self.population.members[index] in self.population.dropped:
            return None
        if not self.population.is_finite(index, only_buffers=are_parameters_finite):
            return NOT_FINITE
        return None if self.unhealthy_reason is None else self.unhealthy_reason(index)

    def _of_all_shards(self, reasons: list[str | None]) -> list[str | None]:
        """A member is sick wherever one of its shards is."""
        here = torch.tensor([float(reason is not None) for reason in reasons])
        anywhere = self.population.group.sum_over_shards(here).tolist()
        return [reason or (NOT_FINITE if sick else None) for reason, sick in zip(reasons, anywhere, strict=True)]

    def _treat_(self, step: int, sick: list[int], told: str) -> None:
        healthy = [member for member in self.population.active if member not in sick]
        if self.policy == "stop" or not healthy:
            cure = "look for what made them diverge: the learning rate, the loss, the data"
            who = "all members are" if not healthy else "a member is" if len(sick) == 1 else "members are"
            raise MemberError(f"{who} sick at step {step} ({told}): {cure}")
        if self.policy == "drop":
            self.population.dropped = self.population.dropped | set(sick)

    def _mend_(self, sick: list[int]) -> None:
        """Restarted and dropped members become the mean of the healthy ones, who keep every bit."""
        population = self.population
        healthy = [member for member in population.active if member not in sick]
        away = [member for member in range(population.size) if member not in healthy]
        matrix = mixing.identity(population.size)
        matrix[away] = mixing.soup_row(population.size, healthy)
        population.mix_(matrix)
        self._copy_what_is_not_averaged_(healthy[0], sick)
        trained = {id(p) for one in self.optimizers for group in one.param_groups for p in group["params"]}
        for index, model in enumerate(population):
            if population.members[index] in sick:
                for optimizer in self.optimizers:
                    for parameter in model.parameters():
                        optimizer.state.pop(parameter, None)
                if self.policy == "restart" and not any(id(parameter) in trained for parameter in model.parameters()):
                    warnings.warn(
                        f"member {population.members[index]} starts again, but its optimizer was not given to the "
                        "averager: momentum that is not finite will make it sick again",
                        stacklevel=6,
                    )

    @torch.no_grad()
    def _copy_what_is_not_averaged_(self, source: int, sick: list[int]) -> None:
        """Numbers that stay with their member, such as a head of its own, have no mean: take a healthy member's."""
        if not sick:
            return
        population = self.population
        names = population.not_averaged
        offers = [
            {name: tensor.cpu() for name, tensor in named_tensors(model, names).items()} if member == source else {}
            for member, model in zip(population.members, population, strict=True)
        ]
        own = population.group.all_gather(offers)[source]
        for member, model in zip(population.members, population, strict=True):
            if member in sick:
                for name, tensor in named_tensors(model, names).items():
                    tensor.copy_(own[name])


def check_one_ratio(highest: float, negative_lowest: float) -> None:
    """Raise a `MixingError` where processes are not at the same share of their initial learning rates."""
    if not math.isclose(highest, -negative_lowest, rel_tol=1e-6, abs_tol=1e-12):
        raise MixingError(
            f"processes are at {-negative_lowest:.6g} to {highest:.6g} of their initial learning rates: a push needs "
            "one ratio for all, pass it as averager.step(lr_ratio=...)"
        )
