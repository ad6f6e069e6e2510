"""The time of a step with the stacked engine against the loop: ten logistic regressions, and larger networks.

Both engines take the same steps of the same members on the same images; one thread, as in a CPU worker.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from _bench import Result, best_times, finish, parser
from papa.lab.models import make_model
from papa.rules import MergeAll
from papa.schedules import constant
from papa.training import Settings, Stacked, Training, Transforms, start_training

NUM_MEMBERS = 10
LEAST_TIMES_FASTER = 4.0


def training_of(make: Callable[[], nn.Module], *, image_size: int, batch_size: int, num_steps: int) -> list[Training]:
    """The same training with the loop and stacked, on random images."""
    channels = 1 if image_size == 8 else 3
    generator = torch.Generator().manual_seed(0)
    num_images = 2 * num_steps * batch_size
    images = torch.randint(17, (num_images, channels, image_size, image_size), generator=generator, dtype=torch.uint8)
    targets = torch.randint(10, (num_images,), generator=generator)
    return [
        start_training(
            make,
            (images, targets),
            Settings(
                num_members=NUM_MEMBERS,
                num_epochs=1000,
                batch_size=batch_size,
                make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
                schedule=constant(),
                transforms=Transforms(prepare=lambda images: images / 16.0),
                device="cpu",
                engine=engine,
            ),
            MergeAll(every_steps=num_steps),
        )
        for engine in (None, Stacked)
    ]


def steps_of(training: Training, num_steps: int) -> Callable[[], None]:
    """A function that takes `num_steps` steps with averaging, but without the end of an epoch."""
    if training.engine is not None:
        training.engine.start_()

    def run() -> None:
        for _ in range(num_steps):
            training._take_step()

    return run


def compare(
    name: str, make: Callable[[], nn.Module], *, rounds: int, target: float | None, **sizes: int
) -> list[Result]:
    """The times of both engines, and their ratio."""
    trainings = training_of(make, **sizes)
    contenders = {
        f"{name}: {engine}": steps_of(training, sizes["num_steps"])
        for engine, training in zip(("loop", "stacked"), trainings, strict=True)
    }
    loop, stacked = best_times(contenders, rounds=rounds).items()
    return [
        Result(name=loop[0], seconds=loop[1] / sizes["num_steps"]),
        Result(name=stacked[0], seconds=stacked[1] / sizes["num_steps"], ratio=stacked[1] / loop[1], target=target),
    ]


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
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
    finish(results, options, title=f"A step of {NUM_MEMBERS} members; ratios to the loop")


if __name__ == "__main__":
    main()
