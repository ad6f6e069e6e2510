"""What papa's BatchNorm saves in a step of ResNet-20 on batches of 64, and what other kernels could.

Two members could share one convolution, with a group of channels for each: its time is compared with two separate
ones, over all layers of 3 x 3, and these with a matrix product of as many operations. BatchNorm and ReLU could be
compiled by PyTorch, or have channels first. oneDNN packs weights at every call: the share of a step that takes is its
own report. Processor time of one thread, in the precision that recipes choose.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from _bench import Result, best_times, finish, parser
from papa.lab.models.networks import resnet20
from papa.lab.recipes.recipe import fast_precision
from papa.process import keep_memory
from papa.training.batch_norm import CompiledBatchNorm

BATCH_SIZE = 64
MATRIX = 1024
LAYERS = ((16, 32, 6), (32, 16, 5), (64, 8, 5))
"""Channels, image size and number of the convolutions whose input and output are alike."""
NUM_STEPS, NUM_CALLS = 5, 10
CHILD = "--steps-of-onednn"
"""The option of the process that takes steps while oneDNN reports."""


def warm_times(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The best processor time of each contender, in several calls one after the other: caches are warm in a step."""

    def several(run: Callable[[], object]) -> Callable[[], object]:
        return lambda: [run() for _ in range(NUM_CALLS)]

    repeated = {name: several(run) for name, run in contenders.items()}
    seconds = best_times(repeated, rounds=2 * rounds, clock=time.thread_time)
    return {name: found / NUM_CALLS for name, found in seconds.items()}


def autocast() -> torch.autocast:
    """The precision that recipes choose."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast_precision() == "bfloat16")


def convolution(channels: int, size: int, members: int) -> Callable[[], None]:
    """Forward and backward of one convolution, with a group of channels for each member."""
    layer = nn.Conv2d(members * channels, members * channels, 3, padding=1, bias=False, groups=members)
    layer = layer.to(memory_format=torch.channels_last)
    images = torch.randn(BATCH_SIZE, members * channels, size, size).to(memory_format=torch.channels_last)
    with autocast():
        upstream = torch.ones_like(layer(images))
    images = images.to(upstream.dtype).requires_grad_()

    def run() -> None:
        with autocast():
            outputs: Tensor = layer(images)
        outputs.backward(upstream)

    return run


def measure_groups(rounds: int) -> list[Result]:
    """Two members' convolutions, separate and in groups."""
    separate = grouped = 0.0
    for channels, size, count in LAYERS:
        one, two = convolution(channels, size, 1), convolution(channels, size, 2)
        seconds = warm_times({"one": one, "two": two}, rounds)
        separate += 2 * count * seconds["one"]
        grouped += count * seconds["two"]
    product = matrix_product(rounds)
    return [
        Result(
            name="a matrix product of as many operations as convolutions of two members", seconds=product, ratio=1.0
        ),
        Result(name="convolutions of two members, against it", seconds=separate, ratio=separate / product),
        Result(name="convolutions of two members, separate", seconds=separate, ratio=1.0),
        Result(name="convolutions of two members, one with two groups", seconds=grouped, ratio=grouped / separate),
    ]


def matrix_product(rounds: int) -> float:
    """The time that all convolutions of two members, forward and backward, would take at the rate of a product."""
    matrix = torch.randn(MATRIX, MATRIX, dtype=dtype_of_activations())
    (seconds,) = warm_times({"product": lambda: matrix @ matrix}, rounds).values()
    images = 2 * BATCH_SIZE * sum(count * (9 * channels**2 * size**2) for channels, size, count in LAYERS)
    return seconds * 3 * images / MATRIX**3  # outputs, gradients of inputs, gradients of weights


def dtype_of_activations() -> torch.dtype:
    """As in recipes."""
    return torch.bfloat16 if fast_precision() == "bfloat16" else torch.float32


def normalization(channels: int, size: int, kind: str) -> Callable[[], None]:
    """Forward and backward of BatchNorm and ReLU."""
    layer: nn.Module = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())
    dtype = dtype_of_activations()
    order = torch.contiguous_format if kind == "channels first" else torch.channels_last
    images = torch.randn(BATCH_SIZE, channels, size, size, dtype=dtype).to(memory_format=order).requires_grad_()
    upstream = torch.ones_like(images)
    function = torch.compile(layer) if kind == "by torch.compile" else layer
    mode = CompiledBatchNorm() if kind == "papa" else contextlib.nullcontext()

    def run() -> None:
        images.grad = None
        with mode:
            outputs = function(images)
        outputs.backward(upstream)

    return run


def measure_normalization(rounds: int) -> list[Result]:
    """BatchNorm and ReLU of all layers: PyTorch's, with channels first, compiled by it, and papa's."""
    kinds = ("PyTorch", "channels first", "by torch.compile", "papa")
    total = dict.fromkeys(kinds, 0.0)
    for channels, size, count in LAYERS:
        contenders = {kind: normalization(channels, size, kind) for kind in kinds}
        for kind, seconds in warm_times(contenders, rounds).items():
            total[kind] += count * seconds
    return [
        Result(
            name=f"BatchNorm and ReLU, {kind}",
            seconds=total[kind],
            ratio=total[kind] / total[kinds[0]],
            target=1.0 if kind == "papa" else None,
        )
        for kind in kinds
    ]


def take_steps() -> None:
    """Take steps while oneDNN reports each of its calls; the last line has their seconds."""
    network = resnet20().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    images = torch.randn(BATCH_SIZE, 3, 32, 32).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (BATCH_SIZE,))

    def step() -> None:
        optimizer.zero_grad()
        with autocast(), CompiledBatchNorm():
            loss = nn.functional.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()

    for _ in range(3):
        step()
    start = time.perf_counter()
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        for _ in range(NUM_STEPS):
            step()
    print(f"seconds,{time.perf_counter() - start}")


def measure_packing() -> list[Result]:
    """The share of a step in which oneDNN packs weights, from the report of another process."""
    command = [sys.executable, __file__, CHILD]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    total = next(float(line.partition(",")[2]) for line in lines if line.startswith("seconds,"))
    calls = [line.split(",") for line in lines if line.startswith("onednn_verbose") and ",exec," in line]
    parts = {kind: sum(float(call[-1]) / 1e3 for call in calls if kind in call) for kind in ("convolution", "reorder")}
    return [
        Result(name=f"a step: {name}", seconds=parts[kind] / NUM_STEPS, ratio=parts[kind] / total)
        for kind, name in (("convolution", "convolutions"), ("reorder", "packing of weights"))
    ]


def main() -> None:
    """Run the benchmark."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_memory()
    if CHILD in sys.argv:
        take_steps()
        return
    options = parser(__doc__.splitlines()[0]).parse_args()
    results = [*measure_groups(options.rounds), *measure_normalization(options.rounds), *measure_packing()]
    finish(results, options, title="ResNet-20; ratios to the first line of each kind, and shares of a step")


if __name__ == "__main__":
    main()
