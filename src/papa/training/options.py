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
from papa.training.checks import check_function, check_metric
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


MAKES_ONE = "a function that makes one for each member"
"""What is expected where a network or an optimizer is made, for errors."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides what a training computes, besides the model, the data and the rule: see `papa.train`."""

    num_epochs: int
    num_members: int = 5
    batch_size: int = 64
    accumulate: int = 1
    task: Task = field(default_factory=Task)
    """Loss, metric, and how networks are applied when they are scored."""
    make_optimizer: Callable[[nn.Module], Optimizer] = sgd
    schedule: Schedule = field(default_factory=cosine)
    make_scheduler: MakeScheduler | None = None
    steps_per_epoch: int | None = None
    seed: int = 1
    device: torch.device | str = "auto"
    validation: Any = 0.02
    transforms: Transforms = Transforms()
    averaging: AveragingOptions = AveragingOptions()
    numerics: Numerics = Numerics()
    monitoring: Monitoring = Monitoring()
    engine: Callable[[Training], Engine] | None = None

    def check(self) -> None:
        """Raise a `ConfigError` about the first invalid setting."""
        for name, kind, example in GROUPS:
            if not isinstance(value := getattr(self, name), kind):
                wanted = f"papa.training.{kind.__name__}"
                raise ConfigError(f"{name} is {value!r}, expected a {wanted}, such as {wanted}({example})")
        check_function("make_optimizer", self.make_optimizer, MAKES_ONE)
        check_function("loss", self.task.loss)
        check_function("schedule", self.schedule)
        if self.make_scheduler is not None:
            check_function("make_scheduler", self.make_scheduler)
        check_function("prepare", self.transforms.prepare)
        check_function("apply", self.task.apply)
        check_metric(self.task.metric)
        for name in ("num_members", "num_epochs", "batch_size", "accumulate", "steps_per_epoch"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= 1) and (name, value) != ("steps_per_epoch", None):
                raise ConfigError(f"{name} is {value!r}, expected a whole number, at least 1")
        dtype, augment = self.numerics.autocast, self.transforms.augment
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ConfigError(f"autocast is {dtype!r}, expected a dtype, such as torch.bfloat16, or None")
        if augment is not None and not callable(augment) and len(augment) != self.num_members:
            raise ConfigError(
                f"augment has {len(augment)} entries, expected one for each of {self.num_members} members"
            )


GROUPS = (
    ("transforms", Transforms, "augment=..."),
    ("averaging", AveragingOptions, "repair=papa.training.Repair()"),
    ("numerics", Numerics, "autocast=torch.bfloat16"),
    ("monitoring", Monitoring, "keep_best_soup=True"),
)
"""The groups of settings, and for errors how each is made."""
