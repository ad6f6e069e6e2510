"""Fabric: members in one process and in several, against the plain loop of papa, bit for bit."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch import nn, optim

import papa
from lightning_members import run_threads
from papa.errors import ConfigError
from papa.integrations import fabric as adapter

INPUTS = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS[:, 0] > 0).long()
NUM_STEPS = 12
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""What Fabric chooses by itself."""
RULE = papa.Push(half_life=0.2, every_steps=3)


def make(member: int) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(member)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(DEVICE)
    return net, optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def take_step(net: nn.Module, optimizer: optim.Optimizer, member: int, step: int, backward: Any = None) -> None:
    batch = torch.randint(64, (16,), generator=torch.Generator().manual_seed(100 * member + step))
    optimizer.zero_grad()
    loss = F.cross_entropy(net(INPUTS[batch].to(DEVICE)), TARGETS[batch].to(DEVICE))
    loss.backward() if backward is None else backward(loss)
    optimizer.step()


def new_fabric(**options: Any) -> Fabric:
    return Fabric(devices=1, **options)


@pytest.fixture(scope="module")
def plain() -> tuple[list[nn.Module], nn.Module]:
    nets, optimizers = zip(*map(make, range(2)), strict=True)
    averager = papa.Averager(papa.Population(nets), RULE, optimizers, num_steps=NUM_STEPS)
    for step in range(NUM_STEPS):
        for member in range(2):
            take_step(nets[member], optimizers[member], member, step)
        averager.step()
    return list(nets), papa.average_soup(averager.population)


def assert_equal(net: nn.Module, expected: nn.Module) -> None:
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in net.state_dict().items())


def test_members_in_one_process_and_their_resume(plain: Any, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "logs")

    def train(first: int, last: int) -> Any:
        fabric = new_fabric(loggers=logger)
        pairs = [fabric.setup(*make(member)) for member in range(2)]
        nets, optimizers = zip(*pairs, strict=True)
        joined = adapter.averaging(fabric, nets, optimizers, RULE, num_steps=NUM_STEPS)
        state = {"papa": joined, **{f"{kind} {j}": pair[kind] for j, pair in enumerate(pairs) for kind in range(2)}}
        if first:
            fabric.load(tmp_path / "state.ckpt", state)
        for step in range(first, last):
            for member in range(2):
                take_step(nets[member], optimizers[member], member, step, fabric.backward)
        fabric.save(tmp_path / "state.ckpt", state)
        return joined

    train(0, 4)
    joined = train(4, NUM_STEPS)
    for net, expected in zip(joined.population, plain[0], strict=True):
        assert_equal(net, expected)
    assert_equal(joined.soup(), plain[1])
    logger.save()
    (metrics,) = (tmp_path / "logs").rglob("metrics.csv")
    rows = list(csv.DictReader(metrics.read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == [3, 6, 9, 12]
    assert all(float(row["papa/distance_before"]) > 0 for row in rows)


def test_one_member_per_process(plain: Any) -> None:
    seen: list[papa.Averaging] = []
    pairs = [make(0), make(1)]  # threads share torch's random state

    def job(member: int, group: Any) -> nn.Module:
        strategy = adapter.MemberPerRank(group=group)
        assert (strategy.member, strategy.num_members) == (member, 2)
        fabric = Fabric(strategy=strategy)
        fabric.launch()
        net, optimizer = fabric.setup(*pairs[member])
        adapter.join(fabric, net, optimizer, RULE, num_steps=NUM_STEPS, on_averaging=seen.append)
        for step in range(NUM_STEPS):
            take_step(net, optimizer, member, step, fabric.backward)
        assert fabric.world_size == 1
        return net

    for net, expected in zip(run_threads(job), plain[0], strict=True):
        assert_equal(net, expected)
    assert len(seen) == 2 * NUM_STEPS // 3


def test_a_process_alone_is_named() -> None:
    fabric = new_fabric()
    with pytest.raises(ConfigError, match="not one of several members: start it with torchrun"):
        adapter.join(fabric, *fabric.setup(*make(0)), RULE)
