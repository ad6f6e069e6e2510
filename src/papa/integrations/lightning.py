"""A Lightning callback that makes the module of every process a member of one population, and a strategy for ranks.

Needs `pip install 'papa-torch[lightning]'`.
"""

from __future__ import annotations

import math
import os
import random
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, SequentialSampler

from papa.attach import Joined, join
from papa.core.group import Group
from papa.core.layout import named_tensors
from papa.core.rules import Rule
from papa.errors import ConfigError, DataError, PapaWarning
from papa.integrations.fabric import OwnMember, group_for
from papa.packages import importing
from papa.streams import accelerators_in_use
from papa.training.callbacks import averaging_values
from papa.training.data_loaders import MemberLoader

with importing():
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.states import TrainerFn

ORDERS = "papa_loaders"
"""The key of the positions of `papa.loaders` in a checkpoint. Lightning saves them too, but does not load them if the
number of steps was asked for before."""
OWN = "current_model_state"
"""The key of a member's own weights in a checkpoint that has the soup as its `state_dict`; as of `WeightAveraging`."""


class MemberPerRank(OwnMember, SingleDeviceStrategy):
    """Trains one member in each process that `torchrun` started, each with its own logs and checkpoints.

    Lightning would wrap the processes of torchrun in data parallelism, which averages gradients and makes members
    copies of one network, and would save rank 0 only. With this strategy they know each other through papa alone:

    ```text
    strategy = MemberPerRank()
    trainer = Trainer(
        strategy=strategy,
        default_root_dir=f"out/{strategy.member}",
        callbacks=PopulationAveraging(papa.Push(half_life=0.003)),
    )
    ```

    Args:
        device: where this process trains; None for the accelerator of its local rank if there is one, else the CPU.
        group: the processes of all members; None for those of the launcher.
    """

    strategy_name = "member_per_rank"


class PopulationAveraging(Callback):
    """Averages the module of this process with those of the others, one member per process.

    The processes are those that `papa.member` started, or the ranks of torchrun with the strategy `MemberPerRank`. Each
    is an ordinary training on one device. What Lightning's own `WeightAveraging` promises holds here too:

    - it begins when fitting begins, and counts optimizer steps, so accumulated batches do not count;
    - validation sees the average soup, and after training the module is the average soup;
    - checkpoints hold what is needed to continue exactly, with the random state and with the orders of `papa.loaders`.
      Other loaders that shuffle begin their orders again, and a warning says so;
    - a checkpoint that is written right after validation, or at the end, has the soup as its `state_dict` and this
      member's weights as `current_model_state`; any other has this member's weights only, since a soup needs all
      processes;
    - `papa/distance_before` and `papa/distance_after` are logged: the members' mean distance to their mean around the
      last averaging.

    ```text
    trainer = Trainer(callbacks=PopulationAveraging(papa.Push(half_life=0.003)), default_root_dir=f"out/{member}")
    ```

    Args:
        rule: how to average.
        num_steps: the number of optimizer steps of the whole training; None for what the trainer estimates.
        group: None for the processes of the launcher; otherwise as for `papa.Population`.
        options: `average`, `merge_hooks`, `on_nonfinite` and `measure`, as for `papa.averaging`.
    """

    def __init__(self, rule: Rule, *, num_steps: int | None = None, group: Any = None, **options: Any) -> None:
        self.rule, self.num_steps, self.group, self.options = rule, num_steps, group, options
        self.joined: Joined | None = None
        """The population and its averager, once fitting has begun."""
        self._device = torch.device("cpu")
        """Where the module is trained: Lightning moves it to the CPU before `on_fit_end`."""
        self._state: dict[str, Any] = {}
        self._random: dict[str, Any] | None = None
        """The random state to continue from, until the first batch."""
        self._orders: list[dict[str, Any]] = []
        """The positions of `papa.loaders` to continue from."""
        self._other: dict[str, Tensor] | None = None
        """The soup while the module holds the member's own weights, and the other way round; None if there is none."""
        self._holds_soup = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Connect to the other processes, and check that each saves to a directory of its own."""
        if stage != "fit":
            return
        if self.group is None and trainer.world_size > 1:
            raise ConfigError(
                f"the trainer has {trainer.world_size} processes, which train one network: for one member per process, "
                "use Trainer(strategy=papa.integrations.lightning.MemberPerRank()), or start the script with torchrun "
                "-m papa.member and Trainer(devices=1)"
            )
        _check_directories(trainer, group_for(trainer.strategy, self.group))
        self._other, self._holds_soup = None, False
        self._state, self._random, self._orders = {}, None, []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the population."""
        num_steps = self.num_steps
        if num_steps is None and 0 <= trainer.estimated_stepping_batches < math.inf:
            num_steps = int(trainer.estimated_stepping_batches)
        group = group_for(trainer.strategy, self.group)
        if trainer.strategy.model is not None:
            group.check_models([trainer.strategy.model])
        self._device = pl_module.device
        self.joined = join(pl_module, trainer.optimizers, self.rule, num_steps=num_steps, group=group, **self.options)
        if self._state:
            self.joined.load_state_dict(self._state)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue from the orders and the random state of a checkpoint."""
        if self._random is None:
            return
        _warn_of_orders(trainer)
        found = _member_loaders(trainer)
        if len(found) != len(self._orders):
            raise DataError(
                f"the checkpoint has the orders of {len(self._orders)} loaders of papa.loaders, the trainer has "
                f"{len(found)}: pass the same loaders as when it was saved"
            )
        for loader, order in zip(found, self._orders, strict=True):
            loader.load_state_dict(order)
        _set_random_state(self._random)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The same, if there was no batch yet: the trainer may have drawn numbers for its loaders."""
        if self._random is not None:
            _set_random_state(self._random)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Forget a soup that this step makes outdated, and end the epoch of loaders at the trainer's limit of it."""
        self._random, self._other, self._holds_soup = None, None, False
        if trainer.is_last_batch:
            for loader in _member_loaders(trainer):
                if loader.state_dict()["num_batches"]:
                    loader.end_epoch()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the distances around the last averaging."""
        last = None if self.joined is None else self.joined.last
        if last is not None and not trainer.barebones:
            pl_module.log_dict(averaging_values(last), on_step=True, on_epoch=False)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the soup into the module."""
        if self.joined is not None and not trainer.sanity_checking:
            self._other = self.joined.soup_tensors()
            self._swap(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the member's own weights back."""
        if self._holds_soup and trainer.state.fn == TrainerFn.FITTING:
            self._swap(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the soup into the module, for good."""
        assert self.joined is not None
        self._other = self.joined.soup_tensors()
        self._swap(pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The same where nothing was left to train: then Lightning does not call `on_train_end`."""
        if not self._holds_soup:
            pl_module.to(self._device)
            self.on_train_end(trainer, pl_module)
            pl_module.cpu()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop averaging."""
        if stage == "fit":
            self._stop(early=trainer.should_stop)  # as `EarlyStopping` asks for

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop averaging, with the member's own weights in the module."""
        if self._holds_soup and self.joined is not None:
            self._swap(pl_module)
        self._stop(early=True)

    def _stop(self, *, early: bool) -> None:
        if self.joined is not None:
            self._state = self.state_dict()
            self.joined.close(early=early)
            self.joined = None

    def state_dict(self) -> dict[str, Any]:
        """What is needed to continue exactly, besides the module and its optimizers."""
        return self._state if self.joined is None else {**self.joined.state_dict(), "random": _random_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a `state_dict` when fitting begins."""
        self._state = dict(state_dict)
        self._random = self._state.pop("random", None)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the soup as the module, and the member's own weights beside it, where both are known."""
        checkpoint[ORDERS] = [loader.state_dict() for loader in _member_loaders(trainer)]
        if self._other is None:
            return
        own = named_tensors(pl_module, self._other)
        by_tensor = {id(tensor): self._other[name] for name, tensor in own.items()}
        tensors = pl_module.state_dict(keep_vars=True)  # a tensor may have several names
        held = checkpoint["state_dict"]
        other = {name: by_tensor.get(id(tensors.get(name)), value) for name, value in held.items()}
        checkpoint["state_dict"], checkpoint[OWN] = (held, other) if self._holds_soup else (other, held)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Continue fitting from the member's own weights; anything else uses the soup."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._orders = checkpoint.get(ORDERS, [])
            if OWN in checkpoint:
                pl_module.load_state_dict(checkpoint[OWN], strict=pl_module.strict_loading)

    @torch.no_grad()
    def _swap(self, pl_module: LightningModule) -> None:
        """Exchange the module's averaged tensors with those kept beside it."""
        assert self._other is not None
        for name, tensor in named_tensors(pl_module, self._other).items():
            held = tensor.clone()
            tensor.copy_(self._other[name])
            self._other[name] = held
        self._holds_soup = not self._holds_soup


def _member_loaders(trainer: Trainer) -> list[MemberLoader]:
    return [loader for loader in tree_leaves(trainer.train_dataloader) if isinstance(loader, MemberLoader)]


def _warn_of_orders(trainer: Trainer) -> None:
    """Warn of loaders whose orders begin again after a resume."""
    for loader in tree_leaves(trainer.train_dataloader):
        sampler = loader.sampler if isinstance(loader, DataLoader) else None
        is_exact = hasattr(loader, "load_state_dict") or hasattr(sampler, "set_epoch")
        if sampler is not None and not is_exact and not isinstance(sampler, SequentialSampler):
            warnings.warn(
                f"a training loader draws its order with a {type(sampler).__name__}, whose state is not in the "
                "checkpoint: training continues with other batches than one without a break. Make the loader with "
                "papa.loaders, or give it a sampler with set_epoch",
                PapaWarning,
                stacklevel=2,
            )
            return


def _check_directories(trainer: Trainer, group: Group) -> None:
    """Raise if members would overwrite each other's checkpoints. All processes must call it."""
    used = sorted({os.path.realpath(path) for path in _directories(trainer)})
    everyone = group.all_gather([used])
    for member, theirs in enumerate(everyone):
        for other in range(member):
            shared = sorted(set(theirs) & set(everyone[other]))
            if shared:
                raise ConfigError(
                    f"members {other} and {member} both write to {shared[0]}, and would overwrite each other's "
                    "checkpoints: give each a directory of its own, as in "
                    'Trainer(default_root_dir=f"out/{member}")'
                )


def _directories(trainer: Trainer) -> Iterable[str]:
    """Where checkpoints go; below these, Lightning chooses names that processes may choose alike."""
    loggers = [str(logger.save_dir) for logger in trainer.loggers if logger.save_dir is not None]
    for checkpoint in trainer.checkpoint_callbacks:
        own = checkpoint.dirpath if isinstance(checkpoint, ModelCheckpoint) else None
        yield str(own or (loggers[0] if loggers else trainer.default_root_dir))
    yield from loggers


def _random_state() -> dict[str, Any]:
    """The state of the global generators, which Lightning's checkpoints lack: tensors, numbers and strings."""
    state: Any = np.random.get_state()
    name, words, *rest = state
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in accelerators_in_use()],
        "python": random.getstate(),
        "numpy": (name, words.tolist(), *rest),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    """Continue from a random state; devices that were not there then are left as they are."""
    torch.set_rng_state(state["torch"].cpu())
    for device, own in zip(accelerators_in_use(), state["cuda"], strict=False):
        torch.cuda.set_rng_state(own.cpu(), device)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, words, *rest = state["numpy"]
    np.random.set_state((name, np.array(words, dtype=np.uint32), *rest))
