"""Where the rows of a population live: the only room that imports `torch.distributed`."""

from papa.group.base import Group, Local
from papa.group.shared import Shared, balanced_share
from papa.group.start import start_workers

__all__ = ["Group", "Local", "Shared", "balanced_share", "start_workers"]
