"""Non-finite members: found before they reach the mean, then restarted, dropped, or a reason to stop."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from papa.core import mixing
from papa.core.layout import named_tensors
from papa.core.population import Population
from papa.core.product import is_finite, row_sums
from papa.core.rules import Memory
from papa.errors import MemberError, MixingError, PapaWarning, did_you_mean

OnNonFinite: TypeAlias = Literal["restart", "drop", "stop"]
"""`restart`: the member starts again from the mean of the healthy members, with fresh optimizer state.
`drop`: the member takes no further part in averages, soups and ensembles. `stop`: raise an error."""

WEIGHTS_NOT_FINITE = "its weights are not finite"

ACTIONS = {"restart": "restarted from the mean of the healthy", "drop": "dropped"}


@dataclass(frozen=True)
class NonFiniteMember:
    """A member that was found non-finite, and what was done."""

    step: int
    """Optimizer steps taken."""
    member: int
    """The member's index in the whole population."""
    reason: str
    """What was not finite."""
    action: str
    """What was done."""

    def to_json(self) -> dict[str, Any]:
        """As a line of `metrics.jsonl`."""
        return {"event": "nonfinite", **asdict(self)}


@dataclass(frozen=True)
class Measured:
    """The distances of all members, and which local members are finite."""

    distances: tuple[float, ...] | None
    """Each member's distance to the mean; None if not measured."""
    are_finite: tuple[bool, ...]
    """Of each local member, whether all its numbers are finite. False may also be due to an overflow in a sum."""
    watched: tuple[float, ...]
    """The numbers that were read along, one for each local member."""
    rows: tuple[Tensor, ...]
    """The local members' rows, or the columns of them that were measured, for a second look at doubtful members."""


class HealthCheck:
    """Measures members, finds those with non-finite weights and applies a policy. All processes agree on the result.

    Without a policy, members are measured and not checked. The state of restarted members' optimizers is cleared, and
    what a rule keeps for them in `memory` starts again. `unhealthy_reason` is an additional check of a local member,
    by index, such as of its loss; it returns what is wrong, or None. `watched` returns a number for each local member,
    on their device. The additional check is then called only for members whose number is not finite, so that a check of
    healthy members reads from an accelerator once.
    """

    def __init__(
        self,
        population: Population,
        memory: Memory,
        optimizers: Sequence[Optimizer],
        *,
        policy: OnNonFinite | None,
        unhealthy_reason: Callable[[int], str | None] | None = None,
        watched: Callable[[], Tensor] | None = None,
    ) -> None:
        known = get_args(OnNonFinite)
        if policy is not None and policy not in known:
            raise MemberError(f"on_nonfinite is {policy!r}: {did_you_mean(str(policy), known)}")
        self.population, self.memory, self.optimizers, self.policy = population, memory, optimizers, policy
        self.unhealthy_reason, self.watched = (unhealthy_reason, watched) if policy is not None else (None, None)

    def measure(self, columns: Mapping[torch.dtype, Tensor] | None = None, *, distances: bool) -> Measured:
        """Measure refreshed members, or some columns of the local ones. All processes must call it.

        Everything is computed where the members are. The numbers are then read in one go, since every read from an
        accelerator waits until it has finished its work. One non-finite weight makes the distances of all members
        non-finite. So if these are finite, only buffers, which do not count for the distances, remain to be checked.

        Args:
            columns: by dtype, the columns of the local members to look at; None for all.
            distances: whether to measure distances to the mean, of all columns.
        """
        population = self.population
        rows = tuple((population.rows if columns is None else columns).values())
        watched = [] if self.watched is None else [self.watched().double()]
        found = [population.measure_distances()] if distances else []
        sums: list[Tensor] = []
        if self.policy is not None:
            sums = [row_sums(one) for one in (population.buffers if distances else rows)]
        parts = found + sums + watched
        if len({part.device for part in parts}) > 1:  # distances of several processes are on the CPU
            numbers = [part.tolist() for part in parts]
        else:
            together = torch.cat(parts).tolist() if parts else []
            ends = list(itertools.accumulate(map(len, parts), initial=0))
            numbers = [together[start:end] for start, end in itertools.pairwise(ends)]
        apart = tuple(numbers[0]) if distances else None
        of_members = [map(math.isfinite, row) for row in numbers[len(found) : len(found) + len(sums)]]
        are_finite = tuple(map(all, zip(*of_members, strict=True))) if sums else (True,) * len(population)
        if apart is not None and not all(map(math.isfinite, apart)):
            are_finite = (False,) * len(population)
        return Measured(apart, are_finite, tuple(numbers[-1]) if watched else (), rows)

    def check_(self, step: int, measured: Measured, lr_ratio: float = 1.0) -> tuple[NonFiniteMember, ...]:
        """Find non-finite members and apply the policy; the weights of healthy members are not touched.

        The learning rate's ratio must be the same in all processes, which is checked in the same exchange.
        """
        population = self.population
        is_watched = self.unhealthy_reason is None or (measured.watched and all(map(math.isfinite, measured.watched)))
        local: list[str | None] = []  # what is wrong with each local member; empty if nothing is
        if self.policy is not None and not (is_watched and all(measured.are_finite)):  # what was measured leaves doubts
            local = [self._reason(index, measured) for index in range(len(population))]
        any_found, highest, negative_lowest = population.group.all_max(float(any(local)), lr_ratio, -lr_ratio)
        if not math.isclose(highest, -negative_lowest, rel_tol=1e-6, abs_tol=1e-12):
            raise MixingError(
                f"processes are at {-negative_lowest:.6g} to {highest:.6g} of their highest learning rates: a push "
                "needs one ratio for all, pass it as averager.step(lr_ratio=...)"
            )
        if self.policy is None or not (any_found or population.dropped):
            return ()
        local = local or [None] * len(population)
        are_bad = torch.tensor([float(reason is not None) for reason in local], device="cpu")
        anywhere = population.group.sum_over_shards(are_bad).tolist()  # a member is if any of its shards is
        reasons = population.group.all_gather(
            [reason or (WEIGHTS_NOT_FINITE if bad else None) for reason, bad in zip(local, anywhere, strict=True)]
        )
        found = {member: reason for member, reason in enumerate(reasons) if reason is not None}
        if found:
            self._apply_policy(step, found)
        self._restart_from_mean_(sorted(found))
        if found:
            self.memory.restart_(found)
        action = ACTIONS.get(self.policy, "")
        return tuple(NonFiniteMember(step, member, reason, action) for member, reason in found.items())

    def _reason(self, index: int, measured: Measured) -> str | None:
        if self.population.members[index] in self.population.dropped:
            return None
        if not measured.are_finite[index] and not all(is_finite(rows[index]) for rows in measured.rows):
            return WEIGHTS_NOT_FINITE
        if self.unhealthy_reason is None or (measured.watched and math.isfinite(measured.watched[index])):
            return None
        return self.unhealthy_reason(index)

    def _apply_policy(self, step: int, found: dict[int, str]) -> None:
        healthy = [member for member in self.population.active if member not in found]
        if self.policy == "stop" or not healthy:
            which = "all members are" if not healthy else "a member is" if len(found) == 1 else "members are"
            listing = "; ".join(f"member {member}: {reason}" for member, reason in found.items())
            raise MemberError(
                f"{which} non-finite at step {step} ({listing}): look for what made them diverge: the learning rate, "
                "the loss, the data"
            )
        if self.policy == "drop":
            self.population.dropped = self.population.dropped | set(found)

    def _restart_from_mean_(self, found: list[int]) -> None:
        """Set non-finite and dropped members to the mean of the healthy ones, which keep every bit."""
        population = self.population
        healthy = [member for member in population.active if member not in found]
        others = [member for member in range(population.size) if member not in healthy]
        matrix = mixing.identity(population.size)
        matrix[others] = mixing.soup_row(population.size, healthy)
        population.mix_(matrix)
        if not found:
            return
        self._copy_not_averaged_(healthy[0], found)
        trained = {id(p) for one in self.optimizers for group in one.param_groups for p in group["params"]}
        for member, model in zip(population.members, population, strict=True):
            if member not in found:
                continue
            for optimizer in self.optimizers:
                for parameter in model.parameters():
                    optimizer.state.pop(parameter, None)
            if self.policy == "restart" and not any(id(parameter) in trained for parameter in model.parameters()):
                warnings.warn(
                    f"member {member} was restarted, but the averager was not given its optimizer: non-finite momentum "
                    "will make it non-finite again. Pass the members' optimizers to the averager",
                    PapaWarning,
                    stacklevel=6,
                )

    @torch.no_grad()
    def _copy_not_averaged_(self, source: int, targets: list[int]) -> None:
        """Copy tensors that are not averaged, such as a member's own head, from a healthy member."""
        population = self.population
        names = population.not_averaged
        offers = [
            {name: tensor.cpu() for name, tensor in named_tensors(model, names).items()} if member == source else {}
            for member, model in zip(population.members, population, strict=True)
        ]
        own = population.group.all_gather(offers)[source]
        for member, model in zip(population.members, population, strict=True):
            if member in targets:
                for name, tensor in named_tensors(model, names).items():
                    tensor.copy_(own[name])
