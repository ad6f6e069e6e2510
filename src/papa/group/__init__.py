"""Where the rows of a population live: the only room that imports `torch.distributed`."""

from papa.group.base import Group, Local, gathered
from papa.group.mesh import as_group
from papa.group.shared import Shared, balanced_share
from papa.group.spread import EXCHANGES, Spread
from papa.group.start import start_workers
from papa.group.torchrun import Torchrun, rank_of_torchrun

__all__ = [
    "EXCHANGES",
    "Group",
    "Local",
    "Shared",
    "Spread",
    "Torchrun",
    "as_group",
    "balanced_share",
    "gathered",
    "rank_of_torchrun",
    "start_workers",
]
