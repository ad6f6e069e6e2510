"""Where the rows of a population live: the only room that imports `torch.distributed`."""

from papa.group.base import Group, LocalGroup, gather_or_raise
from papa.group.distributed import EXCHANGES, DistributedGroup
from papa.group.mesh import as_group
from papa.group.shared_memory import SharedMemoryGroup, balanced_share
from papa.group.start import start_workers
from papa.group.torchrun import Torchrun, rank_of_torchrun

__all__ = [
    "EXCHANGES",
    "DistributedGroup",
    "Group",
    "LocalGroup",
    "SharedMemoryGroup",
    "Torchrun",
    "as_group",
    "balanced_share",
    "gather_or_raise",
    "rank_of_torchrun",
    "start_workers",
]
