"""What worker processes do in the tests of the group; in a module of its own, so that they can import it."""

import os
import time
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
from papa.errors import SoupError
from papa.group import DistributedGroup, Group, LocalGroup, SharedMemoryGroup, start_workers
from papa.training import Callback, Training, finalize

SIZE = 5


class AlwaysStaged(SharedMemoryGroup):
    """Treats the CPU as an accelerator: rows of its own, and a mapping to meet in."""

    def is_staged(self, device: torch.device) -> bool:
        return True


def make_member(member: int) -> nn.Module:
    torch.manual_seed(member)
    net = nn.Sequential(nn.Linear(300, 700), nn.BatchNorm1d(700), nn.Linear(700, 300)).double()
    net[2].float()
    return net


def march(group: Group) -> dict[str, Any]:
    """Every rule in turn on members that move apart in between; everything observable comes back."""
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
        for index, member in enumerate(population.members):
            generator = torch.Generator().manual_seed(100 * number + member)
            with torch.no_grad():
                for parameter in population[index].parameters():
                    parameter += torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        logs.append(Averager(population, rule).step())
    for index, member in enumerate(population.members):
        with torch.no_grad():
            population[index][0].weight += member
    greedy = greedy_soup(population, lambda net: -abs(float(net[0].weight.detach().mean()) - 1.2))
    return {
        "states": group.all_gather([net.state_dict() for net in population]),
        "logs": logs,
        "mean": population.mean(),
        "soup": average_soup(population).state_dict(),
        "greedy": (greedy.members, greedy.score, greedy.member_scores, greedy.network.state_dict()),
        "size": population.size,
    }


def march_shared(group: SharedMemoryGroup) -> dict[str, Any]:
    return march(group)


def march_staged(group: SharedMemoryGroup) -> dict[str, Any]:
    return march(AlwaysStaged(SIZE))


def march_alone() -> dict[str, Any]:
    return march(LocalGroup())


def fresh(group: Group, exchange: str | None = None) -> Group:
    """A group of the same processes for another population."""
    return DistributedGroup(exchange=exchange or group.exchange) if isinstance(group, DistributedGroup) else group


def align(group: Group) -> dict[str, Any]:
    """Members that trained apart, aligned and merged by either way, then made into aligned soups."""
    torch.manual_seed(0)
    batches = [torch.randn(16, 5) for _ in range(2)]
    states, groups = [], None
    for by in ("activations", "weights"):
        members = []
        for member in group.local_range(SIZE):
            torch.manual_seed(member)
            members.append(nn.Sequential(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3)))
        population = Population(members, fresh(group))
        groups = groups or symmetries(members[0], batches[0])
        soups = aligned_soups(
            population, lambda net: float(net[0].weight.detach().mean()), batches, by=by, groups=groups
        )
        states += [soups.average.state_dict(), soups.greedy.network.state_dict()]
        Averager(
            population, Push(alpha=0.5, every_steps=1), merge_hooks=AlignMerges(batches, by=by, groups=groups)
        ).step()
        states += group.all_gather([net.state_dict() for net in population])
    return {"states": states}


def align_shared(group: SharedMemoryGroup) -> dict[str, Any]:
    return align(group)


def align_alone() -> dict[str, Any]:
    return align(LocalGroup())


def fail_on_rank_1(group: SharedMemoryGroup) -> None:
    if group.rank == 1:
        raise SoupError("rank 1 has had enough")
    group.barrier()


def stumble_on_rank_1(group: SharedMemoryGroup) -> None:
    if group.rank == 1:
        raise ZeroDivisionError("not a papa error")
    group.barrier()


def die_on_rank_1(group: SharedMemoryGroup) -> None:
    if group.rank == 1:
        os._exit(3)
    group.barrier()


def disagree(group: SharedMemoryGroup) -> None:
    Population([nn.Linear(3 + group.rank, 2)], group)


def sleep_and_tell(group: SharedMemoryGroup, path: str) -> None:
    """Writes its process number, then waits to be left alone."""
    with open(f"{path}/{group.rank}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)


def start_sleepers(path: str) -> None:
    start_workers(sleep_and_tell, 2, 2, path)


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second)


def sicken_and_average(group: Group, policy: str) -> dict[str, Any]:
    """Two members become sick one after the other, on different ranks."""
    population = Population([make_member(member) for member in group.local_range(SIZE)], group)
    averager = Averager(population, Push(alpha=0.9, every_steps=1), on_nonfinite=policy)
    sick = []
    for victim in (3, None, 0, None):
        for index, member in enumerate(population.members):
            if member == victim:
                with torch.no_grad():
                    population[index][2].bias[7] = float("nan")
        averaging = averager.step()
        assert averaging is not None
        sick += averaging.nonfinite
    return {"nonfinite": sick, "states": group.all_gather([net.state_dict() for net in population])}


class PoisonLast(Callback):
    """Ruins the last member's weights after the seventh step, on whichever rank it lives."""

    def before_step(self, training: Training) -> None:
        if training.step == 7 and training.population.size - 1 in training.members:
            with torch.no_grad():
                next(training.population[len(training.population) - 1].parameters()).fill_(float("nan"))


def train_with_a_sick_member(group: Group, policy: str) -> dict[str, Any]:
    """A small training whose last member falls sick; what everyone sees of it."""
    torch.set_num_threads(1)
    training = small_training(group=group, on_nonfinite=policy)
    training.run([PoisonLast()])
    outcome = finalize(training)
    scores = [repr(member.score) for member in outcome.validation.members]
    return {
        "nonfinite": training.nonfinite,
        "dropped": sorted(training.population.dropped),
        "scores": [*scores, outcome.validation.average_soup.score, outcome.validation.ensemble.score],
        "states": group.all_gather([net.state_dict() for net in training.population]),
    }


def disagree_on_scores(group: Group) -> Any:
    """Scores that differ between ranks by less than a score means, around a tie."""
    members = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in group.local_range(SIZE)]
    population = Population(members, group)
    ranks = iter(range(100))

    def score(network: nn.Module) -> float:
        return 1.0 + (-1e-9 if group.is_leader else 1e-9) * (next(ranks) + 1)

    batches = [torch.ones(8, 4)]
    chosen = [greedy_soup(population, score).members]
    groups = symmetries(population[0], batches[0])
    chosen += [aligned_soups(population, score, batches, by="weights", groups=groups).greedy.members]
    return group.all_gather([chosen] * len(group.local_range(SIZE)))


def reassign_a_buffer(group: Group) -> list[list[float]]:
    """A buffer that a forward pass replaced, on the slower of two ranks, without anybody looking for sick members."""
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
