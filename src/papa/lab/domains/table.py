"""Tables: a multilayer perceptron on rows of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from papa.errors import ConfigError
from papa.lab.config import Config
from papa.lab.data.table import TEST_SHARE, TableSet, load_table
from papa.lab.domains.base import COMBINE, Domain
from papa.lab.models.networks import MLP
from papa.lab.models.weights import load_weights_
from papa.training.data import Data
from papa.training.task import Task


@dataclass(frozen=True)
class TableDomain(Domain):
    """A table whose rows have a class each."""

    table: TableSet

    def split(self) -> Data:
        return self._split()[0]

    def task(self) -> Task:
        return Task(combine=COMBINE[self.config.average.ensemble])

    def make_network(self) -> nn.Module:
        return make_mlp(self.config, self.table.features.shape[1], len(self.table.classes))

    def card(self) -> dict[str, Any]:
        _, mean, std = self._split()
        return {"mean": mean.tolist(), "std": std.tolist(), "classes": list(self.table.classes)}

    def _split(self) -> tuple[Data, Tensor, Tensor]:
        data = self.config.data
        return self.table.split(data.validation, data.test_share or TEST_SHARE, seed=self.config.seed)


def load_table_domain(config: Config) -> TableDomain:
    """The table of a config."""
    data, model = config.data, config.model
    if model.name != "mlp":
        raise ConfigError(f"--model.name is {model.name} with --data.name {data.name}, expected mlp")
    if model.pretrained:
        raise ConfigError("--model.pretrained is for networks of timm: give a file as --model.weights instead")
    if config.diversity.grid != "none":
        raise ConfigError(f"--diversity.grid is {config.diversity.grid}, which is for images, expected none")
    return TableDomain(config, load_table(data.name, data.root, max_train=data.max_train, max_test=data.max_test))


def make_mlp(config: Config, num_features: int, num_classes: int) -> nn.Module:
    """One network, with initial weights from torch's global generator or from the file of the config."""
    model = config.model
    network = MLP(num_features, num_classes, width=model.width or MLP.WIDTH, dropout=model.dropout)
    if model.weights is not None:
        load_weights_(network, model.weights)
    return network
