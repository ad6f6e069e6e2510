"""The time of a step of stacked members against the loop: ten logistic regressions, and larger networks.

Both take the same steps of the same members on the same images. There is one thread, as in a CPU worker, and its CPU
time is measured.
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
from papa.training import Settings, Stacked, Training, Transforms, start_training
from papa.training.schedules import constant

NUM_MEMBERS = 10
LEAST_TIMES_FASTER = 5.0
ENGINES: dict[str, Any] = {"loop": None, "stacked": Stacked}


def perceptron() -> nn.Module:
    """Two hidden layers."""
    hidden = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))


def training_of(
    engine: Any, make: Callable[[], nn.Module], *, image_size: int, batch_size: int, num_steps: int
) -> Training:
    """A training on random images."""
    channels = 1 if image_size == 8 else 3
    generator = torch.Generator().manual_seed(0)
    num_images = 2 * num_steps * batch_size
    images = torch.randint(17, (num_images, channels, image_size, image_size), generator=generator, dtype=torch.uint8)
    targets = torch.randint(10, (num_images,), generator=generator)
    settings = Settings(
        num_members=NUM_MEMBERS,
        num_epochs=10,
        batch_size=batch_size,
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        schedule=constant(),
        transforms=Transforms(prepare=lambda images: images / 16.0),
        device="cpu",
        engine=engine,
    )
    return start_training(make, (images, targets), settings, MergeAll(every_steps=num_steps))


def steps_of(training: Training, num_steps: int) -> Callable[[], None]:
    """A function that takes `num_steps` steps with averaging, but without the end of an epoch."""

    def run() -> None:
        for _ in range(num_steps):
            training._take_step()
        training.go_to_(0)

    training.engine.start_()
    return run


def compare(
    name: str, make: Callable[[], nn.Module], *, rounds: int, target: float | None = None, **sizes: int
) -> list[Result]:
    """The times of both and their ratio."""
    trainings = {engine: training_of(kind, make, **sizes) for engine, kind in ENGINES.items()}
    contenders = {engine: steps_of(training, sizes["num_steps"]) for engine, training in trainings.items()}
    best = best_times(contenders, rounds=rounds, clock=time.process_time)
    loop, stacked = (best[engine] / sizes["num_steps"] for engine in ENGINES)
    return [
        Result(name=f"{name}: loop", seconds=loop),
        Result(name=f"{name}: stacked", seconds=stacked, ratio=stacked / loop, target=target),
    ]


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    rounds = options.rounds
    linear = lambda: make_model("linear", num_classes=10, in_channels=1, image_size=8)  # noqa: E731
    digits = lambda: make_model("digits-cnn", num_classes=10, in_channels=1, image_size=8)  # noqa: E731
    small, large = {"image_size": 8, "num_steps": 20}, {"image_size": 32, "num_steps": 1}
    target = 1 / LEAST_TIMES_FASTER
    results = [
        *compare(
            "logistic regression, batch size 1",
            linear,
            rounds=rounds,
            target=target,
            image_size=8,
            num_steps=100,
            batch_size=1,
        ),
        *compare("perceptron, batch size 16", perceptron, rounds=rounds, **small, batch_size=16),
        *compare("digits-cnn, batch size 16", digits, rounds=rounds, **small, batch_size=16),
        *compare(
            "ResNet-20, batch size 16",
            lambda: make_model("resnet20", num_classes=10),
            rounds=min(rounds, 3),
            **large,
            batch_size=16,
        ),
    ]
    finish(results, options, title=f"A step of {NUM_MEMBERS} members; ratios to the loop")


if __name__ == "__main__":
    main()
