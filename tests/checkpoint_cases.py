"""Members with optimizers, and checkpoints of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from papa.core.group import LocalGroup
from papa.training.checkpoints import Checkpoint, CheckpointWriter, Expected, load_checkpoint, member_state

Member = tuple[nn.Module, torch.optim.Optimizer]


def trained_member(optimizer_type: type[torch.optim.Optimizer], seed: int) -> Member:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    options = {"momentum": 0.9} if optimizer_type is torch.optim.SGD else {}
    optimizer = optimizer_type(net.parameters(), lr=0.1, **options)  # type: ignore[call-arg, arg-type]
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    return net, optimizer


def save(directory: Path, step: int, members: list[Member], *, keep: int = 2, state: Any = None) -> Path:
    """Write one checkpoint."""
    directory.mkdir(exist_ok=True)
    with CheckpointWriter(directory, group=LocalGroup(), num_members=len(members), keep=keep) as writer:
        states = {number: member_state(*member) for number, member in enumerate(members)}
        assert writer.save(step, states, state or {}, lambda: None) is None
        assert writer.settle() is None
    return directory / f"step-{step:08d}"


def load_whole(path: Path, expected: dict[int, Expected], *, num_members: int) -> Checkpoint:
    """Open a checkpoint and read every member."""
    found = load_checkpoint(path, expected, num_members=num_members)
    dict(found.members)
    return found


def expected_of(members: list[Member]) -> dict[int, Expected]:
    return {number: Expected(*member) for number, member in enumerate(members)}
