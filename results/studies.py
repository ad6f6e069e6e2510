"""What was run, and which tables are made of it: the one place that says so.

A command is what a user types, with DATA for where the data lies. Where its runs go follows from its `--out`, and from
that the names of their records: `runs/main/cifar10-vgg11/papa-seed1` is `records/main/cifar10-vgg11/papa-seed1.json`.
What is said about a study stands in `prose/NAME.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from results.tables import (
    Record,
    against_long,
    alike,
    half_lives,
    main_tables,
    of_methods,
    push_against_merge,
    rates,
    side_by_side,
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table, or a few, made of the same runs."""

    title: str
    commands: tuple[str, ...] = ()
    """What makes its runs."""
    beside: tuple[str, ...] = ()
    """Commands of other tables whose runs it shows too, before its own."""
    render: Callable[[Sequence[Record]], str] = side_by_side
    """From records to Markdown."""

    @property
    def all_commands(self) -> tuple[str, ...]:
        """Whose runs it shows."""
        return (*self.beside, *self.commands)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question, and the tables that answer it."""

    name: str
    title: str
    tables: tuple[Table, ...]

    @property
    def commands(self) -> tuple[str, ...]:
        """What makes its runs."""
        return tuple(command for table in self.tables for command in table.commands)


MAIN_CIFAR10 = (
    "papa compare cifar10-vgg11 --budget mini --methods independent,papa,papa-all,papa-2 --seeds 1,2,3 --analysis"
    " --parallel 2 --data.root DATA --out runs/main/cifar10-vgg11"
)
MAIN_CIFAR100 = (
    "papa compare cifar100-resnet18 --budget mini --methods independent,papa,papa-all,papa-2 --seeds 1,2,3 --analysis"
    " --parallel 2 --data.root DATA --out runs/main/cifar100-resnet18"
)
# Every main run ends with the analysis, so that nothing has to be trained twice for it.

HALF_LIVES = {
    5: (0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
    20: (0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
    80: (0.0005, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
}
"""Shares of training, for each length in epochs; the longest training has steps enough for a shorter one."""


def _half_life_commands(epochs: int) -> tuple[str, ...]:
    """A small setting, never pushed, and pushed with each half-life."""
    setting = (
        f"--seeds 1 --members 4 --data.max-train 4000 --data.validation 0.125 --train.epochs {epochs}"
        " --average.every-steps 2 --data.root DATA"
    )
    out = f"runs/half-life/{epochs}-epochs"
    return (
        f"papa compare cifar10-vgg11 --budget mini --methods independent {setting} --out {out}",
        *(
            f"papa compare cifar10-vgg11 --budget mini --methods papa {setting} --average.half-life {share}"
            f" --out {out}-{share}"
            for share in HALF_LIVES[epochs]
        ),
    )


def _rate_command(recipe: str, rate: float, more: str = "") -> str:
    """A few independent members, of a seed that no other study uses, with more validation data than usual."""
    return (
        f"papa compare {recipe} --budget mini --methods independent --seeds 11 --members 3 --data.validation 0.1"
        f" --train.lr {rate}{f' {more}' if more else ''} --data.root DATA --out runs/rates/{recipe}-{rate}"
    )


STUDIES = (
    Study(
        name="main",
        title="Five members, four ways to train them",
        tables=(
            Table(title="CIFAR-10, VGG-11", commands=(MAIN_CIFAR10,), render=main_tables),
            Table(title="CIFAR-100, ResNet-18", commands=(MAIN_CIFAR100,), render=main_tables),
        ),
    ),
    Study(
        name="half-life",
        title="How strong the push should be, and how that depends on the length of training",
        tables=(
            Table(
                title="CIFAR-10, VGG-11, four members, three lengths",
                commands=tuple(command for epochs in HALF_LIVES for command in _half_life_commands(epochs)),
                render=half_lives,
            ),
        ),
    ),
    Study(
        name="rates",
        title="Which learning rate",
        tables=(
            Table(
                title="CIFAR-10, VGG-11, three independent members",
                commands=tuple(_rate_command("cifar10-vgg11", rate) for rate in (0.005, 0.01, 0.02, 0.05, 0.1)),
                render=rates,
            ),
            Table(
                title="CIFAR-100, ResNet-18, three independent members",
                commands=tuple(
                    _rate_command("cifar100-resnet18", rate, "--train.epochs 10") for rate in (0.02, 0.05, 0.1, 0.2)
                ),
                render=rates,
            ),
        ),
    ),
    Study(
        name="high-rate",
        title="A learning rate that is too high",
        tables=(
            Table(
                title="CIFAR-10, VGG-11, the paper's 0.1 for 20 epochs",
                commands=(
                    "papa compare cifar10-vgg11 --budget mini --methods independent,papa,papa-all,papa-2 --seeds 1,2,3"
                    " --analysis --train.lr 0.1 --train.epochs 20 --average.every-epochs 0.3333333333333333"
                    " --parallel 2 --data.root DATA --out runs/high-rate/cifar10-vgg11",
                ),
                render=main_tables,
            ),
            Table(
                title="The same with a weaker push, and with rarer merges",
                commands=(
                    "papa compare cifar10-vgg11 --budget mini --methods papa --seeds 1,2,3 --analysis --train.lr 0.1"
                    " --train.epochs 20 --average.half-life 0.02 --parallel 2 --data.root DATA"
                    " --out runs/high-rate/half-life-0.02",
                    "papa compare cifar10-vgg11 --budget mini --methods papa-all,papa-2 --seeds 1,2,3 --analysis"
                    " --train.lr 0.1 --train.epochs 20 --average.every-epochs 1 --parallel 2 --data.root DATA"
                    " --out runs/high-rate/every-epoch",
                ),
            ),
        ),
    ),
    Study(
        name="sizes",
        title="Fewer members",
        tables=(
            Table(
                title="CIFAR-10, VGG-11, two, three and five members",
                commands=tuple(
                    f"papa compare cifar10-vgg11 --budget mini --methods independent,papa --seeds 1,2,3"
                    f" --members {members} --parallel 2 --data.root DATA --out runs/sizes/{members}-members"
                    for members in (2, 3)
                ),
                beside=(MAIN_CIFAR10,),
                render=of_methods("independent", "papa"),
            ),
        ),
    ),
    Study(
        name="plain",
        title="Without augmentation",
        tables=(
            Table(
                title="CIFAR-10, VGG-11, five members that differ in initial weights and data order alone",
                commands=(
                    "papa compare cifar10-vgg11 --budget mini --methods independent,papa --seeds 1,2,3"
                    " --diversity.grid none --parallel 2 --data.root DATA --out runs/plain/cifar10-vgg11",
                ),
                render=main_tables,
            ),
        ),
    ),
    Study(
        name="long",
        title="The same compute spent on one network",
        tables=(
            Table(
                title="CIFAR-10, VGG-11, five members, or one network for five times as many epochs",
                commands=(
                    "papa compare cifar10-vgg11-long --budget mini --methods independent --seeds 1,2,3 --parallel 2"
                    " --data.root DATA --out runs/long/cifar10-vgg11",
                ),
                beside=(MAIN_CIFAR10,),
                render=against_long,
            ),
        ),
    ),
    Study(
        name="repair",
        title="PAPA-all with and without REPAIR",
        tables=(
            Table(
                title="CIFAR-10, VGG-11, five members",
                commands=(
                    "papa compare cifar10-vgg11 --budget mini --methods papa-all --seeds 1,2,3 --average.repair 0"
                    " --parallel 2 --data.root DATA --out runs/repair/none",
                    "papa compare cifar10-vgg11 --budget mini --methods papa-all --seeds 1,2,3"
                    " --average.repair-scope batch-norm --parallel 2 --data.root DATA --out runs/repair/batch-norm",
                ),
                beside=(MAIN_CIFAR10,),
                render=of_methods("independent", "papa-all"),
            ),
            Table(
                title="Merged as often as PAPA pushes, without REPAIR",
                commands=(
                    "papa compare cifar10-vgg11 --budget mini --methods papa-all --seeds 1,2,3 --average.repair 0"
                    " --average.every-epochs 0.082 --parallel 2 --data.root DATA"
                    " --out runs/repair/every-10-steps",
                ),
                beside=(MAIN_CIFAR10,),
                render=push_against_merge,
            ),
        ),
    ),
    Study(
        name="alike",
        title="What members share",
        tables=(
            Table(title="CIFAR-10, VGG-11: features and straight lines", beside=(MAIN_CIFAR10,), render=alike),
            Table(title="CIFAR-100, ResNet-18: features and straight lines", beside=(MAIN_CIFAR100,), render=alike),
        ),
    ),
    Study(
        name="finetune",
        title="Fine-tuning a pretrained network",
        tables=(
            Table(
                title="CIFAR-100, EfficientNet-Lite0 from ImageNet, two members",
                commands=(
                    "papa compare cifar100-finetune-effnetv2s --budget mini --methods independent,papa --seeds 1"
                    " --model.name timm:tf_efficientnet_lite0 --model.weights lite0.safetensors --data.image-size 96"
                    " --data.max-train 2000 --data.max-test 1000 --train.epochs 6 --train.lr 0.0003 --parallel 2"
                    " --data.root DATA --out runs/finetune/efficientnet-lite0",
                ),
            ),
        ),
    ),
    Study(
        name="segmentation",
        title="A class for every pixel",
        tables=(
            Table(
                title="Aerial images, UNet",
                commands=(
                    "papa compare aerial-unet --budget mini --methods independent,papa,papa-all,papa-2 --seeds 1"
                    " --data.root DATA/aerial --out runs/segmentation",
                ),
            ),
        ),
    ),
)
"""In the order of `RESULTS.md`."""

HEADLINE = {"CIFAR-10, VGG-11": MAIN_CIFAR10, "CIFAR-100, ResNet-18": MAIN_CIFAR100}
"""What the README's first table shows."""
