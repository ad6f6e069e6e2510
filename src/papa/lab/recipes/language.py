"""From a config to what the training of a language model takes: text, network, task."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from papa.errors import ConfigError
from papa.lab.config import Config
from papa.lab.data.text import TextSet, load_text
from papa.lab.models import from_transformers
from papa.lab.models.gpt import GPT
from papa.lab.models.weights import load_weights_
from papa.lab.tasks.language import language_modelling
from papa.task import Task

TEXT = "text"
"""The name of the data."""


def text_for(config: Config) -> TextSet:
    """The text of a config."""
    data = config.data
    return load_text(
        data.root,
        context=data.context,
        tokenizer=data.tokenizer,
        vocab_size=data.vocab_size,
        validation=data.validation,
        test_share=data.test_share or 0.0,
        max_train=data.max_train,
        max_test=data.max_test,
    )


def language_task_for(config: Config, text: TextSet) -> Task:
    """Predicting the next token."""
    return language_modelling(text.tokenizer.num_bytes(), ensemble=config.average.ensemble)


def language_model_for(config: Config, vocab_size: int) -> Callable[[], nn.Module]:
    """A function that makes one language model."""
    name = config.model.name
    if name != "gpt" and not name.startswith(from_transformers.PREFIX):
        known = f"gpt, or {from_transformers.PREFIX}TYPE for a causal model of transformers"
        raise ConfigError(f"--model.name is {name} with --data.name text, expected {known}")
    if config.model.pretrained and name == "gpt":
        raise ConfigError("--model.pretrained is for transformers:PATH: give a file as --model.weights instead")
    return partial(make_language_model, config, vocab_size)


def make_language_model(config: Config, vocab_size: int) -> nn.Module:
    """One language model, with initial weights from torch's global generator or from the file of the config."""
    gpt, model = config.gpt, config.model
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "context": config.data.context,
        "num_layers": gpt.layers,
        "num_heads": gpt.heads,
        "width": gpt.width,
        "dropout": gpt.dropout,
    }
    network: nn.Module
    if model.name == "gpt":
        network = GPT(**sizes, mlp=gpt.mlp, norm=gpt.norm, positions=gpt.positions, tied=gpt.tied, bias=gpt.bias)
    else:
        is_pretrained = model.pretrained and model.weights is None
        network = from_transformers.make_causal_model(model.name, **sizes, pretrained=is_pretrained)
    if config.model.weights is not None:
        load_weights_(network, config.model.weights)
    return network
