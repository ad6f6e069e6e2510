"""Text: language models that predict the next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from papa.errors import ConfigError
from papa.lab.config import Config
from papa.lab.data.text import TextSet, load_text
from papa.lab.domains.base import Domain
from papa.lab.models.gpt import GPT
from papa.lab.models.weights import load_weights_
from papa.lab.runs import RunDirectory
from papa.lab.tasks.language import language_modelling
from papa.storage import write_atomically
from papa.training.data import Data
from papa.training.task import Task

TEXT = "text"
"""The name of the data."""


@dataclass(frozen=True)
class TextDomain(Domain):
    """A text and its tokenizer."""

    text: TextSet
    class_dim = -1

    def split(self) -> Data:
        return self.text.split(self.config.data.validation)

    def task(self) -> Task:
        return language_modelling(self.text.tokenizer.num_bytes(), ensemble=self.config.average.ensemble)

    def make_network(self) -> nn.Module:
        return make_language_model(self.config, self.text.tokenizer.vocab_size)

    def card(self) -> dict[str, Any]:
        return {"vocab_size": self.text.tokenizer.vocab_size}

    def write_files(self, run: RunDirectory) -> None:
        write_atomically(run.tokenizer, self.text.tokenizer.to_json())


def load_text_domain(config: Config) -> TextDomain:
    """The text of a config."""
    data, model = config.data, config.model
    if model.name != "gpt":
        raise ConfigError(f"--model.name is {model.name} with --data.name text, expected gpt")
    if model.pretrained:
        raise ConfigError("--model.pretrained is for networks of timm: give a file as --model.weights instead")
    text = load_text(
        data.root,
        context=data.context,
        test_share=data.test_share or 0.0,
        max_train=data.max_train,
        max_test=data.max_test,
    )
    return TextDomain(config, text)


def make_language_model(config: Config, vocab_size: int) -> nn.Module:
    """One language model, with initial weights from torch's global generator or from the file of the config."""
    gpt = config.gpt
    network = GPT(
        vocab_size=vocab_size,
        context=config.data.context,
        num_layers=gpt.layers,
        num_heads=gpt.heads,
        width=gpt.width,
        dropout=gpt.dropout,
        mlp=gpt.mlp,
        norm=gpt.norm,
        positions=gpt.positions,
        bias=gpt.bias,
    )
    if config.model.weights is not None:
        load_weights_(network, config.model.weights)
    return network
