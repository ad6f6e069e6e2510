"""What could make the default training run faster on this machine: each setting against the run as it ships.

The network, data and optimizer of `papa run cifar10-vgg11 --budget mini`, one member, one thread. Each setting runs in
fresh processes, in turn with the others, since some of them can only be chosen before a process starts. Time is that
of the processor, so that others who use the machine disturb less; the best block of steps counts.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from _bench import Result, finish, parser
from papa.config import Config
from papa.recipes.build import build
from papa.training import Training
from where_time_goes import config_for, write_images

NUM_STEPS = 8
NUM_BLOCKS = 4
NUM_SCORED = 1_024


@dataclass(frozen=True)
class Variant:
    """A setting that is tried."""

    environment: dict[str, str] = field(default_factory=dict)
    """What has to be said before the process starts."""
    config: Callable[[Config], Config] = lambda config: config
    change: Callable[[Training], None] = lambda training: None
    """What is done once, before the first step."""


def _train_options(**options: Any) -> Callable[[Config], Config]:
    return lambda config: replace(config, train=replace(config.train, **options))


def _sgd_options(**options: Any) -> Callable[[Training], None]:
    def change(training: Training) -> None:
        for optimizer in training.optimizers:
            for group in optimizer.param_groups:
                group.update(options)

    return change


def _compile(training: Training) -> None:
    loss_of = training.loss_of
    compiled = torch.compile(training.population[0])
    training.loss_of = lambda _, inputs, targets: loss_of(compiled, inputs, targets)  # type: ignore[method-assign]


def _keep_memory(_: Training) -> None:
    """Tell glibc not to hand memory back to the system, which would have to clear it for the next tensor."""
    libc = ctypes.CDLL(None)
    most, threshold_of_trimming, threshold_of_mapping = 2**30, -1, -3
    assert libc.mallopt(threshold_of_mapping, 2**25) == 1
    assert libc.mallopt(threshold_of_trimming, most) == 1


def _keep_all_memory(_: Training) -> None:
    libc = ctypes.CDLL(None)
    assert libc.mallopt(-3, 2**25) == 1
    assert libc.mallopt(-1, 2**30) == 1
    assert libc.mallopt(-4, 0) == 1


AS_SHIPPED = "as shipped"
STEPS = {
    AS_SHIPPED: Variant(),
    "channels first": Variant(config=_train_options(channels_last=False)),
    "without oneDNN": Variant(change=lambda _: torch.backends.mkldnn.set_flags(False)),
    "SGD, a loop over tensors": Variant(change=_sgd_options(foreach=False)),
    "SGD, foreach": Variant(change=_sgd_options(foreach=True)),
    "SGD, fused": Variant(change=_sgd_options(fused=True)),
    "denormals flushed": Variant(change=lambda _: torch.set_flush_denormal(True)),
    "float32 products in medium precision": Variant(change=lambda _: torch.set_float32_matmul_precision("medium")),
    "torch.compile": Variant(change=_compile),
    "glibc keeps memory": Variant(change=_keep_memory),
    "glibc keeps all memory": Variant(change=_keep_all_memory),
    "huge pages for tensors": Variant(environment={"THP_MEM_ALLOC_ENABLE": "1"}),
    "huge pages for all": Variant(environment={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
    "huge pages for all, and glibc keeps memory": Variant(
        environment={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, change=_keep_memory
    ),
    "AVX2 at most in oneDNN": Variant(environment={"ONEDNN_MAX_CPU_ISA": "AVX2"}),
}


def seconds_of(run: Callable[[], object]) -> float:
    """Processor time of one call, the best of some; one goes first that is not counted."""
    run()
    best = float("inf")
    for _ in range(NUM_BLOCKS):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best


def measure_steps(name: str, root: Path) -> float:
    """Seconds of a step."""
    torch.set_num_threads(1)
    variant = STEPS[name]
    training = build(variant.config(replace(config_for(root), members=1)))
    variant.change(training)

    def steps() -> None:
        for _ in range(NUM_STEPS):
            training._step_members()
            training.step += 1

    return seconds_of(steps) / NUM_STEPS


def in_new_process(environment: dict[str, str], function: Callable[..., float], *arguments: Any) -> float:
    """What a function returns in a process that begins with these variables."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        # Importing torch anew takes longer than the steps, and is only needed where it can be seen.
        with multiprocessing.get_context("spawn" if environment else "fork").Pool(1) as pool:
            return pool.apply(function, arguments)
    finally:
        os.environ.clear()
        os.environ.update(before)


def main() -> None:
    """Run the benchmark."""
    options_parser = parser(__doc__.splitlines()[0])
    options_parser.add_argument("--only", help="names of settings to try, or parts of names, separated by commas")
    options_parser.set_defaults(rounds=2)
    options = options_parser.parse_args()
    wanted = [part.strip() for part in (options.only or "").split(",")]
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_images(root, num_train=8_000, num_test=NUM_SCORED)
        for _ in range(options.rounds):
            for name, variant in STEPS.items():
                if name == AS_SHIPPED or any(part in name for part in wanted):
                    seconds = in_new_process(variant.environment, measure_steps, name, root)
                    best[name] = min(seconds, best.get(name, float("inf")))
                    print(f"{name}: {1e3 * seconds:.1f} ms", file=sys.stderr, flush=True)
    results = [Result(name=name, seconds=seconds, ratio=seconds / best[AS_SHIPPED]) for name, seconds in best.items()]
    finish(results, options, title="A step of VGG-11 of width 12 on 64 images; ratios to the run as it ships")


if __name__ == "__main__":
    main()
