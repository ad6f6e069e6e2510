"""Matching by activations: the correlation, over some data, of what units say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from papa.align.assignment import Orders
from papa.align.blocks import families_of
from papa.align.groups import Program, Slot, Symmetries
from papa.align.permute import permute_slot_
from papa.errors import DataError, MemberError, PapaError


class Activations:
    """How the units of several networks correlate, at every place of the graph where they are seen.

    Correlations do not depend on the order of units, so one pass over the data serves all groups and all pairs.

    Args:
        networks: the tensors of each by name.
        symmetries: what can be permuted in them, with their graph.
        batches: inputs of one shape.
        subjects: what to call each network in errors.
        pairs: which networks are compared with which.
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
        if symmetries.program is None:
            raise PapaError('symmetries written by hand have no graph: match by weights, with by="weights"')
        _check_shape(symmetries.program, batches)
        # The units of a place are the second axis of a correlation, the reference's being the first.
        groups = [
            replace(group, slots=tuple(replace(place, axis=1) for place in group.places))
            for group in symmetries
            if group.places
        ]
        self.symmetries = Symmetries(tuple(groups))
        self.families = families_of(self.symmetries)
        dims = {place.tensor: place.axis for group in symmetries for place in group.places}
        self.alike = _correlations(symmetries.program, networks, batches, dims, subjects, pairs)
        self.covered = _covered(self.symmetries, dims)
        self.count = max(sum(len(indices) for indices in self.covered.values()), 1)
        """How many correlations the likeness of two networks is the sum of."""

    def matching(self, member: int, others: Collection[int]) -> ActivationsMatching:
        """One network in comparison with some others."""
        together = {
            name: torch.stack([self._pair(other, member)[name] for other in others]).sum(0) for name in self.covered
        }
        return ActivationsMatching(together, self.covered)

    def _pair(self, first: int, second: int) -> dict[str, Tensor]:
        if (first, second) in self.alike:
            return self.alike[first, second]
        return {name: alike.T for name, alike in self.alike[second, first].items()}

    def permute_(self, member: int, orders: Orders) -> None:
        """Reorder the units of one network, group after group."""
        groups = {group.name: group for group in self.symmetries}
        moves = [(slot, order) for name, order in orders.items() if name in groups for slot in groups[name].slots]
        for (first, second), alike in self.alike.items():
            if member in (first, second):
                for slot, order in moves:
                    permute_slot_(alike[slot.tensor], replace(slot, axis=int(member == second)), order)


class ActivationsMatching:
    """Correlations of two networks, the model's units along the second axis."""

    def __init__(self, alike: dict[str, Tensor], covered: Mapping[str, Tensor]) -> None:
        self.tensors = alike
        self.covered = covered

    def likeness(self, slot: Slot, index: Tensor) -> Tensor:
        """The sum of correlations over all that two units say at one place."""
        alike = self.tensors[slot.tensor]
        return torch.stack([alike[column][:, column] for column in index.T]).sum(0)

    def value(self, name: str) -> float:
        """The sum of correlations of paired units at one place."""
        return float(self.tensors[name].diagonal()[self.covered[name]].sum())


def _covered(symmetries: Symmetries, dims: Mapping[str, int]) -> dict[str, Tensor]:
    """The indices that belong to some group, at each place."""
    found: dict[str, list[Tensor]] = {name: [] for name in dims}
    for group in symmetries:
        for slot in group.slots:
            found[slot.tensor].append(slot.index.flatten())
    return {name: torch.cat(parts).bincount().nonzero().flatten() for name, parts in found.items()}


def _check_shape(program: Program, batches: Sequence[Tensor]) -> None:
    for node in _inputs(program):
        expected, found = tuple(node.meta["val"].shape), tuple(batches[0].shape)
        if expected != found:
            raise DataError(
                f"batches have inputs of shape {found}, but the symmetries were derived with an example of shape "
                f"{expected}: derive them with a batch of the same shape"
            )


def _inputs(program: Program) -> list[fx.Node]:
    """The placeholders that take the network's inputs."""
    nodes = [node for node in program.graph.graph.nodes if node.op == "placeholder"]
    return [node for node in nodes if node.target not in program.tensors and node.target not in program.constants]


def _correlations(
    program: Program,
    networks: Sequence[Mapping[str, Tensor]],
    batches: Sequence[Tensor],
    dims: Mapping[str, int],
    subjects: Sequence[str],
    pairs: Collection[tuple[int, int]],
) -> dict[tuple[int, int], dict[str, Tensor]]:
    """For each pair and each place, the correlation of each index of the first with each index of the second."""
    single: dict[tuple[str, int], Tensor] = {}
    double: dict[tuple[str, int, int], Tensor] = {}
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
            sums = torch.stack([own.sum(1), own.square().sum(1)])
            single[name, member] = single[name, member] + sums if (name, member) in single else sums
        for first, second in pairs:
            key = name, first, second
            product = units[first] @ units[second].T
            double[key] = double[key].add_(product) if key in double else product

    for batch in batches:
        _march(program, networks, batch, dims, add)
    return {
        (first, second): {
            name: _correlation(
                single[name, first], single[name, second], double.pop((name, first, second)), counts[name]
            )
            for name in dims
        }
        for first, second in pairs
    }


def _march(
    program: Program,
    networks: Sequence[Mapping[str, Tensor]],
    batch: Tensor,
    dims: Mapping[str, int],
    add: Callable[[str, Sequence[Tensor]], None],
) -> None:
    """Run the graph with every network's tensors, node by node, so that only what is still needed is in memory."""
    walkers = [fx.Interpreter(program.graph) for _ in networks]
    for walker, network in zip(walkers, networks, strict=True):
        walker.args_iter = iter(_arguments(program, network, batch))
    for node in program.graph.graph.nodes:
        for walker in walkers:
            walker.env[node] = walker.run_node(node)
        if node.name in dims:
            add(node.name, [walker.env[node] for walker in walkers])
        for walker in walkers:
            for used in walker.user_to_last_uses.get(node, []):
                del walker.env[used]


def _arguments(program: Program, network: Mapping[str, Tensor], batch: Tensor) -> list[Tensor]:
    found = []
    for node in program.graph.graph.nodes:
        if node.op == "placeholder" and node.target in program.tensors:
            found.append(network[program.tensors[node.target]].detach().cpu())
        elif node.op == "placeholder":
            constant = program.constants.get(node.target)
            found.append(batch.cpu().clone() if constant is None else constant)
    return found


def _correlation(first: Tensor, second: Tensor, product: Tensor, count: int) -> Tensor:
    """From sums to correlations; a unit that never varies correlates with none."""
    (x, xx), (y, yy) = first / count, second / count
    scale = ((xx - x.square()).clamp(min=0)[:, None] * (yy - y.square()).clamp(min=0)).sqrt()
    covariance = product / count - x[:, None] * y
    return torch.where(scale > 1e-12, covariance / scale.clamp(min=1e-12), 0.0)
