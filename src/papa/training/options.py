"""The settings of a training, in typed groups: one object for `papa.train`, the loop and the lab."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from papa.core.health import OnNonFinite
from papa.errors import ConfigError
from papa.evaluation.inputs import Inputs
from papa.evaluation.scores import Batch
from papa.repair import Scope
from papa.training.checks import (
    check_dtype,
    check_functions,
    check_loss,
    check_makers,
    check_metric,
    check_schedule,
    check_whole,
)
from papa.training.schedules import MakeScheduler, Schedule, cosine
from papa.training.task import Task

if TYPE_CHECKING:
    from papa.training.loop import Training

Augment: TypeAlias = Callable[[Inputs, Tensor, torch.Generator], Batch]
"""From raw inputs, targets and a generator to what a network trains on."""

AlignBy: TypeAlias = Literal["activations", "weights", "sinkhorn"]
RepairScope: TypeAlias = Literal["all", "activations", "batch-norm"]


@dataclass(frozen=True)
class Length:
    """How long a training is."""

    num_steps: int
    """Optimizer steps of the whole training."""
    steps_per_epoch: int
    """Optimizer steps of an epoch."""


@dataclass(frozen=True, kw_only=True)
class Transforms:
    """What happens to batches on their way to the networks."""

    augment: Augment | Sequence[Augment] | None = None
    """From a batch of raw inputs, its targets and a generator to what a member trains on: one function for all members,
    or one for each. It replaces `prepare` during training. Batches are augmented where the data is, usually on the CPU,
    before they go to the training device; the generator is of the same device as the inputs."""
    prepare: Callable[[Inputs], Inputs] = lambda inputs: inputs
    """From a batch of raw inputs to what a network takes, without randomness, on the training device."""


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Precision, memory format and gradient clipping."""

    autocast: torch.dtype | None = None
    """Run forward passes in this dtype: bfloat16, or float16 with a gradient scaler per member; None for float32."""
    channels_last: bool = False
    """Keep images and convolutions in channels-last memory format, which most convolution kernels prefer."""
    clip_norm: float | None = None
    """The largest norm of a member's gradient; None to never clip."""


@dataclass(frozen=True, kw_only=True)
class Repair:
    """REPAIR after merges: rescale layers so that activation statistics match those of the parents."""

    num_batches: int = 5
    """The number of batches statistics are computed on."""
    own_policies: bool = True
    """Use each member's own augmentation, as the paper does: two passes per member. Otherwise use plain data: one pass
    per member and one per distinct child."""
    scope: RepairScope = "all"
    """Which layers are repaired: `all` convolutions and linear layers; those before an activation function or BatchNorm
    (`activations`, see `papa.repair.Scope`); or none, and only BatchNorm is re-estimated (`batch-norm`), which gives
    the same function if BatchNorm follows every layer."""


@dataclass(frozen=True, kw_only=True)
class Align:
    """Alignment before averaging: permute members' units to match the first member's."""

    by: AlignBy = "activations"
    """What units are matched by."""
    every_epochs: float = 5.0
    """How often, for rules that push; merges align every time."""
    num_batches: int | None = 10
    """The number of batches of training data units are matched on; None for all."""
    move_momentum: bool = True
    """Permute the optimizers' state with the units. The paper's published code leaves it unpermuted."""


@dataclass(frozen=True, kw_only=True)
class AveragingOptions:
    """What happens around averaging besides the rule itself."""

    repair: Repair | None = None
    """Repair members after each merge; None to leave them as they are."""
    align: Align | None = None
    """Align members before averaging; None to leave units where they are."""
    on_nonfinite: OnNonFinite | None = "restart"
    """What to do with a member whose weights, or loss for three steps, are not finite; see `Averager`."""
    measure: bool = True
    """Record distances to the mean at every averaging."""

    @property
    def repaired_layers(self) -> Scope:
        """The scope of a REPAIR that rescales layers, such as that of independent members' soups."""
        return "activations" if self.repair is not None and self.repair.scope == "activations" else "all"


@dataclass(frozen=True, kw_only=True)
class Monitoring:
    """What is scored and kept while training."""

    keep_best_soup: bool = False
    """Keep the average soup of the epoch with the best validation score, besides that of the last."""
    validate_every: int = 1
    """Epochs between scores on validation data, which are also computed after the last epoch."""
    test_each_epoch: bool = False
    """Score members, ensemble and average soup on the test data too, whenever they are scored on validation data."""

    def __post_init__(self) -> None:
        if self.validate_every < 1:
            raise ConfigError(f"validate_every is {self.validate_every}, expected a number of epochs, at least 1")


class Engine(Protocol):
    """A way for all local members to take a step: one after the other, or together."""

    def start_(self) -> None:
        """Called before the first step, and before the first step after a checkpoint was loaded."""

    def step_(self) -> None:
        """Every local member takes a step."""

    def hand_back_(self) -> None:
        """Called after the last step: the members' optimizers are used without the engine from now on."""

    def reset_member_(self, index: int) -> None:
        """Clear the optimizer state of a local member that was restarted."""


def sgd(model: nn.Module) -> Optimizer:
    """SGD as the paper trains its CIFAR networks: lr 0.1, momentum 0.9, weight decay 1e-4."""
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides what a training computes, besides the model, the data and the rule."""

    num_epochs: int
    """Passes over the data."""
    num_members: int = 5
    """The size of the population."""
    batch_size: int = 64
    """Examples per batch; the last incomplete batch of an epoch is left out."""
    accumulate: int = 1
    """Batches per optimizer step, whose gradients are averaged: the step of a larger batch in less memory. Incomplete
    steps at the end of an epoch are left out."""
    task: Task = field(default_factory=Task)
    """Loss, metric, and how networks are applied when they are scored."""
    make_optimizer: Callable[[nn.Module], Optimizer] = sgd
    """From a member to its optimizer."""
    schedule: Schedule = field(default_factory=cosine)
    """From steps taken and the number of steps to the learning rate as a share of the optimizer's."""
    make_scheduler: MakeScheduler | None = None
    """Instead of `schedule`, a function from an optimizer and the number of steps to a PyTorch scheduler."""
    steps_per_epoch: int | None = None
    """For loaders without a length: the optimizer steps to call an epoch."""
    seed: int = 1
    """The seed of every random stream."""
    device: torch.device | str = "auto"
    """Where to train; `auto` is an accelerator if there is one."""
    validation: Any = 0.02
    """The share of the training data held out, or validation data, if `data` names none."""
    transforms: Transforms = Transforms()
    averaging: AveragingOptions = AveragingOptions()
    numerics: Numerics = Numerics()
    monitoring: Monitoring = Monitoring()
    engine: Callable[[Training], Engine] | None = None
    """How members take a step: None for one after the other, `papa.training.Stacked` for all at once."""
    same_order: bool = False
    """Whether all members see the training data in the same order, instead of each in its own."""

    def check(self) -> None:
        """Raise a `ConfigError` about the first invalid setting."""
        check_makers(make_optimizer=self.make_optimizer)
        check_loss(self.task.loss)
        check_schedule(self.schedule, self.make_scheduler)
        check_functions(
            loss=self.task.loss, schedule=self.schedule, prepare=self.transforms.prepare, apply=self.task.apply
        )
        check_metric(self.task.metric)
        check_whole(
            num_members=self.num_members,
            num_epochs=self.num_epochs,
            batch_size=self.batch_size,
            accumulate=self.accumulate,
            steps_per_epoch=1 if self.steps_per_epoch is None else self.steps_per_epoch,
        )
        _check_groups(self)
        augment = self.transforms.augment
        if augment is not None and not callable(augment) and len(augment) != self.num_members:
            raise ConfigError(
                f"augment has {len(augment)} entries, expected one for each of {self.num_members} members"
            )


def _check_groups(settings: Settings) -> None:
    groups: dict[str, tuple[Any, type]] = {
        "transforms": (settings.transforms, Transforms),
        "averaging": (settings.averaging, AveragingOptions),
        "numerics": (settings.numerics, Numerics),
        "monitoring": (settings.monitoring, Monitoring),
    }
    for name, (value, kind) in groups.items():
        if not isinstance(value, kind):
            raise ConfigError(
                f"{name} is {value!r}, expected a papa.training.{kind.__name__}, such as "
                f"papa.training.{kind.__name__}({EXAMPLES[name]})"
            )
    check_dtype(settings.numerics.autocast)


EXAMPLES = {
    "transforms": "augment=...",
    "averaging": "repair=papa.training.Repair()",
    "numerics": "autocast=torch.bfloat16",
    "monitoring": "keep_best_soup=True",
}
"""How each group of settings is made, for errors."""
