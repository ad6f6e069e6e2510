"""The time of `Averager.step()` as users call it, against pushes written by hand, for networks of many kinds.

Members take a training step before each averaging, as in a training: what was used last is in cache then, and nothing
else. Ratios of processor time of one thread, best of all rounds. A measured step also checks for non-finite members and
returns their distances to the mean; versions by hand do neither, and in bfloat16 they add up in bfloat16.
"""

from __future__ import annotations

import functools
import gc
import math
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import papa
from _bench import Result, finish, parser
from push import push_foreach_, push_lerp_

ALPHA = 0.9
BATCH_SIZE = 64


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


class Trained:
    """Networks that take a training step each before they are averaged."""

    def __init__(self, name: str) -> None:
        size, make, dtype = CASES[name]
        self.networks = [make().to(dtype) for _ in range(size)]
        self.optimizers = [torch.optim.SGD(network.parameters(), lr=1e-3) for network in self.networks]
        self._inputs = torch.randn(BATCH_SIZE, next(self.networks[0].parameters()).shape[1], dtype=dtype)

    def tensors(self) -> list[list[Tensor]]:
        """What is averaged by hand."""
        return [[tensor.detach() for tensor in network.state_dict().values()] for network in self.networks]

    def averager(self, *, is_measured: bool) -> papa.Averager:
        """An averager that has made its first averagings, which look for mistakes."""
        population = papa.Population(self.networks)
        push = papa.Push(alpha=ALPHA, every_steps=1)
        averager = papa.Averager(population, push, self.optimizers, measure=is_measured)
        for _ in range(5):
            averager.step()
        return averager

    def step(self) -> None:
        """One training step of every network."""
        for network, optimizer in zip(self.networks, self.optimizers, strict=True):
            optimizer.zero_grad()
            network(self._inputs).square().mean().backward()
            optimizer.step()


def measure(name: str, *, rounds: int) -> list[Result]:
    """The times of one case."""
    contenders: dict[str, tuple[Trained, Callable[[], object]]] = {}
    for by_hand, push in (("torch foreach", push_foreach_), ("loop of lerp_ over tensors", push_lerp_)):
        trained = Trained(name)
        contenders[by_hand] = trained, functools.partial(push, trained.tensors())
    for is_measured in (True, False):
        trained = Trained(name)
        kind = "measured" if is_measured else "unmeasured"
        contenders[f"Averager.step, {kind}"] = trained, trained.averager(is_measured=is_measured).step
    seconds = dict.fromkeys(contenders, math.inf)
    gc.collect()
    gc.disable()
    for _ in range(4 * rounds):
        for contender, (trained, average) in contenders.items():
            trained.step()
            start = time.thread_time()
            average()
            seconds[contender] = min(seconds[contender], time.thread_time() - start)
    gc.enable()
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
    warnings.simplefilter("ignore", papa.PapaWarning)  # averagings without training are warned of
    results = [result for name in CASES for result in measure(name, rounds=options.rounds)]
    finish(results, options, title="One averaging; ratios to torch foreach")


if __name__ == "__main__":
    main()
