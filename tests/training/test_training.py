import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import assert_same_bits, small_data
from papa import Independent, MergeAll, Push, Rule, train
from papa.errors import DataError
from papa.streams import global_stream, stream
from papa.training import AveragingOptions, Callback, EpochRecord, Length, Numerics, Repair, Training
from papa.training.data import Data
from papa.training.entry import default_push
from papa.training.schedules import cosine


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def test_training_is_algorithm_1_written_as_a_plain_loop() -> None:
    data, seed, num_epochs, batch_size, alpha = small_data(), 3, 4, 16, 0.7
    outcome = train(
        make_net,
        data,
        num_members=3,
        num_epochs=num_epochs,
        batch_size=batch_size,
        rule=Push(alpha=alpha, every_steps=2),
        schedule=cosine(0.01),
        seed=seed,
    )
    nets = []
    for member in range(3):
        with global_stream(seed, "init", member):
            nets.append(make_net())
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4) for net in nets]
    steps_per_epoch = len(data.train) // batch_size
    num_steps = num_epochs * steps_per_epoch
    for step in range(num_steps):
        epoch, position = divmod(step, steps_per_epoch)
        for member, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            order = torch.randperm(len(data.train), generator=stream(seed, "order", member, epoch))
            inputs, targets = data.train.batch(order[position * batch_size : (position + 1) * batch_size])
            optimizer.param_groups[0]["lr"] = 0.1 * cosine(0.01)(step, num_steps)
            optimizer.zero_grad()
            with global_stream(seed, "forward", member, step):
                loss = F.cross_entropy(net(inputs), targets)
            loss.backward()
            optimizer.step()
        if (step + 1) % 2 == 0:
            keep = 1 - (1 - alpha) * cosine(0.01)(step + 1, num_steps)
            for tensors in zip(*(net.state_dict().values() for net in nets), strict=True):
                if tensors[0].is_floating_point():
                    mean = torch.stack(tensors).mean(dim=0)
                    for tensor in tensors:
                        tensor.copy_(keep * tensor + (1 - keep) * mean)
    for net, trained in zip(nets, outcome.population, strict=True):
        for key, value in net.state_dict().items():
            torch.testing.assert_close(trained.state_dict()[key], value, rtol=1e-4, atol=1e-5)


def test_training_leaves_the_global_generator_as_found() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    train(make_net, small_data(), num_members=2, num_epochs=1, batch_size=16)
    assert torch.equal(before, torch.random.get_rng_state())


def test_merges_leave_out_the_last_step_so_members_end_apart() -> None:
    outcome = train(
        make_net,
        small_data(),
        num_members=3,
        num_epochs=2,
        batch_size=16,
        rule=lambda training: MergeAll(every_steps=training.steps_in(1)),
    )
    assert outcome.population.distances().min() > 0


def test_scores_of_one_member_agree_however_they_are_made() -> None:
    outcome = train(make_net, small_data(), num_members=1, num_epochs=3, batch_size=16)
    assert outcome.test is not None
    member = outcome.test.members[0].score
    assert outcome.test.ensemble.score == outcome.test.average_soup.score == outcome.test.greedy_soup.score == member
    assert outcome.greedy.members == (0,)


@pytest.mark.parametrize("num_members", [1, 2])
def test_the_score_of_the_soup_after_an_epoch_is_that_of_the_mean_network(num_members: int) -> None:
    scores = []

    class Look(Callback):
        def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
            scores.append((record.validation.average_soup, training.score(training.current_soup())))

    train(make_net, small_data(), num_members=num_members, num_epochs=3, batch_size=16, callbacks=[Look()])
    assert len(scores) == 3
    assert all(found == expected for found, expected in scores)


def test_the_default_push_is_due_in_the_shortest_trainings_too() -> None:
    shortest, short = (default_push(Length(num_steps=num_steps, steps_per_epoch=6)) for num_steps in (6, 3920))
    assert (shortest.every_steps, shortest.half_life_steps) == (1, 1.0)
    assert (short.every_steps, short.half_life_steps) == (10, pytest.approx(39.2))


def test_a_callback_may_end_the_training_early() -> None:
    class Patience(Callback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
            if record.epoch == 2:
                training.stop()

        def on_step_complete(self, training: Training) -> None:
            self.steps.append(training.step)

    patience = Patience()
    outcome = train(make_net, small_data(), num_members=2, num_epochs=5, batch_size=16, callbacks=[patience])
    assert patience.steps == list(range(1, 11))
    assert outcome.validation.mean >= 0.0


def test_the_default_push_brings_members_together_and_its_soup_works() -> None:
    outcome = train(make_net, small_data(1200), num_members=4, num_epochs=8, batch_size=16)
    apart = train(make_net, small_data(1200), num_members=4, num_epochs=8, batch_size=16, rule=Independent())
    assert outcome.test is not None
    assert outcome.population.distances().max() < 0.5 * apart.population.distances().min()
    assert outcome.test.average_soup.score > 85


class Joined(nn.Module):
    """The network of this file on what it is given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        outputs: Tensor = self.net(torch.cat([inputs["left"], inputs["right"]], dim=1))
        return outputs


class ByKeyword(Joined):
    """The same, with an argument for each."""

    def forward(self, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        outputs: Tensor = self.net(torch.cat([left, right], dim=1)) * scale
        return outputs


@pytest.mark.parametrize("make", [Joined, ByKeyword])
@pytest.mark.parametrize("rule", [Push(alpha=0.7, every_steps=2), MergeAll(every_steps=7)])
def test_inputs_by_name_train_to_the_same_bits_as_one_tensor_of_all(rule: Rule, make: type[Joined]) -> None:
    data = small_data()
    parts = {
        name: ({"left": inputs[:, :1], "right": inputs[:, 1:]}, targets)
        for name in ("train", "validation", "test")
        for inputs, targets in [getattr(data, name).batch(torch.arange(80))]
    }
    options = {
        "num_members": 2,
        "num_epochs": 3,
        "batch_size": 16,
        "rule": rule,
        "averaging": AveragingOptions(repair=Repair(num_batches=2)),
    }
    one = train(make_net, data, **options)
    several = train(make, Data(**parts), **options)
    for net, joined in zip(one.population, several.population, strict=True):
        assert_same_bits(net.state_dict(), joined.net.state_dict())
    assert one.test is not None
    assert one.test == several.test


def test_a_regression_with_a_loss_and_metric_of_ones_own() -> None:
    inputs = torch.randn(200, 4)
    outcome = train(
        lambda: nn.Linear(4, 1),
        (inputs, inputs.sum(dim=1, keepdim=True)),
        num_members=2,
        num_epochs=20,
        batch_size=20,
        loss=F.mse_loss,
        metric=lambda outputs, targets: -F.mse_loss(outputs, targets),
        make_optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.05),
    )
    assert -0.01 < outcome.validation.average_soup.score <= 0


@pytest.mark.parametrize(
    "numerics",
    [
        Numerics(autocast=torch.bfloat16, channels_last=True),
        Numerics(autocast=torch.float16, clip_norm=1.0),
        Numerics(clip_norm=0.1),
    ],
)
def test_numerics_train_convolutions(numerics: Numerics) -> None:
    inputs, targets = torch.randn(64, 3, 8, 8), torch.randint(2, (64,))
    net = lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2))  # noqa: E731

    def make() -> nn.Module:
        model = net()
        model(torch.zeros(2, 3, 8, 8))
        return model

    outcome = train(make, (inputs, targets), num_members=2, num_epochs=2, batch_size=16, numerics=numerics)
    weight = next(outcome.population[0].parameters())
    assert weight.is_contiguous(memory_format=torch.channels_last) == numerics.channels_last
    assert all(math.isfinite(member.loss) for member in outcome.validation.members)


def test_accumulated_batches_are_the_step_of_a_larger_batch() -> None:
    options: dict[str, Any] = {"num_members": 2, "num_epochs": 2, "rule": Push(alpha=0.7, every_steps=2)}
    whole = train(lambda: nn.Linear(4, 3), small_data(246), batch_size=16, **options)
    parts = train(lambda: nn.Linear(4, 3), small_data(246), batch_size=4, accumulate=4, **options)
    assert parts.population.matrix.shape == whole.population.matrix.shape
    torch.testing.assert_close(parts.population.matrix, whole.population.matrix, rtol=1e-5, atol=1e-6)


def test_clipping_bounds_the_step() -> None:
    data = small_data()
    start = train(make_net, data, num_members=1, num_epochs=1, batch_size=16, schedule=lambda step, num_steps: 0.0)
    clipped = train(
        make_net,
        data,
        num_members=1,
        num_epochs=1,
        batch_size=16,
        make_optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
        schedule=lambda step, num_steps: 1.0,
        numerics=Numerics(clip_norm=0.01),
    )
    steps = len(data.train) // 16
    moved = [
        (after - before).norm()
        for after, before in zip(clipped.population[0].parameters(), start.population[0].parameters(), strict=True)
    ]
    assert 0 < torch.stack(moved).norm() <= steps * 0.1 * 0.01 * 1.001


class Noisy(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """A dataset with a random transform that draws from the global generator."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(index)) / 60 + torch.randn(4), torch.tensor(index % 3)


def test_a_member_depends_on_the_seed_and_its_index_only() -> None:
    results = []
    for junk, num_members in ((1, 2), (2, 3)):
        torch.manual_seed(junk)
        data = Data(train=Noisy(), validation=Noisy())  # type: ignore[arg-type]
        outcome = train(make_net, data, num_members=num_members, num_epochs=2, batch_size=10, rule=Independent())
        results.append([net.state_dict() for net in outcome.population])
    for first, second in zip(results[0], results[1][:2], strict=True):
        assert_same_bits(first, second)
    assert not torch.equal(results[0][0]["0.weight"], results[0][1]["0.weight"])


def test_what_cannot_be_scored_shows_before_training() -> None:
    inputs = torch.randn(100, 4)
    never = lambda net: pytest.fail("training had begun")  # noqa: E731

    class Tuple(nn.Linear):
        def forward(self, inputs: Tensor) -> tuple[Tensor]:  # type: ignore[override]
            return (super().forward(inputs),)

    class Never(Callback):
        def on_step_begin(self, training: Training) -> None:
            never(training)

    options = {"num_members": 2, "num_epochs": 1, "batch_size": 10, "callbacks": [Never()]}
    with pytest.raises(DataError, match=r"accuracy got outputs of shape \(2, 1\) for targets of shape \(2, 1\)"):
        train(lambda: nn.Linear(4, 1), (inputs, inputs[:, :1]), loss=F.mse_loss, **options)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="Tuple returned a tuple, expected a tensor"):
        train(lambda: Tuple(4, 2), (inputs, torch.zeros(100).long()), **options)  # type: ignore[arg-type]
