"""Matching networks: finding the permutations that make them most similar, without applying them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from papa.align.derive import check_same_graph, symmetries
from papa.align.objectives import ActivationObjective, Comparison, WeightObjective
from papa.align.permute import Permutations, inverses, tensors_by_name
from papa.align.search import MIN_GAIN, anneal_, compose_, coordinate_ascent_, identity
from papa.align.unit_groups import Symmetries
from papa.errors import DataError, MemberError, PapaError, did_you_mean

CRITERIA = ("activations", "weights", "sinkhorn")
"""What networks can be matched by."""


@dataclass(frozen=True)
class Alignment:
    """How similar a network is to its reference, and how it was permuted."""

    before: float
    """The mean similarity before: by weights, the cosine of tensors; by activations, the correlation of units."""
    after: float
    """The mean similarity after. It is never lower for two networks; for a joint alignment, the sum over networks."""
    num_rounds: int
    """The number of rounds over all groups, or over all networks in a joint alignment."""
    permutations: Permutations
    """The permutation of each group by name, for `permute_all_`; the inverses in reversed order undo it."""


class Matcher:
    """Matches networks of one architecture and derives their symmetries once; for its arguments see `align_`."""

    def __init__(
        self, batches: Any = None, *, by: str | None = None, symmetries: Symmetries | None = None, seed: int = 0
    ) -> None:
        is_example = batches is None or isinstance(batches, Tensor)
        self.by = by if by is not None else ("weights" if is_example else "activations")
        if self.by not in CRITERIA:
            raise PapaError(f"networks cannot be matched by '{self.by}': {did_you_mean(self.by, CRITERIA)}")
        if batches is None and (symmetries is None or self.by == "activations"):
            purpose = "" if self.by == "activations" else ": one batch, from which the symmetries are derived"
            raise PapaError(f"aligning by {self.by} needs `batches`{purpose}")
        self.inputs = [] if batches is None else checked_inputs([batches] if is_example else batches)
        self.seed = seed
        self._symmetries = symmetries

    def symmetries_of(self, model: nn.Module) -> Symmetries:
        """The symmetries of the networks' architecture, derived at the first call."""
        if self._symmetries is None:
            self._symmetries = symmetries(model, self.inputs[0])
        return self._symmetries

    def match_to_first(self, models: Sequence[nn.Module], subjects: Sequence[str]) -> list[Alignment]:
        """Find permutations of every network but the first that match it to the first; none is changed."""
        others = range(1, len(models))
        objective = self._objective(models, subjects, [(0, other) for other in others])
        return [self._match(objective, other, [0], models[0])[0] for other in others]

    def match_jointly(self, models: Sequence[nn.Module], subjects: Sequence[str]) -> list[Alignment]:
        """Find permutations of all networks that match them to each other; none is changed."""
        members = range(len(models))
        others = [[other for other in members if other != member] for member in members]
        objective = self._objective(models, subjects, list(itertools.combinations(members, 2)))

        def similarities() -> list[float]:
            count = max(len(models) - 1, 1) * objective.count
            return [objective.compare(m, others[m]).total() / count if others[m] else 1.0 for m in members]

        before = similarities()
        permutations = [identity(self.symmetries_of(models[0])) for _ in members]

        def permute_(member: int, found: Permutations) -> None:
            objective.permute_(member, found)
            for nested in objective.groups:
                compose_(permutations[member], nested, found)

        for member in members[1:]:
            permute_(member, self._match(objective, member, [0], models[0])[0].permutations)
        if sum(similarities()) < sum(before):
            for member in members:
                objective.permute_(member, inverses(permutations[member]))
                permutations[member] = identity(self.symmetries_of(models[0]))
        num_rounds, gains = 0, [True]
        while any(gains) and len(models) > 1:
            gains, num_rounds = [], num_rounds + 1
            for member in members:
                found, is_gain = self._match(objective, member, others[member], models[0])
                gains.append(is_gain)
                if is_gain:
                    permute_(member, found.permutations)
        after = similarities()
        return [Alignment(before[member], after[member], num_rounds, permutations[member]) for member in members]

    def _match(
        self, objective: WeightObjective | ActivationObjective, member: int, others: Sequence[int], model: nn.Module
    ) -> tuple[Alignment, bool]:
        """The best permutations of one network that were found, and whether they are a gain."""
        comparison: Comparison = objective.compare(member, others)
        permutations = identity(self.symmetries_of(model))
        solve: Callable[..., int] = anneal_ if self.by == "sinkhorn" else coordinate_ascent_
        before = comparison.total()
        num_rounds = solve(comparison, objective.groups, permutations, self.seed)
        after = comparison.total()
        count = objective.count * len(others)
        return Alignment(before / count, after / count, num_rounds, permutations), after > before + MIN_GAIN

    def _objective(
        self, models: Sequence[nn.Module], subjects: Sequence[str], pairs: Sequence[tuple[int, int]]
    ) -> WeightObjective | ActivationObjective:
        networks = _matching_tensors(models, subjects)
        found = self.symmetries_of(models[0])
        for model, subject in zip(models[1:], subjects[1:], strict=True):
            if self.inputs:
                check_same_graph(models[0], model, self.inputs[0], subjects=(subjects[0], subject))
        names = {axis.tensor for group in found for axis in group.axes}
        for network, subject in zip(networks, subjects, strict=True):
            for name in sorted(names & network.keys()):
                if not bool(torch.isfinite(network[name]).all()):
                    raise MemberError(f"{subject} has '{name}' with values that are not finite: it cannot be matched")
        if self.by == "activations":
            return ActivationObjective(networks, found, self.inputs, subjects=subjects, pairs=pairs)
        return WeightObjective(networks, found)


def _matching_tensors(models: Sequence[nn.Module], subjects: Sequence[str]) -> list[dict[str, Tensor]]:
    """The tensors of networks by name, or an error that says where they differ."""
    networks = [tensors_by_name(model) for model in models]
    remedy = "only networks of one architecture can be aligned"
    for network, subject in zip(networks[1:], subjects[1:], strict=True):
        for name in sorted(network.keys() ^ networks[0].keys()):
            side, other = (subject, subjects[0]) if name in network else (subjects[0], subject)
            raise MemberError(f"{side} has '{name}', {other} has not: {remedy}")
        for name, tensor in network.items():
            shape, expected = tuple(tensor.shape), tuple(networks[0][name].shape)
            if shape != expected:
                raise MemberError(f"{subject} has '{name}' of shape {shape}, {subjects[0]} {expected}: {remedy}")
    return networks


def checked_inputs(batches: Sequence[Any]) -> list[Tensor]:
    """The inputs of batches, without a smaller last one; an error if there are none or their shapes differ."""
    inputs = [batch[0] if isinstance(batch, tuple | list) else batch for batch in batches]
    if not inputs:
        raise DataError("aligning was given no batches, expected at least one")
    for number, part in enumerate(inputs):
        if not isinstance(part, Tensor):
            raise DataError(f"batch {number} has a {type(part).__name__} as inputs, expected a tensor")
    first, last = inputs[0], inputs[-1]
    if 0 < last.shape[:1].numel() < first.shape[:1].numel() and last.shape[1:] == first.shape[1:]:
        inputs.pop()
    for number, part in enumerate(inputs):
        if part.shape != first.shape or not part.numel():
            raise DataError(
                f"batch {number} has inputs of {tuple(part.shape)}, expected {tuple(first.shape)} as batch 0: all "
                "batches need one shape and at least one example"
            )
        if not bool(torch.isfinite(part).all()):
            raise DataError(f"batch {number} has inputs that are not finite: units cannot be compared on it")
    return inputs
