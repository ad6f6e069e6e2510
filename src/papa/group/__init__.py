"""The processes that hold a population, and how weights travel between them.

Only this package imports `torch.distributed`. Every other module calls the methods of a `Group` and never branches on
the number of processes. There are three groups:

- `LocalGroup`: one process holds all rows. Nothing travels.
- `SharedMemoryGroup`: processes of one machine map one matrix, and each trains its own rows. Nothing travels.
- `DistributedGroup`: processes on any machines hold the rows of their own members. Columns of all rows travel by
  all-to-all (`exchange="exact"`, module `exchange`), or sums of rows (`"fast"` and `"bfloat16"`, module `reduce`).

`as_group` turns a process group or a device mesh into a group, `start_workers` starts worker processes, `Torchrun`
connects the processes that torchrun started, and `connect_members` those that train one member each in ways of their
own, by a group that other libraries do not see. Members that do not wait for each other have no group at all: they
publish their weights (module `published`).

**Why the bits are identical.** `W <- A W` treats every column of `W` alike, so columns can be distributed instead of
rows. `papa.product` cuts the matrix into blocks of columns whose boundaries depend on the shape and dtype of the whole
matrix, never on the number of processes. Each process works on whole blocks, which have the rows of all members in
member order, and calls the function that a single process would call. So every number is the result of the same
operations in the same order. A `SharedMemoryGroup` works on its blocks in place, between two barriers. A
`DistributedGroup` receives its blocks by one all-to-all and sends the results back by another. Two limits: the
processes need the same kind of CPU, build of PyTorch and number of threads, with compiled averaging in all or none, and
`fast` and `bfloat16` are not exact.
"""

from typing import TYPE_CHECKING

from papa.group.base import Group, LocalGroup, balanced_ranges, gather_or_raise
from papa.group.distributed import EXCHANGES, DistributedGroup
from papa.group.mesh import as_group
from papa.group.shared_memory import SharedMemoryGroup
from papa.group.wrappers import check_wrappers
from papa.lazy import lazy_names

if TYPE_CHECKING:
    from papa.group.members import (
        SOUP,
        WEIGHTS,
        connect_members,
        group_of_environment,
        group_of_process,
        group_of_ranks,
        member_of_environment,
        report_soup,
    )
    from papa.group.published import PUBLISHED, Published, PublishedFiles, PublishedStore, published_of_environment
    from papa.group.sharding import inner_module, is_first_data_rank, like, save_distributed, whole
    from papa.group.start import start_workers
    from papa.group.torchrun import Torchrun, rank_of_torchrun

# What a loop of your own in one process does not need.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "members": (
            *("SOUP", "WEIGHTS", "connect_members", "group_of_environment", "group_of_process", "group_of_ranks"),
            *("member_of_environment", "report_soup"),
        ),
        "published": ("PUBLISHED", "Published", "PublishedFiles", "PublishedStore", "published_of_environment"),
        "sharding": ("inner_module", "is_first_data_rank", "like", "save_distributed", "whole"),
        "start": ("start_workers",),
        "torchrun": ("Torchrun", "rank_of_torchrun"),
    },
)

__all__ = [
    "EXCHANGES",
    "PUBLISHED",
    "SOUP",
    "WEIGHTS",
    "DistributedGroup",
    "Group",
    "LocalGroup",
    "Published",
    "PublishedFiles",
    "PublishedStore",
    "SharedMemoryGroup",
    "Torchrun",
    "as_group",
    "balanced_ranges",
    "check_wrappers",
    "connect_members",
    "gather_or_raise",
    "group_of_environment",
    "group_of_process",
    "group_of_ranks",
    "inner_module",
    "is_first_data_rank",
    "like",
    "member_of_environment",
    "published_of_environment",
    "rank_of_torchrun",
    "report_soup",
    "save_distributed",
    "start_workers",
    "whole",
]
