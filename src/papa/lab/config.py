"""The configuration of a run: frozen dataclasses, checked when they are made, written to and read from JSON."""

from __future__ import annotations

import dataclasses
import math
import operator
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from papa.errors import ConfigError, did_you_mean

NEVER_AVERAGED = {
    "independent": "never average: the baseline",
    "longer": "one network, trained as many times longer as there are members: a control",
    "larger-batches": "one network, for as many steps as a member, with the batches of all members: a control",
}
MERGES = {
    "papa-all": "replace members by the mean of all every few epochs",
    "papa-2": "replace members by the means of random pairs every few epochs",
    "pair-75": "as papa-2, with weights 3/4 and 1/4",
    "many-half": "replace members by half of themselves and half of all others",
    "many-75": "as many-half, with weights 3/4 and 1/4",
    "greedy-merge": "replace members by the current greedy soup every few epochs",
}
COUPLINGS = {
    "papa-auto": "push members toward the mean with a strength that sets itself",
    "sparta": "average a few random weights at every step",
    "wash": "permute a few random weights among members at every step",
    "easgd": "let members and an anchor attract each other",
    "lookahead": "move an anchor toward the mean, and restart members from it",
    "diloco": "every few hundred steps an outer Nesterov step on the mean, and restart members from it",
    "noloco": "the same in random pairs, without a mean of all",
    "dppf": "pull and push members to a set distance from the mean",
    "grawa": "push members toward a mean weighted by inverse gradient norms",
}
METHODS = {
    **NEVER_AVERAGED,
    "papa": "push members toward the mean every few steps",
    **MERGES,
    **COUPLINGS,
}
"""What each method does; those of `COUPLINGS` were published since the paper."""
WITH_ANCHORS = ("easgd", "lookahead", "diloco", "noloco")
"""Methods that have rows of their own, which merge hooks do not know."""
ONLY_PUSHES = ("alpha", "half_life", "every_steps", "scale_by_lr", "align_every_epochs", "mutation_every_epochs")
"""Options of `average` that only `papa` uses."""


def option(default: Any, **limits: Any) -> Any:
    """A field with limits: `known` values, or numbers `at_least`, `above`, `at_most`, `below` a value; or None."""
    return field(default=default, metadata=limits)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which data."""

    name: str = "digits"
    """The data set: digits, optdigits, cifar10, cifar100, mnist, fashion-mnist, imagenet; images for your own class
    folders; tiles or vaihingen for segmentation; text for language models; breast-cancer, wine, or table for your own
    CSV file."""
    root: str = "data"
    """The directory of the data, where it is also downloaded to; for text also a file, for a table its CSV file."""
    validation: float = option(0.02, above=0, below=1)
    """The share of the training data held out for validation; tiles are split by area instead, text by position."""
    image_size: int | None = option(None, at_least=1)
    """Resize images to this size; None for the size the network was made for."""
    test_share: float | None = option(None, above=0, below=1)
    """The share of the data to use for testing: of class folders without test images (0.2 by default), of a table
    (0.25), or of the end of a text."""
    max_train: int | None = option(None, at_least=1)
    """The largest number of training images, or of tokens of a text; None for all."""
    max_test: int | None = option(None, at_least=1)
    """The largest number of test images, or of tokens of a text (of tiles and text, also for validation); None for
    all."""
    patch_size: int = option(256, at_least=1)
    """Tiles: height and width of training patches."""
    patches_per_epoch: int = option(10_000, at_least=1)
    """Tiles: the number of random patches in an epoch."""
    shrink: int = option(1, at_least=1)
    """Tiles: shrink images by this factor."""
    context: int = option(256, at_least=1)
    """Text: the number of tokens in a window."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network."""

    name: str = "digits-cnn"
    """The network."""
    width: int | None = option(None, at_least=1)
    """Channels of its first stage, or units of a hidden layer; None for the published width."""
    dropout: float = option(0.0, at_least=0, below=1)
    """mlp: dropout after each hidden layer."""
    pretrained: bool = False
    """Start timm networks from the pretrained weights of timm."""
    weights: str | None = None
    """Start from the weights in this file."""
    frozen: float = option(0.0, at_least=0, below=1)
    """Train only the head for this share of training."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The transformer: `--model.name gpt`, and the size of `transformers:TYPE`."""

    layers: int = option(6, at_least=1)
    """The number of blocks."""
    heads: int = option(6, at_least=1)
    """Attention heads of each block."""
    width: int = option(384, at_least=1)
    """The size of a token's vector."""
    dropout: float = option(0.1, at_least=0, below=1)
    """Dropout of embeddings, attention weights and the outputs of both parts of a block."""
    mlp: str = option("gelu", known=("gelu", "swiglu"))
    """gelu, or swiglu, which has a gate."""
    norm: str = option("layer", known=("layer", "rms"))
    """layer (LayerNorm) or rms (RMSNorm)."""
    positions: str = option("learned", known=("learned", "rotary"))
    """learned, one vector each, or rotary."""
    bias: bool = True
    """Give linear layers a bias."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How each member is trained."""

    epochs: int = option(300, at_least=1)
    """Passes over the data."""
    batch_size: int = option(64, at_least=1)
    """Examples per step."""
    optimizer: str = option("sgd", known=("sgd", "adamw"))
    """sgd or adamw."""
    lr: float = option(0.1, above=0, below=math.inf)
    """The initial learning rate."""
    larger_batch_lr: float | None = option(None, above=0)
    """larger-batches: the learning rate; None for lr times the square root of the number of members."""
    momentum: float = option(0.9, at_least=0, below=1)
    """Momentum of SGD."""
    weight_decay: float = option(1e-4, at_least=0)
    """Weight decay."""
    decay: str = option("all", known=("all", "matrices"))
    """Which parameters decay: all, or matrices only, and no biases and norms."""
    beta2: float = option(0.999, at_least=0, below=1)
    """adamw: the share that its mean of squared gradients keeps at each step."""
    fused: bool = False
    """adamw: update all parameters in one kernel, which is faster; the last bits differ."""
    schedule: str = option("cosine", known=("cosine", "multistep", "constant"))
    """The learning rate schedule: cosine, multistep or constant."""
    min_lr: float = 1e-4
    """The learning rate at the end of a cosine."""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """When multistep divides the learning rate by ten, as shares of training."""
    warmup_epochs: float = option(0.0, at_least=0)
    """The number of epochs of linear warm-up."""
    precision: str = option("float32", known=("float32", "bfloat16", "float16"))
    """float32, or autocast to bfloat16 or float16."""
    channels_last: bool = False
    """Use the channels-last memory format."""
    clip_norm: float | None = option(None, above=0)
    """Clip gradients to this norm; None to never clip."""
    teacher: str | None = None
    """Distil from the ensemble of a finished run: its directory. Members are also trained on the targets."""
    validate_every: int = option(1, at_least=1)
    """Epochs between scores on validation data; the last epoch is always scored."""
    engine: str = option("loop", known=("loop", "stacked"))
    """loop trains members one after the other, stacked all at once, which is faster for tiny networks and batches."""


@dataclass(frozen=True, kw_only=True)
class AverageConfig:
    """How members are averaged."""

    alpha: float | None = None
    """papa: the share of itself a member keeps at each push."""
    half_life: float | None = option(None, above=0, at_most=1)
    """papa: instead of alpha, the half-life of the distance to the mean, as a share of training."""
    every_steps: int = option(10, at_least=1)
    """papa: steps between pushes."""
    every_epochs: float = option(5.0, above=0)
    """Merges: epochs between them."""
    repair: int = option(0, at_least=0)
    """Merges: the number of batches for REPAIR of activation statistics; 0 for no REPAIR."""
    repair_soups: int | None = option(None, at_least=0)
    """The same for soups of independent members; None for the number of merges."""
    repair_policy: str = option("own", known=("own", "shared"))
    """Merges: repair each member under its own augmentation (own: the paper's form, two passes per member) or all on
    plain data (shared: one pass per member and one per distinct child)."""
    repair_scope: str = option("all", known=("all", "activations", "batch-norm"))
    """Repair every convolution and linear layer (all); those before an activation function or BatchNorm, which in
    transformers are fewer (activations: the paper's); or only re-estimate BatchNorm after merges (batch-norm)."""
    align: str = option("none", known=("none", "activations", "weights", "sinkhorn"))
    """Match members' units to the first member's before averaging: by activations, weights or sinkhorn (weights, with
    soft permutations), or not (none)."""
    align_every_epochs: float = option(5.0, above=0)
    """papa: epochs between alignments, since pushes are frequent; merges align every time."""
    align_soups: bool = False
    """Independent members, with REPAIR: also make soups of members aligned to the growing soup."""
    align_batches: int | None = option(10, at_least=1)
    """The number of batches of training data units are matched on; None for all."""
    probes: bool = False
    """Merges: score members on test data just before, just after and a few steps after each."""
    probe_steps: int = option(10, at_least=1)
    """The number of steps after a merge of the last of these."""
    start: float = option(0.0, at_least=0)
    """The first epoch at which averaging may happen."""
    stop: float | None = None
    """The first epoch at which it no longer does; None for never."""
    scale_by_lr: bool = True
    """papa: weaken the push with the learning rate."""
    ensemble: str = option("logits", known=("logits", "probabilities"))
    """What the ensemble averages over members: logits, or probabilities."""
    keep_best_soup: bool = False
    """Keep the average soup of the epoch with the best validation score too; the last soup stays the result."""
    mutation: float = option(0.0, at_least=0)
    """Add noise of this standard deviation, divided by the index of the averaging, after averaging; 0 for none."""
    mutation_every_epochs: float = option(5.0, above=0)
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

    kind: str = option("none", known=("none", "swa", "ema"))
    """none, swa (equal weights, once an epoch) or ema (exponential, every step)."""
    start: float = option(0.0, at_least=0, below=1)
    """When it begins, as a share of training."""
    decay: float = option(0.999, at_least=0, below=1)
    """ema: the share of itself the average keeps at each step."""
    lr: float | None = option(None, above=0)
    """swa: the constant learning rate at the end; None to keep the schedule."""
    anneal: float = option(0.02, at_least=0, below=1)
    """swa: how long the change to it takes, as a share of training."""
    linear: bool = False
    """swa: change linearly instead of by half a cosine."""
    batch_norm_batches: int = option(100, at_least=1)
    """Batches on which BatchNorm statistics of the averages are re-estimated, augmented as in training."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides what a run computes; making one that cannot run is a `ConfigError` with all problems."""

    recipe: str = "custom"
    """The recipe it came from."""
    method: str = option("papa", known=METHODS)
    """How members are averaged: papa, papa-all, papa-2, independent, longer and others, see papa ls methods."""
    members: int = option(5, at_least=1)
    """The size of the population."""
    seed: int = option(1, at_least=0)
    """The seed of every random stream."""
    device: str = "auto"
    """Where to train: auto, cpu, cuda or cuda:1."""
    analysis: bool = False
    """At the end, compare members: the similarity of their features, and scores on the line between two of them."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    gpt: GPTConfig = field(default_factory=GPTConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    average: AverageConfig = field(default_factory=AverageConfig)
    coupling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Options of the method's rule, by the names that it has in `papa.couplings`, such as `{"share": 0.02}` of sparta;
    the others are as published."""
    diversity: DiversityConfig = field(default_factory=DiversityConfig)
    trajectory: TrajectoryConfig = field(default_factory=TrajectoryConfig)

    def __post_init__(self) -> None:
        problems = [*_outside_limits(self), *_contradictions(self)]
        if problems:
            lines = "\n".join(f"  {problem}" for problem in problems)
            raise ConfigError(f"the configuration of {self.recipe} cannot run:\n{lines}")

    @property
    def settled(self) -> Config:
        """As it is run: one network instead of a population for `longer` and `larger-batches`.

        Example:
            >>> config = Config(method="longer", members=5, train=TrainConfig(epochs=20)).settled
            >>> config.members, config.train.epochs, config.settled == config
            (1, 100, True)
        """
        if self.method not in ("longer", "larger-batches") or self.members == 1:
            return self
        train, times = self.train, self.members
        train = replace(train, epochs=train.epochs * times, warmup_epochs=train.warmup_epochs * times)
        if self.method == "larger-batches":
            lr = train.lr * math.sqrt(times) if train.larger_batch_lr is None else train.larger_batch_lr
            train = replace(train, batch_size=train.batch_size * times, lr=lr, min_lr=min(lr, train.min_lr))
        return replace(self, members=1, train=train)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(value: Any, base: Config | None = None) -> Config:
        """From the output of `to_json`, or a part of it; a `ConfigError` lists all that is unknown or of a wrong type.

        What is missing has the value of `base`, or else the default.
        """
        problems: list[str] = []
        try:
            config: Config = _with_values(base or Config(), value, "config", problems)
        except ConfigError as error:  # of the values that fit
            raise ConfigError("\n".join([*problems, str(error)])) from None
        if problems:
            raise ConfigError("\n".join(problems))
        return config


def idle_options(method: str) -> frozenset[str]:
    """The options of averaging, by their dotted names, that a method does not use.

    Example:
        >>> "average.every_epochs" in idle_options("papa"), "average.alpha" in idle_options("papa-all")
        (True, True)
    """
    pushes = () if method == "papa" else ONLY_PUSHES
    merges = () if method in MERGES else ("every_epochs",)
    return frozenset(f"average.{name}" for name in (*pushes, *merges))


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """A config with some of its values replaced, by dotted names.

    Example:
        >>> changed(Config(), {"members": 3, "average.repair": 0}).members
        3
    """
    tree: dict[str, Any] = {}
    for name, value in changes.items():
        *path, last = name.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = value
    return Config.from_json(tree, config)


def flat(value: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The leaves of nested objects, such as a config's options, by their dotted names."""
    if isinstance(value, Mapping) and depth < 8:
        for key, entry in value.items():
            yield from flat(entry, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    else:
        yield prefix, value


def option_of(key: str) -> str:
    """The option that sets an entry, as it is typed: `--average.half-life` for `average.half_life`."""
    return key if key == "recipe" else "--" + key.replace("_", "-")


def _with_values(base: Any, value: Any, where: str, problems: list[str]) -> Any:
    """A dataclass with other values; those that do not fit are left out, and added to the problems."""
    if not isinstance(value, Mapping):
        problems.append(f"{where} is {value!r}, expected an object")
        return base
    hints, fitting = typing.get_type_hints(type(base)), {}
    for name, part in value.items():
        entry = tuple(part) if isinstance(part, list) else part
        if name not in hints:
            problems.append(f"{where}.{name} is not known: {did_you_mean(name, hints)}")
        elif dataclasses.is_dataclass(hints[name]):
            fitting[name] = _with_values(getattr(base, name), part, f"{where}.{name}", problems)
        elif _fits(entry, hints[name]):
            fitting[name] = entry
        else:
            problems.append(f"{where}.{name} is {part!r}, expected {_named(hints[name])}")
    return replace(base, **fitting)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type of a field."""
    options, origin = typing.get_args(hint), typing.get_origin(hint)
    if origin is Mapping:
        return isinstance(value, Mapping)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(part, options[0]) for part in value)
    if options:
        return any(_fits(value, option) for option in options)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint


def _named(hint: Any) -> str:
    return str(getattr(hint, "__name__", hint)).replace("NoneType", "None")


LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "at_least": ("at least", operator.ge),
    "above": ("more than", operator.gt),
    "at_most": ("at most", operator.le),
    "below": ("below", operator.lt),
}


def _outside_limits(config: Any, prefix: str = "") -> Iterator[str]:
    """What is wrong with single values, by the limits of their fields."""
    for entry in dataclasses.fields(config):
        value, limits = getattr(config, entry.name), entry.metadata
        name = prefix + entry.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            yield from _outside_limits(value, f"{name}.")
        elif "known" in limits:
            if value not in limits["known"]:
                yield f"--{name} is {value}: {did_you_mean(value, limits['known'])}"
        elif value is not None and not all(LIMITS[key][1](value, limit) for key, limit in limits.items()):
            ends = ("finite" if limit == math.inf else f"{LIMITS[key][0]} {limit}" for key, limit in limits.items())
            yield f"--{name} is {value}, expected {' and '.join(ends)}"


def _contradictions(config: Config) -> Iterator[str]:
    """Values that do not go together."""
    method, train, average, diversity = config.method, config.train, config.average, config.diversity
    if not 0 <= train.min_lr <= max(train.lr, 0):
        yield f"--train.min-lr is {train.min_lr}, expected 0 to --train.lr ({train.lr})"
    share = config.data.validation + (config.data.test_share or 0.0)
    if share >= 1:
        yield f"--data.validation and --data.test-share are {share:g} together, expected less than 1"
    if train.warmup_epochs > train.epochs:
        yield f"--train.warmup-epochs is {train.warmup_epochs}, expected at most --train.epochs ({train.epochs})"
    if train.engine == "stacked" and train.precision == "float16":
        yield "--train.engine is stacked, which has no gradient scaler for --train.precision float16: use bfloat16"
    if diversity.grid == "dart" and diversity.per_batch:
        yield "--diversity.grid is dart, which has one policy per member: leave out --diversity.per-batch"
    if average.alpha is not None and not 0 <= average.alpha <= 1:
        yield f"--average.alpha is {average.alpha}, expected 0 (merge) to 1 (never push)"
    if average.alpha is not None and average.half_life is not None:
        strengths = f"--average.alpha is {average.alpha} and --average.half-life {average.half_life}"
        yield f"{strengths}, expected one of the two: set the other to None"
    if average.stop is not None and average.stop < average.start:
        yield f"--average.stop is {average.stop}, expected at least --average.start ({average.start})"
    for name in ("tournament", "elitist"):
        if getattr(average, name) and method != "papa-2":
            yield f"--average.{name} is on with --method {method}, expected papa-2"
    if method in (*WITH_ANCHORS, "wash") and average.align != "none":
        yield f"--average.align is {average.align} with --method {method}, which cannot be aligned: use none"
    if method in WITH_ANCHORS and average.mutation:
        yield f"--average.mutation is {average.mutation} with --method {method}, whose anchors it does not reach: use 0"
    if train.engine == "stacked" and method == "grawa":
        yield f"--train.engine is stacked, which keeps the gradients that --method {method} needs: use loop"
    if config.coupling:
        from papa.lab.recipes.rules import problems_of_coupling  # imports torch, which most configs do without

        yield from problems_of_coupling(method, config.coupling)
