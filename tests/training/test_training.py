import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import make_training
from papa import Independent, MergeAll, Push, Rule, train
from papa.errors import ConfigError, DataError
from papa.streams import global_stream, stream
from papa.training import AveragingOptions, Callback, EpochRecord, Numerics, Repair, Training, Transforms
from papa.training.batches import Batches
from papa.training.checkpoints import load_state_, member_states, shared_state
from papa.training.data import Data, as_source
from papa.training.schedules import cosine
from papa.training.task import Task


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def make_data(num_examples: int = 240) -> Data:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_examples, 4, generator=generator)
    targets = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()
    parts = [as_source((inputs[start::3], targets[start::3])) for start in range(3)]
    return Data(train=parts[0], validation=parts[1], test=parts[2])


def states_of(population: object) -> list[dict[str, Tensor]]:
    return [copy.deepcopy(net.state_dict()) for net in population]  # type: ignore[attr-defined]


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_training_is_algorithm_1_written_as_a_plain_loop() -> None:
    data, seed, num_epochs, batch_size, alpha = make_data(), 3, 4, 16, 0.7
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


def test_a_member_does_not_depend_on_how_many_there_are() -> None:
    few = train(make_net, make_data(), num_members=2, num_epochs=2, batch_size=16, rule=Independent())
    many = train(make_net, make_data(), num_members=4, num_epochs=2, batch_size=16, rule=Independent())
    for first, second in zip(states_of(few.population), states_of(many.population)[:2], strict=True):
        assert same(first, second)
    first, second = states_of(many.population)[:2]
    assert not same(first, second)


def test_training_leaves_the_global_generator_as_found() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    train(make_net, make_data(), num_members=2, num_epochs=1, batch_size=16)
    assert torch.equal(before, torch.random.get_rng_state())


def test_whatever_was_drawn_before_does_not_matter() -> None:
    results = []
    for junk in (1, 2):
        torch.manual_seed(junk)
        results.append(states_of(train(make_net, make_data(), num_members=2, num_epochs=1, batch_size=16).population))
    assert all(same(first, second) for first, second in zip(*results, strict=True))


class StopError(Exception):
    pass


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step
        self.saved: tuple[object, ...] = ()

    def on_step_complete(self, training: Training) -> None:
        if training.step == self.step:
            self.saved = copy.deepcopy((training.step, shared_state(training), member_states(training)))
            raise StopError


@pytest.mark.parametrize("stop_at", [1, 5, 7, 13])
def test_a_stopped_and_resumed_training_ends_like_one_never_stopped(stop_at: int) -> None:
    def build() -> Training:
        return make_training(
            make_net,
            make_data(),
            num_members=3,
            num_epochs=3,
            batch_size=16,
            rule=Push(half_life_steps=3, every_steps=2),
            loss=F.cross_entropy,
            metric=lambda outputs, targets: (outputs.argmax(1) == targets).double().mean(),
            make_optimizer=lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
            schedule=cosine(),
            augment=lambda inputs, targets, generator: (
                inputs + torch.randn(inputs.shape, generator=generator),
                targets,
            ),
            prepare=lambda inputs: inputs,
            seed=1,
            device="cpu",
            numerics=Numerics(clip_norm=1.0),
            eval_batch_size=64,
            group=None,
        )

    whole = build()
    whole_records = Records()
    whole.run([whole_records])
    callback, first_records = StopAt(stop_at), Records()
    with pytest.raises(StopError):
        build().run([first_records, callback])
    resumed, second_records = build(), Records()
    load_state_(resumed, *callback.saved)  # type: ignore[arg-type]
    resumed.run([second_records])
    for first, second in zip(states_of(whole.population), states_of(resumed.population), strict=True):
        assert same(first, second)
    assert [*first_records.seen, *second_records.seen] == whole_records.seen


class Records(Callback):
    def __init__(self) -> None:
        self.seen: list[EpochRecord] = []

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        self.seen.append(record)


def test_merges_leave_out_the_last_step_so_members_end_apart() -> None:
    outcome = train(
        make_net,
        make_data(),
        num_members=3,
        num_epochs=2,
        batch_size=16,
        rule=lambda training: MergeAll(every_steps=training.steps_in(1)),
    )
    assert outcome.population.distances().min() > 0


def test_scores_of_one_member_agree_however_they_are_made() -> None:
    outcome = train(make_net, make_data(), num_members=1, num_epochs=3, batch_size=16)
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

    train(make_net, make_data(), num_members=num_members, num_epochs=3, batch_size=16, callbacks=[Look()])
    assert len(scores) == 3
    assert all(found == expected for found, expected in scores)


def test_the_default_push_is_due_in_the_shortest_trainings_too() -> None:
    rules = []

    class Look(Callback):
        def on_train_begin(self, training: Training) -> None:
            rules.append(training.averager.rule)

    inputs = torch.randn(100, 4)
    for num_epochs, batch_size in ((1, 16), (40, 1)):
        train(
            lambda: nn.Linear(4, 2),
            (inputs, (inputs[:, 0] > 0).long()),
            num_members=2,
            num_epochs=num_epochs,
            batch_size=batch_size,
            callbacks=[Look()],
        )
    assert [(rule.every_steps, rule.half_life_steps) for rule in rules] == [
        (1, 1.0),
        (10, pytest.approx(0.01 * 40 * 98)),
    ]


def test_a_hook_may_end_the_training_early() -> None:
    class Patience(Callback):
        def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
            if record.epoch == 2:
                training.stop()

    steps = []

    class Count(Callback):
        def on_step_complete(self, training: Training) -> None:
            steps.append(training.step)

    inputs = torch.randn(100, 4)
    outcome = train(
        lambda: nn.Linear(4, 2),
        (inputs, (inputs[:, 0] > 0).long()),
        num_members=2,
        num_epochs=5,
        batch_size=14,
        callbacks=[Patience(), Count()],
    )
    assert steps == list(range(1, 15))
    assert outcome.validation.mean >= 0.0


def test_the_default_push_brings_members_together_and_its_soup_works() -> None:
    outcome = train(make_net, make_data(1200), num_members=4, num_epochs=8, batch_size=16)
    apart = train(make_net, make_data(1200), num_members=4, num_epochs=8, batch_size=16, rule=Independent())
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
    data = make_data()
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
        assert same(net.state_dict(), joined.net.state_dict())
    assert one.test is not None
    assert one.test == several.test


def test_a_pair_of_tensors_holds_out_two_percent_and_needs_no_test_data() -> None:
    inputs, targets = torch.randn(100, 4), torch.randint(3, (100,))
    outcome = train(make_net, (inputs, targets), num_members=2, num_epochs=1, batch_size=10)
    assert outcome.test is None
    assert outcome.to_json()["test"] is None


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
    whole = train(lambda: nn.Linear(4, 3), make_data(246), batch_size=16, **options)
    parts = train(lambda: nn.Linear(4, 3), make_data(246), batch_size=4, accumulate=4, **options)
    assert parts.population.matrix.shape == whole.population.matrix.shape
    torch.testing.assert_close(parts.population.matrix, whole.population.matrix, rtol=1e-5, atol=1e-6)


def test_a_step_of_more_examples_than_there_are_is_refused() -> None:
    with pytest.raises(DataError, match=r"batch_size is 16 and accumulate 6, which makes 96 examples per step, .* 80"):
        train(make_net, make_data(), num_epochs=1, batch_size=16, accumulate=6)
    with pytest.raises(ConfigError, match=r"accumulate is 0, expected a whole number, at least 1"):
        train(make_net, make_data(), num_epochs=1, accumulate=0)


def test_clipping_bounds_the_step() -> None:
    data = make_data()
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


def test_bad_input_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="num_members is 0, expected a whole number, at least 1"):
        train(make_net, make_data(), num_members=0, num_epochs=1)
    with pytest.raises(DataError, match="batch_size is 1000, expected at most the 80 training examples"):
        train(make_net, make_data(), num_members=1, num_epochs=1, batch_size=1000)


class Noisy(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """A dataset with a random transform that draws from the global generator."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(index)) / 60 + torch.randn(4), torch.tensor(index % 3)


def test_a_dataset_with_random_transforms_is_reproducible_whatever_was_drawn_before() -> None:
    results = []
    for junk, num_members in ((1, 2), (2, 3)):
        torch.manual_seed(junk)
        data = Data(train=Noisy(), validation=Noisy())  # type: ignore[arg-type]
        outcome = train(make_net, data, num_members=num_members, num_epochs=2, batch_size=10, rule=Independent())
        results.append(states_of(outcome.population)[:2])
    assert all(same(first, second) for first, second in zip(*results, strict=True))


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


def test_augments_must_be_as_many_as_members() -> None:
    plain = lambda inputs, targets, generator: (inputs, targets)  # noqa: E731
    with pytest.raises(ConfigError, match="augment has 2 entries, expected one for each of 3 members"):
        train(make_net, make_data(), num_members=3, num_epochs=1, transforms=Transforms(augment=[plain, plain]))


class HalfCounting:
    """A metric that forgot what it is for."""

    def counts(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Nothing."""
        return outputs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"make_model": nn.Linear(2, 2)}, "make_model is a Linear, expected a function that makes one for each member"),
        ({"make_optimizer": "sgd"}, "make_optimizer is a str, expected a function that makes one for each member"),
        ({"loss": "cross-entropy"}, "loss is a str, expected a function"),
        ({"metric": "accuracy"}, "metric is a str, expected a function"),
        ({"metric": HalfCounting()}, "metric is a HalfCounting without score and details, expected a function, or an"),
        ({"schedule": "cosine"}, "schedule is a str, expected a function"),
        ({"transforms": Transforms(prepare=3)}, "prepare is a int, expected a function"),
        ({"task": Task(apply=None)}, "apply is a NoneType, expected a function"),
        ({"rule": "papa"}, r"rule is a str, expected a rule such as papa\.MergeAll"),
        ({"rule": MergeAll}, r"rule is the class MergeAll, expected an instance, such as MergeAll\(\.\.\.\)"),
    ],
)
def test_what_is_no_function_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(**{"make_model": make_net, "data": make_data(), "num_epochs": 1, **options})


def test_repair_after_merges_sees_the_same_batches_on_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Tensor]] = []
    original = Batches.repair_batches

    def spy(feed: Batches, member: int) -> list[Tensor]:
        seen.append(original(feed, member))
        return seen[-1]

    monkeypatch.setattr(Batches, "repair_batches", spy)
    training = make_training(
        make_net,
        make_data(),
        num_members=2,
        num_epochs=3,
        batch_size=16,
        rule=MergeAll(every_steps=5),
        loss=F.cross_entropy,
        metric=lambda outputs, targets: (outputs.argmax(1) == targets).double().mean(),
        make_optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
        schedule=cosine(),
        augment=None,
        prepare=lambda inputs: inputs,
        seed=1,
        device="cpu",
        numerics=Numerics(),
        eval_batch_size=64,
        repair=Repair(num_batches=2),
        group=None,
    )
    training.run()
    assert len(seen) == 2 * 2  # two merges (the last step has none), two members
    for batches in seen:
        assert len(batches) == 2
        assert all(torch.equal(first, second) for first, second in zip(batches, seen[0], strict=True))
