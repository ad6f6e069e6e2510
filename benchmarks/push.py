"""The time to average five networks of 11.7 million parameters, against a plain copy of their memory.

Contenders: every rule of papa, and versions written by hand: a loop over state dicts, a loop over tensors in place,
torch's foreach kernels. The members are ResNet-18 of torchvision; one thread, as in a CPU worker.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torchvision.models import resnet18

import papa
from _bench import Result, best_times, finish, parser, peak_extra_megabytes
from papa.core import mixing

NUM_MEMBERS = 5
KEEP = 0.99
READING = "reading the matrix: the sum of every row"
MEASURED, UNMEASURED = "Averager.step, measured", "Averager.step, unmeasured"
STEPS = {MEASURED: 1.7, UNMEASURED: 1.4}
MOST_TIMES_A_COPY = {"Push": 1.4, "MergePairs": 1.4, **STEPS}
LEAST_TIMES_FASTER_THAN_A_LOOP = 8.0
MOST_EXTRA_MEGABYTES = 8.0
BY_HAND = ("loop over state dicts", "torch foreach", "loop of lerp_ over tensors")


def push_state_dicts_(models: list[nn.Module]) -> None:
    """The usual version by hand: average the state dicts, build a new state dict for each network, and load it."""
    states = [model.state_dict() for model in models]
    names = [name for name, tensor in states[0].items() if tensor.is_floating_point()]
    mean = {name: sum(state[name] for state in states) / len(states) for name in names}
    for model, state in zip(models, states, strict=True):
        model.load_state_dict({**state, **{name: KEEP * state[name] + (1 - KEEP) * mean[name] for name in names}})


@torch.no_grad()
def push_foreach_(tensors: list[list[Tensor]]) -> None:
    """The same with torch's multi-tensor kernels, in place."""
    mean = [tensor.clone() for tensor in tensors[0]]
    for others in tensors[1:]:
        torch._foreach_add_(mean, others)
    torch._foreach_div_(mean, len(tensors))
    for own in tensors:
        torch._foreach_lerp_(own, mean, 1 - KEEP)


@torch.no_grad()
def push_lerp_(tensors: list[list[Tensor]]) -> None:
    """The same tensor by tensor and in place."""
    for own in zip(*tensors, strict=True):
        mean = torch.stack(own).mean(dim=0)
        for tensor in own:
            tensor.lerp_(mean, 1 - KEEP)


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    unbound = [resnet18() for _ in range(NUM_MEMBERS)]
    numbers = [[t.detach() for t in model.state_dict().values() if t.is_floating_point()] for model in unbound]
    population = papa.Population(copy.deepcopy(unbound))
    spare = torch.empty_like(population.matrix)
    generator = torch.Generator().manual_seed(0)
    pairs = mixing.merge_pairs(NUM_MEMBERS, generator)
    dense = torch.softmax(torch.randn(NUM_MEMBERS, NUM_MEMBERS, generator=generator), dim=1).double()
    push = papa.Push(alpha=KEEP, every_steps=1)

    contenders = {
        "plain copy of the matrix": lambda: spare.copy_(population.matrix),
        READING: lambda: population.matrix.sum(dim=1),
        "Push": lambda: population.mix_(mixing.push(NUM_MEMBERS, KEEP)),
        "MergeAll": lambda: population.mix_(mixing.merge_all(NUM_MEMBERS)),
        "MergePairs": lambda: population.mix_(pairs),
        "MergeMany": lambda: population.mix_(mixing.merge_many(NUM_MEMBERS)),
        "any row-stochastic matrix": lambda: population.mix_(dense),
        MEASURED: papa.Averager(population, push).step,
        UNMEASURED: papa.Averager(population, push, measure=False).step,
        "loop over state dicts": lambda: push_state_dicts_(unbound),
        "torch foreach": lambda: push_foreach_(numbers),
        "loop of lerp_ over tensors": lambda: push_lerp_(numbers),
    }
    seconds = best_times(contenders, rounds=options.rounds)
    copy_seconds = seconds["plain copy of the matrix"]
    results = [
        Result(name=name, seconds=best, ratio=best / copy_seconds, target=MOST_TIMES_A_COPY.get(name))
        for name, best in seconds.items()
    ]
    results += [
        Result(
            name=f"{name} / loop over state dicts",
            ratio=seconds[name] / seconds["loop over state dicts"],
            target=1 / LEAST_TIMES_FASTER_THAN_A_LOOP,
        )
        for name in ("Push", "MergePairs")
    ]
    results += [
        Result(name=f"{step} / {name}", ratio=seconds[step] / seconds[name], target=1.0)
        for step in STEPS
        for name in BY_HAND
    ]
    ours = [name for name in contenders if name not in ("plain copy of the matrix", READING, *BY_HAND)]
    results += [
        Result(
            name=f"{name}: peak extra memory",
            megabytes=peak_extra_megabytes(run),
            target=MOST_EXTRA_MEGABYTES if name in ours else None,
        )
        for name, run in contenders.items()
    ]
    columns = population.matrix.shape[1]
    finish(results, options, title=f"Averaging {NUM_MEMBERS} networks of {columns:,} columns; ratios to a plain copy")


if __name__ == "__main__":
    main()
