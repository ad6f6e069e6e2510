"""Soups that are made in a network: of aligned networks, repaired, with learned weights, scored on data."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papa.align import Alignment, align_
from papa.core.soups import loss_and_gradients
from papa.errors import PapaError, SoupError
from papa.files.average import BLOCK, average, differences, in_dtypes, raise_differences, ranges
from papa.files.evaluation_context import EvaluationContext
from papa.files.weights import WeightsFile, open_weights
from papa.repair import goals_of, layer_statistics, repair_toward_, reset_batch_norm_
from papa.repair.statistics import ChannelStatistics
from papa.storage import file_errors
from papa.storage.tensors import Blocks, TensorInfo, write_tensors


@torch.no_grad()
def load_(network: nn.Module, blocks: Blocks, file: WeightsFile) -> None:
    """Load weights that come in blocks; `file` has the same names and shapes."""
    tensors = {name: one for name, one in network.state_dict(keep_vars=True).items() if isinstance(one, Tensor)}
    expected = {name: TensorInfo.of(tensor) for name, tensor in tensors.items()}
    subject = f"{file.path} does not fit the network {type(network).__name__}"
    raise_differences(subject, differences(expected, file.tensors))
    for name, target in tensors.items():
        flat = target.detach().view(-1) if target.is_contiguous() else torch.empty(target.numel(), dtype=target.dtype)
        for (start, stop), block in zip(ranges(target.numel()), blocks(name), strict=True):
            flat[start:stop].copy_(block)
        if not target.is_contiguous():
            target.copy_(flat.view(target.shape))


def blocks_of(network: nn.Module) -> Blocks:
    """The weights of a network."""
    state = network.state_dict()
    return lambda name: state[name].detach().cpu().reshape(-1).split(BLOCK)


class NetworkSoups:
    """Soups of files in the network of an evaluation context, whose weights are overwritten.

    Args:
        files: of one architecture.
        context: the network and data.
        repair: give averages the activation statistics of their members (REPAIR), BatchNorm included.
        reset_batch_norm: estimate the BatchNorm statistics of averages again.
    """

    def __init__(
        self, files: Sequence[WeightsFile], context: EvaluationContext, *, repair: bool, reset_batch_norm: bool
    ) -> None:
        self.files, self.context = list(files), context
        self._repair, self._reset = repair, reset_batch_norm
        self._statistics: dict[int, dict[str, ChannelStatistics]] = {}

    def changes(self, weights: Sequence[float]) -> bool:
        """Whether an average is repaired; a single one of several networks has the right statistics already."""
        return (self._repair or self._reset) and (sum(map(bool, weights)) > 1 or len(weights) == 1)

    def network(self, weights: Sequence[float], blocks: Blocks | None = None) -> nn.Module:
        """The network with the weighted average, or with the blocks of another average of the same files."""
        network, batches = self.context.network, self.context.batches
        is_changed = self.changes(weights)
        if is_changed and self._repair:
            for index, weight in enumerate(weights):
                if weight and index not in self._statistics:
                    subject = str(self.files[index].path)
                    self._statistics[index] = layer_statistics(self._member(index), batches, subject=subject)
        load_(network, average(self.files, weights) if blocks is None else blocks, self.files[0])
        if is_changed and self._repair:
            statistics = [self._statistics.get(index, {}) for index in range(len(weights))]
            repair_toward_(network, goals_of(statistics, torch.tensor(weights, dtype=torch.float64)), batches)
        elif is_changed:
            reset_batch_norm_(network, batches)
        return network

    def _member(self, index: int) -> nn.Module:
        load_(self.context.network, average(self.files[index : index + 1], [1.0]), self.files[index])
        return self.context.network

    def align(self, scratch: Path) -> list[Alignment | None]:
        """Replace every file but the first by a copy whose units match those of the first, by activations."""
        reference = copy.deepcopy(self._member(0))
        found: list[Alignment | None] = [None]
        for index, file in enumerate(self.files[1:], start=1):
            network = self._member(index)
            try:
                found.append(align_(network, reference, list(self.context.batches)))
            except PapaError:
                raise
            except RuntimeError as error:
                raise SoupError(f"the network {type(network).__name__} cannot be aligned: {error}") from error
            path = scratch / f"aligned-{index:03d}.safetensors"
            write_candidate(path, in_dtypes(blocks_of(network), file.tensors), file.tensors)
            self.files[index] = open_weights(path, key=".")
        return found

    def slope(self, weights: Tensor, batch: int) -> tuple[float, Tensor]:
        """The loss of a soup on a batch, and its derivative by each weight."""
        loss, gradients = loss_and_gradients(
            self.network(weights.tolist()), self.context.batches[batch], F.cross_entropy
        )
        products = torch.zeros(len(self.files), dtype=torch.float64)
        for name, gradient in gradients.items():
            for index, file in enumerate(self.files):
                for start, stop in ranges(gradient.numel()):
                    part = gradient.reshape(-1)[start:stop].cpu().double()
                    products[index] += torch.dot(part, file.part(name, start, stop).double())
        return loss, products


def write_candidate(path: Path, blocks: Blocks, tensors: Mapping[str, TensorInfo]) -> None:
    """Write a temporary file of weights."""
    with file_errors(path, "write", error=SoupError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, tensors, blocks, metadata={"format": "pt"})
