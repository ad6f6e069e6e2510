"""The time of `Averager.step()` as users call it, against pushes written by hand, for networks of many kinds.

Ratios of processor time of one thread, best of all rounds. A measured step also checks for non-finite members and
returns their distances to the mean; versions by hand do neither, and in bfloat16 they add up in bfloat16.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

import papa
from _bench import Result, best_times, finish, parser
from push import push_foreach_, push_lerp_

ALPHA = 0.9


def perceptron(width: int, depth: int) -> nn.Module:
    """A network of `depth` linear layers."""
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])


CASES: dict[str, tuple[int, Callable[[], nn.Module], torch.dtype]] = {
    "4 networks of 100,000 numbers": (4, lambda: perceptron(128, 6), torch.float32),
    "50 networks of 100,000 numbers": (50, lambda: perceptron(128, 6), torch.float32),
    "2 networks of a million numbers": (2, lambda: perceptron(512, 4), torch.float32),
    "3 networks of a million numbers": (3, lambda: perceptron(512, 4), torch.float32),
    "10 networks of a million numbers": (10, lambda: perceptron(512, 4), torch.float32),
    "4 networks of a million numbers, bfloat16": (4, lambda: perceptron(512, 4), torch.bfloat16),
}


def measure(name: str, *, rounds: int) -> list[Result]:
    """The times of one case."""
    size, make, dtype = CASES[name]
    by_hand = [make().to(dtype) for _ in range(size)]
    tensors = [[tensor.detach() for tensor in model.state_dict().values()] for model in by_hand]
    contenders: dict[str, Callable[[], object]] = {
        "torch foreach": lambda: push_foreach_(tensors),
        "loop of lerp_ over tensors": lambda: push_lerp_(tensors),
    }
    population = papa.Population([make().to(dtype) for _ in range(size)])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in population]
    for is_measured in (True, False):
        averager = papa.Averager(population, papa.Push(alpha=ALPHA, every_steps=1), optimizers, measure=is_measured)
        for _ in range(5):  # the first averagings look for mistakes
            averager.step()
        contenders[f"Averager.step, {'measured' if is_measured else 'unmeasured'}"] = averager.step
    seconds = best_times(contenders, rounds=2 * rounds, clock=time.thread_time)
    return [
        Result(
            name=f"{name}: {contender}",
            seconds=best,
            ratio=best / seconds["torch foreach"],
            target=1.0 if contender.startswith("Averager") else None,
        )
        for contender, best in seconds.items()
    ]


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", papa.PapaWarning)  # no optimizer takes a step here
    results = [result for name in CASES for result in measure(name, rounds=options.rounds)]
    finish(results, options, title="One averaging; ratios to torch foreach")


if __name__ == "__main__":
    main()
