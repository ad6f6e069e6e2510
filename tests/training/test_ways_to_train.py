"""Data as people have it, schedulers, interruptions and progress in `papa.train`."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from papa import Outcome, PapaWarning, Push, train
from papa.errors import ConfigError, DataError, RunError
from papa.training import Callback
from papa.training.progress import Progress

INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS[:, 0] > 0).long()
PAIRS = TensorDataset(INPUTS, TARGETS)
HELD_OUT = TensorDataset(INPUTS[:20], TARGETS[:20])
SHORT: dict[str, Any] = {"num_members": 2, "num_epochs": 2, "rule": Push(alpha=0.8, every_steps=2)}


def make_net() -> nn.Module:
    return nn.Linear(4, 2)


def matrix(outcome: Outcome) -> Tensor:
    return outcome.population.matrix


class TestLoaders:
    def test_a_shuffled_loader_is_its_dataset_with_its_batch_size(self) -> None:
        expected = matrix(train(make_net, PAIRS, batch_size=8, validation=0.2, **SHORT))
        for shuffle in (True, False):
            found = train(make_net, DataLoader(PAIRS, batch_size=8, shuffle=shuffle), validation=0.2, **SHORT)
            assert torch.equal(matrix(found), expected)
        with pytest.raises(ConfigError, match="batch_size is 4, but the loader's is 8: leave one of them out"):
            train(make_net, DataLoader(PAIRS, batch_size=8), batch_size=4, **SHORT)

    def test_workers_read_the_same_batches(self) -> None:
        expected = matrix(train(make_net, PAIRS, batch_size=20, validation=HELD_OUT, **{**SHORT, "num_epochs": 1}))
        loader = DataLoader(PAIRS, batch_size=20, num_workers=1)
        found = train(make_net, loader, validation=HELD_OUT, **{**SHORT, "num_epochs": 1})
        assert torch.equal(matrix(found), expected)

    def test_validation_data_may_have_any_form(self) -> None:
        forms = [HELD_OUT, (INPUTS[:20], TARGETS[:20]), DataLoader(HELD_OUT, batch_size=7)]
        found = [train(make_net, PAIRS, batch_size=8, validation=form, **SHORT) for form in forms]
        assert torch.equal(matrix(found[0]), matrix(found[1]))
        assert len({one.validation.average_soup.score for one in found}) == 1

    def test_a_sampler_draws_for_each_member(self) -> None:
        weights = [1.0] * 30 + [0.0] * 30
        log: list[Tensor] = []

        def collate(examples: list[Any]) -> Any:
            log.append(torch.stack([inputs for inputs, _ in examples]))
            return default_collate(examples)

        def run() -> Tensor:
            sampler = WeightedRandomSampler(weights, 40)
            loader = DataLoader(PAIRS, batch_size=8, sampler=sampler, collate_fn=collate)
            return matrix(train(make_net, loader, validation=DataLoader(HELD_OUT, batch_size=20), **SHORT))

        first = run()
        torch.rand(3)  # whatever was drawn before does not matter
        assert torch.equal(run(), first)
        assert not torch.equal(log[0], log[1])  # the first batches of the two members
        seen = torch.cat(log)
        assert all(any(torch.equal(row, known) for known in INPUTS[:30]) for row in seen[:40])
        with pytest.raises(DataError, match=r"sampler of its own .* no share can be held out: pass validation data"):
            train(make_net, DataLoader(PAIRS, batch_size=8, sampler=WeightedRandomSampler(weights, 40)), **SHORT)

    def test_members_that_read_the_same_batches_are_reported(self) -> None:
        class InOrder(SequentialSampler):
            pass

        loader = DataLoader(PAIRS, batch_size=8, sampler=InOrder(PAIRS))
        with pytest.warns(PapaWarning, match="all members saw the same 3 first batches"):
            train(make_net, loader, validation=HELD_OUT, **{**SHORT, "rule": Push(alpha=0.8, every_steps=4)})


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, num_examples: int) -> None:
        self.num_examples = num_examples

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.num_examples):
            index = int(torch.randint(60, ()))
            yield INPUTS[index], TARGETS[index]


class TestIterable:
    def test_an_iterable_dataset_needs_a_length(self) -> None:
        options = {**SHORT, "validation": HELD_OUT, "batch_size": 8}
        first = train(make_net, Stream(60), steps_per_epoch=5, **options)
        torch.rand(5)
        again = train(make_net, Stream(60), steps_per_epoch=5, **options)
        assert torch.equal(matrix(first), matrix(again))
        with pytest.raises(DataError, match="loader of Stream has no length: pass steps_per_epoch"):
            train(make_net, Stream(60), **options)
        with pytest.raises(DataError, match="data of member 0 ended after 3 batches of an epoch, expected 5"):
            train(make_net, Stream(30), steps_per_epoch=5, **options)
        with pytest.raises(ConfigError, match="steps_per_epoch is for loaders with a sampler of their own"):
            train(make_net, PAIRS, steps_per_epoch=5, **options)
        loader = DataLoader(PAIRS, batch_size=8, sampler=WeightedRandomSampler([1.0] * 60, 60), drop_last=True)
        with pytest.raises(DataError, match="accumulate is 9, expected at most the 7 batches per epoch"):
            train(make_net, loader, accumulate=9, validation=HELD_OUT, **SHORT)


class Records(Dataset[Any]):
    """Examples of any form."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return self.make(INPUTS[index], TARGETS[index])


class Two(nn.Module):
    """Takes two inputs; with labels, computes its loss as networks of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, first: Tensor, second: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(torch.cat([first, second], dim=1))
        return SimpleNamespace(logits=logits, loss=None if labels is None else F.cross_entropy(logits, labels))


class TestExamples:
    def test_tuples_and_dictionaries_train_as_pairs_do(self) -> None:
        class OfPairs(Two):
            def forward(self, inputs: Tensor) -> Any:  # type: ignore[override]
                return super().forward(inputs[:, :2], inputs[:, 2:]).logits

        forms = [
            lambda inputs, target: (inputs[:2], inputs[2:], target),
            lambda inputs, target: {"first": inputs[:2], "second": inputs[2:], "labels": target},
            lambda inputs, target: ({"first": inputs[:2], "second": inputs[2:]}, target),
        ]
        expected = matrix(train(OfPairs, PAIRS, batch_size=8, validation=0.2, **SHORT))
        for form in forms:
            found = train(Two, Records(form), batch_size=8, validation=0.2, **SHORT)
            assert torch.equal(matrix(found), expected)

    def test_a_network_may_compute_its_own_loss(self) -> None:
        class Doubled(Two):
            def forward(self, first: Tensor, second: Tensor, labels: Tensor | None = None) -> Any:
                found = super().forward(first, second, labels)
                return SimpleNamespace(logits=found.logits, loss=None if labels is None else 2 * found.loss)

        data = Records(lambda inputs, target: {"first": inputs[:2], "second": inputs[2:], "labels": target})
        own = train(Doubled, data, batch_size=8, validation=0.2, **SHORT)
        given = train(
            Two, data, batch_size=8, validation=0.2, loss=lambda out, target: 2 * F.cross_entropy(out, target), **SHORT
        )
        torch.testing.assert_close(matrix(own), matrix(given), rtol=1e-5, atol=1e-6)

    def test_targets_may_be_dictionaries(self) -> None:
        data = Records(lambda inputs, target: (inputs, {"class": target, "weight": inputs[1].abs()}))

        def loss(outputs: Tensor, targets: Any) -> Tensor:
            return (F.cross_entropy(outputs, targets["class"], reduction="none") * targets["weight"]).mean()

        def metric(outputs: Tensor, targets: Any) -> Tensor:
            return (outputs.argmax(dim=1) == targets["class"]).double().mean()

        found = train(make_net, data, batch_size=8, validation=0.2, loss=loss, metric=metric, **SHORT)
        assert 0.0 <= found.validation.average_soup.score <= 1.0

    def test_examples_without_a_target_are_refused(self) -> None:
        with pytest.raises(DataError, match=r"an example of Records is a dict of 1, expected a pair .* labels or"):
            train(make_net, Records(lambda inputs, target: {"inputs": inputs}), batch_size=8, validation=0.2, **SHORT)


class Rates(Callback):
    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []

    def on_step_begin(self, training: Any) -> None:
        group = training.optimizers[1].param_groups[0]
        self.found.append((group["lr"], group["betas"][0]))


class TestSchedulers:
    def test_a_pytorch_scheduler_sets_the_rates_of_every_step(self) -> None:
        def make_scheduler(optimizer: Any, num_steps: int) -> Any:
            return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=num_steps)

        def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.AdamW(net.parameters(), lr=0.01)

        rates = Rates()
        options = {**SHORT, "make_optimizer": make_optimizer, "make_scheduler": make_scheduler, "batch_size": 8}
        train(make_net, PAIRS, validation=0.2, callbacks=[rates], **options)
        optimizer = make_optimizer(make_net())
        scheduler = make_scheduler(optimizer, len(rates.found))
        for lr, beta in rates.found:
            assert (lr, beta) == (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"][0])
            optimizer.step()
            if (lr, beta) != rates.found[-1]:
                scheduler.step()
        assert len(rates.found) == 12

    def test_a_loss_for_each_example_is_refused(self) -> None:
        with pytest.raises(
            DataError, match=r"the loss returned numbers of shape \(2,\), expected one number .* reduction='mean'"
        ):
            train(make_net, PAIRS, batch_size=8, validation=0.2, loss=nn.CrossEntropyLoss(reduction="none"), **SHORT)


class PressCtrlC(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, training: Any) -> None:
        if training.step == self.step:
            signal.raise_signal(signal.SIGINT)


class TestGoingOn:
    OPTIONS: ClassVar[dict[str, Any]] = {**SHORT, "batch_size": 8, "validation": 0.2}

    @pytest.fixture
    def usual_ctrl_c(self) -> Iterator[None]:
        """Where tests run in the background, signals of the keyboard are ignored."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)

    @pytest.mark.usefixtures("usual_ctrl_c")
    def test_ctrl_c_saves_and_the_same_call_continues(self, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt, match=r"training was saved in .* after step 3: the same call continues"):
            train(make_net, PAIRS, checkpoints=tmp_path, callbacks=[PressCtrlC(3)], **self.OPTIONS)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        found = train(make_net, PAIRS, checkpoints=tmp_path, **self.OPTIONS)
        assert torch.equal(matrix(found), matrix(train(make_net, PAIRS, **self.OPTIONS)))

    def test_a_finished_training_goes_on_for_more_epochs(self, tmp_path: Path) -> None:
        options = {**self.OPTIONS, "schedule": lambda step, num_steps: 1.0}
        train(make_net, PAIRS, checkpoints=tmp_path, **options)
        more = train(make_net, PAIRS, checkpoints=tmp_path, **{**options, "num_epochs": 3})
        assert torch.equal(matrix(more), matrix(train(make_net, PAIRS, **{**options, "num_epochs": 3})))
        with pytest.raises(RunError, match="num_epochs is 3, expected 2"):
            train(make_net, PAIRS, checkpoints=tmp_path, **options)


def test_progress_is_shown_on_request_and_in_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {**SHORT, "batch_size": 8, "validation": 0.2}
    outcome = train(make_net, PAIRS, **options)
    assert capsys.readouterr().err == ""
    shown = train(make_net, PAIRS, verbose=True, **options)
    lines = capsys.readouterr().err.splitlines()
    assert "\n".join(lines[2:]) == f"papa: {shown.verdict}"
    assert "papa: epoch 1.0 of 2  loss " in lines[0]
    assert all(part in lines[1] for part in ("epoch 2.0 of 2", "members ", "soup ", "distance ", "0:00 left"))
    screen = io.StringIO()
    train(make_net, PAIRS, callbacks=[Progress(is_live=True, file=screen)], verbose=False, **options)
    assert screen.getvalue().startswith("\rpapa: epoch ")
    assert screen.getvalue().count("\n") == 1
    report = outcome.report().splitlines()
    assert report[0].split() == ["validation"]
    assert [line.split("  ")[0] for line in report[1:6]] == [
        "member 0",
        "member 1",
        "mean of members",
        "ensemble",
        "average soup",
    ]
    assert "members in the greedy soup: [" in report[7]
    assert "\n".join(report[9:]) == str(outcome.verdict)
