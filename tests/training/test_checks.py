"""What `papa.train` is given is looked at before anything is made of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import papa
from helpers import small_data, small_net
from papa.errors import ConfigError, DataError
from papa.training import Callback, Numerics, Transforms

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


class HalfCounting:
    """A metric that forgot what it is for."""

    def counts(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Nothing."""
        return outputs


PLAIN = lambda inputs, targets, generator: (inputs, targets)  # noqa: E731


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callbacks": Callback()}, "callbacks is a Callback, expected a list of callbacks"),
        (
            {"callbacks": [Callback]},
            r"a callback is the class Callback, expected an instance of a subclass of papa\.training\.Callback",
        ),
        ({"callbacks": [3]}, "a callback is a int, expected an instance"),
        ({"rule": "papa"}, r"rule is a str, expected a rule such as papa\.MergeAll"),
        ({"rule": papa.MergeAll}, r"rule is the class MergeAll, expected an instance, such as MergeAll\(\.\.\.\)"),
        ({"make_model": nn.Linear(2, 2)}, "make_model is a Linear, expected a function that makes one for each member"),
        ({"make_optimizer": "sgd"}, "make_optimizer is a str, expected a function that makes one for each member"),
        ({"make_optimizer": torch.optim.AdamW}, "make_optimizer is the class AdamW, .* such as lambda network: AdamW"),
        (
            {"make_optimizer": lambda net: lr_scheduler.StepLR(torch.optim.SGD(net.parameters(), lr=0.1), 3)},
            "make_optimizer made a StepLR, expected a torch.optim.Optimizer: return the optimizer, and pass",
        ),
        ({"loss": "cross-entropy"}, "loss is a str, expected a function"),
        ({"loss": nn.CrossEntropyLoss}, "loss is the class CrossEntropyLoss, expected an instance: Cross"),
        ({"metric": "accuracy"}, "metric is a str, expected a function"),
        ({"metric": HalfCounting()}, "metric is a HalfCounting without score and details, expected a function, or an"),
        ({"task": papa.Task(apply=None)}, "apply is a NoneType, expected a function"),  # type: ignore[arg-type]
        ({"schedule": "cosine"}, "schedule is a str, expected a function"),
        ({"schedule": lr_scheduler.StepLR}, r"schedule is the class StepLR, .* make_scheduler=lambda"),
        ({"make_scheduler": 3}, "make_scheduler is a int, expected a function"),
        ({"make_scheduler": lambda optimizer, num_steps: 3}, "make_scheduler made a int, expected a scheduler"),
        (
            {"make_scheduler": lambda optimizer, num_steps: lr_scheduler.ReduceLROnPlateau(optimizer)},
            "made a ReduceLROnPlateau, which waits for scores",
        ),
        ({"numerics": "bf16"}, r"numerics is 'bf16', expected a papa\.training\.Numerics, such as .*autocast=torch"),
        ({"numerics": Numerics(autocast="bf16")}, "autocast is 'bf16', expected a dtype, such as torch"),  # type: ignore[arg-type]
        ({"transforms": Transforms(prepare=3)}, "prepare is a int, expected a function"),  # type: ignore[arg-type]
        ({"transforms": Transforms(augment=[PLAIN])}, "augment has 1 entries, expected one for each of 2 members"),
        ({"device": "cuda:99"}, "device is cuda:99, which cannot be used here"),
        ({"num_members": 0}, "num_members is 0, expected a whole number, at least 1"),
        ({"accumulate": 0}, r"accumulate is 0, expected a whole number, at least 1"),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(**options)


def test_a_step_of_more_examples_than_there_are_is_refused() -> None:
    with pytest.raises(DataError, match="batch_size is 1000, expected at most the 80 training examples"):
        train(batch_size=1000)
    with pytest.raises(DataError, match=r"batch_size is 16 and accumulate 6, which makes 96 examples per step, .* 80"):
        train(accumulate=6)


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
