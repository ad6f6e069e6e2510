"""Where the time of a default training run goes: `papa run cifar10-vgg11 --budget mini`, one process with one thread.

This is a complete run with checkpoints, soups and report, but only a few epochs: their time is extrapolated to all
epochs, and the time after training is counted once. Shares are of the extrapolated total, from the first step to the
last file. A second, shorter run with torch's profiler shows which operators take the time of a step.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.profiler import ProfilerActivity, profile

from _bench import Parts, Result, finish, parser, positive
from papa.lab.config import Config
from papa.lab.launch import RunSpec, execute
from papa.lab.recipes import find
from papa.lab.recorder import Recorder
from papa.process import configure_process
from papa.training import Callback, Training

RECIPE = "cifar10-vgg11"
NUM_OPERATORS = 12
MOST_IN_DATA = 0.08
MOST_IN_AVERAGING = 0.01
PARTS = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "averaging",
    "evaluation",
    "metrics and checkpoints",
)


class Timed(Callback):
    """Times every part of a training."""

    def __init__(self) -> None:
        self.parts = Parts()
        self.start = self.end = 0.0
        self.at_end: dict[str, float] = {}
        """The seconds of the parts at the end of the last step."""

    def on_train_begin(self, training: Training) -> None:
        """Wrap the functions of all parts."""
        timed = self.parts.timed
        training.batches.training_batch = timed("data", training.batches.training_batch)  # type: ignore[method-assign]
        training.loss_of = timed("forward", training.loss_of)  # type: ignore[method-assign]
        training.averager.step = timed("averaging", training.averager.step)  # type: ignore[method-assign]
        training.evaluate = timed("evaluation", training.evaluate)  # type: ignore[method-assign]
        for optimizer in training.optimizers:
            optimizer.step = timed("optimizer", optimizer.step)  # type: ignore[method-assign]
        for callback in training.callbacks:
            if isinstance(callback, Recorder):
                for name in ("on_averaging", "on_epoch_end", "on_step_complete", "finish"):
                    setattr(callback, name, timed("metrics and checkpoints", getattr(callback, name)))
        self.start = time.perf_counter()

    def on_step_complete(self, training: Training) -> None:
        """Record the end of the last step."""
        if training.step == training.length.num_steps:
            self.end, self.at_end = time.perf_counter(), dict(self.parts.seconds)


class Profiled(Callback):
    """Profiles a number of steps after a warm-up."""

    def __init__(self, *, first_step: int = 10, num_steps: int = 20) -> None:
        self.first_step, self.last_step = first_step, first_step + num_steps
        self.profiler = profile(activities=[ProfilerActivity.CPU])

    def on_step_begin(self, training: Training) -> None:
        """Start the profiler."""
        if training.step == self.first_step:
            self.profiler.start()

    def on_step_complete(self, training: Training) -> None:
        """Stop the profiler."""
        if training.step == self.last_step:
            self.profiler.stop()


def run_with(callback: Callback, config: Config, num_epochs: int) -> None:
    """A complete run as in `papa run`, with `num_epochs` epochs."""

    with tempfile.TemporaryDirectory() as folder:
        shorter = replace(config, train=replace(config.train, epochs=num_epochs))
        make_callback = partial(contextlib.nullcontext, callback)
        execute(RunSpec(config=shorter, path=Path(folder) / "run", workers=1, make_callback=make_callback))


def shares(config: Config, num_epochs: int) -> list[Result]:
    """The parts of a run, extrapolated from `num_epochs` epochs to all epochs of the config."""
    callback = Timed()
    backward = torch.Tensor.backward
    torch.Tensor.backward = callback.parts.timed("backward", backward)  # type: ignore[method-assign]
    try:
        run_with(callback, config, num_epochs)
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
    longer = config.train.epochs / num_epochs
    spent = {
        name: longer * callback.at_end[name] + callback.parts.seconds[name] - callback.at_end[name] for name in PARTS
    }
    whole = longer * (callback.end - callback.start) + time.perf_counter() - callback.end
    spent["the rest: seeds, losses, soups, files, report"] = whole - sum(spent.values())
    return [
        Result(name="the whole run, from a few of its epochs", seconds=whole, ratio=1.0),
        *(
            Result(
                name=name,
                seconds=seconds,
                ratio=seconds / whole,
                target={"averaging": MOST_IN_AVERAGING, "data": MOST_IN_DATA}.get(name),
            )
            for name, seconds in spent.items()
        ),
    ]


def operators(config: Config) -> list[Result]:
    """The operators that take the time of a step, by their own time."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler logs every start and stop
    callback = Profiled()
    run_with(callback, config, 1)
    events = sorted(callback.profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    return [
        Result(
            name=f"operator {event.key}",
            seconds=event.self_cpu_time_total / 1e6,
            ratio=event.self_cpu_time_total / total,
        )
        for event in events[:NUM_OPERATORS]
    ]


def config_for(root: Path) -> Config:
    """The recipe at the mini budget, with the images in `root`."""
    config = find(RECIPE).config("mini")
    return replace(config, data=replace(config.data, root=str(root)))


def write_images(root: Path, *, num_train: int, num_test: int) -> None:
    """Write noise of the shape of CIFAR-10, in class folders."""
    random = np.random.default_rng(0)
    for part, count in (("train", num_train), ("test", num_test)):
        for number in range(count):
            folder = root / "cifar10" / part / str(number % 10)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(256, size=(32, 32, 3), dtype=np.uint8)).save(folder / f"{number}.png")


def main() -> None:
    """Run the benchmark."""
    options_parser = parser(__doc__.splitlines()[0])
    options_parser.add_argument("--epochs", type=positive, default=3, help="number of epochs to run")
    options_parser.add_argument("--data-root", type=Path, help="folder of CIFAR-10; noise of its shape by default")
    options_parser.set_defaults(rounds=1)
    options = options_parser.parse_args()
    configure_process()
    with tempfile.TemporaryDirectory() as folder:
        root = options.data_root
        if root is None:
            root = Path(folder)
            write_images(root, num_train=8_000, num_test=10_000)
        config = config_for(root)
        rounds = [shares(config, options.epochs) for _ in range(options.rounds)]
        results = min(rounds, key=lambda results: results[0].seconds or 0.0)
        results += operators(config)
    finish(results, options, title=f"{RECIPE} at the mini budget: shares of the whole run; operators: of their time")


if __name__ == "__main__":
    main()
