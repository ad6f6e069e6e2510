"""The configuration of a run: frozen dataclasses, checked as a whole, written to and read from JSON."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from typing import Any

from papa.errors import ConfigError, did_you_mean
from papa.group import EXCHANGES
from papa.health import OnNonFinite

METHODS = {
    "independent": "never average: the baseline",
    "papa": "push members toward the mean every few steps",
    "papa-all": "replace members by the mean of all every few epochs",
    "papa-2": "replace members by the means of random pairs every few epochs",
    "pair-75": "as papa-2, with weights 3/4 and 1/4",
    "many-half": "replace members by half of themselves and half of all others",
    "many-75": "as many-half, with weights 3/4 and 1/4",
    "greedy-merge": "replace members by the current greedy soup every few epochs",
}
OPTIMIZERS = ("sgd", "adamw")
SCHEDULES = ("cosine", "restarts", "multistep", "constant")
TRAJECTORIES = ("none", "swa", "ema")
PRECISIONS = ("float32", "bfloat16", "float16")
REPAIR_POLICIES = ("own", "shared")
REPAIR_SCOPES = ("all", "activations", "batch-norm")
ALIGNMENTS = ("none", "activations", "weights", "sinkhorn")
ENGINES = ("loop", "stacked")
PUSH_OPTIONS = frozenset(
    f"average.{name}"
    for name in (
        "alpha",
        "half_life",
        "every_steps",
        "scale_by_lr",
        "delay",
        "align_every_epochs",
        "mutation_every_epochs",
    )
)
"""Options that only pushes use."""
MERGE_OPTIONS = frozenset({"average.every_epochs"})
"""Options that only merges use."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which data."""

    name: str = "digits"
    """The data set: digits, optdigits, cifar10, cifar100, mnist, fashion-mnist, imagenet, or folder for your own class
    folders; tiles or vaihingen for segmentation."""
    root: str = "data"
    """The directory of the data, where it is also downloaded to."""
    validation: float = 0.02
    """The share of the training data held out for validation; tiles are split by area instead."""
    image_size: int | None = None
    """Resize images to this size; None for the size the network was made for."""
    test_share: float | None = None
    """For a folder without test images: the share of its images to use for testing."""
    max_train: int | None = None
    """The largest number of training images; None for all."""
    max_test: int | None = None
    """The largest number of test images (of tiles, also for validation); None for all."""
    patch_size: int = 256
    """Tiles: height and width of training patches."""
    patches_per_epoch: int = 10_000
    """Tiles: the number of random patches in an epoch."""
    shrink: int = 1
    """Tiles: shrink images by this factor."""
    window: int | None = None
    """Tiles: evaluate on overlapping windows of this size, to save memory; None for whole tiles."""
    overlap: int = 64
    """Tiles: the number of pixels by which windows overlap."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network."""

    name: str = "digits-cnn"
    """The network."""
    width: int | None = None
    """Channels of its first stage; None for the published width."""
    pretrained: bool = False
    """Start timm networks from the pretrained weights of timm."""
    weights: str | None = None
    """Start from the weights in this file."""
    frozen: float = 0.0
    """Train only the head for this share of training."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How each member is trained."""

    epochs: int = 300
    """Passes over the data."""
    batch_size: int = 64
    """Examples per step."""
    optimizer: str = "sgd"
    """sgd or adamw."""
    lr: float = 0.1
    """The initial learning rate."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 1e-4
    """Weight decay."""
    schedule: str = "cosine"
    """The learning rate schedule: cosine, restarts, multistep or constant."""
    min_lr: float = 1e-4
    """The learning rate at the end of a cosine."""
    cycles: int = 1
    """The number of cosines of `restarts`."""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """When multistep divides the learning rate by ten, as shares of training."""
    warmup_epochs: float = 0.0
    """The number of epochs of linear warm-up."""
    precision: str = "float32"
    """float32, or autocast to bfloat16 or float16."""
    channels_last: bool = False
    """Use the channels-last memory format."""
    clip_norm: float | None = None
    """Clip gradients to this norm; None to never clip."""
    test_each_epoch: bool = False
    """Score members, ensemble and average soup on the test data too, after every epoch."""
    engine: str = "loop"
    """loop trains members one after the other, stacked all at once, which is faster for tiny networks and batches."""


@dataclass(frozen=True, kw_only=True)
class AverageConfig:
    """How members are averaged."""

    alpha: float | None = None
    """papa: the share of itself a member keeps at each push."""
    half_life: float | None = None
    """papa: instead of alpha, the half-life of the distance to the mean, as a share of training."""
    every_steps: int = 10
    """papa: steps between pushes."""
    every_epochs: float = 5.0
    """Merges: epochs between them."""
    repair: int = 0
    """Merges: the number of batches for REPAIR of activation statistics; 0 for no REPAIR."""
    repair_soups: int | None = None
    """The same for soups of independent members; None for the number of merges."""
    repair_policy: str = "own"
    """Merges: repair each member under its own augmentation (own: the paper's form, two passes per member) or all on
    plain data (shared: one pass per member and one per distinct child)."""
    repair_scope: str = "all"
    """Repair every convolution and linear layer (all); those before an activation function or BatchNorm, which in
    transformers are fewer (activations: the paper's); or only re-estimate BatchNorm after merges (batch-norm)."""
    align: str = "none"
    """Match members' units to the first member's before averaging: by activations, weights or sinkhorn (weights, with
    soft permutations), or not (none)."""
    align_momentum: bool = True
    """Permute the optimizers' momentum with the units; the paper's published code leaves it unpermuted."""
    align_every_epochs: float = 5.0
    """papa: epochs between alignments, since pushes are frequent; merges align every time."""
    align_soups: bool = False
    """Independent members, with REPAIR: also make soups of members aligned to the growing soup."""
    align_batches: int | None = 10
    """The number of batches of training data units are matched on; None for all."""
    probes: bool = False
    """Merges: score members on test data just before, just after and a few steps after each."""
    probe_steps: int = 10
    """The number of steps after a merge of the last of these."""
    probe_examples: int = 1000
    """The largest number of test images to score."""
    start: float = 0.0
    """The first epoch at which averaging may happen."""
    stop: float | None = None
    """The first epoch at which it no longer does; None for never."""
    scale_by_lr: bool = True
    """papa: weaken the push with the learning rate."""
    on_nonfinite: str = "restart"
    """A non-finite member: restart it from the mean of the healthy ones, drop it, or stop. independent: drops it."""
    delay: int = 0
    """papa: steps that members train on while their mean is computed; even, and less than every-steps."""
    exchange: str = "exact"
    """How weights are sent between machines: exact, fast (float32 sums) or bfloat16 (of differences)."""
    measure: bool = True
    """Log distances to the mean at every averaging; between machines this costs half as much again."""
    keep_best_soup: bool = False
    """Keep the average soup of the epoch with the best validation score too; the last soup stays the result."""
    mutation: float = 0.0
    """Add noise of this standard deviation, divided by the index of the averaging, after averaging; 0 for none."""
    mutation_every_epochs: float = 5.0
    """papa: epochs between mutations; merges mutate every time."""
    tournament: bool = False
    """papa-2: draw parents with probability proportional to 1/loss."""
    elitist: bool = False
    """papa-2: make six children per member, keep the best of children and parents, and some at random."""


@dataclass(frozen=True, kw_only=True)
class DiversityConfig:
    """How the members' data differs."""

    grid: str = "none"
    """The grid of augmentations and regularisations that members draw from: none, default, imagenet, ablation or
    segmentation; or dart, which has one for each of its three members."""
    per_batch: bool = False
    """Draw for every mini-batch instead of once for each member."""
    same_init: bool = False
    """Start all members from the same weights."""


@dataclass(frozen=True, kw_only=True)
class TrajectoryConfig:
    """Averages along each member's own trajectory."""

    kind: str = "none"
    """none, swa (equal weights, once an epoch) or ema (exponential, every step)."""
    start: float = 0.0
    """When it begins, as a share of training."""
    decay: float = 0.999
    """ema: the share of itself the average keeps at each step."""
    lr: float | None = None
    """swa: the constant learning rate at the end; None to keep the schedule."""
    anneal: float = 0.02
    """swa: how long the change to it takes, as a share of training."""
    linear: bool = False
    """swa: change linearly instead of by half a cosine."""
    batch_norm_batches: int = 100
    """Batches on which BatchNorm statistics of the averages are re-estimated."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides what a run computes."""

    recipe: str = "custom"
    """The recipe it came from."""
    method: str = "papa"
    """independent, papa, papa-all, papa-2, pair-75, many-half, many-75 or greedy-merge."""
    members: int = 5
    """The size of the population."""
    seed: int = 1
    """The seed of every random stream."""
    device: str = "auto"
    """Where to train: auto, cpu, cuda or cuda:1."""
    analysis: bool = False
    """At the end, compare members: the similarity of their features, and scores on the line between two of them."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    average: AverageConfig = field(default_factory=AverageConfig)
    diversity: DiversityConfig = field(default_factory=DiversityConfig)
    trajectory: TrajectoryConfig = field(default_factory=TrajectoryConfig)

    def check(self) -> Config:
        """This config, or a `ConfigError` that lists everything wrong with it."""
        problems = list(_problems(self))
        if problems:
            lines = "\n".join(f"  {problem}" for problem in problems)
            raise ConfigError(f"the configuration of {self.recipe} cannot run:\n{lines}")
        return self

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Config:
        """From the output of `to_json`; unknown and missing fields are a `ConfigError`."""
        return typing.cast(Config, _from_json(Config, value, "config"))


def idle_options(method: str) -> frozenset[str]:
    """The options of averaging, by their dotted names, that a method does not use.

    Example:
        >>> sorted(idle_options("papa"))
        ['average.every_epochs']
        >>> "average.alpha" in idle_options("papa-all")
        True
    """
    pushes = frozenset[str]() if method == "papa" else PUSH_OPTIONS
    merges = MERGE_OPTIONS if method in ("papa", "independent") else frozenset[str]()
    return pushes | merges


def _from_json(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {value!r}, expected an object")
    hints = typing.get_type_hints(kind)
    for name in value:
        if name not in hints:
            raise ConfigError(f"{where}.{name} is not known: {did_you_mean(name, hints)}")
    arguments = {}
    for name, part in value.items():
        if dataclasses.is_dataclass(hints[name]):
            arguments[name] = _from_json(hints[name], part, f"{where}.{name}")
        else:
            arguments[name] = tuple(part) if isinstance(part, list) else part
            if not _fits(arguments[name], hints[name]):
                raise ConfigError(f"{where}.{name} is {part!r}, expected {_named(hints[name])}")
    return kind(**arguments)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type of a field."""
    options = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(part, options[0]) for part in value)
    if options:
        return any(_fits(value, option) for option in options)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint


def _named(hint: Any) -> str:
    return str(getattr(hint, "__name__", hint)).replace("NoneType", "None")


def _problems(config: Config) -> typing.Iterator[str]:
    train, average = config.train, config.average
    for option, value, known in (
        ("method", config.method, METHODS),
        ("train.optimizer", train.optimizer, OPTIMIZERS),
        ("train.schedule", train.schedule, SCHEDULES),
        ("train.precision", train.precision, PRECISIONS),
        ("average.on-nonfinite", average.on_nonfinite, typing.get_args(OnNonFinite)),
        ("average.repair-policy", average.repair_policy, REPAIR_POLICIES),
        ("average.repair-scope", average.repair_scope, REPAIR_SCOPES),
        ("average.align", average.align, ALIGNMENTS),
        ("train.engine", train.engine, ENGINES),
        ("average.exchange", average.exchange, EXCHANGES),
        ("trajectory.kind", config.trajectory.kind, TRAJECTORIES),
    ):
        if value not in known:
            yield f"--{option} is {value}: {did_you_mean(value, known)}"
    for option, number, least in (
        ("members", config.members, 1),
        ("seed", config.seed, 0),
        ("train.epochs", train.epochs, 1),
        ("train.batch-size", train.batch_size, 1),
        ("train.warmup-epochs", train.warmup_epochs, 0),
        ("train.cycles", train.cycles, 1),
        ("data.max-train", config.data.max_train or 1, 1),
        ("data.max-test", config.data.max_test or 1, 1),
        ("data.patch-size", config.data.patch_size, 1),
        ("data.patches-per-epoch", config.data.patches_per_epoch, 1),
        ("data.shrink", config.data.shrink, 1),
        ("data.window", config.data.window or 1, 1),
        ("data.overlap", config.data.overlap, 0),
        ("average.every-steps", average.every_steps, 1),
        ("average.repair", average.repair, 0),
        ("average.repair-soups", average.repair_soups or 0, 0),
        ("average.align-batches", 1 if average.align_batches is None else average.align_batches, 1),
        ("average.probe-steps", average.probe_steps, 1),
        ("average.probe-examples", average.probe_examples, 1),
        ("average.start", average.start, 0),
        ("average.delay", average.delay, 0),
    ):
        if number < least:
            yield f"--{option} is {number}, expected at least {least}"
    if not 0 <= config.model.frozen < 1:
        yield f"--model.frozen is {config.model.frozen}, expected a share of training from 0 to below 1"
    if not 0 < train.lr < math.inf:
        yield f"--train.lr is {train.lr}, expected a number of more than 0"
    elif not 0 <= train.min_lr <= train.lr:
        yield f"--train.min-lr is {train.min_lr}, expected 0 to --train.lr ({train.lr})"
    if not 0 <= train.momentum < 1:
        yield f"--train.momentum is {train.momentum}, expected 0 to below 1"
    if train.weight_decay < 0:
        yield f"--train.weight-decay is {train.weight_decay}, expected 0 or more"
    if train.warmup_epochs > train.epochs:
        yield f"--train.warmup-epochs is {train.warmup_epochs}, expected at most --train.epochs ({train.epochs})"
    if train.clip_norm is not None and train.clip_norm <= 0:
        yield f"--train.clip-norm is {train.clip_norm}, expected more than 0"
    if train.engine == "stacked" and train.precision == "float16":
        yield "--train.engine is stacked, which has no gradient scaler for --train.precision float16: use bfloat16"
    if config.diversity.grid == "dart" and config.diversity.per_batch:
        yield "--diversity.grid is dart, which has one policy per member: leave out --diversity.per-batch"
    if train.engine == "stacked" and average.align != "none":
        yield f"--train.engine is stacked, which cannot align members (--average.align {average.align}): use loop"
    if not 0 < config.data.validation < 1:
        yield f"--data.validation is {config.data.validation}, expected a share between 0 and 1"
    if config.data.window is not None and config.data.overlap >= config.data.window:
        yield f"--data.overlap is {config.data.overlap}, expected less than --data.window ({config.data.window})"
    if average.alpha is not None and not 0 <= average.alpha <= 1:
        yield f"--average.alpha is {average.alpha}, expected 0 (merge) to 1 (never push)"
    if average.half_life is not None and not average.half_life > 0:
        yield f"--average.half-life is {average.half_life}, expected a share of training above 0"
    if average.alpha is not None and average.half_life is not None:
        yield (
            f"--average.alpha is {average.alpha} and --average.half-life {average.half_life}, expected one of the two: "
            "set the other to None"
        )
    if average.delay and (average.delay % 2 or average.delay >= average.every_steps):
        yield (
            f"--average.delay is {average.delay}, expected an even number below --average.every-steps "
            f"({average.every_steps})"
        )
    yield from _selection_problems(config)
    yield from _trajectory_problems(config.trajectory)
    for option, epochs in (
        ("every-epochs", average.every_epochs),
        ("align-every-epochs", average.align_every_epochs),
        ("mutation-every-epochs", average.mutation_every_epochs),
    ):
        if epochs <= 0:
            yield f"--average.{option} is {epochs}, expected more than 0"
    if average.stop is not None and average.stop < average.start:
        yield f"--average.stop is {average.stop}, expected at least --average.start ({average.start})"


def _selection_problems(config: Config) -> typing.Iterator[str]:
    average = config.average
    for option, is_on in (("tournament", average.tournament), ("elitist", average.elitist)):
        if is_on and config.method != "papa-2":
            yield f"--average.{option} is on with --method {config.method}, expected papa-2"
    if average.mutation < 0:
        yield f"--average.mutation is {average.mutation}, expected 0 or more"


def _trajectory_problems(trajectory: TrajectoryConfig) -> typing.Iterator[str]:
    for option, share in (("start", trajectory.start), ("anneal", trajectory.anneal), ("decay", trajectory.decay)):
        if not 0 <= share < 1:
            yield f"--trajectory.{option} is {share}, expected 0 to below 1"
    if trajectory.lr is not None and trajectory.lr <= 0:
        yield f"--trajectory.lr is {trajectory.lr}, expected more than 0"
    if trajectory.batch_norm_batches < 1:
        yield f"--trajectory.batch-norm-batches is {trajectory.batch_norm_batches}, expected at least 1"
