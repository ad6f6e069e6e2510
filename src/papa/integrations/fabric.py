"""Populations in Fabric: `papa.averaging` and `papa.join` for what `fabric.setup` returns.

Needs `pip install 'papa-torch[lightning]'`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from papa import attach as joining
from papa.attach import Joined
from papa.core.rules import Rule
from papa.distributed.members import group_of_environment
from papa.distributed.mesh import as_group
from papa.distributed.wrappers import check_wrappers
from papa.integrations.lightning.callback import distances
from papa.integrations.lightning.strategy import OwnMember
from papa.packages import importing

with importing():
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.single_device import SingleDeviceStrategy


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
    members = [module_in(model) for model in models]
    return joining.averaging(members, optimizers, rule, **_logging(fabric, options))


def join(
    fabric: Fabric, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], rule: Rule, **options: Any
) -> Joined:
    """Make this process's network a member of a population, with one member per process; distances are logged.

    The processes are those that `papa each` started, or the ranks of torchrun with `Fabric(strategy=MemberPerRank())`.

    Args:
        fabric: whose loggers get the distances.
        model: this process's member, as `fabric.setup` returned it.
        optimizer: its optimizer, as `fabric.setup` returned it.
        rule: how to average.
        options: as for `papa.join`.
    """
    group = options.pop("group", None)
    if group is None:
        group = fabric.strategy.group if isinstance(fabric.strategy, MemberPerRank) else group_of_environment()
    group = as_group(group)
    check_wrappers([model], group)  # also those around the network, such as DistributedDataParallel
    return joining.join(module_in(model), optimizer, rule, group=group, **_logging(fabric, options))


class MemberPerRank(OwnMember, SingleDeviceStrategy):
    """Trains one member in each process that `torchrun` or `papa each` started, each a single process to Fabric.

    Args:
        device: where this process trains; None for the accelerator of its local rank if there is one, else the CPU.
        group: the processes of all members; None for those of the launcher.
    """


def module_in(model: Any) -> nn.Module:
    """The network inside of what `fabric.setup` returned, whose names of tensors are those of the network."""
    module: nn.Module = model.module if hasattr(model, "_forward_module") else model
    return module


def _logging(fabric: Fabric, options: dict[str, Any]) -> dict[str, Any]:
    own = options.pop("on_averaging", None)

    def on_averaging(found: Any) -> None:
        fabric.log_dict(distances(found), step=found.step)
        if own is not None:
            own(found)

    return {**options, "on_averaging": on_averaging}
