"""Comparing the members of a trained population: the similarity of their features, and the line between two of them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from papa.align import Symmetries, permute_all_, symmetries
from papa.align.aligning import match_to_member
from papa.align.matching import Matcher
from papa.align.unit_groups import inverses
from papa.analysis import Curve, Features, curve_between, feature_similarity
from papa.core.mixing import soup_row
from papa.core.population import Population
from papa.core.soups import average_soup
from papa.errors import PapaError
from papa.lab.probes import probe_source
from papa.repair import repair_toward_members, repairable_layers
from papa.training.loop import Training

NUM_BATCHES, NUM_LINE_BATCHES = 5, 10
"""The number of REPAIR batches for a soup, if the training does not set it, and for each point of a line."""
NUM_EXAMPLES, BATCH_SIZE = 256, 32
"""The number of examples for features, in small batches because features take more memory than networks."""


@dataclass(frozen=True)
class Similarity:
    """The mean cosine similarity of features at each layer."""

    layers: tuple[str, ...]
    members: tuple[float, ...]
    """Between two members, the mean over all pairs."""
    soup: tuple[float, ...]
    """Between a member and the average soup, the mean over members."""


@dataclass(frozen=True)
class Analysis:
    """The comparison of a population's members."""

    similarity: Similarity
    """The similarity of features, with units in their own order."""
    matched_similarity: Similarity | None
    """The similarity with units matched to the first member and the soup repaired, as in the paper; None if the
    symmetries cannot be derived."""
    curves: dict[str, Curve]
    """The lines between two members."""
    pair: tuple[int, int]
    """These two members."""

    def to_json(self) -> dict[str, Any]:
        """The entries of `result.json`: the similarity with units matched if possible, and the plain one with it."""
        best = self.similarity if self.matched_similarity is None else self.matched_similarity
        plain = {"members": list(self.similarity.members), "soup": list(self.similarity.soup)}
        return {
            "similarity": {
                **{name: list(values) for name, values in asdict(best).items()},
                "matched": self.matched_similarity is not None,
                "plain": plain,
            },
            "interpolation": {
                "pair": list(self.pair),
                "curves": [{"name": name, **curve.to_json()} for name, curve in self.curves.items()],
            },
        }


def analyse(training: Training, *, num_members: int = 5, num_align_batches: int | None = 10) -> Analysis | None:
    """Compare the members of a trained population with each other; None for fewer than two members. Nothing is changed.

    Members stay on their process; their units are permuted while this runs and restored exactly. Processes exchange
    features, not networks. All processes must call this. Units are matched on `num_align_batches` batches of training
    data, all if None.
    """
    population, batches = training.population, training.batches
    members = population.active[:num_members]
    if len(members) < 2:
        return None
    inputs = batches.plain(num_align_batches)
    repair_inputs = batches.plain(batches.num_repair_batches or NUM_BATCHES)
    line_inputs = batches.plain(NUM_LINE_BATCHES)
    found = derive_symmetries(population[0], inputs[0])
    row, pair = soup_row(population.size, members), (members[0], members[1])
    held_out = list(batches.evaluation(probe_source(training, 1000)))

    def lines(name: str) -> dict[str, Curve]:
        task = training.task
        scoring: dict[str, Any] = {"loss": task.loss, "metric": task.metric, "apply": task.apply}
        repair = repair_toward_members(population, pair, line_inputs)
        plain = curve_between(population, pair, held_out, **scoring)
        repaired = curve_between(population, pair, held_out, after=repair, **scoring)
        return {name or "plain": plain, f"{name} and repaired" if name else "repaired": repaired}

    plain, matched = similarity_of(population, members, average_soup(population, row), line_inputs), None
    curves = lines("")
    if found is not None:
        with matched_to_first(population, members, inputs, found):
            repair = repair_toward_members(population, members, repair_inputs)
            matched = similarity_of(population, members, average_soup(population, row, after=repair), line_inputs)
            curves |= lines("aligned")
    names = ("plain", "aligned", "repaired", "aligned and repaired")
    return Analysis(plain, matched, {name: curves[name] for name in names if name in curves}, pair)


@contextlib.contextmanager
def matched_to_first(
    population: Population, members: Sequence[int], inputs: Sequence[Tensor], symmetries: Symmetries
) -> Iterator[None]:
    """Within the context, the units of some members match those of the first of them, by activations."""
    matcher = Matcher(inputs, by="activations", symmetries=symmetries)
    found = match_to_member(population, members[0], members[1:], matcher)
    with contextlib.ExitStack() as restoring:
        for index, alignment in found.items():
            permute_all_(population[index], symmetries, alignment.permutations)
            restoring.callback(permute_all_, population[index], symmetries, inverses(alignment.permutations))
        yield


def derive_symmetries(model: nn.Module, inputs: Tensor) -> Symmetries | None:
    """The symmetries of a network; None, with a warning, if they cannot be derived."""
    try:
        return symmetries(model, inputs)
    except PapaError as error:
        warnings.warn(f"units of {type(model).__name__} are not matched: {error}", stacklevel=2)
        return None


def similarity_of(
    population: Population, members: Sequence[int], soup: nn.Module, inputs: Sequence[Tensor]
) -> Similarity:
    """The similarity of features between some members, and between them and their soup."""
    layers = layers_to_compare(soup)
    batches = torch.split(torch.cat(list(inputs))[:NUM_EXAMPLES], BATCH_SIZE)
    local = [model for member, model in zip(population.members, population, strict=True) if member in members]

    def gather(features: list[Features]) -> list[Features]:
        return [*population.group.all_gather(features[:-1]), features[-1]]  # every process has the soup

    found = feature_similarity([*local, soup], batches, layers, gather=gather)
    size = len(members)
    pairs = torch.triu_indices(size, size, offset=1)
    return Similarity(
        tuple(layers),
        tuple(float(matrix[pairs[0], pairs[1]].mean()) for matrix in found.values()),
        tuple(float(matrix[-1, :size].mean()) for matrix in found.values()),
    )


def layers_to_compare(model: nn.Module) -> list[str]:
    """A network's stages or blocks if it has them, as the paper does for ResNet-18; else every layer with weights."""
    for name in ("stages", "blocks"):
        part = getattr(model, name, None)
        if isinstance(part, (nn.Sequential, nn.ModuleList)):
            return [f"{name}.{index}" for index in range(len(part))]
    return list(repairable_layers(model))
