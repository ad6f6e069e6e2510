"""What the members of a trained population share: how alike their features are, and what lies between two of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from papa.align import Symmetries, align_all_, symmetries
from papa.align.merging import fetched
from papa.errors import PapaError
from papa.interpolate import Curve, interpolation_curves
from papa.repair import repair_, repairable_layers
from papa.similarity import feature_similarity
from papa.soup import average_soup
from papa.training.loop import Training
from papa.training.probes import probe_source

NUM_BATCHES = 5
"""How many batches REPAIR looks at where the training does not say."""
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


def analyse(training: Training, *, num_members: int = 5, num_align_batches: int = 10) -> Analysis | None:
    """Compare the members of a trained population with each other; nothing is changed.

    Every process holds copies of the members that are compared. All processes must call it.

    Args:
        training: whose population it is.
        num_members: how many members are compared at most.
        num_align_batches: how many batches of training data units are matched on.

    Returns:
        What they share; None for fewer than two members.
    """
    population = training.population
    members = [member for member in range(population.size) if member not in population.dropped][:num_members]
    if len(members) < 2:
        return None
    networks = [fetched(population, member) for member in members]
    inputs = training.plain_batches(max(num_align_batches, NUM_BATCHES))
    repair_inputs = inputs[: training.num_repair_batches or NUM_BATCHES]
    groups = exchangeable(networks[0], inputs[0])
    plain = similarity_of([*networks, average_soup(networks)], inputs)
    matched = None
    if groups is not None:
        aligned = copy.deepcopy(networks)
        align_all_(aligned, inputs, by="activations", groups=groups)
        soup = average_soup(aligned, after=lambda network, row: repair_(network, aligned, repair_inputs, row))
        matched = similarity_of([*aligned, soup], inputs)
    curves = curves_between(training, networks[0], networks[1], inputs, groups)
    return Analysis(plain, matched, curves, (members[0], members[1]))


def exchangeable(model: nn.Module, inputs: Tensor) -> Symmetries | None:
    """Which units of a network can be matched; None, with a warning, where its graph cannot be had."""
    try:
        return symmetries(model, inputs)
    except PapaError as error:
        warnings.warn(f"units of {type(model).__name__} are not matched: {error}", stacklevel=2)
        return None


def similarity_of(networks: Sequence[nn.Module], inputs: Sequence[Tensor]) -> Similarity:
    """How alike the features of networks are on some examples; the last of them is the soup of the others."""
    layers = layers_to_compare(networks[0])
    batches = torch.split(torch.cat(list(inputs))[:NUM_EXAMPLES], BATCH_SIZE)
    found = feature_similarity(networks, batches, layers)
    size = len(networks) - 1
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


def curves_between(
    training: Training, first: nn.Module, second: nn.Module, inputs: Sequence[Tensor], groups: Symmetries | None
) -> dict[str, Curve]:
    """The line between two networks, scored on held-out data; without the lines whose units would need matching."""
    batches = list(training.prepared(probe_source(training, 1000)))
    return interpolation_curves(
        first,
        second,
        batches,
        inputs,
        loss=training.loss,
        metric=training.metric,
        apply=training.apply,
        groups=groups,
        align=groups is not None,
    )
