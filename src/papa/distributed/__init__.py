"""The processes that hold a population, and how weights travel between them.

Only this package imports `torch.distributed`. Every other module calls the methods of a `Group` and never branches on
the number of processes. There are three groups:

- `LocalGroup`: one process holds all rows. Nothing travels.
- `SharedMemoryGroup`: processes of one machine map one matrix, and each trains its own rows. Nothing travels.
- `DistributedGroup`: processes on any machines hold the rows of their own members. Columns of all rows travel by
  all-to-all (`exchange="exact"`), or sums of rows (`"fast"`); module `exchange`.

`papa.core.group.as_group` turns a process group or a device mesh into a group, `start_workers` starts worker processes,
`Torchrun` connects the processes that torchrun started, and `connect_members` those that train one member each in ways
of their own, by a group that other libraries do not see. Members that do not wait for each other have no group at all:
they publish their weights (module `asynchronous`).

**Why the bits are identical.** `W <- A W` treats every column of `W` alike, so columns can be distributed instead of
rows. `papa.core.product` cuts the matrix into blocks of columns, whose boundaries depend on the shape and dtype of
the whole matrix, never on the number of processes. Each process works on whole blocks, which have the rows of all
members in member order, and calls the function that a single process would call. So every number is the result of the
same operations in the same order. A `SharedMemoryGroup` works on its blocks in place, between two barriers. A
`DistributedGroup` receives its blocks by one all-to-all and sends the results back by another. Two limits: the
processes need the same kind of CPU, build of PyTorch and number of threads, with compiled averaging in all or none,
and `fast` is not exact.
"""
