"""Aligning networks: one to another, each of many to the first, or all with each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from papa import layout
from papa.align.activations import Activations
from papa.align.assignment import GAIN, Matching, Orders, compose_, descend_, identity, total
from papa.align.blocks import Family
from papa.align.derive import check_same_graph, symmetries
from papa.align.groups import Symmetries
from papa.align.permute import permute_all_, undoing
from papa.align.sinkhorn import anneal_
from papa.align.weights import Weights
from papa.errors import DataError, MemberError, PapaError, did_you_mean
from papa.group import gather_or_raise
from papa.mixing import soup_row
from papa.population import Population

WAYS = ("activations", "weights", "sinkhorn")
"""What networks can be matched by."""


@dataclass(frozen=True)
class Alignment:
    """How well a network matched, and how it was permuted."""

    before: float
    """The mean likeness, as the networks came: of tensors (cosine) when matched by weights, of units (correlation) when
    matched by activations."""
    after: float
    """The same after permuting. Never less for two networks; where many are aligned jointly, their sum is not."""
    num_rounds: int
    """How often all groups were gone through, or all members where many are aligned jointly."""
    permutations: dict[str, Tensor]
    """What was done to each group, by its name, for `permute_all_`; `inverse`, in reversed order, undoes it."""


@torch.no_grad()
def align_(
    model: nn.Module,
    reference: nn.Module,
    batches: Any = None,
    *,
    by: str | None = None,
    groups: Symmetries | None = None,
    optimizer: Optimizer | None = None,
    seed: int = 0,
) -> Alignment:
    """Permute a network's units to match another's, without changing its function.

    By `"activations"`: each unit pairs with the unit of the reference whose activations correlate most with its own,
    summed over every place where it is seen; one pass over the batches serves all groups.

    By `"weights"`: coordinate descent over groups of units. With all others as they are, the permutation P of one group
    that maximises the sum over its tensors of `<reference, P model> / (|reference| |model|)` is a linear assignment.

    By `"sinkhorn"`: the same objective, over soft permutations that harden while a temperature falls.

    Where units live in blocks (attention heads, groups of channels), units are matched inside each pair of blocks
    first, then the blocks.

    Example:
        >>> reference = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> alignment = align_(model, reference, [torch.randn(32, 4) for _ in range(2)])
        >>> alignment.after >= alignment.before
        True
        >>> alignment = align_(model, reference, torch.randn(3, 4), by="weights")

    Args:
        model: the network to permute in place; its tensors keep their memory, and it is untouched when anything fails.
        reference: the network to match, unchanged.
        batches: inputs, or tuples whose first entry is the inputs, all of one shape (a smaller last one is left out),
            never test data; or one tensor, an example from which the symmetries are derived. Not needed by weights when
            `groups` are given.
        by: `"activations"`, `"weights"` or `"sinkhorn"`. By default activations where there is a list of batches, else
            weights.
        groups: what `symmetries` gave for this architecture (and batches of this shape), when known already.
        optimizer: the model's, whose state is permuted with the parameters.
        seed: of the sequence in which groups are gone through.

    Returns:
        How well the two match before and after, and the permutations.
    """
    plan = Plan(batches, by=by, groups=groups, seed=seed)
    (alignment,) = plan.to_first([reference, model], subjects=["the reference", "the model"])
    permute_all_(model, plan.symmetries_of(model), alignment.permutations, optimizer=optimizer)
    return alignment


@torch.no_grad()
def align_all_(
    models: Sequence[nn.Module] | Population,
    batches: Any = None,
    *,
    to: str = "first",
    by: str | None = None,
    groups: Symmetries | None = None,
    optimizers: Sequence[Optimizer] = (),
    seed: int = 0,
) -> list[Alignment]:
    """Permute the units of many networks so that they match, without changing their functions.

    To `"first"`: each is aligned to the first (the paper's choice before merges). `"joint"`: all with each other, by
    coordinate ascent on the sum over pairs; every member is permuted once, so the alignment of a with b and of b with c
    is that of a with c. It starts from the alignment to the first, unless that is worse than nothing, and never falls.

    Example:
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
        >>> alignments = align_all_(nets, [torch.randn(32, 4)], to="joint")
        >>> len(alignments)
        3

    Args:
        models: networks of one architecture, or a population; over several processes, all must call this, and only
            `"first"` is possible. None is changed when anything fails.
        batches: as for `align_`; one pass over them serves all.
        to: `"first"` or `"joint"`.
        by: as for `align_`.
        groups: as for `align_`.
        optimizers: one for each network, whose state is permuted with its parameters; or none.
        seed: of the sequence in which groups are gone through.

    Returns:
        One for each network held here: its mean likeness to the first, or to all others when jointly, before and after.
    """
    population, models = models if isinstance(models, Population) else None, list(models)
    if to not in ("first", "joint"):
        raise PapaError(f"there is no way to align all to '{to}': {did_you_mean(to, ['first', 'joint'])}")
    if to == "joint" and population is not None and population.size != len(models):
        raise PapaError(
            f"the population has {population.size} members, of which {len(models)} are in this process: members that "
            'several processes hold can be aligned to the first, with to="first"'
        )
    if optimizers and len(optimizers) != len(models):
        raise PapaError(
            f"align_all_ was given {len(optimizers)} optimizers for {len(models)} networks, expected one each"
        )
    plan = Plan(batches, by=by, groups=groups, seed=seed)
    subjects = [f"member {member}" for member in range(len(models))]
    if to == "joint":
        alignments = plan.jointly(models, subjects)
    else:
        still = Alignment(1.0, 1.0, 0, identity(plan.symmetries_of(models[0])) if models else {})
        if population is None:
            alignments = [still, *plan.to_first(models, subjects)][: len(models)]
        else:
            found = matched_to(population, 0, [i for i, member in enumerate(population.members) if member], plan)
            alignments = [found.get(index, still) for index in range(len(models))]
    for member, (model, alignment) in enumerate(zip(models, alignments, strict=True)):
        optimizer = optimizers[member] if optimizers else None
        permute_all_(model, plan.symmetries_of(model), alignment.permutations, optimizer=optimizer)
    return alignments


def matched_to(population: Population, member: int, here: Sequence[int], plan: Plan) -> dict[int, Alignment]:
    """How some members held here are to be permuted to match another, wherever it lives; none is changed.

    Every process that holds members must call it. One network of extra memory is held.

    Args:
        population: theirs.
        member: whom they are matched to, by its index within the whole population.
        here: who is matched, by their indices among those held here.
        plan: how.
    """
    plan.symmetries_of(population[0])  # before a copy is there: deriving them takes memory of its own
    soup_buffer = population.soup_buffer()
    soup_buffer.fill_(soup_row(population.size, [member]))
    subjects = [f"member {member}", *(f"member {population.members[index]}" for index in here)]
    alignments: list[Alignment] = []

    def match() -> list[None]:
        alignments.extend(
            plan.to_first([soup_buffer.network, *(population[index] for index in here)], subjects) if here else []
        )
        return []

    gather_or_raise(population.group, match)
    return dict(zip(here, alignments, strict=True))


class Problem(Protocol):
    """Several networks, and how alike they are."""

    families: list[Family]
    count: int

    def matching(self, member: int, others: Collection[int]) -> Any:
        """One network in comparison with some others."""
        ...

    def permute_(self, member: int, orders: Orders) -> None:
        """Reorder the units of one network, in the comparison alone."""
        ...


class Plan:
    """How networks of one architecture are matched; their symmetries are derived once and kept.

    Args:
        batches: as for `align_`.
        by: as for `align_`.
        groups: as for `align_`.
        seed: as for `align_`.
    """

    def __init__(
        self, batches: Any = None, *, by: str | None = None, groups: Symmetries | None = None, seed: int = 0
    ) -> None:
        is_example = batches is None or isinstance(batches, Tensor)
        self.by = by if by is not None else ("weights" if is_example else "activations")
        if self.by not in WAYS:
            raise PapaError(f"networks cannot be matched by '{self.by}': {did_you_mean(self.by, WAYS)}")
        if batches is None and (groups is None or self.by == "activations"):
            raise PapaError(
                f"aligning by {self.by} needs `batches`"
                + ("" if self.by == "activations" else ", if only one to derive from which units can be permuted")
            )
        self.inputs = [] if batches is None else checked_inputs([batches] if is_example else batches)
        self.seed = seed
        self._groups = groups

    def symmetries_of(self, model: nn.Module) -> Symmetries:
        """What can be permuted, derived when first asked for."""
        if self._groups is None:
            self._groups = symmetries(model, self.inputs[0])
        return self._groups

    def to_first(self, models: Sequence[nn.Module], subjects: Sequence[str]) -> list[Alignment]:
        """How each network but the first is to be permuted to match the first; none is changed."""
        others = range(1, len(models))
        problem = self._problem(models, subjects, [(0, other) for other in others])
        return [self._matched(problem, other, [0], models[0])[0] for other in others]

    def jointly(self, models: Sequence[nn.Module], subjects: Sequence[str]) -> list[Alignment]:
        """How networks are to be permuted to match each other; none is changed."""
        members = range(len(models))
        others = [[other for other in members if other != member] for member in members]
        problem = self._problem(models, subjects, list(itertools.combinations(members, 2)))

        def likeness() -> list[float]:
            pairs = max(len(models) - 1, 1) * problem.count
            return [total(problem.matching(m, others[m])) / pairs if others[m] else 1.0 for m in members]

        before = likeness()
        orders = [identity(self.symmetries_of(models[0])) for _ in members]

        def move_(member: int, found: Orders) -> None:
            problem.permute_(member, found)
            for family in problem.families:
                compose_(orders[member], family, found)

        for member in members[1:]:
            move_(member, self._matched(problem, member, [0], models[0])[0].permutations)
        if sum(likeness()) < sum(before):
            for member in members:
                problem.permute_(member, undoing(orders[member]))
                orders[member] = identity(self.symmetries_of(models[0]))
        num_rounds, gains = 0, [True]
        while any(gains) and len(models) > 1:
            gains, num_rounds = [], num_rounds + 1
            for member in members:
                found, has_gained = self._matched(problem, member, others[member], models[0])
                gains.append(has_gained)
                if has_gained:
                    move_(member, found.permutations)
        after = likeness()
        return [Alignment(before[member], after[member], num_rounds, orders[member]) for member in members]

    def _matched(
        self, problem: Problem, member: int, others: Sequence[int], model: nn.Module
    ) -> tuple[Alignment, bool]:
        """How one network is to be permuted, and whether that is a gain."""
        matching: Matching = problem.matching(member, others)
        orders = identity(self.symmetries_of(model))
        solve: Callable[..., int] = anneal_ if self.by == "sinkhorn" else descend_
        before = total(matching)
        num_rounds = solve(matching, problem.families, orders, self.seed)
        after = total(matching)
        count = problem.count * len(others)
        return Alignment(before / count, after / count, num_rounds, orders), after > before + GAIN

    def _problem(
        self, models: Sequence[nn.Module], subjects: Sequence[str], pairs: Sequence[tuple[int, int]]
    ) -> Problem:
        networks = matched_tensors(models, subjects)
        found = self.symmetries_of(models[0])
        for model, subject in zip(models[1:], subjects[1:], strict=True):
            if self.inputs:
                check_same_graph(models[0], model, self.inputs[0], subjects=(subjects[0], subject))
        names = {slot.tensor for group in found for slot in group.slots}
        for network, subject in zip(networks, subjects, strict=True):
            for name in sorted(names & network.keys()):
                if not bool(torch.isfinite(network[name]).all()):
                    raise MemberError(f"{subject} has '{name}' with values that are not finite: it cannot be matched")
        if self.by == "activations":
            return Activations(networks, found, self.inputs, subjects=subjects, pairs=pairs)
        return Weights(networks, found)


def matched_tensors(models: Sequence[nn.Module], subjects: Sequence[str]) -> list[dict[str, Tensor]]:
    """The tensors of networks by name, or an error that says where they differ."""
    networks = [{name: tensor for name, _, _, _, tensor in layout.tensors_of(model)} for model in models]
    cure = "only networks of one architecture can be aligned"
    for network, subject in zip(networks[1:], subjects[1:], strict=True):
        for name in sorted(network.keys() ^ networks[0].keys()):
            side, other = (subject, subjects[0]) if name in network else (subjects[0], subject)
            raise MemberError(f"{side} has '{name}', {other} has not: {cure}")
        for name, tensor in network.items():
            shape, expected = tuple(tensor.shape), tuple(networks[0][name].shape)
            if shape != expected:
                raise MemberError(f"{subject} has '{name}' of shape {shape}, {subjects[0]} {expected}: {cure}")
    return networks


def _is_rest(part: Any, like: Tensor) -> bool:
    is_alike = isinstance(part, Tensor) and part.dim() > 0 and part.shape[1:] == like.shape[1:]
    return is_alike and 0 < len(part) < len(like)


def checked_inputs(batches: Sequence[Any]) -> list[Tensor]:
    """The inputs of batches, or an error when there are none or their shapes differ.

    A last batch of fewer examples, as loaders of data give, is left out.
    """
    inputs = [batch[0] if isinstance(batch, tuple | list) else batch for batch in batches]
    if len(inputs) > 1 and isinstance(inputs[0], Tensor) and _is_rest(inputs[-1], inputs[0]):
        inputs.pop()
    if not inputs:
        raise DataError("aligning was given no batches, expected at least one")
    for number, part in enumerate(inputs):
        if not isinstance(part, Tensor):
            raise DataError(f"batch {number} has a {type(part).__name__} as inputs, expected a tensor")
        if part.shape != inputs[0].shape or not part.numel():
            raise DataError(
                f"batch {number} has inputs of {tuple(part.shape)}, expected {tuple(inputs[0].shape)} as batch 0: all "
                "batches need one shape and at least one example"
            )
        if not bool(torch.isfinite(part).all()):
            raise DataError(f"batch {number} has inputs that are not finite: units cannot be compared on it")
    return inputs
