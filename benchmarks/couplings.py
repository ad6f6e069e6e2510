"""The time and the bytes of one averaging by every rule, against a push of all weights.

Five ResNet-18 of torchvision, one thread, averagers as they are by default: distances are measured, except by rules
that act on some columns only. Bytes are what a process sends that holds one of two
halves of the population, on a smaller network; they are in proportion to its number of weights.

Single weights take longer than lines, since for each of them a whole line of memory is read and written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torchvision.models import resnet18

import papa
from _bench import Result, best_times, finish, parser
from papa.distributed.group import DistributedGroup
from papa.distributed.shared_memory import SharedMemoryGroup
from papa.distributed.start import start_workers

NUM_MEMBERS = 5
MOST_OF_A_PUSH = 0.1
SPARSE = ("SparseAverage, 0.5%", "Shuffle, 0.5%")

RULES: dict[str, Callable[[], papa.Rule]] = {
    "Push": partial(papa.Push, alpha=0.99, every_steps=1),
    "SparseAverage, 0.5%": partial(papa.SparseAverage, share=0.005, every_steps=1),
    "SparseAverage, 0.05%": partial(papa.SparseAverage, share=0.0005, every_steps=1),
    "SparseAverage, 0.5%, single weights": partial(papa.SparseAverage, share=0.005, by_lines=False, every_steps=1),
    "Shuffle, 0.5%": partial(papa.Shuffle, share=0.005, depth="constant", every_steps=1),
    "Shuffle, 0.1%, fewer in deep layers": partial(papa.Shuffle, every_steps=1),
    "Elastic": partial(papa.Elastic, every_steps=1),
    "Lookahead": partial(papa.Lookahead, every_steps=1),
    "OuterStep": partial(papa.OuterStep, every_steps=1),
    "OuterStep, a fragment of 8": partial(papa.OuterStep, fragments=8, every_steps=8),
    "Gossip": partial(papa.Gossip, every_steps=1),
    "PushPull": partial(papa.PushPull, every_steps=1),
    "GradientWeightedPush": partial(papa.GradientWeightedPush, every_steps=1),
    "MergeAll": partial(papa.MergeAll, every_steps=1),
    "MergePairs": partial(papa.MergePairs, every_steps=1),
}


def population_of(models: list[nn.Module], group: object = None) -> papa.Population:
    """Members that have gradients."""
    population = papa.Population(models, group)
    for network in population:
        for parameter in network.parameters():
            parameter.grad = torch.ones_like(parameter)
    return population


def bytes_by_rule(group: SharedMemoryGroup) -> dict[str, float]:
    """What the first of two processes sends at an averaging, in bytes for each weight of the network."""
    found = {}
    for name, make in RULES.items():
        members = DistributedGroup().local_range(NUM_MEMBERS)
        population = population_of([nn.Linear(1000, 400) for _ in members], DistributedGroup())
        averager = papa.Averager(population, make(), measure=False)
        num_steps = 8  # so that every fragment had its turn
        sent = [averager.step() for _ in range(num_steps)]
        total = sum(averaging.bytes for averaging in sent if averaging is not None)
        found[name] = total / num_steps / population.matrix.shape[1]
    return found


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    population = population_of([resnet18() for _ in range(NUM_MEMBERS)])
    contenders = {name: papa.Averager(population, make()).step for name, make in RULES.items()}
    seconds = best_times(contenders, rounds=options.rounds)
    sent = start_workers(bytes_by_rule, 2, NUM_MEMBERS)
    results = [
        Result(
            name=name,
            seconds=best,
            ratio=best / seconds["Push"],
            target=MOST_OF_A_PUSH if name in SPARSE else None,
        )
        for name, best in seconds.items()
    ]
    results += [
        Result(
            name=f"{name}: bytes sent / Push",
            ratio=sent[name] / sent["Push"],
            target=MOST_OF_A_PUSH if name in SPARSE else None,
            note=f"{sent[name]:.3g} for each weight",
        )
        for name in RULES
    ]
    finish(results, options, title=f"One averaging of {NUM_MEMBERS} ResNet-18 by every rule; ratios to a push")


if __name__ == "__main__":
    main()
