"""Jobs for members that two ranks train each, and a slow reference in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from group_jobs import message_of
from papa import Averager, MergeAll, MergePairs, Mix, Population, Push, Rule, Shuffle, average_soup, save_soup
from papa.distributed.collectives import all_gather_object
from papa.distributed.members import connect_members
from papa.distributed.shared_memory import SharedMemoryGroup
from papa.files.saved_soups import soup_state

RULES: list[Rule] = [
    Push(alpha=0.8, every_steps=1),
    MergePairs(every_steps=1, seed=3),
    Mix([[0.7, 0.3], [0.4, 0.6]], every_steps=1),
    MergeAll(every_steps=1),
    Push(alpha=0.5, every_steps=3),
]
NUM_STEPS = 6
"""For each rule."""


def make_net(member: int) -> nn.Module:
    torch.manual_seed(member)
    return nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))


def half_batch(member: int, half: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * member + half)
    return torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)


def backward(net: nn.Module, member: int, half: int, step: int) -> None:
    inputs, targets = half_batch(member, half, step)
    (net(inputs) - targets).square().mean().backward()


def reference() -> list[Any]:
    """Two members in one process; BatchNorm statistics are those of the first half of each batch."""
    nets = [make_net(member) for member in range(2)]
    population = Population(nets)
    optimizers = [SGD(net.parameters(), lr=0.05, momentum=0.9) for net in nets]
    record: list[Any] = []
    for number, rule in enumerate(RULES):
        averager = Averager(population, rule)
        for step in range(NUM_STEPS):
            for member, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
                optimizer.zero_grad()
                twin = copy.deepcopy(net)
                backward(net, member, 0, 100 * number + step)
                backward(twin, member, 1, 100 * number + step)
                for parameter, other in zip(net.parameters(), twin.parameters(), strict=True):
                    parameter.grad = (parameter.grad + other.grad) / 2
                optimizer.step()
            log = averager.step()
            record.append(([state_of(net) for net in nets], None if log is None else log.distances_before))
    return record


def state_of(net: nn.Module) -> dict[str, Tensor]:
    """Parameters and statistics, whole and copied."""
    state = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    return {
        name.removeprefix("module."): (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)
        .detach()
        .clone()
        for name, tensor in state.items()
        if "num_batches" not in name
    }


KINDS = ("ddp before", "ddp after", "fsdp", "fsdp, own connections")


def train(kind: str, directory: Path, port: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("population", "data"))
    member, half = mesh.get_coordinate()
    net = make_net(member)
    if kind.startswith("fsdp"):
        fully_shard(net[0], mesh=mesh["data"])
        fully_shard(net, mesh=mesh["data"])
        trained = net
    elif kind == "ddp after":
        trained = net = DistributedDataParallel(net, process_group=mesh["data"].get_group())
    where: Any = mesh
    if kind == "fsdp, own connections":  # as `papa.member` makes them
        data_group = mesh["data"].get_group()
        where = connect_members(member=member, num_members=2, address=f"127.0.0.1:{port}", data_group=data_group)
    population = Population([net], group=where)
    if kind == "ddp before":
        trained = DistributedDataParallel(net, process_group=mesh["data"].get_group())
    optimizer: Optimizer = SGD(net.parameters(), lr=0.05, momentum=0.9)
    record = []
    for number, rule in enumerate(RULES):
        averager = Averager(population, rule)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            backward(trained, member, half, 100 * number + step)
            optimizer.step()
            log = averager.step()
            distances = None if log is None else log.distances_before
            record.append((population.group.all_gather([state_of(net)]), distances))
    saved = save_soups(population, directory / kind)
    net.eval()
    with torch.no_grad():
        net(torch.randn(4, 5))  # leaves a module under fully_shard whole
    population.mix_([[0.5, 0.5], [0.5, 0.5]])
    merged = population.group.all_gather([state_of(net)])
    soup = message_of(lambda: average_soup(population))
    nonfinite, restarted = average_with_nonfinite_shard(population, is_here=(member, half) == (1, 1))
    found = {"record": record, "saved": saved, "merged": merged, "soup": soup, "size": population.size}
    return {**found, "nonfinite": nonfinite, "restarted": restarted, "shuffled": shuffle(population)}


def shuffle(population: Population) -> bool:
    """Whether a permutation changed weights."""
    before = state_of(population[0])
    with torch.no_grad():
        for parameter in population[0].parameters():
            parameter.mul_(1 + population.members[0])
    Averager(population, Shuffle(share=0.5, depth="constant")).step()
    after = state_of(population[0])
    return any(not torch.equal(before[name], after[name]) for name in before)


def save_soups(population: Population, directory: Path) -> dict[str, Any]:
    """What is written for the soup, in the two formats, and what is said when the directory exists."""
    save_soup(population, directory / "soup.safetensors")
    save_soup(population, directory / "soup")
    error = message_of(lambda: save_soup(population, directory / "soup"))
    num_leaders = sum(all_gather_object(population.group.is_leader))
    return {"error": error, "leaders": num_leaders, "only averaged": soup_state(population, only_averaged=True)}


def average_with_nonfinite_shard(population: Population, *, is_here: bool) -> tuple[list[int], list[dict[str, Tensor]]]:
    """An averaging after one number of one rank became NaN: the members found, and the weights after it."""
    if is_here:
        with torch.no_grad():
            parameter = next(population[0].parameters())
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local[0, 0] = torch.nan
    log = Averager(population, Push(alpha=0.5, every_steps=1)).step()
    assert log is not None
    return [found.member for found in log.nonfinite], population.group.all_gather([state_of(population[0])])


def train_all(group: SharedMemoryGroup, directory: str, port: int) -> dict[str, Any]:
    found: dict[str, Any] = {kind: train(kind, Path(directory), port) for kind in KINDS}
    without_population = init_device_mesh("cpu", (4,), mesh_dim_names=("ranks",))
    return found | {"wrong mesh": message_of(lambda: Population([make_net(0)], group=without_population))}


def wrap_several_members(group: SharedMemoryGroup) -> list[str]:
    """What is said when a wrapper spans the processes of two members."""
    world = DistributedDataParallel(make_net(group.rank))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("population",))
    sharded = make_net(group.rank)
    fully_shard(sharded, mesh=mesh)
    return [message_of(lambda net=net: Population([net], mesh)) for net in (world, sharded)]
