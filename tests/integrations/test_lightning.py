"""Lightning: members in processes of their own, against the plain loop of papa, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import papa
from lightning_members import run_threads
from papa.core.group import LocalGroup
from papa.errors import ConfigError, DataError
from papa.integrations.lightning import MemberPerRank, PopulationAveraging

INPUTS = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, (INPUTS[:, 0] > 0).long())
VALIDATION = DataLoader(DATA, batch_size=48)
NUM_EPOCHS, NUM_BATCHES, ACCUMULATE = 3, 5, 2
NUM_STEPS = NUM_EPOCHS * 3  # the last batch of an epoch is a step too
RULE = papa.Push(half_life=0.2, every_steps=2)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""What Lightning chooses by itself."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


class Net(pl.LightningModule):
    """What anybody's module looks like: losses, a schedule by step, logs, BatchNorm and tied weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.head(self.second(F.relu(self.norm(self.first(inputs)))))
        return found

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(member: int) -> DataLoader[Any]:
    """In an order that depends on the member and the epoch."""
    order = DistributedSampler(DATA, num_replicas=1, rank=0, seed=member)
    return DataLoader(DATA, batch_size=20, sampler=order)


def make_trainer(path: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    given = {"max_epochs": NUM_EPOCHS, "devices": 1, "logger": False, **options}
    return pl.Trainer(
        default_root_dir=path,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )


def plain_loop(size: int = 2) -> tuple[papa.Population, nn.Module]:
    """The loop of the docs: optimizers, averager, schedules."""
    nets = [Net(seed).to(DEVICE) for seed in range(size)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    schedules = [torch.optim.lr_scheduler.OneCycleLR(one, 0.1, NUM_STEPS) for one in optimizers]
    population = papa.Population(nets)
    averager = papa.Averager(population, RULE, optimizers, num_steps=NUM_STEPS)
    loaders = [loader(member) for member in range(size)]
    for epoch in range(NUM_EPOCHS):
        for one in loaders:
            one.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for number, batches in enumerate(zip(*loaders, strict=True)):
            is_step = number % ACCUMULATE == ACCUMULATE - 1 or number == NUM_BATCHES - 1
            for net, optimizer, (inputs, targets) in zip(nets, optimizers, batches, strict=True):
                if number % ACCUMULATE == 0:
                    optimizer.zero_grad()
                (F.cross_entropy(net(inputs.to(DEVICE)), targets.to(DEVICE)) / ACCUMULATE).backward()
                if is_step:
                    optimizer.step()
            if is_step:
                averager.step()
                for schedule in schedules:
                    schedule.step()
    assert averager.num_averagings == NUM_STEPS // 2
    return population, papa.average_soup(population)


@pytest.fixture(scope="module")
def plain() -> tuple[papa.Population, nn.Module]:
    return plain_loop()


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].cpu(), tensor.cpu()), name


class Noise(Net):
    """Draws random numbers of its own in training."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(F.dropout(inputs, 0.5, self.training))


@pytest.mark.parametrize(
    ("trainer_options", "every", "names"),
    [
        ({}, {}, ["epoch=0-step=4", "epoch=1-step=8"]),
        ({"limit_train_batches": 3}, {}, ["epoch=0-step=3"]),
        ({}, {"every_n_train_steps": 1}, ["epoch=0-step=2", "epoch=0-step=4", "epoch=1-step=5"]),
    ],
)
def test_shuffled_loaders_of_papa_and_what_networks_draw_are_resumed_exactly(
    trainer_options: dict[str, Any], every: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    """At the end of an epoch, also if the trainer makes it shorter, and within one."""

    def trained(**resumed: Any) -> dict[str, Any]:
        module, averaging = Noise(0), PopulationAveraging(RULE, group=LocalGroup())
        trainer = make_trainer(tmp_path, averaging, ModelCheckpoint(save_top_k=-1, **every), **trainer_options)
        trainer.fit(module, papa.loaders(DATA, members=[0], batch_size=20)[0], VALIDATION, **resumed)
        assert trainer.current_epoch == NUM_EPOCHS
        return module.state_dict()

    expected = trained()
    for name in names:
        (saved,) = tmp_path.rglob(f"{name}.ckpt")
        assert_equal(trained(ckpt_path=saved), expected)


def test_orders_that_begin_again_after_a_resume_are_warned_of(tmp_path: Path) -> None:
    def train(data: Any, **resumed: Any) -> None:
        averaging = PopulationAveraging(RULE, group=LocalGroup())
        make_trainer(tmp_path, averaging, ModelCheckpoint(save_top_k=-1)).fit(Net(0), data, VALIDATION, **resumed)

    shuffled = DataLoader(DATA, batch_size=20, shuffle=True)
    train(shuffled)
    (first,) = tmp_path.rglob("epoch=0-*.ckpt")
    with pytest.warns(papa.PapaWarning, match=r"with a RandomSampler, whose state is not in .*papa.loaders"):
        train(shuffled, ckpt_path=first)
    with pytest.raises(DataError, match=r"has the orders of 0 loaders of papa.loaders, the trainer has 1: pass the sa"):
        train(papa.loaders(DATA, members=[0], batch_size=20), ckpt_path=first)


class FailsAtLast(Net):
    """Fails in the last validation, which sees the soup."""

    def on_validation_epoch_end(self) -> None:
        if self.current_epoch == NUM_EPOCHS - 1:
            raise ZeroDivisionError


def test_an_error_leaves_the_members_own_weights(plain: Any, tmp_path: Path) -> None:
    nets = [FailsAtLast(0), FailsAtLast(1)]

    def job(member: int, group: Any) -> None:
        with pytest.raises(ZeroDivisionError):
            fit_member(tmp_path, nets[member], member, group)

    run_threads(job)
    for net, expected in zip(nets, plain[0], strict=True):
        assert_equal(net.state_dict(), expected.state_dict())


def fit_member(path: Path, net: Net, member: int, group: Any, **options: Any) -> tuple[Net, pl.Trainer]:
    every = ModelCheckpoint(save_top_k=-1, monitor="val_loss")
    averaging = PopulationAveraging(RULE, group=group)
    trainer = make_trainer(path / str(member), averaging, every, accumulate_grad_batches=ACCUMULATE)
    trainer.fit(net, loader(member), VALIDATION, **options)
    return net, trainer


def test_one_member_per_process_has_the_bits_of_the_plain_loop(plain: Any, tmp_path: Path) -> None:
    population, soup = plain
    nets = [Net(0), Net(1)]  # threads share torch's random state
    found = run_threads(lambda member, group: fit_member(tmp_path, nets[member], member, group))
    for member, (net, trainer) in enumerate(found):
        assert_equal(net.state_dict(), {**population[member].state_dict(), **soup.state_dict()})
        (last,) = (tmp_path / str(member)).rglob("epoch=2-*.ckpt")
        saved = torch.load(last, weights_only=True)
        assert_equal(saved["state_dict"], soup.state_dict())
        assert_equal(saved["current_model_state"], population[member].state_dict())
        assert {"papa/distance_before", "papa/distance_after", "val_loss"} <= trainer.callback_metrics.keys()
        loss = trainer.callback_metrics["val_loss"].item()
        assert trainer.validate(net, VALIDATION, verbose=False)[0]["val_loss"] == loss
        assert trainer.validate(Net(5), VALIDATION, ckpt_path=last, verbose=False)[0]["val_loss"] == loss


@pytest.mark.parametrize("epoch", [0, 2])
def test_one_member_per_process_is_resumed_exactly_also_after_its_end(epoch: int, tmp_path: Path) -> None:
    def resume(member: int, group: Any) -> Any:
        (saved,) = (tmp_path / str(member)).rglob(f"epoch={epoch}-*.ckpt")
        return fit_member(tmp_path, others[member], member, group, ckpt_path=saved)

    nets, others = [Net(0), Net(1)], [Net(2), Net(3)]
    run_threads(lambda member, group: fit_member(tmp_path, nets[member], member, group))
    for net, (found, _) in zip(nets, run_threads(resume), strict=True):
        assert_equal(found.state_dict(), net.state_dict())


def test_ranks_are_members(plain: Any, tmp_path: Path) -> None:
    nets = [Net(0), Net(1)]

    def job(member: int, group: Any) -> Any:
        strategy = MemberPerRank(group=group)
        net = nets[member]
        trainer = make_trainer(
            tmp_path / str(strategy.member),
            PopulationAveraging(RULE),
            strategy=strategy,
            accumulate_grad_batches=ACCUMULATE,
        )
        trainer.fit(net, loader(member), VALIDATION)
        return net, strategy.member, strategy.num_members, trainer.world_size

    for member, (net, *numbers) in enumerate(run_threads(job)):
        assert numbers == [member, 2, 1]
        assert len(list((tmp_path / str(member)).rglob("*.ckpt"))) == 1
        assert_equal(net.state_dict(), {**plain[0][member].state_dict(), **plain[1].state_dict()})


def test_members_must_not_share_a_directory(tmp_path: Path) -> None:
    def job(member: int, group: Any) -> Any:
        trainer = make_trainer(tmp_path, PopulationAveraging(RULE, group=group))
        trainer.fit(Net(member), loader(member), VALIDATION)

    with pytest.raises(ConfigError, match=r"members 0 and 1 both write to .*give each a directory of its own"):
        run_threads(job)


class SeveralProcesses(pl.strategies.SingleDeviceStrategy):
    """A strategy that trains one network on several processes, as far as a callback sees before training."""

    def __init__(self) -> None:
        super().__init__(DEVICE)
        self.world_size = 2


def test_processes_that_are_no_members_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not one of several members: start it with torchrun"):
        make_trainer(tmp_path, PopulationAveraging(RULE)).fit(Net(0), loader(0), VALIDATION)
    with pytest.raises(ConfigError, match="not one of several members"):
        MemberPerRank()
    trainer = make_trainer(
        tmp_path, PopulationAveraging(RULE), strategy=SeveralProcesses(), use_distributed_sampler=False
    )
    with pytest.raises(ConfigError, match=r"has 2 processes, which train one network.*MemberPerRank"):
        trainer.fit(Net(0), loader(0), VALIDATION)
