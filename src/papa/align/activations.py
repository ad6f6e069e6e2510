"""Matching by activations: the correlation, over some data, between the activations of units."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from papa.align.assignment import Comparison, Permutations
from papa.align.nesting import nested_groups
from papa.align.permute import permute_axis_
from papa.align.unit_groups import ExportedGraph, Symmetries, TensorAxis
from papa.errors import DataError, MemberError, PapaError


class ActivationObjective:
    """The similarity of networks by their activations: the sum of correlations of paired units at every node.

    Correlations do not depend on the order of units, so one pass over the data serves all groups and all pairs.

    Args:
        networks: the tensors of each network by name.
        symmetries: the groups that can be permuted, with their graph.
        batches: inputs of one shape.
        subjects: the names of the networks in errors.
        pairs: the pairs of networks to compare.
    """

    def __init__(
        self,
        networks: Sequence[Mapping[str, Tensor]],
        symmetries: Symmetries,
        batches: Sequence[Tensor],
        *,
        subjects: Sequence[str],
        pairs: Collection[tuple[int, int]],
    ) -> None:
        if symmetries.graph is None:
            raise PapaError('symmetries written by hand have no graph: match by weights, with by="weights"')
        # A correlation matrix has the reference's units along dim 0 and the network's along dim 1.
        groups = [
            replace(group, axes=tuple(replace(axis, dim=1) for axis in group.activations))
            for group in symmetries
            if group.activations
        ]
        self.groups = nested_groups(Symmetries(tuple(groups)))
        self._axes = {group.name: group.axes for group in groups}
        dims = {axis.tensor: axis.dim for group in symmetries for axis in group.activations}
        self._correlations = _correlations(symmetries.graph, networks, batches, dims, subjects, pairs)
        indices: dict[str, list[Tensor]] = {name: [] for name in dims}
        for axis in (axis for group in groups for axis in group.axes):
            indices[axis.tensor].append(axis.index.flatten())
        self._covered = {name: torch.cat(parts).bincount().nonzero().flatten() for name, parts in indices.items()}
        self.count = max(sum(map(len, self._covered.values())), 1)
        """The number of correlations in the sum."""

    def compare(self, member: int, others: Collection[int]) -> ActivationComparison:
        """One network with the sum of some others."""
        tensors = {
            name: torch.stack([self._pair(other, member)[name] for other in others]).sum(0) for name in self._covered
        }
        return ActivationComparison(tensors, self._covered)

    def _pair(self, first: int, second: int) -> dict[str, Tensor]:
        if (first, second) in self._correlations:
            return self._correlations[first, second]
        return {name: matrix.T for name, matrix in self._correlations[second, first].items()}

    def permute_(self, member: int, permutations: Permutations) -> None:
        """Permute the units of one network, in this comparison only."""
        for pair, matrices in self._correlations.items():
            if member in pair:
                for name, permutation in permutations.items():
                    for axis in self._axes.get(name, ()):
                        permute_axis_(matrices[axis.tensor], replace(axis, dim=int(member == pair[1])), permutation)


class ActivationComparison(Comparison):
    """Correlation matrices of a network's units with those of its reference, for each node of the graph."""

    def __init__(self, tensors: dict[str, Tensor], covered: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self._covered = covered

    def unit_similarity(self, axis: TensorAxis, index: Tensor) -> Tensor:
        """The correlations of units at one node, summed over the indices that they own there."""
        matrix = self.tensors[axis.tensor]
        return torch.stack([matrix[column][:, column] for column in index.T]).sum(0)

    def similarity(self, name: str) -> float:
        """The sum of correlations of paired units at one node."""
        return float(self.tensors[name].diagonal()[self._covered[name]].sum())


def _correlations(
    graph: ExportedGraph,
    networks: Sequence[Mapping[str, Tensor]],
    batches: Sequence[Tensor],
    dims: Mapping[str, int],
    subjects: Sequence[str],
    pairs: Collection[tuple[int, int]],
) -> dict[tuple[int, int], dict[str, Tensor]]:
    """For each pair of networks and each node, the correlation of each index of the first with each of the second."""
    sums: dict[tuple[str, int], Tensor] = {}
    products: dict[tuple[str, int, int], Tensor] = {}
    counts: dict[str, int] = {}

    def add(name: str, outputs: Sequence[Tensor]) -> None:
        units = [output.detach().double().movedim(dims[name], 0).flatten(1) for output in outputs]
        counts[name] = counts.get(name, 0) + units[0].shape[1]
        for member, own in enumerate(units):
            if not bool(torch.isfinite(own).all()):
                raise MemberError(
                    f"{subjects[member]} has activations that are not finite at '{name}': a network that diverged "
                    "cannot be matched"
                )
            found = torch.stack([own.sum(1), own.square().sum(1)])
            sums[name, member] = sums[name, member] + found if (name, member) in sums else found
        for first, second in pairs:
            key, product = (name, first, second), units[first] @ units[second].T
            products[key] = products[key].add_(product) if key in products else product

    for batch in batches:
        _run_side_by_side(graph, networks, batch, dims, add)
    return {
        (first, second): {
            name: _correlation(sums[name, first], sums[name, second], products.pop((name, first, second)), counts[name])
            for name in dims
        }
        for first, second in pairs
    }


def _run_side_by_side(
    graph: ExportedGraph,
    networks: Sequence[Mapping[str, Tensor]],
    batch: Tensor,
    names: Collection[str],
    add: Callable[[str, Sequence[Tensor]], None],
) -> None:
    """Run the graph with every network's tensors, node by node, so that only activations still needed are in memory."""
    runs = [fx.Interpreter(graph.module) for _ in networks]
    for run, network in zip(runs, networks, strict=True):
        run.args_iter = _arguments(graph, network, batch)
    for node in graph.module.graph.nodes:
        for run in runs:
            run.env[node] = run.run_node(node)
        if node.name in names:
            add(node.name, [run.env[node] for run in runs])
        for run in runs:
            for used in run.user_to_last_uses.get(node, []):
                del run.env[used]


def _arguments(graph: ExportedGraph, network: Mapping[str, Tensor], batch: Tensor) -> Iterator[Tensor]:
    """The value of each placeholder of the graph."""
    for node in graph.module.graph.nodes:
        if node.op != "placeholder":
            return
        if node.target in graph.tensors:
            yield network[graph.tensors[node.target]].detach().cpu()
        elif node.target in graph.constants:
            yield graph.constants[node.target]
        elif node.meta["val"].shape == batch.shape:
            yield batch.cpu().clone()
        else:
            raise DataError(
                f"batches have inputs of shape {tuple(batch.shape)}, but the symmetries were derived with an example "
                f"of shape {tuple(node.meta['val'].shape)}: derive them with a batch of the same shape"
            )


def _correlation(first: Tensor, second: Tensor, product: Tensor, count: int) -> Tensor:
    """Correlations from sums, sums of squares and sums of products; 0 for a unit that never varies."""
    (x, xx), (y, yy) = first / count, second / count
    scale = ((xx - x.square()).clamp(min=0)[:, None] * (yy - y.square()).clamp(min=0)).sqrt()
    covariance = product / count - x[:, None] * y
    return torch.where(scale > 1e-12, covariance / scale.clamp(min=1e-12), 0.0)
