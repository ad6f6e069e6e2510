"""The loop: Algorithm 1 of the paper, with every random stream a function of the step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from papa.align import AlignMerges
from papa.averager import Averager, Averaging, MergeHook, chain
from papa.data import Source, Subset, as_data
from papa.errors import ConfigError, DataError
from papa.evaluation import Apply, Evaluation, Loss, Metric, call, evaluate_together
from papa.group import Group, LocalGroup
from papa.health import NonFiniteMember
from papa.inputs import Inputs, outputs_of
from papa.lab.selection import Mutation
from papa.population import Population
from papa.rules import HALF_LIFE_SHARE, Independent, Push, Rule
from papa.schedules import Schedule
from papa.streams import accelerators_in_use, derive, global_stream, seed_global_
from papa.training.batches import Augment, Batches
from papa.training.checks import check_callbacks, check_functions, check_makers, check_metric, check_rule, check_whole
from papa.training.merge_options import MergeOptions, repair_hook
from papa.training.options import Engine, EpochRecord, Length, Numerics

MOST_BAD_LOSSES = 3
"""A member whose loss was not finite for so many steps in a row is sick, whatever its weights."""


class Callback:
    """What may be told of a training while it runs. Override what you need."""

    def on_start(self, training: Training) -> None:
        """Before the first step, or the first after a resume."""

    def before_step(self, training: Training) -> None:
        """Before members take a step."""

    def on_averaging(self, training: Training, averaging: Averaging) -> None:
        """After members were averaged."""

    def after_step(self, training: Training) -> None:
        """After a step and all that belongs to it: its averaging, the end of its epoch."""

    def on_epoch(self, training: Training, record: EpochRecord) -> None:
        """After an epoch."""

    def on_event(self, training: Training, event: Mapping[str, Any]) -> None:
        """After something out of the ordinary, such as a checkpoint that could not be written."""


class Companion(Protocol):
    """Something that goes along with each member and is saved with it, such as an average of its trajectory."""

    def begin(self, training: Training) -> None:
        """Before the first step, or before a checkpoint is loaded."""
        ...

    def after_step(self, training: Training) -> None:
        """After a step and all that belongs to it."""
        ...

    def forget_(self, index: int, model: nn.Module) -> None:
        """Begin anew with a member held here: it was sick, and is what is given now."""
        ...

    def member_state(self, index: int) -> dict[str, Tensor]:
        """What belongs to a member held here, by name; always of the same form."""
        ...

    def load_member_state_(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `member_state` gave."""
        ...


class Training:
    """A population, its optimizers and averager, and the step they are at."""

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        data: Any,
        *,
        num_members: int,
        num_epochs: int,
        batch_size: int,
        validation: float = 0.02,
        rule: Rule | Callable[[Training], Rule] | None,
        loss: Loss,
        metric: Metric,
        make_optimizer: Callable[[nn.Module], Optimizer],
        schedule: Schedule,
        augment: Augment | Sequence[Augment] | None,
        prepare: Callable[[Inputs], Inputs],
        seed: int,
        device: torch.device | str,
        numerics: Numerics,
        eval_batch_size: int,
        num_repair_batches: int = 0,
        on_nonfinite: str | None = "restart",
        apply: Apply = call,
        merging: MergeOptions = MergeOptions(),  # noqa: B008
        engine: Callable[[Training], Engine] | None = None,
        measure: bool = True,
        companion: Companion | None = None,
        group: Group | None,
    ) -> None:
        check_makers(make_model=make_model, make_optimizer=make_optimizer)
        check_functions(loss=loss, schedule=schedule, prepare=prepare, apply=apply)
        check_metric(metric)
        check_rule(rule)
        check_whole(num_members=num_members, num_epochs=num_epochs, batch_size=batch_size)
        if augment is not None and not callable(augment) and len(augment) != num_members:
            raise ConfigError(f"augment has {len(augment)} entries, expected one for each of {num_members} members")
        self.data = as_data(data, validation, seed=seed)
        if batch_size > len(self.data.train):
            available = len(self.data.train)
            raise DataError(f"batch_size is {batch_size}, expected at most the {available} training examples")
        steps_per_epoch = len(self.data.train) // batch_size
        self.length = Length(num_steps=num_epochs * steps_per_epoch, steps_per_epoch=steps_per_epoch)
        self.num_epochs, self.batch_size = num_epochs, batch_size
        self.loss, self.metric, self.schedule = loss, metric, schedule
        self.apply = apply
        self.seed, self.device, self.numerics = seed, torch.device(device), numerics
        self.group = group if group is not None else LocalGroup()
        self.members = self.group.local_range(num_members)
        self.population = Population([self._make_member(make_model, member) for member in self.members], self.group)
        self.optimizers = [make_optimizer(model) for model in self.population]
        self.scalers = [self._make_scaler() for _ in self.members]
        self.batches = Batches(
            self.data,
            members=self.members,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            augment=augment,
            prepare=prepare,
            num_repair_batches=num_repair_batches,
            seed=seed,
            device=self.device,
            channels_last=numerics.channels_last,
        )
        self.step = 0
        self.seconds = {"train": 0.0, "average": 0.0, "evaluate": 0.0}
        self.loss_sums = torch.zeros(len(self.members), dtype=torch.float64, device=self.device)
        self.recent_losses = torch.zeros(len(self.members), MOST_BAD_LOSSES, device=self.device)
        self.nonfinite: list[dict[str, Any]] = []
        """Members that were found sick so far, as lines of the metrics."""
        self._callbacks: Sequence[Callback] = ()
        self._is_stopped = False
        self.set_lr_()
        self.merging = merging
        self.mutation: Mutation | None = None
        rule = _rule_of(rule, self)
        self.averager = Averager(
            self.population,
            rule,
            self.optimizers,
            num_steps=self.length.num_steps,
            measure=measure,
            merge_hooks=self._around(rule),
            on_nonfinite=on_nonfinite,
            unhealthy_reason=self._symptom,
        )
        self.engine = None if engine is None else engine(self)
        self.companion = companion
        if companion is not None:
            companion.begin(self)

    @property
    def epoch(self) -> int:
        """Whole epochs done."""
        return self.step // self.length.steps_per_epoch

    def _make_member(self, make_model: Callable[[], nn.Module], member: int) -> nn.Module:
        with global_stream(self.seed, "init", member):
            model = make_model().to(self.device)
        return model.to(memory_format=torch.channels_last) if self.numerics.channels_last else model

    def _around(self, rule: Rule) -> MergeHook | None:
        """What happens around averagings, besides mixing: members are matched before, and repaired after merges."""
        merging, data = self.merging, self.batches
        parts: list[MergeHook] = []
        if merging.mutation and not isinstance(rule, Independent):
            every_steps = None if rule.is_merge else self.steps_in(merging.mutation_every_epochs)
            self.mutation = Mutation(merging.mutation, seed=self.seed, every_steps=every_steps)
            parts.append(self.mutation)  # the outermost, so that it comes after REPAIR
        if merging.align is not None and not isinstance(rule, Independent):
            align_steps = 1 if rule.is_merge else self.steps_in(merging.align_every_epochs)
            batches = data.plain_batches(merging.num_align_batches)
            parts.append(AlignMerges(batches, by=merging.align, optimizers=self.optimizers, every_steps=align_steps))
        if data.num_repair_batches and rule.is_merge:
            parts.append(repair_hook(self.population[0], merging, data.repair_batches, data.plain_repair_batches))
        return chain(*parts) if parts else None

    def steps_in(self, num_epochs: float) -> int:
        """How many steps so many epochs have, at least one."""
        return max(1, round(num_epochs * self.length.steps_per_epoch))

    def set_lr_(self) -> float:
        """Set the learning rate that belongs to the current step, and return that of the first group."""
        share = self.schedule(self.step, self.length.num_steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * share
        return float(self.optimizers[0].param_groups[0]["lr"])

    def go_to_(self, step: int) -> None:
        """Go on from a step, with the state of that step; all random streams follow from it."""
        self.step = self.averager.num_steps_taken = step
        self.set_lr_()

    def run(self, callbacks: Sequence[Callback] = ()) -> None:
        """Train from the current step to the end."""
        check_callbacks(callbacks, Callback)
        self._try_out()
        self._callbacks = callbacks
        for callback in callbacks:
            callback.on_start(self)
        if self.engine is not None:
            self.engine.start_()
        with torch.random.fork_rng(
            devices=accelerators_in_use()
        ):  # member_step seeds the global generators, which are the caller's
            while self.step < self.length.num_steps and not self._is_stopped:
                self._one_step(callbacks)
                record = self._finish_epoch() if self.step % self.length.steps_per_epoch == 0 else None
                if self.companion is not None:
                    self.companion.after_step(self)  # before callbacks, which may save
                if record is not None:
                    for callback in callbacks:
                        callback.on_epoch(self, record)
                for callback in callbacks:
                    callback.after_step(self)
        if self.engine is not None:
            self.engine.hand_back_()

    def stop(self) -> None:
        """End the training after this step, for callbacks; what it has come to is harvested as usual.

        Where processes hold the population together, all of them must call it at the same step.
        """
        self._is_stopped = True

    def tell(self, event: Mapping[str, Any]) -> None:
        """Tell all callbacks of something out of the ordinary."""
        for callback in self._callbacks:
            callback.on_event(self, event)

    def _try_out(self) -> None:
        """Score one batch, so that a loss or metric that does not fit shows now and not after the first epoch."""
        first = Subset(self.data.validation, torch.arange(min(2, len(self.data.validation)), device="cpu"))
        self.evaluate([self.population[0]], first)

    def _one_step(self, callbacks: Sequence[Callback]) -> None:
        for callback in callbacks:
            callback.before_step(self)
        with self._timed("train"):
            self._step_members()
            self.step += 1
            self.set_lr_()
        with self._timed("average"):
            averaging = self.averager.step()
        self._note_nonfinite(self.averager.found_nonfinite)
        if averaging is not None:
            for callback in callbacks:
                callback.on_averaging(self, averaging)

    def _step_members(self) -> None:
        if self.engine is not None:
            self.engine.step_()
        else:
            for index, member in enumerate(self.members):
                if member not in self.population.dropped:
                    self._member_step(index)

    def loss_of(self, model: Callable[[Inputs], Tensor], inputs: Inputs, targets: Tensor) -> Tensor:
        """A network's mean loss on a batch, in the precision of the training."""
        with self._autocast():
            return self.loss(outputs_of(model, inputs), targets)

    def _member_step(self, index: int) -> None:
        model, optimizer, scaler = self.population[index], self.optimizers[index], self.scalers[index]
        inputs, targets = self.batches.training_batch(index, self.step)
        seed_global_(derive(self.seed, "forward", self.members[index], self.step))
        optimizer.zero_grad(set_to_none=True)
        loss = self.loss_of(model, self.batches.formatted(inputs), targets)
        (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        if self.numerics.clip_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), self.numerics.clip_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        self.loss_sums[index] += loss.detach()
        self.recent_losses[index, self.step % MOST_BAD_LOSSES] = loss.detach()

    def add_losses_(self, losses: Tensor) -> None:
        """Note every member's loss of a step, for the epoch's mean and for their health."""
        self.loss_sums += losses.detach()
        self.recent_losses[:, self.step % MOST_BAD_LOSSES] = losses.detach()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.numerics.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.numerics.autocast)

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start, counted = time.perf_counter(), sum(self.seconds.values())
        yield
        within = sum(self.seconds.values()) - counted  # scoring around a merge counts as scoring, not as averaging
        self.seconds[what] += time.perf_counter() - start - within

    def _symptom(self, index: int) -> str | None:
        """Looked at where members meet, so that no step waits for an accelerator."""
        if bool(torch.isfinite(self.recent_losses[index]).any()):
            return None
        return f"its loss was not finite for {MOST_BAD_LOSSES} steps"

    def _note_nonfinite(self, found: Sequence[NonFiniteMember]) -> None:
        for sickness in found:
            if sickness.member in self.members:
                index = sickness.member - self.members.start
                self.recent_losses[index] = 0.0
                self.scalers[index] = self._make_scaler()
                if self.engine is not None:
                    self.engine.forget_(index)
                if self.companion is not None:
                    self.companion.forget_(index, self.population[index])
            self.nonfinite.append(sickness.to_json())
            self.tell(sickness.to_json())

    def _make_scaler(self) -> torch.amp.GradScaler | None:
        return torch.amp.GradScaler(self.device.type) if self.numerics.autocast is torch.float16 else None

    def _finish_epoch(self) -> EpochRecord:
        self._note_nonfinite(self.averager.check_health())
        for index, member in enumerate(self.members):
            if member in self.population.dropped:
                self.loss_sums[index] = math.nan
        losses = (self.loss_sums / self.length.steps_per_epoch).tolist()
        self.loss_sums.zero_()
        validation, ensemble = self.evaluate_population(self.data.validation)
        return EpochRecord(
            epoch=self.epoch,
            step=self.step,
            lr=float(self.optimizers[0].param_groups[0]["lr"]),
            losses=self.group.all_gather(losses),
            validation=validation,
            validation_ensemble=ensemble,
            distances=self.population.distances().tolist(),
        )

    def evaluate_population(
        self, source: Source, population: Population | None = None
    ) -> tuple[list[Evaluation], Evaluation]:
        """Every member of the whole population (or of another that lives where it does), and their ensemble."""
        population = self.population if population is None else population
        dropped = population.dropped
        members, ensemble = self.evaluate(
            list(population), source, gather=self.group.all_gather, ensemble_of=population.active
        )
        nothing = Evaluation(math.nan, math.nan)
        return [nothing if member in dropped else found for member, found in enumerate(members)], ensemble

    def evaluate(
        self,
        models: Sequence[nn.Module],
        source: Source,
        *,
        gather: Callable[[list[Any]], list[Any]] = list,
        ensemble_of: Sequence[int] | None = None,
    ) -> tuple[list[Evaluation], Evaluation]:
        """Some networks, and their ensemble, on a source, without augmentation."""
        with self._timed("evaluate"), self._autocast():
            return evaluate_together(
                models,
                self.batches.evaluation_batches(source),
                loss=self.loss,
                metric=self.metric,
                apply=self.apply,
                gather=gather,
                ensemble_of=ensemble_of,
            )


def _rule_of(rule: Rule | Callable[[Training], Rule] | None, training: Training) -> Rule:
    if rule is None:
        half_life = max(1.0, HALF_LIFE_SHARE * training.length.num_steps)
        return Push(half_life=half_life, every_steps=min(10, round(half_life)))
    return rule if isinstance(rule, Rule) else rule(training)
