"""From a row of weights to a soup: the mean of checkpoints, aligned before and repaired after where that is asked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from papa.align import Alignment
from papa.errors import ConfigError
from papa.evaluation import Evaluation
from papa.files.average import Mean, output_tensors
from papa.files.evaluation_context import EvaluationContext, align_to_, load_
from papa.files.header import TensorInfo
from papa.files.scores import run_score_command, split_command
from papa.files.sources import Checkpoint, SafetensorsFile, TensorDict
from papa.files.writing import told_as_soup_errors, write_file
from papa.repair import goals_of, layer_statistics, repair_toward_, reset_batch_norm_
from papa.repair.statistics import ChannelStatistics

NO_KITCHEN = (
    "aligning, repairing and resetting BatchNorm need a network and data: name a --recipe, or a --factory "
    "package.module:function that returns (network, batches)"
)
Watch = Callable[[int, int], object]
"""Told how many bytes of how many are written."""
Tell = Callable[[Sequence[Path], float], object]
"""Told which files were averaged, and how they scored."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What is done to networks besides averaging them; all of it needs a evaluation_context."""

    align: bool = False
    """Permute each network's units to match the first's, before averaging."""
    repair: bool = False
    """Give each average the activation statistics of what it is made of (REPAIR), BatchNorm included."""
    reset_batch_norm: bool = False
    """Estimate each average's BatchNorm statistics anew."""

    @property
    def after(self) -> bool:
        """Whether an average is changed after it was made."""
        return self.repair or self.reset_batch_norm

    def check(self, evaluation_context: EvaluationContext | None) -> None:
        """Raise a `ConfigError` when there is no evaluation_context to do these in."""
        if evaluation_context is None and (self.align or self.after):
            raise ConfigError(NO_KITCHEN)


class SoupBuilder:
    """Makes soups of some checkpoints, any number of them.

    Args:
        checkpoints: of one architecture.
        workshop: a directory for files that are only needed while cooking; made when needed.
        dtype: what floating-point tensors are stored in; None for the first checkpoint's.
        evaluation_context: the network and data for `steps`.
        steps: what is done besides averaging.
    """

    def __init__(
        self,
        checkpoints: Sequence[Checkpoint],
        workshop: Path,
        *,
        dtype: torch.dtype | None = None,
        evaluation_context: EvaluationContext | None = None,
        steps: Steps = Steps(),  # noqa: B008
    ) -> None:
        steps.check(evaluation_context)
        self.checkpoints = list(checkpoints)
        self.workshop, self.evaluation_context, self.steps = workshop, evaluation_context, steps
        self.tensors = output_tensors(checkpoints, dtype)
        self._moments: dict[int, dict[str, ChannelStatistics]] = {}

    def align(self) -> list[Alignment | None]:
        """Replace every checkpoint but the first by a copy whose units match the first's."""
        evaluation_context = self.require_kitchen()
        self.load(0)
        reference = copy.deepcopy(evaluation_context.network)
        found: list[Alignment | None] = [None]
        for index in range(1, len(self.checkpoints)):
            self.load(index)
            found.append(align_to_(evaluation_context.network, reference, evaluation_context.batches))
            path = self._room(f"aligned-{index:03d}.safetensors")
            held = TensorDict(path, evaluation_context.network.state_dict())
            tensors = self.checkpoints[index].tensors
            write_file(path, tensors, _stored(Mean([held], [1.0]), tensors), {})
            self.checkpoints[index] = SafetensorsFile(path)
        return found

    def require_kitchen(self) -> EvaluationContext:
        """The evaluation_context, or a `ConfigError` when there is none."""
        if self.evaluation_context is None:
            raise ConfigError(NO_KITCHEN)
        return self.evaluation_context

    def _room(self, name: str) -> Path:
        with told_as_soup_errors(self.workshop):
            self.workshop.mkdir(parents=True, exist_ok=True)
        return self.workshop / name

    def load(self, index: int) -> nn.Module:
        """The evaluation_context's network with the weights of one checkpoint."""
        row = [float(index == other) for other in range(len(self.checkpoints))]
        network = self.require_kitchen().network
        load_(network, Mean(self.checkpoints, row), self.checkpoints[index])
        return network

    def network(self, row: Sequence[float]) -> nn.Module:
        """The evaluation_context's network with the weights of a soup, repaired where that is asked."""
        evaluation_context = self.require_kitchen()
        if self._is_repaired(row) and self.steps.repair:
            for index, weight in enumerate(row):
                if weight and index not in self._moments:
                    subject = str(self.checkpoints[index].path)
                    self._moments[index] = layer_statistics(
                        self.load(index), evaluation_context.batches, subject=subject
                    )
        load_(evaluation_context.network, Mean(self.checkpoints, row), self.checkpoints[0])
        if self._is_repaired(row):
            if self.steps.repair:
                moments = [self._moments.get(index, {}) for index in range(len(row))]
                goals = goals_of(moments, torch.tensor(row, dtype=torch.float64))
                repair_toward_(evaluation_context.network, goals, evaluation_context.batches)
            else:
                reset_batch_norm_(evaluation_context.network, evaluation_context.batches)
        return evaluation_context.network

    def _is_repaired(self, row: Sequence[float]) -> bool:
        """One network of several has the right statistics already; one that came alone is repaired as asked."""
        return self.steps.after and (sum(map(bool, row)) > 1 or len(row) == 1)

    def blocks(self, row: Sequence[float]) -> Callable[[str], Iterator[Tensor]]:
        """A soup as it is stored, tensor by tensor and block by block."""
        if not self._is_repaired(row):
            return _stored(Mean(self.checkpoints, row), self.tensors)
        held = TensorDict(Path("the repaired soup"), self.network(row).state_dict())
        return _stored(Mean([held], [1.0]), self.tensors)

    def write_candidate(self, row: Sequence[float]) -> Path:
        """A soup in a file of the workshop."""
        path = self._room("candidate.safetensors")
        write_file(path, self.tensors, self.blocks(row), {"format": "pt"})
        return path


def _stored(mean: Mean, tensors: Mapping[str, TensorInfo]) -> Callable[[str], Iterator[Tensor]]:
    return lambda name: mean.blocks_as(name, tensors[name].dtype)


ScoreFile = Callable[[Path], float]


class Scorer:
    """Scores soups: by a command, by a function of a file, or in the evaluation_context.

    Args:
        builder: makes the soups.
        score: a command in which `{}` stands for the file, or a function of the file; None for the evaluation_context's own.
    """

    def __init__(self, builder: SoupBuilder, score: str | ScoreFile | None) -> None:
        if score is None and builder.evaluation_context is None:
            raise ConfigError(
                "a greedy soup needs scores: give a --score command that prints a number for the file {}, a --recipe, "
                "or a --factory"
            )
        self._cook = builder
        self._words = split_command(score) if isinstance(score, str) else None
        self._function = score if callable(score) else None
        self.name = _name_of(score, builder.evaluation_context)

    def __call__(self, row: Sequence[float]) -> Evaluation:
        """A soup's score, and its loss where it is known."""
        if self._words is not None:
            return Evaluation(run_score_command(self._words, self._cook.write_candidate(row)), float("nan"))
        if self._function is not None:
            return Evaluation(float(self._function(self._cook.write_candidate(row))), float("nan"))
        network = self._cook.network(row)
        return self._cook.require_kitchen().evaluate(network)


def _name_of(score: str | ScoreFile | None, evaluation_context: EvaluationContext | None) -> str:
    if isinstance(score, str):
        return score
    if score is not None:
        return getattr(score, "__qualname__", type(score).__name__)
    return "" if evaluation_context is None else evaluation_context.name
