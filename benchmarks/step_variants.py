"""Settings that could make the default training run faster on this machine, each against the run as it ships.

The network, data and optimizer of `papa run cifar10-vgg11 --budget mini`, one member, one thread. Each setting has its
own process, since some can only be set before a process starts; they take turns, a few steps at a time. Processor time
is measured, which other processes disturb less, and the best turn counts.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import mkldnn

from _bench import Result, finish, parser
from papa.lab.recipes.build import build
from papa.lab.recipes.recipe import fast_precision
from papa.process import keep_memory
from papa.training import Training
from where_time_goes import config_for, write_images

NUM_STEPS = 8
NUM_SCORED = 1_024
AS_SHIPPED = "as shipped"


@dataclass(frozen=True)
class Variant:
    """A setting to try."""

    change: Callable[[Training], object] = lambda training: None
    """Called once, before the first turn."""
    train: dict[str, Any] = field(default_factory=dict)
    """Options of `config.train`."""
    keeps_memory: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the process."""


def set_sgd(**options: bool) -> Callable[[Training], None]:
    """Another implementation of the optimizer step."""
    return lambda training: training.optimizers[0].param_groups[0].update(options)


def compile_network(training: Training) -> None:
    """Compile the network."""
    loss_of, compiled = training.loss_of, torch.compile(training.population[0])
    training.loss_of = lambda _, inputs, targets: loss_of(compiled, inputs, targets)  # type: ignore[method-assign]


def set_eval_batch(size: int) -> Callable[[Training], None]:
    """Another batch size in evaluation."""
    return lambda training: setattr(training.batches, "eval_batch_size", size)


def evaluate_in_inference_mode(training: Training) -> None:
    """Inference mode, which allows more than `no_grad`."""
    training.evaluate = torch.inference_mode()(training.evaluate)  # type: ignore[method-assign]


def prepack(training: Training) -> None:
    """Evaluate copies with weights in the layout of oneDNN; each evaluation makes a copy."""
    evaluate = training.evaluate

    def packed(models: list[nn.Module], *args: Any) -> Any:
        copies = [mkldnn.to_mkldnn(copy.deepcopy(model).eval()) for model in models]
        return evaluate(copies, *args)

    training.task = replace(
        training.task, apply=lambda model, inputs: model(inputs.contiguous().to_mkldnn()).to_dense()
    )
    training.evaluate = packed  # type: ignore[method-assign]


OTHER_PRECISION = "float32" if fast_precision() == "bfloat16" else "bfloat16"
"""The precision that is not the default on this machine."""
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
STEPS = {
    AS_SHIPPED: Variant(),
    "freed memory goes back to the system": Variant(keeps_memory=False),
    "the same, with huge pages": Variant(keeps_memory=False, environment=HUGE_PAGES),
    "huge pages": Variant(environment=HUGE_PAGES),
    "channels first": Variant(train={"channels_last": False}),
    "without oneDNN": Variant(lambda _: torch.backends.mkldnn.set_flags(False)),
    "SGD, a loop over tensors": Variant(set_sgd(foreach=False)),
    "SGD, foreach": Variant(set_sgd(foreach=True)),
    "SGD, fused": Variant(set_sgd(fused=True)),
    "denormals flushed": Variant(lambda _: torch.set_flush_denormal(True)),
    OTHER_PRECISION: Variant(train={"precision": OTHER_PRECISION}),
    "products in medium precision": Variant(lambda _: torch.set_float32_matmul_precision("medium")),
    "torch.compile": Variant(compile_network),
}
EVALUATIONS = {
    AS_SHIPPED: Variant(),
    "freed memory goes back to the system": Variant(keeps_memory=False),
    **{f"batches of {size}": Variant(set_eval_batch(size)) for size in (32, 64, 128, 256, 1024)},
    "channels first": Variant(train={"channels_last": False}),
    OTHER_PRECISION: Variant(train={"precision": OTHER_PRECISION}),
    "inference mode": Variant(evaluate_in_inference_mode),
    "weights in oneDNN's order": Variant(prepack),
}
WHAT = {"a step": STEPS, "an evaluation": EVALUATIONS}

_training: list[Training] = []
"""The training of a contender, in its process."""


def start(what: str, name: str, root: Path) -> None:
    """Set up a contender in its process."""
    torch.set_num_threads(1)
    variant = WHAT[what][name]
    if variant.keeps_memory:
        keep_memory()
    config = replace(config_for(root), members=1)
    training = build(replace(config, train=replace(config.train, **variant.train)))
    variant.change(training)
    _training.append(training)


def take_turn(what: str) -> float:
    """Processor time of a step, or of an evaluation."""
    training, start = _training[0], time.process_time()
    if what == "an evaluation":
        assert training.data.test is not None
        training.evaluate([training.population[0]], training.data.test)
        return time.process_time() - start
    for _ in range(NUM_STEPS):
        training.engine.step_()
        training.step += 1
    return (time.process_time() - start) / NUM_STEPS


def start_contender(what: str, name: str, root: Path) -> ProcessPoolExecutor:
    """A process with the environment variables of its variant, which waits for its turns; its errors are raised."""
    before, environment = dict(os.environ), WHAT[what][name].environment
    os.environ.update(environment)
    try:
        # Importing torch again takes longer than the steps, and is only needed where variables are set.
        context = multiprocessing.get_context("spawn" if environment else "fork")
        contender = ProcessPoolExecutor(1, mp_context=context)
        contender.submit(start, what, name, root).result()
        return contender
    finally:
        os.environ.clear()
        os.environ.update(before)


def compare(what: str, names: list[str], root: Path, rounds: int) -> list[Result]:
    """The best turn of each contender; the first round is not counted."""
    with ExitStack() as stack:
        contenders = {name: stack.enter_context(start_contender(what, name, root)) for name in names}
        best = dict.fromkeys(names, float("inf"))
        for counted in [False, *[True] * rounds]:
            for name, contender in contenders.items():
                seconds = contender.submit(take_turn, what).result()
                best[name] = min(best[name], seconds) if counted else best[name]
    return [
        Result(
            name=f"{what}, {name}",
            seconds=seconds,
            ratio=seconds / best[AS_SHIPPED],
            note=f"in {fast_precision()}" if name == AS_SHIPPED else None,
        )
        for name, seconds in best.items()
    ]


def main() -> None:
    """Run the benchmark."""
    options_parser = parser(__doc__.splitlines()[0])
    options_parser.set_defaults(rounds=2)
    options_parser.add_argument("--only", default="", help="settings or parts of their names, separated by commas")
    options = options_parser.parse_args()
    torch.set_num_threads(1)
    wanted = options.only.split(",")
    for part in wanted:
        if not any(part in name for variants in WHAT.values() for name in variants):
            options_parser.error(f"--only has {part!r}, which is in no setting's name")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), num_train=8_000, num_test=NUM_SCORED)
        for what, variants in WHAT.items():
            names = [name for name in variants if name == AS_SHIPPED or any(part in name for part in wanted)]
            results += compare(what, names, Path(folder), options.rounds)
    finish(results, options, title=f"VGG-11 of width 12: a step on 64 images, an evaluation on {NUM_SCORED}")


if __name__ == "__main__":
    main()
