"""Members that diverge while they train: the others end as well as without them."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from group_jobs import train_with_nonfinite_member
from helpers import assert_same_bits, make_training
from papa import Independent, Push
from papa.core.group import LocalGroup
from papa.distributed.start import start_workers
from papa.evaluation.scores import Evaluation
from papa.training import Callback, EpochRecord, Numerics, Training, finalize

pytestmark = pytest.mark.filterwarnings("ignore:member .* the averager was not given its optimizer:UserWarning")


@pytest.mark.parametrize("policy", ["restart", "drop"])
def test_a_whole_training_over_two_ranks_survives_a_sick_member_as_one_process_does(policy: str) -> None:
    alone = train_with_nonfinite_member(LocalGroup(), policy)
    together = start_workers(train_with_nonfinite_member, 2, 3, policy)
    assert [event["member"] for event in alone["nonfinite"]] == [2]
    assert {**alone, "states": None} == {**together, "states": None}
    for first, second in zip(alone["states"], together["states"], strict=True):
        assert_same_bits(second, first)


class Poison(Callback):
    """Ruins one member's weights, gradients or loss at some step."""

    def __init__(self, what: str, member: int, step: int) -> None:
        self.what, self.member, self.step = what, member, step
        self.is_on = False
        self.step_losses: list[list[float]] = []
        self.epoch_losses: list[list[float]] = []

    def on_step_begin(self, training: Training) -> None:
        self.is_on = training.step >= self.step
        if self.what == "weights" and training.step == self.step:
            with torch.no_grad():
                next(training.population[self.member].parameters()).fill_(math.nan)
        if self.what == "gradient" and training.step == self.step:
            parameter = next(training.population[self.member].parameters())
            handle = parameter.register_hook(lambda gradient: handle.remove() or gradient * math.nan)
        if self.what == "momentum" and training.step == self.step:
            for state in training.optimizers[self.member].state.values():
                state["momentum_buffer"].fill_(math.inf)
        self.step_losses.append([])

    def on_step_end(self, training: Training) -> None:
        self.step_losses[-1] = training.recent_losses[(training.step - 1) % 3].tolist()

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        self.epoch_losses.append(record.losses)


def train_with(
    callback: Callback | None = None, rule: Any = None, on_nonfinite: Any = "restart", loss: Any = None
) -> tuple[Training, Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(600, 6, generator=generator)
    targets = (inputs[:, :3].sum(dim=1) > 0).long()
    training = make_training(
        lambda: nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)),
        (inputs, targets),
        num_members=3,
        num_epochs=6,
        batch_size=30,
        validation=0.2,
        rule=rule or Push(half_life_steps=8, every_steps=4),
        loss=loss or nn.functional.cross_entropy,
        metric=lambda outputs, targets: (outputs.argmax(dim=1) == targets).double().mean() * 100,
        make_optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        schedule=lambda step, num_steps: 1.0,
        augment=None,
        prepare=lambda inputs: inputs,
        seed=1,
        device="cpu",
        numerics=Numerics(),
        eval_batch_size=512,
        on_nonfinite=on_nonfinite,
        group=None,
    )
    training.run([callback] if callback else [])
    return training, finalize(training)


@pytest.fixture(scope="module")
def healthy() -> Any:
    return train_with()[1]


@pytest.mark.parametrize(
    ("what", "member", "step", "policy"),
    [
        ("weights", 0, 7, "restart"),
        ("momentum", 1, 29, "restart"),
        ("gradient", 1, 13, "restart"),
        ("gradient", 2, 50, "drop"),
        ("weights", 2, 64, "drop"),
        ("momentum", 0, 41, "drop"),
    ],
)
def test_the_others_end_as_healthy_as_without_it(healthy: Any, what: str, member: int, step: int, policy: str) -> None:
    poison = Poison(what, member, step)
    training, outcome = train_with(poison, on_nonfinite=policy)
    assert [event["member"] for event in training.nonfinite] == [member]
    assert outcome.to_json()["nonfinite"] == training.nonfinite
    others = [found.score for index, found in enumerate(outcome.validation.members) if index != member]
    assert min(others) > healthy.validation.mean - 5.0
    assert outcome.validation.average_soup.score > healthy.validation.average_soup.score - 5.0
    assert outcome.validation.ensemble.score > healthy.validation.ensemble.score - 5.0
    assert math.isnan(outcome.validation.members[member].score) == (policy == "drop")
    found, epoch = training.nonfinite[0]["step"], step // 16
    since = [losses[member] for losses in poison.step_losses[found : 16 * (epoch + 1)]]
    expected = sum(since) / len(since) if policy == "restart" and since else math.nan
    assert poison.epoch_losses[epoch][member] == pytest.approx(expected, nan_ok=True)
    assert all(math.isfinite(loss) for losses in poison.epoch_losses for j, loss in enumerate(losses) if j != member)


def test_a_loss_that_stays_not_finite_is_unhealthy_and_one_bad_loss_is_not() -> None:
    calls = {"count": 0, "bad": 0}

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        value = nn.functional.cross_entropy(outputs, targets)
        if torch.is_grad_enabled():
            calls["count"] += 1
            member, step = (calls["count"] - 1) % 3, (calls["count"] - 1) // 3
            if member == 1 and step in calls["steps"]:  # type: ignore[operator]
                return value + (math.inf - value.detach())  # the gradient is as healthy as ever
        return value

    calls["steps"] = {10}  # type: ignore[assignment]
    training, _ = train_with(loss=loss)
    assert training.nonfinite == []
    calls["count"], calls["steps"] = 0, set(range(10, 16))  # type: ignore[assignment]
    training, _ = train_with(loss=loss)
    assert [(event["member"], event["step"], event["reason"]) for event in training.nonfinite] == [
        (1, 16, "its loss was not finite for 3 steps")
    ]


def test_members_that_are_never_averaged_are_dropped_since_their_mean_is_no_network() -> None:
    training, outcome = train_with(Poison("weights", 1, 30), rule=Independent())
    assert [(event["member"], event["action"]) for event in training.nonfinite] == [(1, "dropped")]
    assert isinstance(outcome.validation.ensemble, Evaluation)
    assert outcome.validation.ensemble.score > 80
