"""What other kernels could save in a step of ResNet-20 on batches of 64.

Two members could share one convolution, with a group of channels for each: its time is compared with two separate
ones, over all layers of 3 x 3. BatchNorm and ReLU could be compiled, or have channels first. oneDNN packs weights at
every call: the share of a step that takes is its own report. Processor time of one thread, in the precision that
recipes choose.
"""

from __future__ import annotations

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

BATCH_SIZE = 64
LAYERS = ((16, 32, 6), (32, 16, 5), (64, 8, 5))
"""Channels, image size and number of the convolutions whose input and output are alike."""
NUM_STEPS = 5
CHILD = "--steps-of-onednn"
"""The option of the process that takes steps while oneDNN reports."""


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
        seconds = best_times({"one": one, "two": two}, rounds=2 * rounds, clock=time.thread_time)
        separate += 2 * count * seconds["one"]
        grouped += count * seconds["two"]
    return [
        Result(name="convolutions of two members, separate", seconds=separate, ratio=1.0),
        Result(name="convolutions of two members, one with two groups", seconds=grouped, ratio=grouped / separate),
    ]


def normalization(channels: int, size: int, kind: str) -> Callable[[], None]:
    """Forward and backward of BatchNorm and ReLU."""
    layer: nn.Module = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())
    dtype = torch.bfloat16 if fast_precision() == "bfloat16" else torch.float32
    order = torch.contiguous_format if kind == "channels first" else torch.channels_last
    images = torch.randn(BATCH_SIZE, channels, size, size, dtype=dtype).to(memory_format=order).requires_grad_()
    upstream = torch.ones_like(images)
    function = torch.compile(layer) if kind == "compiled" else layer

    def run() -> None:
        images.grad = None
        function(images).backward(upstream)

    return run


def measure_normalization(rounds: int) -> list[Result]:
    """BatchNorm and ReLU of all layers, as they are, with channels first, and compiled."""
    kinds = ("channels last", "channels first", "compiled")
    total = dict.fromkeys(kinds, 0.0)
    for channels, size, count in LAYERS:
        contenders = {kind: normalization(channels, size, kind) for kind in kinds}
        for kind, seconds in best_times(contenders, rounds=2 * rounds, clock=time.thread_time).items():
            total[kind] += count * seconds
    return [
        Result(name=f"BatchNorm and ReLU, {kind}", seconds=total[kind], ratio=total[kind] / total[kinds[0]])
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
        with autocast():
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
