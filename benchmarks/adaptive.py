"""What a push that sets its own strength costs: its checks, as a share of training at the default cadence.

Five networks, one thread, batches of 64. A check is a forward pass of every member and of their average on one batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import papa
from _bench import Result, best_times, finish, parser
from papa.core.rules import AveragingContext
from papa.lab.models import make_model
from papa.training import Settings
from papa.training.entry import start_training

MOST = 0.01
"""The largest share of training time."""
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP, 3 layers of 256": (
        lambda: nn.Sequential(
            nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
            nn.Linear(256, 10),
        ),
        (256,),
    ),
    "VGG-11 of width 8": (
        lambda: make_model("vgg11", num_classes=10, in_channels=3, image_size=32, width=8),
        (3, 32, 32),
    ),
}  # fmt: skip


def share_of(name: str, rounds: int) -> Result:
    """The time of a check, divided by that of all steps and pushes from one check to the next."""
    make_model_of, shape = NETWORKS[name]
    data = torch.randn(640, *shape), torch.randint(10, (640,))
    settings = Settings(num_members=5, num_epochs=rounds + 1, batch_size=64, device="cpu")
    training = start_training(make_model_of, data, settings, papa.AdaptivePush())
    rule, population = training.averager.rule, training.population
    assert isinstance(rule, papa.AdaptivePush)
    context = AveragingContext(step=rule.check_every, size=5, lr_ratio=1.0, state=rule.initial_state(5))

    def check() -> None:
        training.step += 1  # another batch, which has to be read
        rule.see(population, context)
        training.step -= 1

    def steps() -> None:
        for _ in range(rule.every_steps):  # the last of them pushes
            training._take_step()

    times = best_times({"steps": steps, "check": check}, rounds=rounds)
    ratio = times["check"] / (rule.check_every / rule.every_steps * times["steps"])
    words = f"checks every {rule.check_every} steps, {name}"
    return Result(name=words, seconds=times["check"], ratio=ratio, target=MOST)


def main() -> None:
    """Print the share of every network."""
    options = parser(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    finish([share_of(name, options.rounds) for name in NETWORKS], options, title="AdaptivePush")


if __name__ == "__main__":
    main()
