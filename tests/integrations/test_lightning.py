"""Lightning: members in one process and in several, against the plain loop of papa, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import papa
from lightning_members import run_threads
from papa.errors import ConfigError, DataError
from papa.integrations.lightning import MemberPerRank, PopulationAveraging, PopulationModule

INPUTS = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, (INPUTS[:, 0] > 0).long())
VALIDATION = DataLoader(DATA, batch_size=48)
NUM_EPOCHS, NUM_BATCHES, ACCUMULATE = 3, 5, 2
NUM_STEPS = NUM_EPOCHS * 3  # the last batch of an epoch is a step too
RULE = papa.Push(half_life=0.2, every_steps=2)

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
        self.num_epochs_ended = 0

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.head(self.second(F.relu(self.norm(self.first(inputs)))))
        return found

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        return self(batch[0])

    def on_train_epoch_end(self) -> None:
        self.num_epochs_ended += 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(member: int) -> DataLoader[Any]:
    """In an order that depends on the member and the epoch."""
    order = DistributedSampler(DATA, num_replicas=1, rank=0, seed=member)
    return DataLoader(DATA, batch_size=20, sampler=order)


def make_trainer(path: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    given = {"max_epochs": NUM_EPOCHS, "accelerator": "cpu", "logger": False, **options}
    return pl.Trainer(
        default_root_dir=path,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )


def plain_loop(size: int = 2) -> tuple[papa.Population, nn.Module]:
    """The loop of the docs: optimizers, averager, schedules."""
    nets = [Net(seed) for seed in range(size)]
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
                (F.cross_entropy(net(inputs), targets) / ACCUMULATE).backward()
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
        assert torch.equal(found[name], tensor), name


def make_population(**options: Any) -> PopulationModule:
    return PopulationModule([Net(seed) for seed in range(2)], RULE, accumulate_grad_batches=ACCUMULATE, **options)


def test_a_module_of_members_has_the_bits_of_the_plain_loop(plain: Any, tmp_path: Path) -> None:
    module = make_population()
    logger = CSVLogger(tmp_path)
    trainer = make_trainer(tmp_path, logger=logger, log_every_n_steps=1)
    trainer.fit(module, [loader(0), loader(1)], VALIDATION)
    population, soup = plain
    for member, expected in enumerate(population):
        assert_equal(module.members[member].state_dict(), expected.state_dict())
    assert_equal(module.soup.state_dict(), soup.state_dict())
    assert trainer.global_step == NUM_STEPS
    metrics = trainer.callback_metrics
    for name, net in (("val_loss", soup), ("member_0/val_loss", population[0]), ("member_1/val_loss", population[1])):
        halves = papa.evaluate(net.eval(), [(INPUTS[:48], DATA.tensors[1][:48]), (INPUTS[48:], DATA.tensors[1][48:])])
        assert metrics[name].item() == pytest.approx(halves.loss, rel=1e-5)
    assert {"member_0/loss", "member_1/loss", "papa/distance_before", "papa/distance_after"} <= metrics.keys()
    assert [net.num_epochs_ended for net in module.members] == [NUM_EPOCHS, NUM_EPOCHS]
    logged = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0]
    assert "papa/distance_before" in logged
    assert torch.equal(module.eval()(INPUTS), soup.eval()(INPUTS))
    assert "log" not in vars(module.members[0])


def test_a_module_of_members_is_resumed_exactly(plain: Any, tmp_path: Path) -> None:
    loaders, every = [loader(0), loader(1)], ModelCheckpoint(save_top_k=-1)
    make_trainer(tmp_path, every).fit(make_population(), loaders, VALIDATION)
    (first,) = tmp_path.rglob("epoch=0-*.ckpt")
    module = make_population()
    make_trainer(tmp_path).fit(module, loaders, VALIDATION, ckpt_path=first)
    population, soup = plain
    for member, expected in enumerate(population):
        assert_equal(module.members[member].state_dict(), expected.state_dict())
    assert_equal(module.soup.state_dict(), soup.state_dict())
    state = torch.load(first, weights_only=True)["state_dict"]
    members = [{name[10:]: state[name] for name in state if name.startswith(f"members.{j}.")} for j in range(2)]
    found = {name[5:]: state[name] for name in state if name.startswith("soup.")}
    assert_equal(found, papa.average_soup(members))


class Noise(Net):
    """Draws random numbers of its own in training."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(F.dropout(inputs, 0.5, self.training))


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization:UserWarning")
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
        module = PopulationModule([Noise(seed) for seed in range(2)], RULE)
        loaders = papa.loaders(DATA, members=2, batch_size=20)
        trainer = make_trainer(tmp_path, ModelCheckpoint(save_top_k=-1, **every), **trainer_options)
        trainer.fit(module, loaders, VALIDATION, **resumed)
        assert trainer.current_epoch == NUM_EPOCHS
        return module.state_dict()

    expected = trained()
    for name in names:
        (saved,) = tmp_path.rglob(f"{name}.ckpt")
        assert_equal(trained(ckpt_path=saved), expected)


def test_orders_that_begin_again_after_a_resume_are_warned_of(tmp_path: Path) -> None:
    def trained(**resumed: Any) -> None:
        loaders = [DataLoader(DATA, batch_size=20, shuffle=True) for _ in range(2)]
        make_trainer(tmp_path, ModelCheckpoint(save_top_k=-1)).fit(make_population(), loaders, VALIDATION, **resumed)

    trained()
    (first,) = tmp_path.rglob("epoch=0-*.ckpt")
    with pytest.warns(papa.PapaWarning, match=r"with a RandomSampler, whose state is not in .*papa.loaders"):
        trained(ckpt_path=first)
    own = papa.loaders(DATA, members=2, batch_size=20)
    with pytest.raises(DataError, match=r"has the orders of 0 loaders of papa.loaders, the trainer has 2: pass the sa"):
        make_trainer(tmp_path).fit(make_population(), own, VALIDATION, ckpt_path=first)


def test_the_soup_of_a_checkpoint(tmp_path: Path) -> None:
    module = make_population()
    make_trainer(tmp_path).fit(module, [loader(0), loader(1)], VALIDATION)
    (last,) = tmp_path.rglob("*.ckpt")
    assert_equal(PopulationModule.load_soup(last, Net(7)).state_dict(), module.soup.state_dict())
    with pytest.raises(ConfigError, match=r"soup of .* has no 'bias', the module has 'bias' of shape \(2,\): pass a"):
        PopulationModule.load_soup(last, nn.Linear(4, 2))


def test_a_trainer_is_used_again_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module, trainer = make_population(), make_trainer(tmp_path, max_epochs=1)
    with caplog.at_level("INFO"):
        trainer.fit(module, [loader(0), loader(1)], VALIDATION)
        trainer.test(module, VALIDATION, verbose=False)
    assert "override" not in caplog.text


def fit_member(
    path: Path, net: Net, member: int, group: Any, rule: papa.Rule = RULE, **options: Any
) -> tuple[Net, pl.Trainer]:
    every = ModelCheckpoint(save_top_k=-1, monitor="val_loss")
    averaging = PopulationAveraging(rule, group=group)
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


def test_one_member_per_process_is_resumed_exactly_also_within_a_delayed_push(tmp_path: Path) -> None:
    rule = papa.Push(half_life=0.2, every_steps=3, delay=2)  # the first one is under way when an epoch ends

    def resume(member: int, group: Any) -> Any:
        (first,) = (tmp_path / str(member)).rglob("epoch=0-*.ckpt")
        return fit_member(tmp_path, others[member], member, group, rule, ckpt_path=first)

    nets, others = [Net(0), Net(1)], [Net(2), Net(3)]
    run_threads(lambda member, group: fit_member(tmp_path, nets[member], member, group, rule))
    for net, (found, _) in zip(nets, run_threads(resume), strict=True):
        assert_equal(found.state_dict(), net.state_dict())


def test_a_training_that_is_resumed_after_its_end_leaves_the_soup_too(plain: Any, tmp_path: Path) -> None:
    def resume(member: int, group: Any) -> Any:
        (last,) = (tmp_path / str(member)).rglob("epoch=2-*.ckpt")
        return fit_member(tmp_path, others[member], member, group, ckpt_path=last)

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


def fit(tmp_path: Path, module: pl.LightningModule, data: Any, *callbacks: pl.Callback, **options: Any) -> None:
    make_trainer(tmp_path, *callbacks, enable_checkpointing=False, **options).fit(module, data, VALIDATION)


def test_wrong_uses_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not one of several members: start it with `papa each"):
        fit(tmp_path, Net(0), loader(0), PopulationAveraging(RULE))
    with pytest.raises(ConfigError, match="not one of several members"):
        MemberPerRank()
    with pytest.raises(DataError, match="training data is a DataLoader, expected a list of 2 loaders"):
        fit(tmp_path, make_population(), loader(0))
    with pytest.raises(ConfigError, match="a PopulationModule has no members"):
        PopulationModule([], RULE)
    with pytest.raises(ConfigError, match=r"member 0 is a Linear, expected a lightning.pytorch.LightningModule"):
        PopulationModule([nn.Linear(1, 1)], RULE)  # type: ignore[list-item]
    for name, value in (("accumulate_grad_batches", 4), ("gradient_clip_val", 0.5)):
        with pytest.raises(
            ConfigError, match=rf"the trainer has {name}={value}.*PopulationModule\(members, rule, {name}"
        ):
            fit(tmp_path, make_population(), [loader(0), loader(1)], **{name: value})
    with pytest.raises(ConfigError, match="accumulate_grad_batches is 0, expected at least 1"):
        PopulationModule([Net(0)], RULE, accumulate_grad_batches=0)


class Steps(Net):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


class Two(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.first, self.head)]


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_loss"}


def test_members_that_a_module_cannot_train_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="member 1 overrides optimizer_step, which a PopulationModule would ignore"):
        PopulationModule([Net(0), Steps(1)], RULE)
    manual = Net(0)
    manual.automatic_optimization = False
    with pytest.raises(ConfigError, match=r"member 0 optimizes itself \(automatic_optimization is False\)"):
        PopulationModule([manual], RULE)
    with pytest.raises(ConfigError, match="member 0 has 2 optimizers, expected 1"):
        fit(tmp_path, PopulationModule([Two(0)], RULE), [loader(0)])
    with pytest.raises(ConfigError, match="member 0 has a ReduceLROnPlateau, which would give members different"):
        fit(tmp_path, PopulationModule([Plateau(0)], RULE), [loader(0)])


class SeveralProcesses(pl.strategies.SingleDeviceStrategy):
    """A strategy that trains one network on several processes, as far as a callback sees before training."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.world_size = 2


def test_a_network_on_several_processes_is_no_population(tmp_path: Path) -> None:
    for module, data, callbacks, message in (
        (Net(0), loader(0), [PopulationAveraging(RULE)], "has 2 processes, which train one network.*MemberPerRank"),
        (make_population(), [loader(0), loader(1)], [], "has 2 processes, expected 1 for a PopulationModule"),
    ):
        with pytest.raises(ConfigError, match=message):
            fit(tmp_path, module, data, *callbacks, strategy=SeveralProcesses(), use_distributed_sampler=False)


def test_options_of_the_module_of_members(tmp_path: Path) -> None:
    """Clipping as by hand, no validation of members, the length in steps, averages of some tensors only."""
    module = make_population(gradient_clip_val=0.01, validate_members=False, average={"head.*": False}, num_steps=40)
    trainer = make_trainer(tmp_path, max_steps=4, max_epochs=-1, enable_checkpointing=False)
    trainer.fit(module, [loader(0), loader(1)], VALIDATION)
    assert trainer.global_step == 4
    assert trainer.callback_metrics.keys() >= {"val_loss", "member_0/loss"}
    assert "member_0/val_loss" not in trainer.callback_metrics
    norms = [nn.utils.get_total_norm([p.grad for p in net.parameters()]) for net in module.members]
    assert all(norm <= 0.01001 for norm in norms)
    assert trainer.predict(module, VALIDATION)[0].shape == (48, 2)
    assert len(trainer.test(module, VALIDATION, verbose=False)) == 1
