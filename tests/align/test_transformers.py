"""Alignment of transformers: heads, hidden units and the residual stream, with tied weights and rotary positions."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import papa
from align_networks import noisy_, random_permutations, same
from papa.align import permute_all_
from papa.lab.data.text import Characters, Windows
from papa.lab.models.gpt import GPT
from papa.lab.tasks.language import language_modelling
from papa.training import Numerics
from papa.training.data import Data
from texts import sample_text

SIZES: dict[str, Any] = {"vocab_size": 25, "context": 16, "num_layers": 2, "num_heads": 2, "width": 16}
STYLES: list[dict[str, Any]] = [
    {},
    {"mlp": "swiglu", "norm": "rms", "positions": "rotary", "bias": False},
]


@pytest.mark.parametrize("style", STYLES)
@torch.no_grad()
def test_units_are_permuted_without_a_change_and_found_again(style: dict[str, Any]) -> None:
    torch.manual_seed(0)
    network, tokens = noisy_(GPT(**SIZES, **style), 0.05).eval(), torch.randint(25, (4, 16))
    found = papa.symmetries(network, tokens)
    heads = [group for group in found if "qkv" in group.name and not group.is_inner]
    assert [group.size for group in heads] == [2, 2]
    assert sum(not group.is_inner for group in found) == 5  # the residual stream, heads and hidden units of two blocks
    twin = copy.deepcopy(network)
    permute_all_(twin, found, random_permutations(found))
    torch.testing.assert_close(twin(tokens), network(tokens), rtol=1e-4, atol=1e-5)
    assert twin.head.weight is twin.embedding.weight
    papa.align_(noisy_(twin, 1e-4), network, [tokens, tokens.flip(0)], by="weights", symmetries=found)
    assert same(twin, network, tolerance=0.01)


def train_two() -> tuple[papa.Outcome, Data]:
    """Two small transformers, trained independently of each other."""
    text = sample_text(400)
    tokenizer = Characters(text)
    tokens = tokenizer.encode(text)
    train, validation = (Windows(part, context=16) for part in tokens.split([6000, len(tokens) - 6000]))
    data = Data(train=train, validation=validation)
    outcome = papa.train(
        partial(GPT, **{**SIZES, "num_layers": 1}),
        data,
        num_members=2,
        num_epochs=8,
        batch_size=16,
        rule=papa.Independent(),
        task=language_modelling(tokenizer.num_bytes()),
        make_optimizer=lambda network: torch.optim.AdamW(network.parameters(), lr=5e-3),
        numerics=Numerics(clip_norm=1.0),
        device="cpu",
    )
    return outcome, data


def test_alignment_lowers_the_barrier_between_two_trained_transformers() -> None:
    outcome, data = train_two()
    first, second = outcome.population
    batches = [data.validation.batch(torch.arange(32))]
    inputs = [data.train.batch(part)[0] for part in torch.arange(128).split(32)]
    task = language_modelling([1] * 25)

    def barrier(other: nn.Module) -> float:
        return papa.interpolate(first, other, batches, loss=task.loss, metric=task.metric, num_points=5).barrier

    aligned = copy.deepcopy(second)
    papa.align_(aligned, first, inputs)
    torch.testing.assert_close(aligned(inputs[0]), second(inputs[0]), rtol=1e-4, atol=1e-4)
    assert barrier(aligned) < 0.6 * barrier(second)
