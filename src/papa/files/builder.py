"""From weights per file to a soup: the average, optionally of aligned networks, optionally repaired."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papa.align import Alignment
from papa.core.soups import loss_and_gradients
from papa.errors import ConfigError, SoupError
from papa.evaluation.scores import Evaluation
from papa.files.average import WeightedAverage, output_tensors
from papa.files.evaluation_context import EvaluationContext, align_to_, load_average_
from papa.files.scores import run_score_command, split_command
from papa.files.weights import WeightsFile, safetensors_weights, weights_in_memory
from papa.repair import goals_of, layer_statistics, repair_toward_, reset_batch_norm_
from papa.repair.statistics import ChannelStatistics
from papa.storage import file_errors
from papa.storage.tensors import Blocks, TensorInfo, write_tensors


@dataclass(frozen=True, kw_only=True)
class SoupSteps:
    """What is done besides averaging; all of it needs an evaluation context."""

    align: bool = False
    """Permute each network's units to match those of the first, before averaging."""
    repair: bool = False
    """Give each average the activation statistics of its members (REPAIR), BatchNorm included."""
    reset_batch_norm: bool = False
    """Estimate the BatchNorm statistics of each average again."""

    @property
    def changes_average(self) -> bool:
        """Whether an average is changed after it was made."""
        return self.repair or self.reset_batch_norm


class SoupBuilder:
    """Makes soups of files of one architecture; `scratch` is a directory for temporary files, made when needed."""

    def __init__(
        self,
        files: Sequence[WeightsFile],
        scratch: Path,
        *,
        dtype: torch.dtype | None = None,
        context: EvaluationContext | None = None,
        steps: SoupSteps = SoupSteps(),
        merge: WeightedAverage | None = None,
    ) -> None:
        self.files, self.scratch, self._context, self.steps = list(files), scratch, context, steps
        if steps.align or steps.changes_average:
            _ = self.context
        self.tensors = output_tensors(files, dtype)
        self._statistics: dict[int, dict[str, ChannelStatistics]] = {}
        self.merge = merge
        """What is written in place of the weighted average, if any."""

    @property
    def context(self) -> EvaluationContext:
        """The evaluation context, or a `ConfigError` if there is none."""
        if self._context is None:
            raise ConfigError(
                "aligning, repairing and resetting BatchNorm need a network and data: give an evaluation context, or a "
                "function package.module:function that returns (network, batches)"
            )
        return self._context

    @property
    def has_context(self) -> bool:
        """Whether there is an evaluation context."""
        return self._context is not None

    def align(self) -> list[Alignment | None]:
        """Replace every file but the first by a copy whose units match those of the first."""
        reference = copy.deepcopy(self._load(0))
        found: list[Alignment | None] = [None]
        for index in range(1, len(self.files)):
            network, tensors = self._load(index), self.files[index].tensors
            found.append(align_to_(network, reference, self.context.batches))
            path = self._write(f"aligned-{index:03d}", tensors, _stored_network(network, tensors))
            self.files[index] = safetensors_weights(path)
        return found

    def _write(self, name: str, tensors: Mapping[str, TensorInfo], blocks: Blocks) -> Path:
        path = self.scratch / f"{name}.safetensors"
        with file_errors(path, "write", error=SoupError):
            self.scratch.mkdir(parents=True, exist_ok=True)
            write_tensors(path, tensors, blocks, metadata={"format": "pt"})
        return path

    def _load(self, index: int) -> nn.Module:
        """The context's network with the weights of one file."""
        average = WeightedAverage(self.files[index : index + 1], [1.0])
        load_average_(self.context.network, average, self.files[index])
        return self.context.network

    def network(self, weights: Sequence[float]) -> nn.Module:
        """The context's network with the weights of a soup, repaired if requested."""
        network, batches = self.context.network, self.context.batches
        is_changed = self._is_changed(weights)
        if is_changed and self.steps.repair:
            for index, weight in enumerate(weights):
                if weight and index not in self._statistics:
                    subject = str(self.files[index].path)
                    self._statistics[index] = layer_statistics(self._load(index), batches, subject=subject)
        load_average_(network, self._average(weights), self.files[0])
        if is_changed and self.steps.repair:
            statistics = [self._statistics.get(index, {}) for index in range(len(weights))]
            repair_toward_(network, goals_of(statistics, torch.tensor(weights, dtype=torch.float64)), batches)
        elif is_changed:
            reset_batch_norm_(network, batches)
        return network

    def _is_changed(self, weights: Sequence[float]) -> bool:
        """A single one of several networks has the right statistics already."""
        return self.steps.changes_average and (sum(map(bool, weights)) > 1 or len(weights) == 1)

    def blocks(self, weights: Sequence[float]) -> Blocks:
        """A soup in its stored dtypes, tensor by tensor and block by block."""
        if self._is_changed(weights):
            return _stored_network(self.network(weights), self.tensors)
        return stored_blocks(self._average(weights), self.tensors)

    def _average(self, weights: Sequence[float]) -> WeightedAverage:
        return WeightedAverage(self.files, weights) if self.merge is None else self.merge

    def slope(self, weights: Tensor, batch: int) -> tuple[float, Tensor]:
        """The loss of a soup on a batch of the evaluation context, and its derivative by each weight."""
        network = self.network(weights.tolist())
        loss, gradients = loss_and_gradients(network, self.context.batches[batch], F.cross_entropy)
        return loss, torch.tensor([_product(gradients, file) for file in self.files], dtype=torch.float64)

    def write_candidate(self, weights: Sequence[float]) -> Path:
        """Write a soup to a file in the scratch directory."""
        return self._write("candidate", self.tensors, self.blocks(weights))


def _product(gradients: Mapping[str, Tensor], file: WeightsFile) -> float:
    """The sum of the products of gradients and the weights in a file."""
    total = 0.0
    for name, gradient in gradients.items():
        start = 0
        for block in WeightedAverage([file], [1.0]).blocks(name):
            part = gradient.reshape(-1)[start : start + block.numel()]
            total += float((part.double() * block.double()).sum())
            start += block.numel()
    return total


def stored_blocks(average: WeightedAverage, tensors: Mapping[str, TensorInfo]) -> Blocks:
    """An average in the dtypes it is stored in."""
    return lambda name: average.blocks_as(name, tensors[name].dtype)


def _stored_network(network: nn.Module, tensors: Mapping[str, TensorInfo]) -> Blocks:
    held = weights_in_memory(Path("the network"), network.state_dict())
    return stored_blocks(WeightedAverage([held], [1.0]), tensors)


ScoreFile = Callable[[Path], float]


class Scorer:
    """Scores soups: by a command in which `{}` stands for the file, by a function of the file, or in the context."""

    def __init__(self, builder: SoupBuilder, score: str | ScoreFile | None) -> None:
        if score is None and not builder.has_context:
            raise ConfigError(
                "a greedy soup needs scores: give a score command that prints a number for the file {}, a function of "
                "the file, or an evaluation context"
            )
        self._builder = builder
        self._score_file: ScoreFile | None
        if isinstance(score, str):
            self.name, self._score_file = score, partial(run_score_command, split_command(score))
        elif score is not None:
            self.name, self._score_file = getattr(score, "__qualname__", type(score).__name__), score
        else:
            self.name, self._score_file = builder.context.name, None

    def __call__(self, weights: Sequence[float]) -> Evaluation:
        """A soup's score, and its loss if it is known."""
        if self._score_file is None:
            return self._builder.context.evaluate(self._builder.network(weights))
        return Evaluation(float(self._score_file(self._builder.write_candidate(weights))), float("nan"))
