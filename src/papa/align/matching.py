"""Finding the permutations that make networks most similar, without applying them.

The search is coordinate ascent over groups, or annealed soft permutations (Sinkhorn).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from papa.align.derive import check_same_graph, symmetries
from papa.align.objectives import (
    ActivationObjective,
    Comparison,
    NestedGroup,
    WeightComparison,
    WeightObjective,
    unit_rows,
)
from papa.align.unit_groups import Permutations, Symmetries, TensorAxis, UnitGroup
from papa.core.layout import check_same_tensors, named_tensors
from papa.errors import DataError, MemberError, PapaError, did_you_mean
from papa.streams import stream

CRITERIA = ("activations", "weights", "sinkhorn")
"""What networks can be matched by."""
MIN_GAIN = 1e-9
"""The similarity that a permutation must gain to be kept, in units of one cosine or correlation."""
MAX_ROUNDS = 100
"""The largest number of rounds of coordinate ascent; more than ten are rare."""
NUM_ROUNDS = 40
"""The number of rounds of annealing, while the temperature falls."""
HOTTEST, COLDEST = 2.0, 0.02
"""The first and last temperature, in units of what one perfectly matched unit adds to a cosine."""
MAX_NORMALISATIONS, TOLERANCE = 60, 1e-3
"""The largest number of normalisations of rows and columns, and the error in log space at which they stop."""


@dataclass(frozen=True)
class Alignment:
    """How similar a network is to its reference, and how it was permuted."""

    before: float
    """The mean similarity before: by weights, the cosine of tensors; by activations, the correlation of units."""
    after: float
    """The mean similarity after; never lower."""
    num_rounds: int
    """The number of rounds over all groups."""
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
        networks = [named_tensors(model) for model in models]
        for network, subject in zip(networks[1:], subjects[1:], strict=True):
            remedy = "only networks of one architecture can be aligned"
            check_same_tensors(
                network, networks[0], subject=subject, reference=subjects[0], remedy=remedy, same_dtypes=False
            )
        found = self.symmetries_of(models[0])
        if self.inputs:
            for model, subject in zip(models[1:], subjects[1:], strict=True):
                check_same_graph(models[0], model, self.inputs[0], subjects=(subjects[0], subject))
        names = {axis.tensor for group in found for axis in group.axes}
        for network, subject in zip(networks, subjects, strict=True):
            for name in sorted(names & network.keys()):
                if not bool(torch.isfinite(network[name]).all()):
                    raise MemberError(f"{subject} has '{name}' with values that are not finite: it cannot be matched")
        objective: WeightObjective | ActivationObjective
        if self.by == "activations":
            objective = ActivationObjective(networks, found, self.inputs, subjects=subjects)
        else:
            objective = WeightObjective(networks, found)
        solve: Callable[..., int] = anneal_ if self.by == "sinkhorn" else coordinate_ascent_
        alignments = []
        for member in range(1, len(models)):
            comparison: Comparison = objective.compare(member)
            permutations = identity(found)
            before = comparison.total() / objective.count
            num_rounds = solve(comparison, objective.groups, permutations, self.seed)
            alignments.append(Alignment(before, comparison.total() / objective.count, num_rounds, permutations))
            del comparison  # a copy of the network: the next one takes its place
        return alignments


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


def assign(gain: Tensor) -> Tensor:
    """The permutation with the largest sum of `gain[i, permutation[i]]`."""
    from scipy.optimize import linear_sum_assignment  # slow to import, and needed only by alignment

    return torch.from_numpy(linear_sum_assignment(gain.numpy(), maximize=True)[1])


def nested_similarity(
    nested: NestedGroup, unit_similarity: Callable[[TensorAxis, Tensor], Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The similarity of `n` blocks, `(n, n)`, and of the `m` units of each part in pairs of blocks, `(n, n, m, m)`.

    Numbers that belong to a part are not counted for the blocks.
    """
    size = nested.outer.size
    blocks = torch.zeros(size, size, dtype=torch.float64, device="cpu")
    parts = [
        torch.zeros(size, size, *[part.groups[0].size] * 2, dtype=torch.float64, device="cpu") for part in nested.parts
    ]
    for number, axis in enumerate(nested.outer.axes):
        is_free = torch.ones(axis.index.shape[1], dtype=torch.bool, device="cpu")
        for part, similarity in zip(nested.parts, parts, strict=True):
            columns, num_units = part.columns[number], part.groups[0].size
            is_free[columns.flatten()] = False
            if columns.numel():
                index = axis.index[:, columns.flatten()].reshape(size * num_units, -1)
                pairs = unit_similarity(axis, index).double()
                similarity += pairs.view(size, num_units, size, num_units).transpose(1, 2)
        if is_free.any():
            blocks += unit_similarity(axis, axis.index[:, is_free]).double()
    return blocks, parts


def best_permutations(nested: NestedGroup, comparison: Comparison) -> Permutations:
    """The best permutation of the units in every pair of blocks, then of the blocks."""
    blocks, parts = nested_similarity(nested, comparison.unit_similarity)
    assigned = []
    for similarity in parts:
        orders = [[assign(pair) for pair in row] for row in similarity]
        values = [
            [
                float(pair[torch.arange(len(order), device="cpu"), order].sum())
                for pair, order in zip(*rows, strict=True)
            ]
            for rows in zip(similarity, orders, strict=True)
        ]
        blocks = blocks + torch.tensor(values, dtype=torch.float64, device="cpu")
        assigned.append(orders)
    order = assign(blocks)
    return {nested.outer.name: order} | {
        inner.name: orders[block][int(order[block])]
        for part, orders in zip(nested.parts, assigned, strict=True)
        for block, inner in enumerate(part.groups)
    }


def with_inner(groups: list[NestedGroup]) -> list[NestedGroup]:
    """All groups, then the inner ones once more by themselves, since their units lie on further axes."""
    return [*groups, *(NestedGroup(inner) for nested in groups for inner in nested.inner)]


def coordinate_ascent_(comparison: Comparison, groups: list[NestedGroup], permutations: Permutations, seed: int) -> int:
    """Give each group in turn its best permutation, all others fixed, until a whole round gains nothing.

    The comparison is permuted in place, and `permutations` composed with what was done. Returns the number of rounds.
    """
    visits = with_inner(groups)
    for round_ in range(MAX_ROUNDS):
        sequence = torch.randperm(len(visits), generator=stream(seed, "align", position=round_), device="cpu").tolist()
        gains = []
        for nested in (visits[number] for number in sequence):
            gains.append(_keep_if_gain_(comparison, [nested], best_permutations(nested, comparison), permutations))
        if not any(gains):
            return round_ + 1
    return MAX_ROUNDS


def _keep_if_gain_(
    comparison: Comparison, groups: list[NestedGroup], found: Permutations, permutations: Permutations
) -> bool:
    """Permute some groups, and undo it unless the similarity rises."""
    if all(torch.equal(order, torch.arange(len(order), device="cpu")) for order in found.values()):
        return False
    axes = [axis for nested in groups for group in (nested.outer, *nested.inner) for axis in group.axes]
    kept = {name: comparison.tensors[name].clone() for name in dict.fromkeys(axis.tensor for axis in axes)}
    before = sum(map(comparison.similarity, kept))
    for nested in groups:
        comparison.permute_(nested, found)
    if sum(map(comparison.similarity, kept)) <= before + MIN_GAIN:
        comparison.tensors.update(kept)
        return False
    for nested in groups:
        compose_(permutations, nested, found)
    return True


def compose_(permutations: Permutations, nested: NestedGroup, found: Mapping[str, Tensor]) -> None:
    """Append the permutations that were found to those made before; units inside a block have moved with it."""
    outer = found[nested.outer.name]
    permutations[nested.outer.name] = permutations[nested.outer.name][outer]
    for part in nested.parts:
        before = [permutations[inner.name] for inner in part.groups]
        for block, inner in enumerate(part.groups):
            permutations[inner.name] = before[int(outer[block])][found[inner.name]]


def identity(symmetries: Symmetries) -> Permutations:
    """The permutations that move nothing."""
    return {group.name: torch.arange(group.size, device="cpu") for group in symmetries}


def sinkhorn(logits: Tensor) -> Tensor:
    """The doubly stochastic matrix `P` that maximises `<P, logits> + entropy(P)`, in the log domain.

    Example:
        >>> sinkhorn(torch.tensor([[9.0, 0.0], [0.0, 9.0]])).round(decimals=3)
        tensor([[1., 0.],
                [0., 1.]])
    """
    for _ in range(MAX_NORMALISATIONS):
        excess = logits.logsumexp(dim=-1, keepdim=True)
        logits = logits - excess
        logits = logits - logits.logsumexp(dim=-2, keepdim=True)
        if float(excess.abs().max()) < TOLERANCE:
            break
    return logits.exp()


def anneal_(comparison: WeightComparison, groups: list[NestedGroup], permutations: Permutations, seed: int) -> int:
    """Match by soft permutations, rounded to permutations at the end.

    Soft permutations start uniform. Each group in turn gets the soft permutation that maximises

        <reference, P network> + temperature * entropy(P)

    with all others fixed, while the temperature falls. The result is kept if it is a gain. Arguments and result are
    those of `coordinate_ascent_`.
    """
    soft, visits = _SoftPermutations(comparison, groups), with_inner(groups)
    for round_, temperature in enumerate(torch.logspace(0, 1, NUM_ROUNDS, COLDEST / HOTTEST, device="cpu").tolist()):
        for number in torch.randperm(
            len(visits), generator=stream(seed, "align", position=round_), device="cpu"
        ).tolist():
            soft.update_(visits[number], HOTTEST * temperature)
    found = {name: assign(matrix) for name, matrix in soft.matrices.items()}
    _keep_if_gain_(comparison, groups, found, permutations)
    return NUM_ROUNDS


class _SoftPermutations:
    """A doubly stochastic matrix for each group, starting uniform."""

    def __init__(self, comparison: WeightComparison, nested_groups: list[NestedGroup]) -> None:
        self._comparison = comparison
        groups = [nested.outer for nested in with_inner(nested_groups)]
        self.matrices = {
            group.name: torch.full((group.size, group.size), 1 / group.size, dtype=torch.float64, device="cpu")
            for group in groups
        }
        self._axes: dict[str, list[tuple[UnitGroup, TensorAxis]]] = {}
        for group in groups:
            for axis in group.axes:
                self._axes.setdefault(axis.tensor, []).append((group, axis))

    def update_(self, nested: NestedGroup, temperature: float) -> None:
        """Give one group its best soft permutation: of the units in every pair of blocks, then of the blocks."""
        permuted: dict[int, Tensor] = {}
        own = self._before_blocks(nested)

        def unit_similarity(axis: TensorAxis, index: Tensor) -> Tensor:
            if id(axis) not in permuted:
                permuted[id(axis)] = self._permuted_elsewhere(axis, own)
            reference = self._comparison.reference(axis.tensor)
            return unit_rows(reference, axis, index) @ unit_rows(permuted[id(axis)], axis, index).T

        similarity, parts = nested_similarity(nested, unit_similarity)
        size, inner_matrices = nested.outer.size, []
        for part in parts:
            matrices = sinkhorn(part * (size * part.shape[-1] / temperature))
            similarity = similarity + (matrices * part).sum(dim=(-1, -2))
            inner_matrices.append(matrices)
        blocks = sinkhorn(similarity * (size / temperature))
        self.matrices[nested.outer.name] = blocks
        for block_part, matrices in zip(nested.parts, inner_matrices, strict=True):
            for block, inner in enumerate(block_part.groups):
                self.matrices[inner.name] = torch.einsum("b,buv->uv", blocks[block], matrices[block])

    def _before_blocks(self, nested: NestedGroup) -> dict[str, Tensor]:
        """The matrices of a nested group, those of inner groups as they were before the blocks moved."""
        blocks = self.matrices[nested.outer.name]
        own = {nested.outer.name: blocks}
        for part in nested.parts:
            inside = torch.stack([self.matrices[inner.name] for inner in part.groups])
            for block, inner in enumerate(part.groups):
                own[inner.name] = torch.einsum("b,buv->uv", blocks[:, block], inside)
        return own

    def _permuted_elsewhere(self, axis: TensorAxis, own: Mapping[str, Tensor]) -> Tensor:
        """The network's tensor, permuted along all axes but this one."""
        tensor = self._comparison.tensors[axis.tensor]
        for group, other in self._axes[axis.tensor]:
            if group.name not in own or other.dim != axis.dim:
                tensor = _permuted(tensor, other, own.get(group.name, self.matrices[group.name]))
        return tensor


def _permuted(tensor: Tensor, axis: TensorAxis, matrix: Tensor) -> Tensor:
    """The tensor with every unit replaced by a weighted mean of units."""
    changed, index = tensor.clone(), axis.index.flatten()
    part = axis.view(changed)
    lines = part.index_select(axis.dim, index).movedim(axis.dim, 0)
    means = (matrix.to(lines.dtype) @ lines.reshape(len(matrix), -1)).view(lines.shape).movedim(0, axis.dim)
    part.index_copy_(axis.dim, index, means)
    return changed
