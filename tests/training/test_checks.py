"""What `papa.train` is given is looked at before anything is made of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import papa
from helpers import small_data, small_net
from papa.errors import ConfigError, DataError
from papa.training import Callback

INPUTS, TARGETS = torch.zeros(40, 4), torch.zeros(40, dtype=torch.long)


class Misspelt(Callback):
    """Would never be called."""

    def on_epoch_done(self, training: Any) -> None:
        """Too late."""


def train(**options: Any) -> papa.training.Outcome:
    return papa.train(
        **{
            "make_model": small_net,
            "data": small_data(),
            "num_members": 2,
            "num_epochs": 1,
            "batch_size": 16,
            **options,
        }
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callbacks": Callback()}, "callbacks is a Callback, expected a list of callbacks"),
        (
            {"callbacks": [Callback]},
            r"a callback is the class Callback, expected an instance of a subclass of papa\.training\.Callback",
        ),
        ({"callbacks": [3]}, "a callback is a int, expected an instance"),
        ({"make_optimizer": torch.optim.AdamW}, "make_optimizer is the class AdamW, .* such as lambda network: AdamW"),
        ({"numerics": "bfloat16"}, r"numerics is 'bfloat16', expected a papa\.training\.Numerics"),
        ({"device": "cuda:99"}, "device is cuda:99, which cannot be used here"),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(**options)


@pytest.mark.parametrize(
    "data",
    [
        (INPUTS, INPUTS, TARGETS),
        ((INPUTS, TARGETS), (INPUTS, TARGETS)),
        {"train": (INPUTS, TARGETS)},
        {"words": INPUTS, "labels": TARGETS},
    ],
)
def test_arrays_in_another_form_are_told_the_right_one(data: Any) -> None:
    with pytest.raises(DataError, match=r"expected a pair of tensors \(inputs, targets\)\. Several inputs go by name"):
        train(data=data)


def test_a_callback_method_that_is_never_called_is_reported() -> None:
    with pytest.warns(
        UserWarning, match="the callback Misspelt has on_epoch_done, which is never called: did you mean on_epoch_end"
    ):
        train(callbacks=[Misspelt()])


def test_a_network_that_makes_networks_may_make_optimizers_too() -> None:
    class Maker(nn.Module):
        def forward(self, network: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(network.parameters(), lr=0.1)

    assert train(make_optimizer=Maker()).validation.mean >= 0


def test_soups_come_ready_to_be_used() -> None:
    outcome = train(make_model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), device="auto")
    assert not outcome.average_soup.training
    assert not outcome.greedy.network.training
    assert all(member.training for member in outcome.population), "members can be trained on"
