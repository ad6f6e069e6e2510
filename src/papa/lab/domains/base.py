"""What a run needs to know about its kind of data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from papa.evaluation.scores import Combine, mean_logits, mean_probabilities
from papa.lab.config import Config
from papa.lab.runs import RunDirectory
from papa.streams import global_stream
from papa.training import Transforms
from papa.training.data import Data
from papa.training.task import Task

COMBINE: Mapping[str, Combine] = {"logits": mean_logits, "probabilities": mean_probabilities}
"""How an ensemble combines outputs, by `average.ensemble`."""


@dataclass(frozen=True)
class Domain(ABC):
    """A loaded data set with the task, the networks and the transforms that belong to its kind of data.

    There is one subclass for images, one for text and one for tables.
    """

    config: Config
    class_dim = 1
    """The dimension of classes in a network's outputs."""

    @abstractmethod
    def split(self) -> Data:
        """Training, validation and test data."""

    @abstractmethod
    def task(self) -> Task:
        """Loss, metric, and how the ensemble combines outputs."""

    @abstractmethod
    def make_network(self) -> nn.Module:
        """One network, with initial weights from torch's global generator or from the file of the config."""

    @abstractmethod
    def card(self) -> dict[str, Any]:
        """What `papa.lab.loading.load` needs to build the network without the data; a part of `result.json`."""

    def transforms(self) -> Transforms:
        """Preparation and augmentation; by default none."""
        return Transforms()

    def write_files(self, run: RunDirectory) -> None:
        """Write what else belongs to a finished run; by default nothing."""
        return None

    def maker(self) -> Callable[[], nn.Module]:
        """A function that makes one member."""
        return partial(_alike, self) if self.config.diversity.same_init else self.make_network


def _alike(domain: Domain) -> nn.Module:
    """The first member, whoever asks."""
    with global_stream(domain.config.seed, "init", 0):
        return domain.make_network()
