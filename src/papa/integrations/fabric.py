"""Populations in Fabric: `papa.averaging` and `papa.join` for what `fabric.setup` returns, and a strategy for ranks.

Needs `pip install 'papa-torch[lightning]'`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from papa import attach
from papa.attach import Joined
from papa.core.averager import Averaging
from papa.core.group import Group, as_group
from papa.core.rules import Rule
from papa.distributed.members import group_of_environment, group_of_process
from papa.packages import importing
from papa.training.callbacks import averaging_values

with importing():
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.single_device import SingleDeviceStrategy
    from lightning.fabric.utilities.rank_zero import rank_zero_only


def averaging(
    fabric: Fabric,
    models: Iterable[nn.Module],
    optimizers: Optimizer | Sequence[Optimizer],
    rule: Rule,
    **options: Any,
) -> Joined:
    """Average several members in this process whenever all of them have taken a step; distances are logged.

    What it returns can be saved and loaded with the rest:
    `fabric.save(path, {"nets": joined.population, "papa": joined})`.

    Example:
        >>> from torch.optim import SGD
        >>> from papa import Push
        >>> fabric = Fabric(accelerator="cpu", devices=1)
        >>> nets = [nn.Linear(4, 2) for _ in range(3)]
        >>> nets, optimizers = zip(*[fabric.setup(net, SGD(net.parameters(), lr=0.1)) for net in nets])
        >>> joined = averaging(fabric, nets, optimizers, Push(half_life=0.1), num_steps=20)

    Args:
        fabric: whose loggers get the distances.
        models: the members, as `fabric.setup` returned them.
        optimizers: one for each, as `fabric.setup` returned them.
        rule: how to average.
        options: as for `papa.averaging`.
    """
    return attach.averaging([_inner(model) for model in models], optimizers, rule, **_logging(fabric, **options))


def join(
    fabric: Fabric, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], rule: Rule, **options: Any
) -> Joined:
    """Make this process's network a member of a population, with one member per process; distances are logged.

    The processes are those of `papa.member`, or the ranks of torchrun with `Fabric(strategy=MemberPerRank())`.

    Args:
        fabric: whose loggers get the distances.
        model: this process's member, as `fabric.setup` returned it.
        optimizer: its optimizer, as `fabric.setup` returned it.
        rule: how to average.
        options: as for `papa.join`.
    """
    group = group_for(fabric.strategy, options.pop("group", None))
    group.check_models([model])  # also those around the network, such as DistributedDataParallel
    return attach.join(_inner(model), optimizer, rule, group=group, **_logging(fabric, **options))


class OwnMember:
    """What strategies for one member per process share: the member, the group, and ranks that are hidden."""

    def __init__(self, device: torch.device | str | None = None, *, group: Group | None = None) -> None:
        if device is None and torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        super().__init__(device=torch.device("cpu" if device is None else device))  # type: ignore[call-arg]
        self.group = group_of_process() if group is None else group
        (self.member,) = self.group.members(1)
        # Every process has logs and checkpoints of its own.
        rank_zero_only.rank = 0  # type: ignore[attr-defined]

    @property
    def num_members(self) -> int:
        """The number of members of all processes."""
        return self.group.size(1)


class MemberPerRank(OwnMember, SingleDeviceStrategy):
    """Trains one member in each process that `torchrun` or `papa.member` started, each a single process to Fabric.

    Args:
        device: where this process trains; None for the accelerator of its local rank if there is one, else the CPU.
        group: the processes of all members; None for those of the launcher.
    """


def group_for(strategy: object, group: Any = None) -> Group:
    """The given group; or else that of a strategy for one member per process, or of the launcher."""
    if group is not None:
        return as_group(group)
    return strategy.group if isinstance(strategy, OwnMember) else group_of_environment()


def _inner(model: Any) -> nn.Module:
    """The network inside of what `fabric.setup` returned, whose names of tensors are those of the network."""
    module: nn.Module = model.module if hasattr(model, "_forward_module") else model
    return module


def _logging(
    fabric: Fabric, *, on_averaging: Callable[[Averaging], object] | None = None, **options: Any
) -> dict[str, Any]:
    def log(found: Averaging) -> None:
        fabric.log_dict(averaging_values(found), step=found.step)
        if on_averaging is not None:
            on_averaging(found)

    return {**options, "on_averaging": log}
