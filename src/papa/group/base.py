"""What a population needs to know of the processes that hold it, and the simplest case: one process.

Everything that could depend on how members are spread goes through the group, so that no other room ever asks how many
processes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from papa.errors import PapaError
from papa.product import combine_rows, mix_rows_, squared_distances

T = TypeVar("T")


class Group(Protocol):
    """The processes that hold a population."""

    @property
    def num_ranks(self) -> int:
        """The number of processes, for the record."""
        ...

    @property
    def is_alone(self) -> bool:
        """Whether this process may lay out the matrix anew without asking anyone."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes files and talks to people."""
        ...

    @property
    def bytes_sent(self) -> int:
        """How many bytes of members' numbers this process has sent to others so far."""
        ...

    def share(self, size: int) -> range:
        """Which members of a population of `size` this process is to hold."""
        ...

    def members(self, num_here: int) -> range:
        """The indices, within the whole population, of the `num_here` members this process holds."""
        ...

    def size(self, num_here: int) -> int:
        """The number of members of the whole population."""
        ...

    def check_same(self, facts: Mapping[str, str], *, cure: str) -> None:
        """Raise a `MemberError` that names the first process and fact that differ between processes."""
        ...

    def place(self, device: torch.device) -> torch.device:
        """Where this process is to train when the run is to train on `device`."""
        ...

    def first_row(self, num_here: int, device: torch.device) -> int:
        """Which row of what `allocate` gives belongs to the first member held here."""
        ...

    def allocate(self, num_here: int, num_columns: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeroed memory for the rows of the members held here, and perhaps of more."""
        ...

    def mix_(self, rows: Tensor, matrix: Tensor, *, met: bool = False) -> None:
        """`rows <- matrix @ rows` over all members, wherever they live.

        Args:
            rows: those held here, or all.
            matrix: one row for each member.
            met: all processes have met since rows last changed, and need not wait for each other once more.
        """
        ...

    def combine(self, rows: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """The sum of all members' rows, each times its weight, in `out` or a new row; weight 0: not read."""
        ...

    def squared_distances(self, rows: Tensor) -> Tensor:
        """The squared distance to the mean row of each member of the whole population, in float64 on the CPU."""
        ...

    def begin_mean(self, rows: Tensor, snapshot: Tensor, weights: Tensor) -> Callable[[], Tensor]:
        """Start on a mean of all members' rows as they are now; what is returned waits for it and hands it over.

        `weights` has one for each member, as in `combine`; `snapshot` is a copy of the rows of the members held here,
        which must stay as it is until then.
        """
        ...

    def agree_(self, columns: Tensor) -> None:
        """Where several processes train one member, make these numbers of it the same on all."""
        ...

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Where several processes hold a shard of one member each, add up what they computed from their shards."""
        ...

    def last_means(self) -> dict[torch.dtype, Tensor]:
        """What a checkpoint must keep for exchanges to go on exactly as they would have, by dtype; often nothing."""
        ...

    def set_last_means(self, means: Mapping[torch.dtype, Tensor]) -> None:
        """Go on where `last_means` was taken."""
        ...

    def gather(self, values: list[T]) -> list[T]:
        """One value per member held here, turned into one value per member of the whole population."""
        ...

    def highest(self, *values: float) -> tuple[float, ...]:
        """The highest of each that any process has; much cheaper than to `gather`."""
        ...

    def wait(self) -> None:
        """Return when all processes have come here."""
        ...


def gather_or_raise(group: Group, work: Callable[[], list[T]]) -> list[T]:
    """What every process finds in `work`, which may differ in number, put together; one's `PapaError` is everyone's.

    Without that, the others would wait for the one who found something wrong with its members.

    Example:
        >>> gather_or_raise(LocalGroup(), lambda: [1, 2])
        [1, 2]
    """
    values: list[T] = []
    problem: PapaError | None = None
    try:
        values = work()
    except PapaError as error:
        problem = error
    for found in group.gather([problem]):
        if found is not None:
            raise found
    return group.gather(values)


class LocalGroup:
    """One process holds every member."""

    num_ranks = 1
    is_alone = True
    leads = True
    bytes_sent = 0

    def share(self, size: int) -> range:
        """All of them."""
        return range(size)

    def members(self, num_here: int) -> range:
        """All of them."""
        return range(num_here)

    def size(self, num_here: int) -> int:
        """As many as are here."""
        return num_here

    def check_same(self, facts: Mapping[str, str], *, cure: str) -> None:
        """One process agrees with itself."""

    def place(self, device: torch.device) -> torch.device:
        """There."""
        return device

    def first_row(self, num_here: int, device: torch.device) -> int:
        """The first."""
        return 0

    def allocate(self, num_here: int, num_columns: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An ordinary zeroed tensor."""
        return torch.zeros(num_here, num_columns, dtype=dtype, device=device)

    def mix_(self, rows: Tensor, matrix: Tensor, *, met: bool = False) -> None:
        """The product, block by block."""
        mix_rows_(rows, matrix)

    def combine(self, rows: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """The sum, block by block."""
        return combine_rows(rows, weights, out)

    def squared_distances(self, rows: Tensor) -> Tensor:
        """Block by block, so that nothing of the matrix's size is allocated."""
        return squared_distances(rows)

    def begin_mean(self, rows: Tensor, snapshot: Tensor, weights: Tensor) -> Callable[[], Tensor]:
        """At once: there is nobody to wait for."""
        mean = combine_rows(rows, weights)
        return lambda: mean

    def agree_(self, columns: Tensor) -> None:
        """One process trains each member."""

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Members are whole."""
        return values

    def last_means(self) -> dict[torch.dtype, Tensor]:
        """None: nothing is sent."""
        return {}

    def set_last_means(self, means: Mapping[torch.dtype, Tensor]) -> None:
        """Nothing to set."""

    def gather(self, values: list[T]) -> list[T]:
        """They are all here already."""
        return list(values)

    def highest(self, *values: float) -> tuple[float, ...]:
        """They are what they are here."""
        return values

    def wait(self) -> None:
        """There is nobody to wait for."""
