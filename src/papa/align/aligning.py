"""Aligning networks: one to another, each of many to the first, all jointly, or members before they are merged."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from papa.align.matching import Alignment, Matcher
from papa.align.permute import permute_all_
from papa.align.search import identity
from papa.align.unit_groups import Symmetries
from papa.core.group import gather_or_raise
from papa.core.mixing import soup_row
from papa.core.population import Population
from papa.core.rules import AveragingContext
from papa.errors import MixingError, PapaError, did_you_mean


@torch.no_grad()
def align_(
    model: nn.Module,
    reference: nn.Module,
    batches: Any = None,
    *,
    by: str | None = None,
    symmetries: Symmetries | None = None,
    optimizer: Optimizer | None = None,
    seed: int = 0,
) -> Alignment:
    """Permute a network's units to match another network, without changing its function.

    - by `"activations"`: maximise the correlation of paired units, summed over all nodes of the graph that have them.
    - by `"weights"`: maximise the sum over tensors of `<reference, P model> / (|reference| |model|)`.
    - by `"sinkhorn"`: the objective of weights, over soft permutations that harden while a temperature falls.

    The first two give each group in turn its best permutation, a linear assignment, until nothing is gained. Units
    inside blocks (attention heads, groups of channels) are matched in each pair of blocks first, then the blocks.

    Example:
        >>> reference = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> alignment = align_(model, reference, [torch.randn(32, 4) for _ in range(2)])
        >>> alignment.after >= alignment.before
        True
        >>> alignment = align_(model, reference, torch.randn(3, 4), by="weights")

    Args:
        model: the network to permute in place; its tensors keep their memory; unchanged if an error is raised.
        reference: the network to match, unchanged.
        batches: inputs, or tuples that start with the inputs, all of one shape (a smaller last one is left out), never
            test data; or one tensor, an example from which the symmetries are derived. Optional when matching by
            weights with given `symmetries`.
        by: `"activations"`, `"weights"` or `"sinkhorn"`; by default activations for a list of batches, else weights.
        symmetries: the result of `papa.symmetries` for this architecture and inputs of this shape; None to derive them.
        optimizer: the model's; its state is permuted with the parameters.
        seed: of the order in which groups are matched.

    Returns:
        How similar the networks are before and after, and the permutations.
    """
    matcher = Matcher(batches, by=by, symmetries=symmetries, seed=seed)
    (alignment,) = matcher.match_to_first([reference, model], subjects=["the reference", "the model"])
    permute_all_(model, matcher.symmetries_of(model), alignment.permutations, optimizer=optimizer)
    return alignment


@torch.no_grad()
def align_all_(
    models: Sequence[nn.Module] | Population,
    batches: Any = None,
    *,
    to: Literal["first", "joint"] = "first",
    by: str | None = None,
    symmetries: Symmetries | None = None,
    optimizers: Sequence[Optimizer] = (),
    seed: int = 0,
) -> list[Alignment]:
    """Permute the units of many networks to match each other, without changing their functions.

    To `"first"`: each is aligned to the first, as the paper does before merges. `"joint"`: coordinate ascent on the sum
    over all pairs, in which each network in turn is matched to the sum of the others. As every network has one
    permutation, aligning a with b and b with c aligns a with c. It starts from the alignment to the first, if that is
    a gain, and the sum never decreases.

    Example:
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
        >>> alignments = align_all_(nets, [torch.randn(32, 4)], to="joint")
        >>> len(alignments)
        3

    Args:
        models: networks of one architecture, or a population; if several processes hold it, all must call this, and
            only `"first"` is possible. None is changed if an error is raised.
        batches: as for `align_`; one pass over them serves all.
        to: `"first"` or `"joint"`.
        by: as for `align_`.
        symmetries: as for `align_`.
        optimizers: one for each network, to permute their state with the parameters; or none.
        seed: as for `align_`.

    Returns:
        For each network on this process, its mean similarity to the first, or to all others when aligned jointly.
    """
    population, networks = models if isinstance(models, Population) else None, list(models)
    if to not in ("first", "joint"):
        raise PapaError(f"networks cannot be aligned to '{to}': {did_you_mean(to, ['first', 'joint'])}")
    if to == "joint" and population is not None and population.size != len(networks):
        raise PapaError(
            f"the population has {population.size} members, of which {len(networks)} are on this process: members of "
            'several processes can only be aligned to the first, with to="first"'
        )
    _check_optimizers(optimizers, networks)
    matcher = Matcher(batches, by=by, symmetries=symmetries, seed=seed)
    subjects = [f"member {member}" for member in range(len(networks))]
    if to == "joint":
        alignments = dict(enumerate(matcher.match_jointly(networks, subjects)))
    else:
        unchanged = Alignment(1.0, 1.0, 0, identity(matcher.symmetries_of(networks[0])) if networks else {})
        if population is None:
            found = dict(enumerate(matcher.match_to_first(networks, subjects), start=1))
        else:
            found = match_to_member(population, 0, range(1, population.size), matcher)
        alignments = {index: found.get(index, unchanged) for index in range(len(networks))}
    _permute_(networks, alignments, matcher, optimizers)
    return list(alignments.values())


def match_to_member(
    population: Population, reference: int, members: Collection[int], matcher: Matcher
) -> dict[int, Alignment]:
    """Find permutations of some members that match them to another member, on whichever process it is.

    No member is changed. Every process that holds members must call this; it takes the memory of one more network.
    Members have their index in the whole population, the alignments of those on this process their local index.
    """
    matcher.symmetries_of(population[0])  # deriving them takes memory: do it before there is a copy
    local = [index for index, member in enumerate(population.members) if member in members]
    buffer = population._soup_buffer()
    buffer.fill_(soup_row(population.size, [reference]))
    subjects = [f"member {member}" for member in (reference, *(population.members[index] for index in local))]
    alignments: list[Alignment] = []

    def match() -> list[None]:
        if local:
            networks = [buffer.network, *(population[index] for index in local)]
            alignments.extend(matcher.match_to_first(networks, subjects))
        return []

    gather_or_raise(population.group, match)
    return dict(zip(local, alignments, strict=True))


def _check_optimizers(optimizers: Sequence[Optimizer], models: Sequence[nn.Module] | Population) -> None:
    if optimizers and len(optimizers) != len(models):
        raise PapaError(
            f"alignment was given {len(optimizers)} optimizers for {len(models)} networks, expected one for each "
            "network on this process"
        )


def _permute_(
    models: Sequence[nn.Module] | Population,
    alignments: Mapping[int, Alignment],
    matcher: Matcher,
    optimizers: Sequence[Optimizer],
) -> None:
    for index, alignment in alignments.items():
        optimizer = optimizers[index] if optimizers else None
        permute_all_(models[index], matcher.symmetries_of(models[index]), alignment.permutations, optimizer=optimizer)


class AlignMerges:
    """A merge hook for `Averager` that aligns every member to the first before members are averaged.

    The symmetries are derived once. Members may be on several processes.

    Example:
        >>> from papa import Averager, MergeAll
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
        >>> align = AlignMerges([torch.randn(32, 4) for _ in range(5)])
        >>> averager = Averager(Population(nets), MergeAll(every_steps=1), merge_hooks=align)
        >>> averager.step().rule
        'MergeAll'
        >>> [alignment.after >= alignment.before for alignment in align.alignments]
        [True, True]

    Args:
        batches: as for `align_`: the same for all members and all merges.
        by: as for `align_`.
        symmetries: as for `align_`.
        optimizers: one for each member on this process, to permute their state (such as momentum) with the parameters;
            without them it stays in place, as in the paper's published code, and belongs to other units than before.
        every_steps: align only at the first averaging of every `every_steps` steps; 1 for every averaging.
        seed: as for `align_`.
    """

    def __init__(
        self,
        batches: Any = None,
        *,
        by: str | None = None,
        symmetries: Symmetries | None = None,
        optimizers: Iterable[Optimizer] = (),
        every_steps: int = 1,
        seed: int = 0,
    ) -> None:
        if every_steps < 1:
            raise MixingError(f"every_steps is {every_steps}, expected a number of steps, at least 1")
        self.every_steps = every_steps
        self.alignments: list[Alignment] = []
        """The last alignments of the members on this process, without the first member."""
        self._optimizers = list(optimizers)
        self._matcher = Matcher(batches, by=by, symmetries=symmetries, seed=seed)

    @contextlib.contextmanager
    def __call__(self, population: Population, matrix: Tensor, context: AveragingContext) -> Iterator[None]:
        """Align if it is time, before the members are averaged."""
        if context.is_first_since(self.every_steps):
            self.align_(population)
        yield

    @torch.no_grad()
    def align_(self, population: Population) -> None:
        """Align every member to the first now; every process that holds members must call this."""
        _check_optimizers(self._optimizers, population)
        found = match_to_member(population, 0, range(1, population.size), self._matcher)
        self.alignments = list(found.values())
        _permute_(population, found, self._matcher, self._optimizers)
