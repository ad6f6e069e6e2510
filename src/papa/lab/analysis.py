"""What the members of a trained population share: how alike their features are, and what lies between two of them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from papa.align import Symmetries, permute_all_, symmetries
from papa.align.matching import Plan, matched_to
from papa.align.permute import undoing
from papa.errors import PapaError
from papa.evaluation import Batch
from papa.group import gather_or_raise
from papa.interpolation import Curve, curve_of
from papa.lab.probes import probe_source
from papa.mixing import soup_row
from papa.population import Population
from papa.repair import goals_of, layer_statistics, repair_toward_, repairable_layers
from papa.similarity import Features, feature_similarity
from papa.soup import After, average_soup
from papa.training.loop import Training

NUM_BATCHES, NUM_LINE_BATCHES = 5, 10
"""How many batches REPAIR looks at, in a soup where the training does not say, and at each point of a line."""
NUM_EXAMPLES, BATCH_SIZE = 256, 32
"""How many examples features are compared on; features take more memory than networks, so a few at a time."""


@dataclass(frozen=True)
class Similarity:
    """The mean cosine similarity of features at each layer."""

    layers: tuple[str, ...]
    members: tuple[float, ...]
    """Between two members, the mean over all pairs."""
    soup: tuple[float, ...]
    """Between a member and the average soup, the mean over members."""

    def to_json(self) -> dict[str, list[Any]]:
        """As plain values."""
        return {"layers": list(self.layers), "members": list(self.members), "soup": list(self.soup)}


@dataclass(frozen=True)
class Analysis:
    """What members share."""

    similarity: Similarity
    """How alike features are as they are."""
    matched_similarity: Similarity | None
    """How alike they are when units are matched to the first member's and the soup is repaired, as in the paper; None
    where units cannot be matched."""
    curves: dict[str, Curve]
    """What lies between the first two members."""
    pair: tuple[int, int]
    """Who these two are."""

    def to_json(self) -> dict[str, Any]:
        """As `result.json` holds it: the similarity of matched features, that of features as they are beside it."""
        best = self.similarity if self.matched_similarity is None else self.matched_similarity
        plain = self.similarity.to_json()
        return {
            "similarity": {
                **best.to_json(),
                "matched": self.matched_similarity is not None,
                "plain": {"members": plain["members"], "soup": plain["soup"]},
            },
            "interpolation": {
                "pair": list(self.pair),
                "curves": [{"name": name, **curve.to_json()} for name, curve in self.curves.items()],
            },
        }


def analyse(training: Training, *, num_members: int = 5, num_align_batches: int | None = 10) -> Analysis | None:
    """Compare the members of a trained population with each other; nothing is changed.

    Members are looked at where they live, their units permuted meanwhile and put back exactly; features travel,
    networks do not. All processes must call it.

    Args:
        training: whose population it is.
        num_members: how many members are compared at most.
        num_align_batches: how many batches of training data units are matched on; None for all there are.

    Returns:
        What they share; None for fewer than two members.
    """
    population = training.population
    members = population.active[:num_members]
    if len(members) < 2:
        return None
    inputs = training.batches.plain_batches(num_align_batches)
    repair_inputs = training.batches.plain_batches(training.batches.num_repair_batches or NUM_BATCHES)
    line_inputs = training.batches.plain_batches(NUM_LINE_BATCHES)
    groups = exchangeable(population[0], inputs[0])
    row, pair = soup_row(population.size, members), (members[0], members[1])
    held_out = list(training.batches.evaluation_batches(probe_source(training, 1000)))

    def lines(name: str) -> dict[str, Curve]:
        repair = repair_between(population, pair, line_inputs)
        return {
            name or "plain": line_between(training, pair, held_out),
            f"{name} and repaired" if name else "repaired": line_between(training, pair, held_out, repair),
        }

    plain, matched = similarity_of(population, members, average_soup(population, row), line_inputs), None
    curves = lines("")
    if groups is not None:
        with matched_to_first(population, members, inputs, groups):
            after = repair_between(population, members, repair_inputs)
            matched = similarity_of(population, members, average_soup(population, row, after=after), line_inputs)
            curves |= lines("aligned")
    names = ("plain", "aligned", "repaired", "aligned and repaired")
    return Analysis(plain, matched, {name: curves[name] for name in names if name in curves}, pair)


@contextlib.contextmanager
def matched_to_first(
    population: Population, members: Sequence[int], inputs: Sequence[Tensor], groups: Symmetries
) -> Iterator[None]:
    """Let the units of some members match those of the first of them, by activations, for the block."""
    here = [index for index, member in enumerate(population.members) if member in members[1:]]
    found = matched_to(population, members[0], here, Plan(inputs, by="activations", groups=groups))
    moved = []
    try:
        for index, alignment in found.items():
            permute_all_(population[index], groups, alignment.permutations)
            moved.append(index)
        yield
    finally:
        for index in moved:
            permute_all_(population[index], groups, undoing(found[index].permutations))


def repair_between(population: Population, members: Sequence[int], inputs: Sequence[Tensor]) -> After:
    """What repairs a mean of some members, as they are now."""
    here = [(member, model) for member, model in zip(population.members, population, strict=True) if member in members]
    moments = gather_or_raise(
        population.group,
        lambda: [layer_statistics(model, inputs, subject=f"member {member}") for member, model in here],
    )

    def repair(network: nn.Module, row: Tensor) -> None:
        weights = row[list(members)]
        repair_toward_(network, goals_of(moments, weights), inputs, restores=False)

    return repair


def line_between(
    training: Training, pair: tuple[int, int], batches: Sequence[Batch], after: After | None = None
) -> Curve:
    """The line between two members, scored on some batches."""
    size = training.population.size

    def network(t: float) -> nn.Module:
        row = (1 - t) * soup_row(size, pair[:1]) + t * soup_row(size, pair[1:])
        return average_soup(training.population, row, after=after)

    return curve_of(network, batches, loss=training.loss, metric=training.metric, apply=training.apply)


def exchangeable(model: nn.Module, inputs: Tensor) -> Symmetries | None:
    """Which units of a network can be matched; None, with a warning, where its graph cannot be had."""
    try:
        return symmetries(model, inputs)
    except PapaError as error:
        warnings.warn(f"units of {type(model).__name__} are not matched: {error}", stacklevel=2)
        return None


def similarity_of(
    population: Population, members: Sequence[int], soup: nn.Module, inputs: Sequence[Tensor]
) -> Similarity:
    """How alike the features of some members are on some examples, and those of their soup."""
    layers = layers_to_compare(soup)
    batches = torch.split(torch.cat(list(inputs))[:NUM_EXAMPLES], BATCH_SIZE)
    here = [model for member, model in zip(population.members, population, strict=True) if member in members]

    def gather(features: list[Features]) -> list[Features]:
        return [*population.group.all_gather(features[:-1]), features[-1]]  # every process has the soup

    found = feature_similarity([*here, soup], batches, layers, gather=gather)
    size = len(members)
    pairs = torch.triu_indices(size, size, offset=1)
    return Similarity(
        tuple(layers),
        tuple(float(matrix[pairs[0], pairs[1]].mean()) for matrix in found.values()),
        tuple(float(matrix[-1, :size].mean()) for matrix in found.values()),
    )


def layers_to_compare(model: nn.Module) -> list[str]:
    """A network's stages or blocks where it has them (the paper compares ResNet-18 at its four stages); else every
    convolution and linear layer."""
    for name in ("stages", "blocks"):
        part = getattr(model, name, None)
        if isinstance(part, (nn.Sequential, nn.ModuleList)):
            return [f"{name}.{index}" for index in range(len(part))]
    return list(repairable_layers(model))
