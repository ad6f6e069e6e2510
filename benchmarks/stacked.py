"""The time of a step with the stacked engine against the loop: ten logistic regressions, and larger networks.

Engines take the same steps of the same members on the same images. There is one thread, as in a CPU worker, and its CPU
time is measured. The ratio of `auto` is to the better engine, both with all that they do in a training of `NUM_STEPS`
steps: `auto` measures, and both record the stacked step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from _bench import Result, best_times, finish, parser
from papa.core.rules import MergeAll
from papa.lab.models import make_model
from papa.training import Auto, Settings, Stacked, Training, Transforms, start_training
from papa.training.schedules import constant

NUM_MEMBERS = 10
NUM_STEPS = 1000
"""The length of the training that `auto` chooses for."""
LEAST_TIMES_FASTER = 4.0
ENGINES: dict[str, Any] = {"loop": None, "stacked": Stacked, "auto": Auto}


def perceptron() -> nn.Module:
    """Two hidden layers with dropout."""
    hidden = [nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))


def trainings_of(
    make: Callable[[], nn.Module], *, image_size: int, batch_size: int, num_steps: int
) -> dict[str, Training]:
    """The same training with each engine, on random images."""
    channels = 1 if image_size == 8 else 3
    generator = torch.Generator().manual_seed(0)
    num_images = 2 * num_steps * batch_size
    images = torch.randint(17, (num_images, channels, image_size, image_size), generator=generator, dtype=torch.uint8)
    targets = torch.randint(10, (num_images,), generator=generator)
    return {
        name: start_training(
            make,
            (images, targets),
            Settings(
                num_members=NUM_MEMBERS,
                num_epochs=NUM_STEPS // (2 * num_steps),
                batch_size=batch_size,
                make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
                schedule=constant(),
                transforms=Transforms(prepare=lambda images: images / 16.0),
                device="cpu",
                engine=engine,
            ),
            MergeAll(every_steps=num_steps),
        )
        for name, engine in ENGINES.items()
    }


def seconds_to_start(training: Training) -> float:
    """The time before the second step, in which engines record and choose."""
    begin = time.process_time()
    if training.engine is not None:
        training.engine.start_()
        training._take_step()
    return time.process_time() - begin


def steps_of(training: Training, num_steps: int) -> Callable[[], None]:
    """A function that takes `num_steps` steps with averaging, but without the end of an epoch."""

    def run() -> None:
        for _ in range(num_steps):
            training._take_step()
        training.go_to_(0)

    return run


def compare(
    name: str, make: Callable[[], nn.Module], *, rounds: int, target: float | None, **sizes: int
) -> list[Result]:
    """The times of both engines and their ratio, and of the engine that chooses."""
    trainings = trainings_of(make, **sizes)
    starts = {engine: seconds_to_start(training) for engine, training in trainings.items()}
    contenders = {engine: steps_of(training, sizes["num_steps"]) for engine, training in trainings.items()}
    best = best_times(contenders, rounds=rounds, clock=time.process_time)
    seconds = {engine: best[engine] / sizes["num_steps"] for engine in ENGINES}
    whole = {engine: starts[engine] / NUM_STEPS + seconds[engine] for engine in ENGINES}
    chooser = trainings["auto"].engine
    assert isinstance(chooser, Auto)
    return [
        Result(name=f"{name}: loop", seconds=seconds["loop"]),
        Result(
            name=f"{name}: stacked",
            seconds=seconds["stacked"],
            ratio=seconds["stacked"] / seconds["loop"],
            target=target,
        ),
        Result(
            name=f"{name}: auto",
            seconds=whole["auto"],
            ratio=whole["auto"] / min(whole["loop"], whole["stacked"]),
            target=1.05,
            note=f"chose {chooser.chosen}",
        ),
    ]


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    seconds_to_start(trainings_of(perceptron, image_size=8, batch_size=1, num_steps=100)["stacked"])  # imports
    results = [
        *compare(
            "logistic regression, batch size 1",
            lambda: make_model("linear", num_classes=10, in_channels=1, image_size=8),
            rounds=options.rounds,
            target=1 / LEAST_TIMES_FASTER,
            image_size=8,
            batch_size=1,
            num_steps=100,
        ),
        *compare(
            "perceptron with dropout, batch size 16",
            perceptron,
            rounds=options.rounds,
            target=None,
            image_size=8,
            batch_size=16,
            num_steps=20,
        ),
        *compare(
            "digits-cnn, batch size 16",
            lambda: make_model("digits-cnn", num_classes=10, in_channels=1, image_size=8),
            rounds=options.rounds,
            target=None,
            image_size=8,
            batch_size=16,
            num_steps=5,
        ),
        *compare(
            "ResNet-20, batch size 16",
            lambda: make_model("resnet20", num_classes=10),
            rounds=min(options.rounds, 3),
            target=None,
            image_size=32,
            batch_size=16,
            num_steps=1,
        ),
    ]
    finish(results, options, title=f"A step of {NUM_MEMBERS} members; ratios to the loop, of auto to the better engine")


if __name__ == "__main__":
    main()
