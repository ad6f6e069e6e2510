"""Every rule, with a slow and obvious twin: what the common suite runs. A new rule joins by one line in `CASES`.

In a module of its own because worker processes import it too.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from group_jobs import StagedGroup, states_of
from helpers import make_network, random_stochastic
from papa.core.averager import Averager
from papa.core.group import Group, LocalGroup
from papa.core.population import Population
from papa.core.rules import AveragingContext, Independent, MergeAll, MergeMany, MergePairs, Mix, Push, Rule
from papa.couplings.adaptive import AdaptivePush
from papa.couplings.anchored import Elastic, Gossip, Lookahead, OuterStep
from papa.couplings.masks import Mask
from papa.couplings.sparse import Shuffle, SparseAverage
from papa.couplings.weighted import GradientWeightedPush, PushPull, ScoreWeightedPush
from papa.distributed.group import DistributedGroup
from papa.distributed.shared_memory import SharedMemoryGroup
from papa.lab.selection import MergeElite, MergeGreedy, MergeTournament

Memory = dict[str, Any]
Twin = Callable[[Any, Tensor, AveragingContext, Memory, Mask | None], Tensor]
"""What a rule does to the rows of all members in float64, given the rule, the rows, the context, `memory` and the mask.

`memory` is the twin's own: `anchor` and `members` are the mean and the members at the start, `norms` the gradient
norms, `num_parameters` the number of columns that are parameters. It may keep there what it needs the next time."""


def weights_of_the_step(context: AveragingContext) -> Tensor:
    return random_stochastic(context.size, seed=context.step)


def best_of_all() -> tuple[int, ...]:
    return (0,)


def ordered_losses(size: int) -> list[float]:
    return [1.0 + member for member in range(size)]


def candidate_losses(rows: Tensor, candidates: range) -> list[float]:
    return [1.0 + candidate % 7 for candidate in candidates]


def size_of_weights(network: nn.Module) -> float:
    return sum(float(parameter.detach().double().square().sum()) for parameter in network.parameters())


def by_matrix(rule: Rule, rows: Tensor, context: AveragingContext, memory: Memory, mask: Mask | None) -> Tensor:
    return rule.matrix(context) @ rows


def sparse_average(rule: Any, rows: Tensor, context: AveragingContext, memory: Memory, mask: Mask) -> Tensor:
    rows = rows.clone()
    for column in mask.columns[torch.float64].indices.tolist():
        rows[:, column] = rows[:, column].mean()
    return rows


def shuffle(rule: Any, rows: Tensor, context: AveragingContext, memory: Memory, mask: Mask) -> Tensor:
    new, lines = rows.clone(), mask.columns[torch.float64]
    for position, column in enumerate(lines.indices.tolist()):
        for member, source in enumerate(mask.sources[torch.float64][:, position // lines.width].tolist()):
            new[member, column] = rows[source, column]
    return new


def elastic(rule: Any, rows: Tensor, context: AveragingContext, memory: Memory, mask: Mask | None) -> Tensor:
    anchor, rate = memory["anchor"], rule.moving_rate / len(rows)
    memory["anchor"] = anchor + rate * (rows - anchor).sum(dim=0)
    return rows + rate * (anchor - rows)


def lookahead(rule: Any, rows: Tensor, context: AveragingContext, memory: Memory, mask: Mask | None) -> Tensor:
    memory["anchor"] = memory["anchor"] + rule.slow_rate * (rows.mean(dim=0) - memory["anchor"])
    return memory["anchor"].repeat(len(rows), 1)


def outer_step(rule: Any, rows: Tensor, context: AveragingContext, memory: Memory, mask: Mask | None) -> Tensor:
    """With torch's own SGD as the outer optimizer, one for each fragment."""
    columns = slice(None) if mask is None else mask.columns[torch.float64]
    anchor = nn.Parameter(memory["anchor"][columns].clone())
    optimizer = torch.optim.SGD([anchor], lr=rule.lr, momentum=rule.momentum, nesterov=rule.momentum > 0)
    key = str(columns)
    if key in memory:
        optimizer.state[anchor]["momentum_buffer"] = memory[key]
    anchor.grad = anchor.detach() - rows[:, columns].mean(dim=0)
    optimizer.step()
    memory[key] = optimizer.state[anchor]["momentum_buffer"]
    memory["anchor"] = memory["anchor"].clone()
    memory["anchor"][columns] = anchor.detach()
    rows = rows.clone()
    rows[:, columns] = anchor.detach()
    return rows


def gossip(rule: Any, rows: Tensor, context: AveragingContext, memory: Memory, mask: Mask | None) -> Tensor:
    pairs = rule.matrix(context)
    anchors = memory.setdefault("anchors", memory["members"])
    momenta = memory.get("momenta", torch.zeros_like(rows))
    for member in range(len(rows)):
        pair = pairs[member].nonzero().flatten()
        momenta[member] = rule.momentum * momenta[member] + rule.lr * (rows[pair].mean(dim=0) - anchors[member])
    memory["momenta"], memory["anchors"] = momenta, anchors + momenta
    return memory["anchors"]


def push_pull(rule: Any, rows: Tensor, context: AveragingContext, memory: Memory, mask: Mask | None) -> Tensor:
    difference = rows - rows.mean(dim=0)
    distances = difference[:, : memory["num_parameters"]].norm(dim=1, keepdim=True)
    return rows - rule.pull * difference + rule.pull * rule.spread * difference / distances


def gradient_weighted(rule: Any, rows: Tensor, context: AveragingContext, memory: Memory, mask: Mask | None) -> Tensor:
    norms = torch.tensor(memory["norms"], dtype=torch.float64)
    memory["sum"] = rule.smoothing * memory.get("sum", 0.0) + (1 - rule.smoothing) * norms
    memory["count"] = memory.get("count", 0) + 1
    inverse = 1 / (memory["sum"] / (1 - rule.smoothing ** memory["count"]))
    return rule.alpha * rows + (1 - rule.alpha) * (inverse / inverse.sum()).double() @ rows


def score_weighted(rule: Any, rows: Tensor, context: AveragingContext, memory: Memory, mask: Mask | None) -> Tensor:
    inverse = 1 / (rows[:, : memory["num_parameters"]] ** 2).sum(dim=1)
    return rule.alpha * rows + (1 - rule.alpha) * (inverse / inverse.sum()) @ rows


def adaptive_push(rule: Any, rows: Tensor, context: AveragingContext, memory: Memory, mask: Mask | None) -> Tensor:
    half_life, mean = memory.get("half_life", rule.half_life_steps), rows.mean(dim=0)
    weights = rows[:, : memory["num_parameters"]]
    losses, average = (weights**2).sum(dim=1), (weights.mean(dim=0) ** 2).sum()
    first = memory.setdefault("first", losses.mean())
    if min(average, losses.mean()) < 0.9 * first:
        grown = half_life + rule.growth * (context.step - memory.get("checked", 0))
        half_life = grown if average <= losses.mean() else max(half_life / 2, rule.every_steps / 4)
    memory["half_life"], memory["checked"] = half_life, context.step
    return mean + 0.5 ** (rule.every_steps / half_life) * (rows - mean)


@dataclass(frozen=True)
class Case:
    """How to make a rule for a number of members and a cadence, and its twin."""

    make: Callable[..., Rule]
    twin: Twin = by_matrix

    def __call__(self, size: int, **cadence: Any) -> Rule:
        return self.make(size, **{"every_steps": 1, **cadence})


def case(make: Callable[..., Rule], twin: Twin = by_matrix, **options: Any) -> Case:
    return Case(lambda size, **cadence: make(**{**options, **cadence}), twin)


CASES: dict[str, Case] = {
    "Independent": case(Independent, lambda rule, rows, *_: rows),
    "Push": case(Push, alpha=0.99),
    "Push by half-life": case(Push, half_life_steps=50),
    "Push unscaled": case(Push, alpha=0.5, scale_by_lr=False),
    "MergeAll": case(MergeAll),
    "MergePairs": case(MergePairs, seed=3),
    "MergePairs 75": case(MergePairs, share=0.75, seed=3),
    "MergeMany": case(MergeMany),
    "MergeMany 75": case(MergeMany, share=0.75),
    "Mix by a matrix": Case(lambda size, **cadence: Mix(random_stochastic(size, seed=0), **cadence)),
    "Mix by lists": Case(lambda size, **cadence: Mix(random_stochastic(size, seed=0).tolist(), **cadence)),
    "Mix by a function": case(Mix, weights=weights_of_the_step),
    "MergeGreedy": case(MergeGreedy, choose=best_of_all),
    "MergeTournament": Case(
        lambda size, **cadence: MergeTournament(functools.partial(ordered_losses, size), seed=3, **cadence)
    ),
    "MergeElite": case(MergeElite, losses=candidate_losses, seed=3),
    "SparseAverage": case(SparseAverage, sparse_average, share=0.2, seed=3),
    "SparseAverage of single columns": case(SparseAverage, sparse_average, share=0.2, seed=3, by_lines=False),
    "Shuffle": case(Shuffle, shuffle, share=0.4, seed=3),
    "Shuffle of single columns": case(Shuffle, shuffle, share=0.4, seed=3, by_lines=False),
    "Elastic": case(Elastic, elastic),
    "Lookahead": case(Lookahead, lookahead),
    "OuterStep": case(OuterStep, outer_step),
    "Gossip": case(Gossip, gossip, seed=3),
    "PushPull": case(PushPull, push_pull, spread=3.0),
    "GradientWeightedPush": case(GradientWeightedPush, gradient_weighted),
    "AdaptivePush": case(AdaptivePush, adaptive_push, probe=size_of_weights, check_every=1),
    "ScoreWeightedPush": case(ScoreWeightedPush, score_weighted, probe=size_of_weights, alpha=0.7),
}

VARIANTS: dict[str, Case] = {
    "OuterStep in fragments": Case(
        lambda size, **cadence: OuterStep(fragments=2, **{**cadence, "every_steps": 2 * cadence["every_steps"]}),
        outer_step,
    ),
}
"""Options of rules that change when they act, for the tests of what they compute."""

if chosen := os.environ.get("PAPA_RULES"):
    # For whoever writes a rule: the common suite for the rules of these names only.
    CASES, VARIANTS = (
        {name: one for name, one in some.items() if name in chosen.split(",")} for some in (CASES, VARIANTS)
    )

SIZE = 4


def make_population(group: Group | None = None, kind: str = "mixed_dtypes", size: int = SIZE) -> Population:
    group = LocalGroup() if group is None else group
    return Population([make_network(kind, member) for member in group.local_range(size)], group)


def step_(population: Population, optimizers: Sequence[torch.optim.Optimizer], step: int) -> None:
    """A step of every local member with random gradients, which depend on step and member."""
    for index, member in enumerate(population.members):
        generator = torch.Generator().manual_seed(100 * step + member)
        for parameter in population[index].parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = ((1 + member) * noise).to(parameter.dtype)
        optimizers[index].step()


def run_rule(
    rule: Rule,
    group: Group | None = None,
    *,
    save_at: int | None = None,
    nonfinite_at: int | None = None,
    policy: Any = "restart",
) -> dict[str, Any]:
    """Some steps with a rule; optionally saved, and continued by new objects, or with a member set to NaN."""
    population = make_population(group)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in population]
    averager = Averager(population, rule, optimizers, on_nonfinite=policy)
    logs = []
    for step in range(1, 9):
        step_(population, optimizers, step)
        if step == nonfinite_at:
            for index, member in enumerate(population.members):
                if member == 2:
                    with torch.no_grad():
                        for parameter in population[index].parameters():
                            parameter.fill_(math.nan)
        logs.append(averager.step())
        if step == save_at:
            saved = copy.deepcopy((averager.state_dict(), [net.state_dict() for net in population]))
            states = copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])
            other = group if not isinstance(group, DistributedGroup) else DistributedGroup()
            population = make_population(other)
            for net, state in zip(population, saved[1], strict=True):
                net.load_state_dict(state)
            optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in population]
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(state)
            averager = Averager(population, rule, optimizers, on_nonfinite=policy)
            averager.load_state_dict(saved[0])
    return {"states": states_of(population), "logs": logs}


def run_every_rule(new_group: Callable[[], Group]) -> dict[str, Any]:
    """Each rule over the processes of a group: with a member that becomes non-finite, then saved and resumed."""
    return {
        # Nothing replaces a non-finite member of `Independent`, and NaN is not equal to itself.
        name: run_rule(make(SIZE), new_group(), nonfinite_at=None if name == "Independent" else 4, save_at=5)
        for name, make in {**CASES, **VARIANTS}.items()
    }


def run_in_workers(group: SharedMemoryGroup) -> dict[str, Any]:
    """`run_every_rule` over shared memory, over staged shared memory, and over messages."""
    torch.set_num_threads(1)
    staged = StagedGroup(SIZE)
    groups: dict[str, Callable[[], Group]] = {"shared": lambda: group, "staged": lambda: staged}
    groups["distributed"] = DistributedGroup
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: run_every_rule(new_group) for name, new_group in groups.items()}
