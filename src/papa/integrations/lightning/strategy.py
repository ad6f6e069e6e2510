"""A strategy for one member per rank: to Lightning, every process is a single one."""

from __future__ import annotations

import os

import torch

from papa.core.group import Group
from papa.distributed.members import group_of_process
from papa.packages import importing

with importing():
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch.strategies import SingleDeviceStrategy


class OwnMember:
    """What strategies for one member per process share: the member, the group, and ranks that are hidden."""

    def __init__(self, device: torch.device | str | None = None, *, group: Group | None = None) -> None:
        super().__init__(device=own_device() if device is None else device)  # type: ignore[call-arg]
        self.group = group_of_process() if group is None else group
        (self.member,) = self.group.members(1)
        # Every process has logs and checkpoints of its own.
        rank_zero_only.rank = 0  # type: ignore[attr-defined]

    @property
    def num_members(self) -> int:
        """The number of members of all processes."""
        return self.group.size(1)


class MemberPerRank(OwnMember, SingleDeviceStrategy):
    """Trains one member in each process that `torchrun` or `papa each` started, each with its own logs and checkpoints.

    Lightning would wrap the processes of torchrun in data parallelism, which averages gradients and makes members
    copies of one network, and would save rank 0 only. With this strategy they know each other through papa alone:

    ```text
    strategy = MemberPerRank()
    trainer = Trainer(
        strategy=strategy,
        default_root_dir=f"out/{strategy.member}",
        callbacks=PopulationAveraging(papa.Push(half_life=0.003)),
    )
    ```

    Args:
        device: where this process trains; None for the accelerator of its local rank if there is one, else the CPU.
        group: the processes of all members; None for those of the launcher.
    """

    strategy_name = "member_per_rank"


def own_device() -> torch.device:
    """The accelerator of this process's local rank if there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
