"""Re-estimation of BatchNorm statistics, for networks with averaged weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from papa.errors import DataError
from papa.evaluation import evaluating
from papa.inputs import inputs_of, num_examples, outputs_of


@torch.no_grad()
def reset_batch_norm_(model: nn.Module, batches: Iterable[Any]) -> nn.Module:
    """Re-estimate a network's BatchNorm statistics over some batches.

    The running mean and variance become the mean over batches (weighted by their sizes) of the batch statistics.
    Everything else is left as found: weights, momentum, counters, modes and random state. Dropout is off meanwhile.
    When an error is raised, the old statistics are restored.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        >>> _ = reset_batch_norm_(net, [torch.randn(8, 4) for _ in range(5)])

    Args:
        model: changed in place; unchanged when it has no BatchNorm.
        batches: inputs, or tuples with the inputs first.

    Returns:
        The same model.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.running_mean is not None]
    if not layers:
        return model
    found = [(layer, layer.momentum, {k: v.clone() for k, v in layer.named_buffers(recurse=False)}) for layer in layers]
    try:
        with evaluating(model):
            _accumulate(model, layers, batches)
    except BaseException:
        for layer, _, buffers in found:
            for name, value in buffers.items():
                layer.get_buffer(name).copy_(value)
        raise
    finally:
        for layer, momentum, buffers in found:
            layer.momentum = momentum
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.copy_(buffers["num_batches_tracked"])
    return model


def _accumulate(model: nn.Module, layers: list[_BatchNorm], batches: Iterable[Any]) -> None:
    num_seen = 0
    for layer in layers:
        layer.reset_running_stats()
        layer.train()
    for batch in batches:
        inputs = inputs_of(batch)
        num_here = num_examples(inputs)
        if not num_here:
            continue
        num_seen += num_here
        for layer in layers:
            layer.momentum = num_here / num_seen
        outputs_of(model, inputs)
    if not num_seen:
        raise DataError("there was no batch to estimate BatchNorm statistics from: the data is empty")
