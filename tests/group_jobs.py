"""Jobs that worker processes run in the tests of groups, and helpers that all jobs share.

They are in a module because new processes must be able to import them.
"""

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from helpers import small_training
from papa import (
    AlignMerges,
    Averager,
    MergeAll,
    MergePairs,
    Mix,
    Population,
    Push,
    aligned_soups,
    average_soup,
    greedy_soup,
    symmetries,
)
from papa.core.group import Group
from papa.distributed.group import DistributedGroup
from papa.distributed.shared_memory import SharedMemoryGroup
from papa.distributed.start import start_workers
from papa.errors import PapaError, SoupError
from papa.training import Callback, Training, finalize

SIZE = 5


class StagedGroup(SharedMemoryGroup):
    """Treats the CPU as an accelerator: rows are copied into the mapping to be mixed."""

    def is_staged(self, device: torch.device) -> bool:
        return True


def make_member(member: int) -> nn.Module:
    torch.manual_seed(member)
    net = nn.Sequential(nn.Linear(300, 700), nn.BatchNorm1d(700), nn.Linear(700, 300)).double()
    net[2].float()
    return net


def make_mlp(member: int) -> nn.Module:
    torch.manual_seed(member)
    return nn.Sequential(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))


def add_noise_(population: Population, seed: int) -> None:
    """Move the parameters of every member, as training would."""
    for index, member in enumerate(population.members):
        generator = torch.Generator().manual_seed(100 * seed + member)
        with torch.no_grad():
            for parameter in population[index].parameters():
                parameter += torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def states_of(population: Population) -> list[dict[str, Tensor]]:
    """The state dicts of all members of all processes."""
    return population.group.all_gather([net.state_dict() for net in population])


def message_of(call: Callable[[], object]) -> str:
    """The `PapaError` that a call raises, as text."""
    try:
        call()
    except PapaError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def apply_every_rule(group: Group) -> dict[str, Any]:
    """Each rule in turn on members that move in between, then soups; returns all results."""
    population = Population([make_member(member) for member in group.local_range(SIZE)], group)
    rules = [
        Push(alpha=0.9, every_steps=1),
        MergePairs(every_steps=1),
        Mix(lambda context: torch.softmax(torch.arange(25.0).sin().view(5, 5), dim=1), every_steps=1),
        Push(alpha=0.3, every_steps=1),
        MergeAll(every_steps=1),
    ]
    logs = []
    for number, rule in enumerate(rules):
        add_noise_(population, number)
        logs.append(Averager(population, rule).step())
    for index, member in enumerate(population.members):
        with torch.no_grad():
            population[index][0].weight += member
    greedy = greedy_soup(population, lambda net: -abs(float(net[0].weight.detach().mean()) - 1.2))
    return {
        "states": states_of(population),
        "logs": logs,
        "mean": population.mean(),
        "soup": average_soup(population).state_dict(),
        "greedy": (greedy.members, greedy.score, greedy.member_scores, greedy.network.state_dict()),
        "size": population.size,
        "distances": Population([with_other_buffer(member) for member in group.local_range(SIZE)], group).distances(),
    }


def with_other_buffer(member: int) -> nn.Module:
    """A network with a dtype that only a buffer has."""
    net = make_mlp(member)
    net.register_buffer("scale", torch.ones(3, dtype=torch.float64))
    return net


def apply_every_rule_staged(group: SharedMemoryGroup) -> dict[str, Any]:
    return apply_every_rule(StagedGroup(SIZE))


def new_group(group: Group, exchange: str | None = None) -> Group:
    """A group of the same processes for another population."""
    return DistributedGroup(exchange=exchange or group.exchange) if isinstance(group, DistributedGroup) else group


def align(group: Group) -> dict[str, Any]:
    """Independent members aligned by activations and by weights: aligned soups, and aligned pushes."""
    torch.manual_seed(0)
    batches = [torch.randn(16, 5) for _ in range(2)]
    states, groups = [], None
    for by in ("activations", "weights"):
        members = [make_mlp(member) for member in group.local_range(SIZE)]
        population = Population(members, new_group(group))
        groups = groups or symmetries(members[0], batches[0])
        soups = aligned_soups(
            population, lambda net: float(net[0].weight.detach().mean()), batches, by=by, symmetries=groups
        )
        states += [soups.average.state_dict(), soups.greedy.network.state_dict()]
        Averager(
            population, Push(alpha=0.5, every_steps=1), merge_hooks=AlignMerges(batches, by=by, symmetries=groups)
        ).step()
        states += states_of(population)
    return {"states": states}


def raise_papa_error_on_rank_1(group: SharedMemoryGroup) -> None:
    if group.rank == 1:
        raise SoupError("an error of rank 1")
    group.barrier()


def raise_other_error_on_rank_1(group: SharedMemoryGroup) -> None:
    if group.rank == 1:
        raise ZeroDivisionError("not a papa error")
    group.barrier()


def exit_on_rank_1(group: SharedMemoryGroup) -> None:
    if group.rank == 1:
        os._exit(3)
    group.barrier()


def build_different_networks(group: SharedMemoryGroup) -> None:
    Population([nn.Linear(3 + group.rank, 2)], group)


def write_pid_and_sleep(group: SharedMemoryGroup, path: str) -> None:
    """Write the process id to a file, then wait to be killed."""
    with open(f"{path}/{group.rank}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)


def start_sleeping_workers(path: str) -> None:
    start_workers(write_pid_and_sleep, 2, 2, path)


def identical(first: Any, second: Any) -> bool:
    """Whether two nested values are equal, and their tensors bit for bit."""
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(identical(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(identical(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second)


def average_with_nonfinite_members(group: Group, policy: str) -> dict[str, Any]:
    """Averagings in which first one member is not finite, then another on a different rank."""
    population = Population([make_member(member) for member in group.local_range(SIZE)], group)
    averager = Averager(population, Push(alpha=0.9, every_steps=1), on_nonfinite=policy)
    nonfinite = []
    for victim in (3, None, 0, None):
        for index, member in enumerate(population.members):
            if member == victim:
                with torch.no_grad():
                    population[index][2].bias[7] = float("nan")
        averaging = averager.step()
        assert averaging is not None
        nonfinite += averaging.nonfinite
    return {"nonfinite": nonfinite, "states": states_of(population)}


class SetLastMemberToNaN(Callback):
    """Sets a parameter of the last member to NaN before step 7, on the rank that holds it."""

    def on_step_begin(self, training: Training) -> None:
        if training.step == 7 and training.population.size - 1 in training.members:
            with torch.no_grad():
                next(training.population[len(training.population) - 1].parameters()).fill_(float("nan"))


def train_with_nonfinite_member(group: Group, policy: str) -> dict[str, Any]:
    """A small training whose last member becomes non-finite."""
    torch.set_num_threads(1)
    training = small_training(group=group, on_nonfinite=policy)
    training.run([SetLastMemberToNaN()])
    outcome = finalize(training)
    scores = [repr(member.score) for member in outcome.validation.members]
    return {
        "nonfinite": training.nonfinite,
        "dropped": sorted(training.population.dropped),
        "scores": [*scores, outcome.validation.average_soup.score, outcome.validation.ensemble.score],
        "states": states_of(training.population),
    }


def choose_by_different_scores(group: Group) -> Any:
    """Greedy soups by scores that differ between ranks in the last digits, around a tie."""
    members = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in group.local_range(SIZE)]
    population = Population(members, group)
    calls = itertools.count(1)

    def score(network: nn.Module) -> float:
        return 1.0 + (-1e-9 if group.is_leader else 1e-9) * next(calls)

    batches = [torch.ones(8, 4)]
    chosen = [greedy_soup(population, score).members]
    groups = symmetries(population[0], batches[0])
    chosen += [aligned_soups(population, score, batches, by="weights", symmetries=groups).greedy.members]
    return group.all_gather([chosen] * len(group.local_range(SIZE)))


def replace_a_buffer(group: Group) -> list[list[float]]:
    """A buffer that was replaced on the slower of two ranks, without a check for non-finite members."""
    net = nn.BatchNorm1d(4)
    population = Population([net], group)
    averager = Averager(population, Push(alpha=0.0, every_steps=1), measure=False, on_nonfinite=None)
    if not group.is_leader:
        refresh = population.refresh_

        def slowly() -> None:
            time.sleep(0.5)
            refresh()

        population.refresh_ = slowly  # type: ignore[method-assign]
    net.running_mean = torch.full((4,), 10.0 if group.is_leader else 20.0)
    averager.step()
    return group.all_gather([net.running_mean.tolist()])
