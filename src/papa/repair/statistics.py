"""Means and standard deviations of what a network's layers say, channel by channel, over some batches."""

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
from papa.evaluation import evaluating
from papa.inputs import each, inputs_of, num_examples, outputs_of

Watch: TypeAlias = Callable[[str, nn.Module, Tensor, int], Tensor | None]
"""Told of a layer's name, the layer, its output and how often it ran before on this batch; may return what is to be
passed on instead."""


@dataclass
class ChannelStatistics:
    """Running sums of a layer's output, per channel, in float64: over all uses of the layer, and each use apart."""

    count: int = 0
    total: Tensor | None = None
    squares: Tensor | None = None
    uses: list[ChannelStatistics] = field(default_factory=list)

    def add(self, layer: nn.Module, output: Tensor, use: int = 0) -> None:
        """Count one more output, which the layer gave the `use`-th time it ran on a batch (from 0)."""
        channels = channels_last(layer, output).reshape(-1, num_channels(layer)).double()
        total, squares = channels.sum(dim=0), channels.square().sum(dim=0)
        while len(self.uses) <= use:
            self.uses.append(ChannelStatistics())
        for moments in (self, self.uses[use]):
            moments.count += len(channels)
            moments.total = total + (0.0 if moments.total is None else moments.total)
            moments.squares = squares + (0.0 if moments.squares is None else moments.squares)

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


@dataclass
class Record:
    """Which layers ran, in order, and their moments."""

    moments: dict[str, ChannelStatistics] = field(default_factory=dict)

    def __call__(self, name: str, layer: nn.Module, output: Tensor, use: int) -> None:
        """Count a layer's output."""
        self.moments.setdefault(name, ChannelStatistics()).add(layer, output, use)


def all_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Convolutions (plain, transposed, of any dimension) and linear layers, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, (_ConvNd, nn.Linear))}


def repairable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Those whose tensors are theirs alone."""
    users = Counter(id(tensor) for module in model.modules() for tensor in module._parameters.values())
    return {
        name: layer
        for name, layer in all_layers(model).items()
        if all(tensor is None or users[id(tensor)] == 1 for tensor in layer._parameters.values())
        and "weight" in layer._parameters  # not so under a parametrization, which makes it from others
    }


def num_channels(layer: nn.Module) -> int:
    """How many output channels a layer has."""
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)  # type: ignore[arg-type]


def channel_axis(layer: nn.Module, output: Tensor) -> int:
    """Which axis of a layer's output its channels are on."""
    if isinstance(layer, nn.Linear):
        return output.dim() - 1
    assert isinstance(layer, _ConvNd)
    return output.dim() - 1 - len(layer.kernel_size)


def channels_last(layer: nn.Module, output: Tensor) -> Tensor:
    """The output with its channels on the last axis."""
    return output.movedim(channel_axis(layer, output), -1)


@torch.no_grad()
def run_watched(model: nn.Module, batches: Iterable[Any], watch: Watch, layers: Mapping[str, nn.Module]) -> None:
    """Run batches through a network whose BatchNorm layers use batch statistics, telling `watch` of every layer.

    All else is as in evaluation, and everything is left as found, BatchNorm's running statistics included.
    """
    num_batches = 0
    uses: Counter[str] = Counter()

    def told(name: str, layer: nn.Module, output: Tensor) -> Tensor | None:
        uses[name] += 1
        return watch(name, layer, output, uses[name] - 1)

    with evaluating(model), batch_statistics(model), contextlib.ExitStack() as hooks:
        for name, layer in layers.items():
            hook = layer.register_forward_hook(lambda layer, _, output, name=name: told(name, layer, output))
            hooks.callback(hook.remove)
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
    """Let BatchNorm layers normalise by the batch for the block, without touching their running statistics."""
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
    model: nn.Module, batches: Iterable[Any], *, subject: str = "the network"
) -> dict[str, ChannelStatistics]:
    """The moments of every convolution and linear layer over the batches, in the order the layers first ran.

    Layers that do not run are left out. A layer that says something not finite is a `DataError`.
    """
    record = Record()
    run_watched(model, batches, record, repairable_layers(model))
    for name, moments in record.moments.items():
        if not (torch.isfinite(moments.mean).all() and torch.isfinite(moments.std).all()):
            raise DataError(f"{subject} has activations that are not finite at '{name}': it cannot be a parent")
    return record.moments


def feeds_batch_norm(model: nn.Module, batches: Iterable[Any]) -> dict[str, bool]:
    """The convolutions and linear layers that run, in order, and whether their output goes straight into BatchNorm.

    Looked up on two examples. A layer that runs several times feeds BatchNorm only if it does so every time.
    """
    waiting: dict[int, tuple[str, Tensor]] = {}  # holds on to the outputs, or another could get the same id
    num_runs: Counter[str] = Counter()
    num_fed: Counter[str] = Counter()

    def note(name: str, layer: nn.Module, output: Tensor, use: int) -> None:
        num_runs[name] += 1
        waiting[id(output)] = (name, output)

    def take(inputs: tuple[Any, ...]) -> None:
        name, _ = waiting.pop(id(inputs[0]) if inputs else 0, ("", None))
        num_fed[name] += 1

    filled = (inputs for batch in batches if num_examples(inputs := inputs_of(batch)))
    first = next((each(inputs, lambda part: part[:2]) for inputs in filled), None)
    with contextlib.ExitStack() as hooks:
        for layer in model.modules():
            if isinstance(layer, _BatchNorm):
                hooks.callback(layer.register_forward_pre_hook(lambda _, inputs: take(inputs)).remove)
        run_watched(model, [] if first is None else [first], note, all_layers(model))
    return {name: num_fed[name] == runs for name, runs in num_runs.items()}
