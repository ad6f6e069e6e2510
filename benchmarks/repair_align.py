"""The cost of REPAIR and alignment: REPAIR with PAPA-all, matching by activations, deriving symmetries.

REPAIR takes one pass over the batches for each parent and one for each distinct child: p + 1 if all members share their
batches, 2p if each has its own. Activations are matched in one pass over the data for all groups, against one pass for
each group as in code written by hand. Symmetries are derived once per architecture. One thread, as in a CPU worker.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import timm
import torch
import torchvision
from torch import Tensor, nn

import papa
from _bench import Result, best_times, finish, parser
from papa.lab import models
from papa.repair import RepairMerges

SIZES = (2, 4, 8)
WIDTH = 8
MOST_SECONDS_TO_DERIVE = 60.0
SLACK = 1.35
"""The allowed ratio of a time to the time expected from the number of passes."""

IMAGE = (1, 3, 32, 32)
ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "VGG-16": (lambda: models.VGG(16), IMAGE),
    "ResNet-18": (models.resnet18, IMAGE),
    "ResNet-20, option A": (models.resnet20, IMAGE),
    "ResNet-50": (torchvision.models.resnet50, IMAGE),
    "DenseNet-121": (torchvision.models.densenet121, IMAGE),
    "ResNeXt-50": (torchvision.models.resnext50_32x4d, IMAGE),
    "EfficientNetV2-S": (torchvision.models.efficientnet_v2_s, IMAGE),
    "ConvNeXt-T": (torchvision.models.convnext_tiny, IMAGE),
    "ViT-Ti": (lambda: timm.create_model("vit_tiny_patch16_224", img_size=32), IMAGE),
    "ConViT-Ti": (lambda: timm.create_model("convit_tiny", img_size=32), IMAGE),
    "EVA-02-Ti": (lambda: timm.create_model("eva02_tiny_patch14_224", img_size=28), (1, 3, 28, 28)),
}


def repairs(size: int, batches: Sequence[Tensor]) -> dict[str, Callable[[], object]]:
    """REPAIR with a merge of all members, with shared batches and with own batches for each member."""
    population = papa.Population([models.resnet18(width=WIDTH) for _ in range(size)])
    own = [list(batches) for _ in range(size)]

    def merging(batches_for: Callable[[int], Sequence[Tensor]]) -> Callable[[], object]:
        rule, repair = papa.MergeAll(every_steps=1), RepairMerges(batches_for)
        return papa.Averager(population, rule, measure=False, merge_hooks=repair).step

    return {
        f"REPAIR of {size}, shared batches ({size + 1} passes)": merging(lambda member: batches),
        f"REPAIR of {size}, own batches ({2 * size} passes)": merging(lambda member: own[member]),
    }


def repair_results(rounds: int) -> list[Result]:
    """REPAIR for growing populations: linear in their size."""
    batches = [torch.randn(32, 3, 32, 32) for _ in range(2)]
    contenders = {name: run for size in SIZES for name, run in repairs(size, batches).items()}
    seconds = best_times(contenders, rounds=rounds)
    names = list(contenders)
    results = []
    for number, size in enumerate(SIZES):
        shared, own = names[2 * number], names[2 * number + 1]
        results += [
            Result(
                name=own, seconds=seconds[own], ratio=seconds[own] / seconds[names[1]], target=SLACK * size / SIZES[0]
            ),
            Result(
                name=shared,
                seconds=seconds[shared],
                ratio=seconds[shared] / seconds[own],
                target=min(SLACK * (size + 1) / (2 * size), 1.0),
            ),
        ]
    return results


def matching_results(rounds: int) -> list[Result]:
    """Matching two networks in one pass over the data, against one pass for each group."""
    batches = [torch.randn(32, 3, 32, 32)]
    reference, model = models.resnet18(width=WIDTH), models.resnet18(width=WIDTH)
    symmetries = papa.symmetries(model, batches[0])

    def by_layer() -> None:
        twin = copy.deepcopy(model)
        for group in symmetries:
            papa.align_(twin, reference, batches, symmetries=replace(symmetries, groups=(group,)))

    names = ("ResNet-18 matched in one pass for each group", "ResNet-18 matched in one pass")
    contenders = {
        names[0]: by_layer,
        names[1]: lambda: papa.align_(copy.deepcopy(model), reference, batches, symmetries=symmetries),
    }
    seconds = best_times(contenders, rounds=rounds)
    return [
        Result(name=names[0], seconds=seconds[names[0]]),
        Result(
            name=names[1],
            seconds=seconds[names[1]],
            ratio=seconds[names[1]] / seconds[names[0]],
            target=0.5,
        ),
    ]


def deriving_results() -> list[Result]:
    """The time to derive symmetries, once per architecture: seconds, not minutes."""
    results = []
    for name, (build, shape) in ARCHITECTURES.items():
        model, inputs = build().eval(), torch.randn(shape)
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            num_groups = len(papa.symmetries(model, inputs))
        elapsed = time.perf_counter() - start
        results.append(
            Result(
                name=f"deriving {name}: {num_groups} groups, ratio to a minute",
                seconds=elapsed,
                ratio=elapsed / MOST_SECONDS_TO_DERIVE,
                target=1.0,
            )
        )
    return results


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(rounds=3)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = [*repair_results(chosen.rounds), *matching_results(chosen.rounds), *deriving_results()]
    title = f"REPAIR and alignment of ResNet-18 (width {WIDTH}); own batches to p = {SIZES[0]}, shared to own"
    finish(results, chosen, title=title)


if __name__ == "__main__":
    main()
