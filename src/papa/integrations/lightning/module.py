"""Several Lightning modules in one process: each takes its own step on its own batch, and they are averaged."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from papa.attach import Joined, averaging
from papa.core.layout import named_tensors
from papa.core.rules import Rule
from papa.errors import ConfigError, DataError
from papa.files import open_weights
from papa.integrations.lightning.callback import PopulationAveraging
from papa.packages import importing

with importing():
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.core.optimizer import _configure_optimizers, _configure_schedulers_automatic_opt
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden

AnyModule = TypeVar("AnyModule", bound=nn.Module)
NOT_CALLED = (
    *("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping", "backward"),
    *("on_before_backward", "on_after_backward", "on_before_zero_grad", "on_before_optimizer_step"),
    *("on_train_batch_start", "on_train_batch_end", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_test_batch_start", "on_test_batch_end", "configure_model", "configure_callbacks"),
    *("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer"),
    *("on_save_checkpoint", "on_load_checkpoint"),
)
"""Hooks that members must not override, since nobody would call them."""
STAGE_HOOKS = ("setup", "teardown")
EVALUATION_HOOKS = tuple(
    f"on_{stage}_{point}" for stage in ("validation", "test") for point in ("start", "epoch_start", "epoch_end", "end")
)
TRAINING_HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
)


class PopulationModule(LightningModule):
    """Trains several Lightning modules of one architecture in one process, and averages them.

    Each member keeps its `training_step`, its `configure_optimizers` and its hooks, and its logs under `member_0/` and
    so on. The average soup is validated and tested under the plain names, so that `ModelCheckpoint(monitor="val_loss")`
    keeps the best soup; it is `soup` after training, and what `forward` and `predict_step` call. `PopulationAveraging`
    is added by itself.

    ```text
    module = PopulationModule([LitModel() for _ in range(3)], papa.Push(half_life=0.003))
    Trainer(max_epochs=10).fit(module, papa.loaders(dataset, members=3, batch_size=64), val_loader)
    ```

    Args:
        members: the modules, each with its own initial weights.
        rule: how to average.
        accumulate_grad_batches: batches per optimizer step. The trainer's own options of this and of the next name are
            for modules that it optimizes itself.
        gradient_clip_val: the largest norm of a member's gradient; None to never clip.
        validate_members: whether each member is validated and tested too, besides the soup.
        options: `num_steps`, `average`, `merge_hooks`, `on_nonfinite` and `measure`, as for `PopulationAveraging`.
    """

    def __init__(
        self,
        members: Iterable[LightningModule],
        rule: Rule,
        *,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        validate_members: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        listed = list(members)
        _check_members(listed)
        if accumulate_grad_batches < 1:
            raise ConfigError(f"accumulate_grad_batches is {accumulate_grad_batches}, expected at least 1")
        self.members = nn.ModuleList(listed)
        self.soup: LightningModule = copy.deepcopy(listed[0])
        """The average soup: as of the last validation, the last checkpoint or the end of training."""
        self._averaging = AveragesMembers(rule, **options)
        self.accumulate_grad_batches, self.gradient_clip_val = accumulate_grad_batches, gradient_clip_val
        self.validate_members = validate_members

    def configure_callbacks(self) -> Sequence[PopulationAveraging]:
        """The callback that averages the members. The trainer asks for it first, so its options are checked here."""
        trainer: Any = self.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            _check_trainer(trainer)
        return [] if self._averaging in trainer.callbacks else [self._averaging]

    @staticmethod
    def load_soup(checkpoint: str | os.PathLike[str], module: AnyModule) -> AnyModule:
        """Load the soup of a checkpoint of a `PopulationModule` into a module as its members are, and return it.

        ```text
        net = PopulationModule.load_soup("last.ckpt", LitModel())
        ```

        Args:
            checkpoint: the file that the trainer wrote. Only its tensors are read.
            module: what to load it into; its weights are replaced.
        """
        weights = open_weights(checkpoint, key="state_dict.soup")
        found = {name: info.shape for name, info in weights.tensors.items()}
        expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        for name in sorted(found.keys() | expected.keys()):
            if found.get(name) != expected.get(name):
                raise ConfigError(
                    f"the soup of {checkpoint} has {_shape(found, name)}, the module has {_shape(expected, name)}: "
                    "pass a module of the same architecture as the members"
                )
        module.load_state_dict({name: weights.read(name) for name in weights.tensors})
        return module

    def configure_optimizers(self) -> Any:
        """The optimizer and the schedules of each member."""
        optimizers: list[Optimizer] = []
        self._schedules: list[list[Any]] = []
        for member, module in self._each():
            module._trainer = self._trainer
            own, schedules, monitor = _configure_optimizers(module.configure_optimizers())
            if len(own) != 1:
                raise ConfigError(f"member {member} has {len(own)} optimizers, expected 1: train it in its own process")
            configs = _configure_schedulers_automatic_opt(schedules, monitor)
            if any(config.reduce_on_plateau for config in configs):
                raise ConfigError(
                    f"member {member} has a ReduceLROnPlateau, which would give members different learning rates: use "
                    "another schedule"
                )
            optimizers += own
            self._schedules.append(configs)
        configs = [config for one in self._schedules for config in one]
        return optimizers, [{"scheduler": one.scheduler, "interval": one.interval, "name": one.name} for one in configs]

    def on_train_start(self) -> None:
        """Check that there is a loader for each member."""
        loaders, num_members = self.trainer.train_dataloader, len(self.members)
        if not isinstance(loaders, list | tuple) or len(loaders) != num_members:
            found = f"{len(loaders)} loaders" if isinstance(loaders, list | tuple) else f"a {type(loaders).__name__}"
            raise DataError(
                f"the training data is {found}, expected a list of {num_members} loaders, one for each member: "
                f"papa.loaders(dataset, members={num_members}, batch_size=...) makes them"
            )
        self._call("on_train_start")

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Every member takes a step on its own batch, or adds to its gradient."""
        is_step = (batch_idx + 1) % self.accumulate_grad_batches == 0 or self.trainer.is_last_batch
        for (member, module), own in zip(self._each(), batch, strict=True):
            optimizer = self._optimizers[member]
            if member:  # one step of all members is one step of the trainer
                optimizer._on_before_step = optimizer._on_after_step = lambda: None
            with self._logging(module, f"member_{member}/"):
                output = _call_with(module.training_step, own, batch_idx)
            loss = output.get("loss") if isinstance(output, dict) else output
            if batch_idx % self.accumulate_grad_batches == 0:
                optimizer.zero_grad()
            if loss is not None:
                self.manual_backward(loss / self.accumulate_grad_batches)
            if is_step:
                if self.gradient_clip_val is not None:
                    self.clip_gradients(optimizer, self.gradient_clip_val, "norm")
                optimizer.step()
        if is_step:
            self._step_schedules("step", self.trainer.global_step)
        if self.trainer.is_last_batch:
            self._step_schedules("epoch", self.trainer.current_epoch + 1)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Validate the soup, and each member."""
        self._evaluate("validation_step", batch, batch_idx, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Test the soup, and each member."""
        self._evaluate("test_step", batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """The predictions of the soup."""
        return _call_with(self.soup.predict_step, batch, batch_idx, dataloader_idx)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the soup."""
        return self.soup(*args, **kwargs)

    def fill_soup_(self, tensors: dict[str, Tensor]) -> None:
        """Set the soup to averaged tensors, and everything else of it to that of the first member."""
        self.soup.load_state_dict(self.members[0].state_dict())
        with torch.no_grad():
            for name, tensor in named_tensors(self.soup, tensors).items():
                tensor.copy_(tensors[name])

    @property
    def _optimizers(self) -> list[Any]:
        found: Any = self.optimizers()
        return list(found) if isinstance(found, list) else [found]

    def _each(self) -> Iterator[tuple[int, Any]]:
        yield from enumerate(self.members)

    def _evaluate(self, step: str, *arguments: Any) -> None:
        evaluated: list[tuple[str, Any]] = [("", self.soup)]
        if self.validate_members:
            evaluated += [(f"member_{member}/", module) for member, module in self._each()]
        for prefix, module in evaluated:
            with self._logging(module, prefix):
                _call_with(getattr(module, step), *arguments)

    def _call(self, hook: str, **arguments: Any) -> None:
        """Call a hook of the soup and of all members."""
        is_evaluation = hook in EVALUATION_HOOKS
        if is_evaluation or hook in STAGE_HOOKS:
            with self._logging(self.soup, ""):
                getattr(self.soup, hook)(**arguments)
        if not is_evaluation or self.validate_members:
            for member, module in self._each():
                with self._logging(module, f"member_{member}/"):
                    getattr(module, hook)(**arguments)

    @contextlib.contextmanager
    def _logging(self, module: Any, prefix: str) -> Iterator[None]:
        """Let a module log through this one, which the trainer knows, with a prefix of its names."""
        module._trainer = self._trainer
        module.log = lambda name, *args, **kwargs: self.log(f"{prefix}{name}", *args, **kwargs)
        try:
            yield
        finally:
            del module.log

    def _step_schedules(self, interval: str, count: int) -> None:
        for config in (config for one in self._schedules for config in one):
            if config.interval == interval and count % config.frequency == 0:
                config.scheduler.step()


def _forwarded(hook: str) -> Callable[..., None]:
    def call(self: PopulationModule, **arguments: Any) -> None:
        self._call(hook, **arguments)

    call.__name__, call.__doc__ = hook, f"Call `{hook}` of all members."
    return call


for _hook in (*STAGE_HOOKS, *TRAINING_HOOKS, *EVALUATION_HOOKS):
    if _hook not in vars(PopulationModule):
        setattr(PopulationModule, _hook, _forwarded(_hook))


class AveragesMembers(PopulationAveraging):
    """Averages the members of a `PopulationModule`, all in one process."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the trainer's estimate of steps count accumulated batches once."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            assert isinstance(pl_module, PopulationModule)
            trainer.accumulate_grad_batches = pl_module.accumulate_grad_batches

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo what `setup` did: Lightning would refuse it at the start of the next training."""
        super().teardown(trainer, pl_module, stage)
        if stage == "fit":
            trainer.accumulate_grad_batches = 1

    def _check(self, trainer: Trainer) -> None:
        if trainer.world_size > 1:
            raise ConfigError(
                f"the trainer has {trainer.world_size} processes, expected 1 for a PopulationModule: use "
                "Trainer(devices=1)"
            )

    def _join(self, trainer: Trainer, pl_module: LightningModule, num_steps: int | None) -> Joined:
        assert isinstance(pl_module, PopulationModule)
        return averaging(pl_module.members, trainer.optimizers, self.rule, num_steps=num_steps, **self.options)

    def _swap(self, pl_module: LightningModule) -> None:
        """Update the soup: it has a module of its own, and members keep their weights."""
        assert isinstance(pl_module, PopulationModule)
        assert self._other is not None
        pl_module.fill_soup_(self._other)
        self._other = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Update the soup, whose tensors the checkpoint refers to."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        assert isinstance(pl_module, PopulationModule)
        if self.joined is not None:
            pl_module.fill_soup_(self.joined.soup_tensors())


def _shape(shapes: Mapping[str, Sequence[int]], name: str) -> str:
    return f"'{name}' of shape {tuple(shapes[name])}" if name in shapes else f"no '{name}'"


def _check_trainer(trainer: Trainer) -> None:
    """Raise for options of the trainer that Lightning would refuse without saying what to do."""
    given = {"accumulate_grad_batches": trainer.accumulate_grad_batches, "gradient_clip_val": trainer.gradient_clip_val}
    for name, usual in (("accumulate_grad_batches", 1), ("gradient_clip_val", 0)):
        if given[name] not in (None, usual):
            raise ConfigError(
                f"the trainer has {name}={given[name]}, which is for a module that it optimizes itself: pass it to the "
                f"module instead, as in PopulationModule(members, rule, {name}={given[name]})"
            )


def _call_with(step: Callable[..., Any], *arguments: Any) -> Any:
    """Call a step with as many of the arguments as it takes."""
    parameters = inspect.signature(step).parameters.values()
    takes_all = any(one.kind == inspect.Parameter.VAR_POSITIONAL for one in parameters)
    return step(*(arguments if takes_all else arguments[: len(parameters)]))


def _check_members(members: Sequence[Any]) -> None:
    if not members:
        raise ConfigError("a PopulationModule has no members, expected a list of Lightning modules")
    for member, module in enumerate(members):
        if not isinstance(module, LightningModule):
            raise ConfigError(
                f"member {member} is a {type(module).__name__}, expected a lightning.pytorch.LightningModule"
            )
        overridden = [hook for hook in NOT_CALLED if is_overridden(hook, module)]
        own = "optimizes itself (automatic_optimization is False)" if not module.automatic_optimization else ""
        own = f"overrides {overridden[0]}" if overridden else own
        if own:
            raise ConfigError(
                f"member {member} {own}, which a PopulationModule would ignore: train one member per process, with "
                "PopulationAveraging"
            )
