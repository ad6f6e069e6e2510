"""The training loop: Algorithm 1 of the paper, with every random stream a function of the step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from papa.core.averager import Averager, MergeHook
from papa.core.group import Group, LocalGroup
from papa.core.health import NonFiniteMember
from papa.core.mixing import soup_row
from papa.core.population import Population
from papa.core.rules import Independent, Rule
from papa.core.soups import mean_network
from papa.evaluation.inputs import Inputs, logits_of, outputs_of, own_loss_of
from papa.evaluation.scores import Evaluation, checked_loss, evaluate_together
from papa.process import find_device
from papa.streams import accelerators_in_use, derive, global_stream, seed_global_
from papa.training.batches import Batches
from papa.training.callbacks import Callback, EpochRecord, EpochScores
from papa.training.checks import check_callbacks, check_function, checked_optimizer
from papa.training.data import Source, as_data, reader_of
from papa.training.options import MAKES_ONE, Engine, Length, Settings
from papa.training.probe import TrainingLoss
from papa.training.schedules import LRTable
from papa.training.task import own_loss
from papa.verdict import spread_of

NUM_BAD_LOSSES = 3
"""A member whose loss was not finite for this many steps in a row is unhealthy, whatever its weights."""


class Training:
    """A population, its optimizers and averager, and the current step.

    Members train independently until `use_rule` sets an averaging rule. `make_model` and `data` are as for
    `papa.train`. Callbacks that keep state must be given here, others may be given to `run`. Without a group, this
    process holds all members.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        data: Any,
        settings: Settings,
        *,
        callbacks: Sequence[Callback] = (),
        group: Group | None = None,
    ) -> None:
        settings.check()
        check_function("make_model", make_model, MAKES_ONE)
        self.settings, self.seed, self.task = settings, settings.seed, settings.task
        self.data = as_data(data, settings.validation, seed=settings.seed, batch_size=settings.batch_size)
        if settings.steps_per_epoch is not None:
            num_batches = settings.steps_per_epoch * settings.accumulate
            reader = reader_of(self.data.train, settings.batch_size)
            self.data = replace(self.data, train=reader.limited(num_batches))
        reader = reader_of(self.data.train, settings.batch_size)
        reader.check_step(settings.accumulate)
        steps_per_epoch = len(reader) // settings.accumulate
        self.length = Length(num_steps=settings.num_epochs * steps_per_epoch, steps_per_epoch=steps_per_epoch)
        self.device = find_device(settings.device)
        self.group = group if group is not None else LocalGroup()
        self.members = self.group.local_range(settings.num_members)
        self.population = Population([self._make_member(make_model, member) for member in self.members], self.group)
        self.optimizers = [checked_optimizer(settings.make_optimizer(model)) for model in self.population]
        self._lr_table: LRTable | None = None
        if settings.make_scheduler is not None:
            self._lr_table = LRTable(settings.make_scheduler, self.optimizers[0], self.length.num_steps)
        self.scalers = [self._make_scaler() for _ in self.members]
        self.batches = Batches(self.data, settings, self.members, self.device)
        self.step = 0
        self.seconds = {"train": 0.0, "average": 0.0, "evaluate": 0.0}
        self.loss_sums = torch.zeros(len(self.members), dtype=torch.float64, device=self.device)
        self.recent_losses = [torch.zeros_like(self.loss_sums) for _ in range(NUM_BAD_LOSSES)]
        self.nonfinite: list[dict[str, Any]] = []
        """Members that were found non-finite so far, as lines of the metrics."""
        self._is_stopped = False
        self.set_lr_()
        self.use_rule(Independent())
        self.engine: Engine = OneByOne(self) if settings.engine is None else settings.engine(self)
        self.callbacks: list[Callback] = []
        self._add(callbacks)

    def use_rule(self, rule: Rule, merge_hooks: Sequence[MergeHook] = ()) -> None:
        """Set how members are averaged; of the merge hooks, the first is the outermost.

        A rule without a `probe` gets the loss on a training batch.
        """
        self.averager = Averager(
            self.population,
            rule.with_probe(TrainingLoss(self)),
            self.optimizers,
            num_steps=self.length.num_steps,
            merge_hooks=merge_hooks,
            on_nonfinite=self.settings.averaging.on_nonfinite,
            unhealthy_reason=lambda index: f"its loss was not finite for {NUM_BAD_LOSSES} steps",
            watched=self._watched_losses,
            watch_batches=self.batches.reader.decides_order,
        )

    @property
    def epoch(self) -> int:
        """The number of complete epochs."""
        return self.step // self.length.steps_per_epoch

    def _make_member(self, make_model: Callable[[], nn.Module], member: int) -> nn.Module:
        with global_stream(self.seed, "init", member):
            model = make_model().to(self.device)
        return model.to(memory_format=torch.channels_last) if self.settings.numerics.channels_last else model

    def steps_in(self, num_epochs: float) -> int:
        """The number of steps in a number of epochs, at least one."""
        return max(1, round(num_epochs * self.length.steps_per_epoch))

    def set_lr_(self) -> float:
        """Set the learning rate of the current step; returns that of the first parameter group."""
        if self._lr_table is not None:
            for optimizer in self.optimizers:
                self._lr_table.set_(optimizer, self.step)
            return float(self.optimizers[0].param_groups[0]["lr"])
        share = self.settings.schedule(self.step, self.length.num_steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * share
        return float(self.optimizers[0].param_groups[0]["lr"])

    def go_to_(self, step: int) -> None:
        """Continue from a step whose state was loaded; all random streams follow from it."""
        self.step = self.averager.num_steps_taken = step
        self.set_lr_()

    def _add(self, callbacks: Sequence[Callback]) -> None:
        check_callbacks(callbacks, Callback)
        self.callbacks += callbacks
        for callback in callbacks:
            callback.setup(self)

    def run(self, callbacks: Sequence[Callback] = ()) -> None:
        """Train from the current step to the end, with callbacks after those that the training has already."""
        self._add(callbacks)
        # Score one batch, so that a wrong loss or metric shows before the first epoch.
        self.evaluate([self.population[0]], reader_of(self.data.validation, 1).few(2))
        error: BaseException | None = None
        try:
            for callback in self.callbacks:
                callback.on_train_begin(self)
            self._take_steps()
        except BaseException as found:
            error = found
            raise
        finally:
            for callback in self.callbacks:
                callback.on_train_end(self, error)

    def _take_steps(self) -> None:
        self.engine.start_()
        # Steps seed the global generators, which belong to the caller.
        with torch.random.fork_rng(devices=accelerators_in_use()):
            while self.step < self.length.num_steps and not self._is_stopped:
                self._take_step()
                record = self._finish_epoch() if self.step % self.length.steps_per_epoch == 0 else None
                for callback in self.callbacks:
                    callback.on_step_end(self)
                if record is not None:
                    for callback in self.callbacks:
                        callback.on_epoch_end(self, record)
                for callback in self.callbacks:
                    callback.on_step_complete(self)
        self.engine.hand_back_()

    def stop(self) -> None:
        """End training after this step, for callbacks; soups and scores are computed as usual.

        If several processes hold the population, all must call it at the same step.
        """
        self._is_stopped = True

    def report(self, event: Mapping[str, Any]) -> None:
        """Report something unusual to all callbacks."""
        for callback in self.callbacks:
            callback.on_event(self, event)

    def _take_step(self) -> None:
        for callback in self.callbacks:
            callback.on_step_begin(self)
        with self._timed("train"):
            self.engine.step_()
            self.step += 1
            self.set_lr_()
        with self._timed("average"):
            averaging = self.averager.step()
        self._handle_nonfinite(self.averager.found_nonfinite)
        if averaging is not None:
            for callback in self.callbacks:
                callback.on_averaging(self, averaging)

    def loss_of(self, model: Callable[[Inputs], Tensor], inputs: Inputs, targets: Tensor) -> Tensor:
        """A network's mean loss on a batch, in the precision of the training."""
        with self.autocast():
            if self.task.objective is not None:
                return self.task.objective(model, inputs, targets)
            if self.task.loss is own_loss:
                outputs, loss = own_loss_of(model, inputs, targets)
                return own_loss(logits_of(outputs), targets) if loss is None else checked_loss(loss)
            return checked_loss(self.task.loss(logits_of(outputs_of(model, inputs)), targets))

    def add_losses_(self, losses: Tensor) -> None:
        """Record every local member's loss of a step, for the epoch's mean and the health check."""
        losses = losses.detach()
        self.loss_sums += losses
        self.recent_losses[self.step % NUM_BAD_LOSSES] = losses

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of forward passes."""
        if self.settings.numerics.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.settings.numerics.autocast)

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start, counted = time.perf_counter(), sum(self.seconds.values())
        yield
        within = sum(self.seconds.values()) - counted  # scoring during a merge counts as scoring, not as averaging
        self.seconds[what] += time.perf_counter() - start - within

    def _watched_losses(self) -> Tensor:
        """Of each local member, 0, or NaN if its last losses were not finite.

        Read only when members are averaged or an epoch ends, so that no other step waits for an accelerator.
        """
        return torch.where(torch.isfinite(torch.stack(self.recent_losses)).any(dim=0), 0.0, math.nan)

    def _handle_nonfinite(self, found: Sequence[NonFiniteMember]) -> None:
        for one in found:
            if one.member in self.members:
                index = one.member - self.members.start
                for losses in (*self.recent_losses, self.loss_sums):
                    losses[index] = 0.0
                self.scalers[index] = self._make_scaler()
                self.engine.reset_member_(index)
                for callback in self.callbacks:
                    callback.reset_member_(index, self.population[index])
            self.nonfinite.append(one.to_json())
            self.report(one.to_json())

    def _make_scaler(self) -> torch.amp.GradScaler | None:
        return torch.amp.GradScaler(self.device.type) if self.settings.numerics.autocast is torch.float16 else None

    def _finish_epoch(self) -> EpochRecord | None:
        self._handle_nonfinite(self.averager.check_health())
        is_scored = self.epoch % self.settings.monitoring.validate_every == 0 or self.step == self.length.num_steps
        losses = self._mean_losses() if is_scored else []
        self.loss_sums.zero_()
        if not is_scored:
            return None
        soup = self.current_soup()
        test = self.data.test if self.settings.monitoring.test_each_epoch else None
        return EpochRecord(
            epoch=self.epoch,
            step=self.step,
            lr=float(self.optimizers[0].param_groups[0]["lr"]),
            losses=self.group.all_gather(losses),
            validation=self._epoch_scores(self.data.validation, soup),
            test=None if test is None else self._epoch_scores(test, soup),
            distances=(distances := self.population.distances()).tolist(),
            spread=spread_of(distances[list(self.population.active)], soup),
        )

    def _mean_losses(self) -> list[float]:
        """Each local member's mean loss since the epoch began, or since the member was restarted; NaN if dropped."""
        began = dict.fromkeys(self.members, self.step - self.length.steps_per_epoch)
        for event in self.nonfinite:
            if event["member"] in began:
                began[event["member"]] = max(began[event["member"]], event["step"])
        return [
            math.nan if member in self.population.dropped or begin == self.step else loss_sum / (self.step - begin)
            for (member, begin), loss_sum in zip(began.items(), self.loss_sums.tolist(), strict=True)
        ]

    def current_soup(self) -> nn.Module:
        """The mean of the active members now, as a separate network. All processes must call it."""
        mean = mean_network(self.population)
        mean.fill_(soup_row(self.population.size, self.population.active))
        network: nn.Module = mean.network
        return network

    def _epoch_scores(self, source: Source, soup: nn.Module) -> EpochScores:
        members, ensemble = self.evaluate_population(source)
        is_alone = self.population.size == 1  # then its soup is a copy of it
        return EpochScores(members, ensemble, members[0] if is_alone else self.score(soup, source))

    def evaluate_population(
        self, source: Source, population: Population | None = None, **options: Any
    ) -> tuple[list[Evaluation], Evaluation]:
        """Score every member of the whole population, or of another one on the same processes, and their ensemble.

        `options` are those of `papa.evaluation.scores.evaluate_together`.
        """
        population = self.population if population is None else population
        members, ensemble = self.evaluate(
            list(population), source, gather=self.group.all_gather, ensemble_of=population.active, **options
        )
        nothing = Evaluation(math.nan, math.nan)
        scores = [nothing if member in population.dropped else found for member, found in enumerate(members)]
        return scores, ensemble

    def score(self, network: nn.Module, source: Source | None = None) -> Evaluation:
        """Score one network on a source, by default the validation data."""
        return self.evaluate([network], self.data.validation if source is None else source)[0][0]

    def evaluate(
        self,
        models: Sequence[nn.Module],
        source: Source,
        **options: Any,
    ) -> tuple[list[Evaluation], Evaluation]:
        """Score some networks, and their ensemble, on a source without augmentation.

        `options` are those of `papa.evaluation.scores.evaluate_together`.
        """
        with self._timed("evaluate"), self.autocast():
            return evaluate_together(
                models,
                self.batches.evaluation(source),
                loss=self.task.loss,
                metric=self.task.metric,
                apply=self.task.apply,
                combine=self.task.combine,
                **options,
            )


class OneByOne:
    """The plain engine: members take a step one after the other."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def start_(self) -> None:
        pass

    def hand_back_(self) -> None:
        pass

    def reset_member_(self, index: int) -> None:
        pass

    def step_(self) -> None:
        """Take a step with each local member that was not dropped."""
        training = self.training
        losses = torch.zeros_like(training.loss_sums)
        for index, member in enumerate(training.members):
            if member not in training.population.dropped:
                losses[index] = self._step_of(index)
        training.add_losses_(losses)

    def _step_of(self, index: int) -> Tensor:
        """One member's step; returns its loss, the mean over its batches."""
        training, settings = self.training, self.training.settings
        model, optimizer, scaler = training.population[index], training.optimizers[index], training.scalers[index]
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for number in range(training.step * settings.accumulate, (training.step + 1) * settings.accumulate):
            inputs, targets = training.batches.training_batch(index, number)
            seed_global_(derive(training.seed, "forward", training.members[index], number))
            loss = training.loss_of(model, training.batches.formatted(inputs), targets) / settings.accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        if settings.numerics.clip_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), settings.numerics.clip_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        return torch.stack(losses).sum()
