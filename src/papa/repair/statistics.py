"""Statistics over some batches: those of the outputs of layers, per channel, and those of BatchNorm."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from papa.errors import DataError
from papa.evaluation.inputs import inputs_of, num_examples, outputs_of
from papa.evaluation.scores import evaluating

OutputHook: TypeAlias = Callable[[str, nn.Module, Tensor, int], Tensor | None]
"""Called with a layer's name, the layer, its output, and the number of times it ran before on this batch. May return a
tensor that replaces the output."""


@dataclass
class ChannelStatistics:
    """Running sums of a layer's output, per channel, in float64: over all uses of the layer, and for each use."""

    count: int = 0
    total: Tensor | None = None
    squares: Tensor | None = None
    uses: list[ChannelStatistics] = field(default_factory=list)

    def add(self, layer: nn.Module, output: Tensor, use: int = 0) -> None:
        """Add one output of the layer, from its `use`-th run on a batch (from 0)."""
        channels = output.movedim(channel_axis(layer, output), -1).reshape(-1, num_channels(layer)).double()
        total, squares = channels.sum(dim=0), channels.square().sum(dim=0)
        while len(self.uses) <= use:
            self.uses.append(ChannelStatistics())
        for statistics in (self, self.uses[use]):
            statistics.count += len(channels)
            statistics.total = total + (0.0 if statistics.total is None else statistics.total)
            statistics.squares = squares + (0.0 if statistics.squares is None else statistics.squares)

    @property
    def mean(self) -> Tensor:
        """The mean of each channel."""
        assert self.total is not None
        return self.total / self.count

    @property
    def std(self) -> Tensor:
        """The standard deviation of each channel (over all examples and positions, not corrected)."""
        assert self.squares is not None
        variance = (self.squares / self.count - self.mean.square()).clamp_(min=0.0)
        # What rounding leaves of a constant channel is not variance.
        return torch.where(variance > 1e-12 * (self.squares / self.count), variance, 0.0).sqrt()


def all_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Convolutions (plain, transposed, of any dimension) and linear layers, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, (_ConvNd, nn.Linear))}


def repairable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The convolutions and linear layers that share their tensors with no other module, by name."""
    users = Counter(id(tensor) for module in model.modules() for tensor in module._parameters.values())
    return {
        name: layer
        for name, layer in all_layers(model).items()
        if all(tensor is None or users[id(tensor)] == 1 for tensor in layer._parameters.values())
        and "weight" in layer._parameters  # a parametrization computes it from other tensors
    }


def num_channels(layer: nn.Module) -> int:
    """The number of output channels of a layer."""
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)  # type: ignore[arg-type]


def channel_axis(layer: nn.Module, output: Tensor) -> int:
    """The axis of a layer's output that holds its channels."""
    if isinstance(layer, nn.Linear):
        return output.dim() - 1
    assert isinstance(layer, _ConvNd)
    return output.dim() - 1 - len(layer.kernel_size)


@torch.no_grad()
def run_with_hook(model: nn.Module, batches: Iterable[Any], hook: OutputHook, layers: Mapping[str, nn.Module]) -> None:
    """Run batches through a network and call `hook` with every output of the layers.

    BatchNorm layers normalise by the batch; everything else is in evaluation mode. The network's modes and BatchNorm's
    running statistics are left as found.
    """
    num_batches = 0
    uses: Counter[str] = Counter()

    def on_output(name: str, layer: nn.Module, output: Tensor) -> Tensor | None:
        uses[name] += 1
        return hook(name, layer, output, uses[name] - 1)

    with evaluating(model), batch_statistics(model), contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            handle = layer.register_forward_hook(lambda layer, _, output, name=name: on_output(name, layer, output))
            stack.callback(handle.remove)
        for batch in batches:
            inputs = inputs_of(batch)
            if num_examples(inputs):
                uses.clear()
                outputs_of(model, inputs)
                num_batches += 1
    if not num_batches:
        raise DataError("there was no batch to take activation statistics from: the data is empty")


@contextlib.contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Make BatchNorm layers normalise by the batch, without changing their running statistics."""
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    found = [(layer.training, layer.track_running_stats, dict(layer._buffers)) for layer in layers]
    try:
        for layer in layers:
            layer.training, layer.track_running_stats = True, False
            layer._buffers["running_mean"] = layer._buffers["running_var"] = None
        yield
    finally:
        for layer, (training, track, buffers) in zip(layers, found, strict=True):
            layer.training, layer.track_running_stats = training, track
            layer._buffers.update(buffers)


def layer_statistics(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    layers: Mapping[str, nn.Module] | None = None,
    subject: str = "the network",
) -> dict[str, ChannelStatistics]:
    """The statistics of layers (by default all `repairable_layers`) that run, in the order in which they first run.

    Raises a `DataError`, with `subject` as the network's name, if an output is not finite or there is no batch.
    """
    found: dict[str, ChannelStatistics] = {}

    def on_output(name: str, layer: nn.Module, output: Tensor, use: int) -> None:
        found.setdefault(name, ChannelStatistics()).add(layer, output, use)

    run_with_hook(model, batches, on_output, repairable_layers(model) if layers is None else layers)
    for name, statistics in found.items():
        if not (torch.isfinite(statistics.mean).all() and torch.isfinite(statistics.std).all()):
            raise DataError(f"{subject} has activations that are not finite at '{name}', expected finite ones")
    return found


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
            num_seen = 0
            for layer in layers:
                layer.reset_running_stats()
                layer.train()
            for inputs in map(inputs_of, batches):
                num_here = num_examples(inputs)
                if num_here:
                    num_seen += num_here
                    for layer in layers:
                        layer.momentum = num_here / num_seen
                    outputs_of(model, inputs)
            if not num_seen:
                raise DataError("there was no batch to estimate BatchNorm statistics from: the data is empty")
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
