"""How similar the features of several networks are, layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from papa.errors import DataError, did_you_mean
from papa.evaluation.inputs import inputs_of, num_examples, outputs_of
from papa.evaluation.scores import evaluating
from papa.repair.statistics import repairable_layers

Features: TypeAlias = dict[str, Tensor]
"""The output of each layer, by the layer's name: one normalised row per example."""
Gather: TypeAlias = Callable[[list[Features]], list[Features]]
"""Turns the features of the networks on this process into those of all networks."""


@torch.no_grad()
def feature_similarity(
    models: Sequence[nn.Module],
    batches: Iterable[Any],
    layers: Sequence[str] | None = None,
    *,
    gather: Gather = list,
) -> dict[str, Tensor]:
    """The cosine similarity of features between networks, for each layer.

        similarity[layer][j, k] = mean over examples of cos(features_j, features_k)

    The features of an example are all numbers of the layer's output for it. The units of independently trained
    networks have different orders, so align them first. Pass a soup as one more network to compare members with it.

    Example:
        >>> nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
        >>> similarity = feature_similarity(nets, [torch.randn(16, 4)], layers=["1"])
        >>> similarity["1"].shape
        torch.Size([3, 3])

    Args:
        models: networks of one architecture, compared in evaluation mode and left as found.
        batches: inputs, or tuples that start with the inputs.
        layers: names of submodules; None for every convolution and linear layer.
        gather: turns the features of the networks on this process into those of all networks.

    Returns:
        A symmetric matrix in float64 for each layer, in the order of `layers`.
    """
    if not models:
        raise DataError("there is no network whose features could be compared, expected at least one")
    names = list(repairable_layers(models[0])) if layers is None else list(layers)
    for number, model in enumerate(models):
        known = dict(model.named_modules())
        for name in names:
            if name not in known:
                near = did_you_mean(name, [key for key in known if key])
                raise DataError(f"there is no layer '{name}' in network {number}: {near}")
    totals: dict[str, Tensor] = {}
    num_seen = 0
    with contextlib.ExitStack() as stack:
        for model in models:
            stack.enter_context(evaluating(model))
        for batch in batches:
            inputs = inputs_of(batch)
            features = gather([_features(model, inputs, names) for model in models])
            for name in names:
                _check(name, [its[name] for its in features])
                rows = torch.stack([its[name] for its in features])
                products = torch.einsum("jnd,knd->jk", rows, rows).cpu()
                totals[name] = totals[name] + products if name in totals else products
            num_seen += num_examples(inputs)
    if not num_seen:
        raise DataError("there was no batch to compare features on: the data is empty")
    return {name: total / num_seen for name, total in totals.items()}


def _check(name: str, features: Sequence[Tensor]) -> None:
    for number, found in enumerate(features):
        if found.shape != features[0].shape:
            raise DataError(
                f"layer '{name}' has {features[0].shape[1]} outputs per example in network 0 and {found.shape[1]} in "
                f"network {number}: only networks of one architecture can be compared"
            )
        if not bool(torch.isfinite(found).all()):
            raise DataError(f"layer '{name}' of network {number} has outputs that are not finite: leave it out")


def _features(model: nn.Module, inputs: Tensor, names: Sequence[str]) -> Features:
    found: Features = {}

    def keep(name: str, output: Any) -> None:
        if not isinstance(output, Tensor) or len(output) != len(inputs):
            raise DataError(f"layer '{name}' does not return one tensor with a row per example: name another layer")
        found[name] = nn.functional.normalize(output.reshape(len(output), -1).double(), dim=1)

    with contextlib.ExitStack() as hooks:
        for name in names:
            layer = model.get_submodule(name)
            hook = layer.register_forward_hook(lambda _, __, output, name=name: keep(name, output))
            hooks.callback(hook.remove)
        outputs_of(model, inputs)
    for name in names:
        if name not in found:
            raise DataError(f"layer '{name}' did not run: name layers that the network's forward pass uses")
    return found
